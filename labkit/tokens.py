"""Batches of token ids, from pairs tokenised in the loop or from the cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import torch

from labkit.data import DATA_FOLDER, DataError, Pairs
from labkit.recipe import Recipe
from labkit.token_cache import cached_tokens
from labkit.tokenizer import TokenizerError, encode, load_tokenizer

__all__ = ["Batch", "TokenizerError", "batches", "collate", "load_tokenizer"]

CACHE_FOLDER = DATA_FOLDER.parent / "runs" / "cache"


@dataclass(frozen=True)
class Batch:
    """Token ids of some pairs, padded to one length."""

    input_ids: torch.Tensor  # (B, T) int64
    attention_mask: torch.Tensor  # (B, T) int64, 1 for a token and 0 for padding
    labels: torch.Tensor  # (B,) int64
    real_tokens: int | None  # without padding; None for a part, which is not counted again

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            labels=self.labels.to(device),
        )

    def split(self, parts: int) -> list["Batch"]:
        """Views of the batch, never empty, whose sizes differ by one pair at most."""
        parts = min(parts, len(self.labels))
        tensors = (self.input_ids, self.attention_mask, self.labels)
        return [
            Batch(*part, real_tokens=self.real_tokens if parts == 1 else None)
            for part in zip(*(tensor.tensor_split(parts) for tensor in tensors), strict=True)
        ]


def collate(
    rows: Sequence[Sequence[int] | torch.Tensor],
    labels: Sequence[int] | torch.Tensor,
    *,
    pad_id: int,
    length: int | None,
    side: str = "right",
) -> Batch:
    """One batch out of rows of different lengths.

    Args:
        rows: Token ids, one row a pair.
        labels: One label a row.
        pad_id: Fills the rest of a row.
        length: Tokens of every row of the batch; None for those of the longest row.
        side: Where the padding goes, ``right`` or ``left``.

    Raises:
        ValueError: A row is longer than ``length``, or ``side`` is neither.
    """
    if side not in ("right", "left"):
        raise ValueError(f"side must be right or left, not {side!r}.")
    longest = max(len(row) for row in rows)
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"a row of {longest} tokens does not fit into {length}.")
    input_ids = torch.full((len(rows), length), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        where = slice(len(row)) if side == "right" else slice(length - len(row), length)
        input_ids[index, where] = torch.as_tensor(row, dtype=torch.int64)
        attention_mask[index, where] = 1
    labels = torch.as_tensor(labels, dtype=torch.int64)
    return Batch(input_ids, attention_mask, labels, sum(len(row) for row in rows))


def batches(
    recipe: Recipe,
    pairs: Pairs,
    tokenizer,
    *,
    cache_folder: Path | None = None,
    skip: int = 0,
) -> Iterator[Batch]:
    """Batches without end; cached or not, they are the same for the same seed.

    Each epoch shuffles all pairs anew. Its last batch holds what is left and may be smaller.
    Padding goes to the right, whatever the tokenizer prefers: a token's position then does not
    depend on what else is in the batch.

    Args:
        recipe: Decides batch size, length, padding, order, and whether a cache is used.
        pairs: At least one.
        tokenizer: From ``load_tokenizer``.
        cache_folder: Where the cache is; ``runs/cache`` of the repository if left out.
        skip: Batches to leave out at the start, as an interrupted training does.

    Raises:
        DataError: There are no pairs.
        CacheError: The cache cannot be written.
        TokenizerError: A pair cannot be tokenised.
    """
    if not len(pairs):
        raise DataError(f"{pairs.name} holds no pairs; training needs some.")
    if recipe.cached:
        tokens = cached_tokens(
            pairs, tokenizer, recipe.max_length, cache_folder or CACHE_FOLDER
        )
        return _batches(recipe, tokens.labels, tokenizer.pad_token_id, tokens.rows, skip)

    def tokenise(chosen: list[int]) -> list[list[int]]:
        first, second = ([texts[i] for i in chosen] for texts in (pairs.first, pairs.second))
        return encode(tokenizer, first, second, recipe.max_length)

    return _batches(recipe, torch.tensor(pairs.labels), tokenizer.pad_token_id, tokenise, skip)


def _batches(
    recipe: Recipe, labels: torch.Tensor, pad_id: int, rows_of, skip: int
) -> Iterator[Batch]:
    length = recipe.max_length if recipe.padding == "max" else None
    for chosen in islice(_orders(recipe, len(labels)), skip, None):
        yield collate(rows_of(chosen.tolist()), labels[chosen], pad_id=pad_id, length=length)


def _orders(recipe: Recipe, pairs: int) -> Iterator[torch.Tensor]:
    """Which pairs each batch holds, without end."""
    for epoch in count():
        order = torch.randperm(
            pairs, generator=torch.Generator().manual_seed(recipe.seed + epoch)
        )
        yield from order.split(recipe.batch_size)
