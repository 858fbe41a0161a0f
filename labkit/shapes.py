"""The shape of a batch, and which batch of a data set is the largest: it decides the peak."""

import random
from dataclasses import asdict, dataclass
from statistics import fmean

from labkit.data import Pairs
from labkit.recipe import Recipe
from labkit.tokenizer import encode
from labkit.tokens import Batch

CHUNK = 2000  # pairs tokenised at a time
SAMPLED_BATCHES = 200


@dataclass(frozen=True)
class BatchShape:
    """What of a batch decides the bytes of a step.

    ``padded`` says whether some row is shorter than ``tokens``: attention then needs a mask,
    and the mask is what makes it take another path.
    """

    pairs: int
    tokens: int
    padded: bool
    why: str = ""

    def to_dict(self) -> dict:
        """Plain values for the report."""
        return asdict(self)


def shape_of(batch: Batch, why: str) -> BatchShape:
    """The shape of a batch that was made."""
    pairs, tokens = batch.input_ids.shape
    return BatchShape(pairs, tokens, not bool(batch.attention_mask.all()), why)


def worst_shape(recipe: Recipe, pairs: Pairs, tokenizer) -> BatchShape:
    """The largest batch that the data can give under the recipe's padding.

    Order is random, so every pair can end up in any batch: the worst one is as long as the
    longest pair. Padding to ``max_length`` makes all batches alike.
    """
    count = min(recipe.batch_size, len(pairs))
    longest, shortest = 0, recipe.max_length
    for start in range(0, len(pairs), CHUNK):
        chosen = slice(start, start + CHUNK)
        rows = encode(tokenizer, pairs.first[chosen], pairs.second[chosen], recipe.max_length)
        lengths = [len(row) for row in rows]
        longest, shortest = max([longest, *lengths]), min([shortest, *lengths])
        if recipe.padding == "max" and shortest < recipe.max_length:
            break  # nothing more to learn
    if recipe.padding == "max":
        why = f"every batch is padded to max_length, {recipe.max_length}"
        return BatchShape(count, recipe.max_length, shortest < recipe.max_length, why)
    cut = " (cut there)" if longest == recipe.max_length else ""
    why = f"the longest of {len(pairs):,} pairs of {pairs.name} has {longest} tokens{cut}"
    return BatchShape(count, longest, shortest < longest, why)


def pair_lengths(pairs: Pairs, tokenizer) -> list[int]:
    """Tokens of each pair, uncut."""
    lengths = []
    for start in range(0, len(pairs), CHUNK):
        chosen = slice(start, start + CHUNK)
        rows = encode(tokenizer, pairs.first[chosen], pairs.second[chosen])
        lengths += [len(row) for row in rows]
    return lengths


def mean_longest(lengths: list[int], batch_size: int) -> float:
    """The length of a batch's longest pair, on average over batches drawn at random.

    The same batches are drawn each time.
    """
    draw = random.Random(0)
    count = min(batch_size, len(lengths))
    return fmean(max(draw.sample(lengths, count)) for _ in range(SAMPLED_BATCHES))
