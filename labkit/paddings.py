"""How much of an epoch is padding, for each way of making batches: counted, not measured."""

from dataclasses import replace
from itertools import islice

import torch

from labkit.data import Pairs
from labkit.order import orders
from labkit.recipe import Recipe
from labkit.tokens import BatchMaker, load_tokenizer

WINDOWS = (2, 16, 64)  # of batches, for grouped lengths


def padding_shares(recipe: Recipe, pairs: Pairs) -> dict[str, float]:
    """Share of the computed tokens that are padding, by the way of making batches.

    Args:
        recipe: Batch size, length, seed and tokenizer; the pairs are read in its order.
    """
    plain = replace(recipe, cached=False, last_token_only=False, shared_prefix=False)
    lengths = BatchMaker(plain, pairs, load_tokenizer(recipe.model), None).lengths()
    ways = {"max": replace(plain, padding="max"), "longest": replace(plain, padding="longest")}
    for window in WINDOWS:
        grouped = replace(plain, padding="grouped", group_window=window)
        ways[f"grouped, {window} batches"] = grouped
    ways["none"] = replace(plain, padding="none")
    return {
        name: 1 - int(lengths.sum()) / _computed(way, lengths) for name, way in ways.items()
    }


def _computed(recipe: Recipe, lengths: torch.Tensor) -> int:
    """Tokens that one epoch computes."""
    if recipe.padding == "none":
        return int(lengths.sum())
    if recipe.padding == "max":
        return len(lengths) * recipe.max_length
    batches = -(-len(lengths) // recipe.batch_size)
    chosen = islice(orders(recipe, lengths), batches)
    return sum(len(batch) * int(lengths[batch].max()) for batch in chosen)
