"""Batches of token ids, from pairs tokenised in the loop or from the cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from labkit.data import DATA_FOLDER, DataError, Pairs
from labkit.order import leave_group, loader_options, orders
from labkit.packing import PackedBatch, pack
from labkit.recipe import Recipe
from labkit.token_cache import cached_tokens
from labkit.tokenizer import TokenizerError, encode, load_tokenizer

__all__ = ["Batch", "TokenizerError", "batches", "collate", "load_tokenizer"]

CHUNK = 2000  # pairs tokenised at a time
CACHE_FOLDER = DATA_FOLDER.parent / "runs" / "cache"


@dataclass(frozen=True)
class Batch:
    """Token ids of some pairs, padded to one length."""

    input_ids: torch.Tensor  # (B, T) int64
    attention_mask: torch.Tensor  # (B, T) int64, 1 for a token and 0 for padding
    labels: torch.Tensor  # (B,) int64
    real_tokens: int | None  # without padding; None for a part, which is not counted again

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """What the model is called with."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the batch holds in memory."""
        return [self.input_ids, self.attention_mask, self.labels]

    @property
    def computed_tokens(self) -> int:
        """Tokens that every layer computes, padding too."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            labels=self.labels.to(device),
        )

    def pin_memory(self) -> "Batch":
        """The same batch where a card reads it directly; a DataLoader asks for this."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            attention_mask=self.attention_mask.pin_memory(),
            labels=self.labels.pin_memory(),
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


class BatchMaker(Dataset):
    """Makes the batch of any chosen pairs, from their texts or from the cache.

    A data set of batches: a DataLoader can hand it to worker processes.

    Raises:
        DataError: There are no pairs.
        CacheError: The cache cannot be written.
        TokenizerError: A pair cannot be tokenised.
    """

    def __init__(
        self, recipe: Recipe, pairs: Pairs, tokenizer, cache_folder: Path | None
    ) -> None:
        if not len(pairs):
            raise DataError(f"{pairs.name} holds no pairs; training needs some.")
        self.recipe, self.pairs, self.tokenizer = recipe, pairs, tokenizer
        self.pad_id = tokenizer.pad_token_id
        self.labels = torch.tensor(pairs.labels)
        self.prefix = instruction_tokens(recipe, tokenizer)
        self.cached = None
        if recipe.cached:
            folder = cache_folder or CACHE_FOLDER
            self.cached = cached_tokens(pairs, tokenizer, recipe.max_length, folder)

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self) -> torch.Tensor:
        """(pairs,) tokens of each pair, without the instruction."""
        if self.cached is not None:
            return self.cached.offsets.diff()
        chunks = torch.arange(len(self)).split(CHUNK)
        return torch.tensor([len(row) for chunk in chunks for row in self._rows(chunk)])

    def __getitem__(self, chosen: torch.Tensor) -> Batch | PackedBatch:
        """The batch of the pairs with these numbers."""
        rows, labels = self._rows(chosen), self.labels[chosen]
        if self.recipe.shared_prefix:
            return pack(rows, labels, pad_id=self.pad_id, prefix=self.prefix)
        if self.prefix:
            rows = [[*self.prefix, *row] for row in rows]
        if self.recipe.padding == "none":
            return pack(rows, labels, pad_id=self.pad_id)
        length = self.recipe.max_length + len(self.prefix)
        return collate(
            rows,
            labels,
            pad_id=self.pad_id,
            length=length if self.recipe.padding == "max" else None,
        )

    def _rows(self, chosen: torch.Tensor) -> list:
        chosen = chosen.tolist()
        if self.cached is not None:
            return self.cached.rows(chosen)
        texts = ([some[i] for i in chosen] for some in (self.pairs.first, self.pairs.second))
        return encode(self.tokenizer, *texts, self.recipe.max_length)


def instruction_tokens(recipe: Recipe, tokenizer) -> list[int]:
    """The tokens of the recipe's instruction, which stand before those of a pair."""
    return tokenizer(recipe.instruction, add_special_tokens=False)["input_ids"]


def batches(
    recipe: Recipe,
    pairs: Pairs,
    tokenizer,
    *,
    cache_folder: Path | None = None,
    skip: int = 0,
    device_type: str = "cpu",
) -> Iterator[Batch | PackedBatch]:
    """Batches without end; cached or not, they are the same for the same seed.

    Each epoch shuffles all pairs anew. One of its batches holds what is left and may be
    smaller. Padding goes to the right, whatever the tokenizer prefers: a token's position then
    does not depend on what else is in the batch.

    Args:
        recipe: Decides batch size, length, padding, order, and whether a cache or worker
            processes are used.
        pairs: At least one.
        tokenizer: From ``load_tokenizer``.
        cache_folder: Where the cache is; ``runs/cache`` of the repository if left out.
        skip: Batches to leave out at the start, as an interrupted training does.
        device_type: Where the batches will be used.

    Raises:
        DataError, CacheError, TokenizerError: As ``BatchMaker`` says.
    """
    maker = BatchMaker(recipe, pairs, tokenizer, cache_folder)
    lengths = maker.lengths() if recipe.padding == "grouped" else maker.labels
    chosen = islice(orders(recipe, lengths), skip, None)
    options, _ = loader_options(recipe, device_type)
    if not any(options.values()):
        return map(maker.__getitem__, chosen)
    # a generator of its own, or the loader would draw a number from that of dropout
    draw = torch.Generator().manual_seed(recipe.seed)
    loader = DataLoader(
        maker, batch_size=None, sampler=chosen, generator=draw, worker_init_fn=leave_group,
        **options,
    )  # fmt: skip
    return iter(loader)


def in_order(
    recipe: Recipe,
    pairs: Pairs,
    tokenizer,
    *,
    batch_size: int,
    cache_folder: Path | None = None,
) -> Iterator[Batch | PackedBatch]:
    """All pairs once, as they stand in the data: for evaluation.

    Raises:
        DataError, CacheError, TokenizerError: As ``BatchMaker`` says.
    """
    maker = BatchMaker(recipe, pairs, tokenizer, cache_folder)
    return map(maker.__getitem__, torch.arange(len(maker)).split(batch_size))
