"""The shape of a batch, and which batch of a data set is the largest: it decides the peak."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean

from labkit.data import Pairs
from labkit.packing import PackedBatch
from labkit.recipe import Recipe
from labkit.tokenizer import encode
from labkit.tokens import CHUNK, Batch, instruction_tokens

SAMPLED_BATCHES = 200


@dataclass(frozen=True)
class BatchShape:
    """What of a batch decides the bytes of a step.

    ``padded`` says whether some row is shorter than ``tokens``: attention then needs a mask,
    and the mask is what makes it take another path. A batch without padding has ``lengths``,
    the tokens of each pair, of which ``tokens`` is the largest; ``shared`` tokens stand before
    them, once for all.
    """

    pairs: int
    tokens: int
    padded: bool
    why: str = ""
    lengths: tuple[int, ...] = ()
    shared: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))  # JSON makes a list of it

    def to_dict(self) -> dict:
        """Plain values for the report, as JSON gives them back."""
        return asdict(self) | {"lengths": list(self.lengths)}


def shape_of(batch: Batch | PackedBatch, why: str) -> BatchShape:
    """The shape of a batch that was made."""
    if isinstance(batch, PackedBatch):
        shared = batch.computed_tokens - sum(batch.lengths)
        sizes = (len(batch.lengths), max(batch.lengths))
        return BatchShape(*sizes, False, why, batch.lengths, shared)
    pairs, tokens = batch.input_ids.shape
    return BatchShape(pairs, tokens, not bool(batch.attention_mask.all()), why)


def worst_shape(recipe: Recipe, pairs: Pairs, tokenizer) -> BatchShape:
    """The largest batch that the data can give under the recipe's padding.

    Order is random, so every pair can end up in any batch: the worst one is as long as the
    longest pair. Padding to ``max_length`` makes all batches alike.
    """
    count = min(recipe.batch_size, len(pairs))
    before = len(instruction_tokens(recipe, tokenizer))
    if recipe.padding == "none":
        lengths = sorted(_lengths(pairs, tokenizer, recipe.max_length), reverse=True)[:count]
        shared = before if recipe.shared_prefix else 0
        lengths = [length + before - shared for length in lengths]
        why = f"the longest of {len(pairs):,} pairs of {pairs.name} have {lengths[0]} tokens"
        return BatchShape(count, lengths[0], False, why, lengths, shared)
    longest, shortest = 0, recipe.max_length
    for length in _lengths(pairs, tokenizer, recipe.max_length):
        longest, shortest = max(longest, length), min(shortest, length)
        if recipe.padding == "max" and shortest < recipe.max_length:
            break  # nothing more to learn
    if recipe.padding == "max":
        padded = shortest < recipe.max_length
        why = f"every batch is padded to max_length, {recipe.max_length}"
        return BatchShape(count, recipe.max_length + before, padded, why)
    cut = " (cut there)" if longest == recipe.max_length else ""
    why = f"the longest of {len(pairs):,} pairs of {pairs.name} has {longest} tokens{cut}"
    return BatchShape(count, longest + before, shortest < longest, why)


def _lengths(pairs: Pairs, tokenizer, max_length: int | None = None) -> Iterator[int]:
    """Tokens of each pair, one after the other."""
    for start in range(0, len(pairs), CHUNK):
        chosen = slice(start, start + CHUNK)
        yield from map(
            len, encode(tokenizer, pairs.first[chosen], pairs.second[chosen], max_length)
        )


def pair_lengths(pairs: Pairs, tokenizer) -> list[int]:
    """Tokens of each pair, uncut."""
    return list(_lengths(pairs, tokenizer))


def mean_longest(lengths: list[int], batch_size: int) -> float:
    """The length of a batch's longest pair, on average over batches drawn at random.

    The same batches are drawn each time.
    """
    draw = random.Random(0)
    count = min(batch_size, len(lengths))
    return fmean(max(draw.sample(lengths, count)) for _ in range(SAMPLED_BATCHES))
