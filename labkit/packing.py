"""A batch without padding: the tokens of all pairs in one row, and where each pair lies.

Every layer but attention treats tokens one by one, so it need not know where a pair ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np
import torch


@dataclass(frozen=True)
class PackedBatch:
    """Token ids of some pairs, end to end; before them the prefix that all share, if any.

    N counts the row's tokens, P those of the prefix, B the pairs, T the longest pair's tokens.
    """

    input_ids: torch.Tensor  # (1, N) int64
    position_ids: torch.Tensor  # (1, N) int64, each token's place in its own pair
    slots: torch.Tensor  # (B, T) int64, the row's token at each place of each pair
    places: torch.Tensor  # (N - P,) int64, where each token lies in the flattened slots
    starts: torch.Tensor  # (B + 1,) int32, where each pair begins in the row, and the last ends
    ends: torch.Tensor  # (B,) int64, the token of each pair that the head reads
    labels: torch.Tensor  # (B,) int64
    lengths: tuple[int, ...]  # tokens of each pair, without the prefix
    real_tokens: int | None  # of all pairs, each with its prefix; None for a part

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """What a ``PackedClassifier`` is called with."""
        beside = ("labels", "lengths", "real_tokens")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in beside}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the batch holds in memory."""
        return [*self.arguments.values(), self.labels]

    @property
    def computed_tokens(self) -> int:
        """Tokens that every layer computes."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch on another device."""
        names = [*self.arguments, "labels"]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def pin_memory(self) -> "PackedBatch":
        """The same batch where a card reads it directly; a DataLoader asks for this."""
        names = [*self.arguments, "labels"]
        return replace(self, **{name: getattr(self, name).pin_memory() for name in names})

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
            ends = self.ends[pairs] - start + shared
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
    ends = [start + _last_other(row, pad_id) for start, row in zip(starts, rows, strict=False)]
    return lay_out(
        torch.cat([torch.tensor(prefix, dtype=torch.int64), *rows]),
        lengths,
        torch.tensor(ends),
        torch.as_tensor(labels, dtype=torch.int64),
        real_tokens=sum(lengths) + len(prefix) * len(lengths),
    )


def _last_other(row: torch.Tensor, pad_id: int) -> int:
    """The last token that is not ``pad_id``; the first one if all are, as transformers does."""
    others = (row != pad_id).nonzero()
    return int(others[-1]) if len(others) else 0


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
    shared, longest = len(ids) - int(counts.sum()), int(counts.max())
    starts = np.concatenate([[0], counts.cumsum()]) + shared
    column = np.arange(longest)
    there = column < counts[:, None]  # (B, T)
    slots = starts[:-1, None] + np.minimum(column, counts[:, None] - 1)  # then the last again
    positions = np.concatenate([np.arange(shared), there.nonzero()[1] + shared])

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype, device=ids.device)

    return PackedBatch(
        input_ids=ids[None],
        position_ids=tensor(positions)[None],
        slots=tensor(slots),
        places=tensor(np.flatnonzero(there)),
        starts=tensor(starts, torch.int32),
        ends=ends,
        labels=labels,
        lengths=tuple(lengths),
        real_tokens=real_tokens,
    )
