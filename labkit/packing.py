"""A batch without padding: the tokens of all pairs in one row, and where each pair lies.

Every layer but attention treats tokens one by one, so it need not know where a pair ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

GROUPS = 4  # of a batch's pairs: more would leave less padding, in more calls of attention


@dataclass(frozen=True)
class PackedBatch:
    """Token ids of some pairs, end to end; before them the prefix that all share, if any.

    N counts the row's tokens, P those of the prefix, B the pairs. For attention on rows that
    are padded, pairs of similar length are put in groups: of b pairs, the longest of T tokens.
    """

    input_ids: torch.Tensor  # (1, N) int64
    position_ids: torch.Tensor  # (1, N) int64, each token's place in its own pair
    slots: tuple[torch.Tensor, ...]  # (b, T) int64 each, a group's tokens in the row
    places: torch.Tensor  # (N - P,) int64, where each token lies in all slots, flattened
    starts: torch.Tensor  # (B + 1,) int32, where each pair begins in the row, and the last ends
    ends: torch.Tensor  # (B,) int64, the token of each pair that the head reads
    labels: torch.Tensor  # (B,) int64
    lengths: tuple[int, ...]  # tokens of each pair, without the prefix
    real_tokens: int | None  # of all pairs, each with its prefix; None for a part

    @property
    def arguments(self) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        """What a ``PackedClassifier`` is called with."""
        beside = ("labels", "lengths", "real_tokens")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in beside}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the batch holds in memory."""
        return tree_leaves([self.arguments, self.labels])

    @property
    def longest(self) -> int:
        """Tokens of the longest pair, without the prefix."""
        return max(self.lengths)

    @property
    def computed_tokens(self) -> int:
        """Tokens that every layer computes."""
        return self.input_ids.numel()

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch":
        """The same batch with each tensor changed."""
        return replace(self, **tree_map(change, self.arguments | {"labels": self.labels}))

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def pin_memory(self) -> "PackedBatch":
        """The same batch where a card reads it directly; a DataLoader asks for this."""
        return self.map(torch.Tensor.pin_memory)

    def split(self, parts: int) -> list["PackedBatch"]:
        """The batch in parts, never empty, whose numbers of pairs differ by one at most."""
        if parts == 1:
            return [self]
        row, shared = self.input_ids[0], self.input_ids.numel() - sum(self.lengths)
        found, start = [], shared
        for chosen in np.array_split(range(len(self.labels)), min(parts, len(self.labels))):
            pairs = slice(int(chosen[0]), int(chosen[-1]) + 1)
            lengths = self.lengths[pairs]
            stop = start + sum(lengths)
            ids = torch.cat([row[:shared], row[start:stop]])
            ends = self.ends[pairs]
            ends = torch.where(ends < shared, ends, ends - start + shared)
            found.append(lay_out(ids, lengths, ends, self.labels[pairs], real_tokens=None))
            start = stop
        return found


def pack(
    rows: Sequence[Sequence[int] | torch.Tensor],
    labels: Sequence[int] | torch.Tensor,
    *,
    pad_id: int,
    prefix: Sequence[int] = (),
) -> PackedBatch:
    """One batch out of rows of different lengths, none of them padded.

    Args:
        rows: Token ids, one row a pair, without the prefix.
        labels: One label a row.
        pad_id: A token that the head does not read: transformers' classifiers take the last
            one that is another, and so does this batch.
        prefix: Tokens that stand before every pair and are computed once.
    """
    rows = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    lengths = tuple(len(row) for row in rows)
    starts = accumulate(lengths, initial=len(prefix))
    whole = [torch.tensor(prefix, dtype=torch.int64), *rows]
    ends = []
    for start, row in zip(starts, rows, strict=False):
        others = (row != pad_id).nonzero()
        # a pair of nothing else is read at the prefix's last token, or at its own first
        ends.append(
            start + int(others[-1]) if len(others) else _fallback(prefix, start, pad_id)
        )
    return lay_out(
        torch.cat(whole),
        lengths,
        torch.tensor(ends),
        torch.as_tensor(labels, dtype=torch.int64),
        real_tokens=sum(lengths) + len(prefix) * len(lengths),
    )


def _fallback(prefix: Sequence[int], start: int, pad_id: int) -> int:
    """Where a pair of padding alone is read: as transformers reads it behind its prefix."""
    others = [place for place, token in enumerate(prefix) if token != pad_id]
    return others[-1] if others else (0 if prefix else start)


def lay_out(
    ids: torch.Tensor,
    lengths: Sequence[int],
    ends: torch.Tensor,
    labels: torch.Tensor,
    *,
    real_tokens: int | None,
) -> PackedBatch:
    """The batch of a row of tokens, on its device; all that depends on values is counted here.

    Args:
        ids: (N,) token ids: a prefix, if there are more than ``lengths`` add up to, then the
            pairs.
        lengths: Tokens of each pair.
        ends: (B,) the token of each pair that the head reads, counted in the row.
        labels: (B,) labels.
    """
    counts = np.array(lengths)
    shared = len(ids) - int(counts.sum())
    starts = np.concatenate([[0], counts.cumsum()]) + shared
    positions = np.concatenate([np.arange(shared), *(np.arange(n) + shared for n in counts)])

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype, device=ids.device)

    slots, places = _group(counts, starts)
    return PackedBatch(
        input_ids=ids[None],
        position_ids=tensor(positions)[None],
        slots=tuple(map(tensor, slots)),
        places=tensor(places),
        starts=tensor(starts, torch.int32),
        ends=ends,
        labels=labels,
        lengths=tuple(lengths),
        real_tokens=real_tokens,
    )


def _group(counts: np.ndarray, starts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Pairs of similar length in groups, padded to the longest, and each token's place there.

    Args:
        counts: (B,) tokens of each pair.
        starts: (B + 1,) where each begins in the row.
    """
    slots, places, before = [], np.empty(int(counts.sum()), dtype=np.int64), 0
    by_length = counts.argsort(kind="stable")
    for group in np.array_split(by_length, min(GROUPS, len(counts))):
        column = np.arange(counts[group].max())
        there = column < counts[group, None]  # (b, T)
        # beyond a pair's last token, that token again: nothing of it is used
        slots.append(starts[group, None] + np.minimum(column, counts[group, None] - 1))
        places[slots[-1][there] - starts[0]] = before + np.flatnonzero(there)
        before += there.size
    return slots, places
