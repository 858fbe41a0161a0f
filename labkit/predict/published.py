"""Predictions beside figures that others measured on cards and published.

The figures are a table of the repository, with the setting, the statistic and the source of
each. The steps are written as they were run, and nothing is fitted but one length that was not
published.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from labkit.machine import PROJECT
from labkit.predict.prediction import PredictError, predict_step
from labkit.predict.published_steps import find_step

TABLE = PROJECT / "data" / "published" / "measured.csv"
UNIT_BYTES = {"bytes": 1, "MiB": 2**20, "GiB": 2**30, "GB": 10**9}
FITTED_ON = "peft-lora-r32"  # the length of peft's batches
LENGTHS = (512, 768)  # between which it is sought; the data is cut at the upper one
NEAR = 0.005  # an error at which the search for it ends


@dataclass(frozen=True)
class Published:
    """A figure as it was published, and how it is compared.

    Attributes:
        what: What was run; ``setting`` is its size.
        statistic: What the figure is, in the publisher's terms.
        value: In ``unit``.
        gpu: The card in the publisher's words; ``card`` is its key in the catalogue.
        torch: The version.
        counted: The statistic here, ``allocated`` or ``reserved``, less ``subtracted_bytes``.
        bound: The error that a prediction may have, as a fraction.
    """

    id: str
    what: str
    setting: str
    statistic: str
    value: float
    unit: str
    gpu: str
    torch: str
    source: str
    counted: str
    subtracted_bytes: int
    card: str
    bound: float

    @property
    def bytes(self) -> int:
        """The published value in bytes."""
        return round(self.value * UNIT_BYTES[self.unit])


@dataclass(frozen=True)
class PublishedRow:
    """A published figure with its prediction."""

    published: Published
    predicted_bytes: int
    note: str

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted_bytes / self.published.bytes - 1

    @property
    def within(self) -> bool:
        """Whether the error is not above its bound."""
        return abs(self.error) <= self.published.bound

    def to_dict(self) -> dict:
        """Plain values, for JSON."""
        return {
            **asdict(self.published),
            "published_bytes": self.published.bytes,
            "predicted_bytes": self.predicted_bytes,
            "error": self.error,
            "within": self.within,
            "note": self.note,
        }


def read_published(path: Path = TABLE) -> dict[str, Published]:
    """The published figures by id."""
    rows = {}
    with path.open(encoding="utf-8", newline="") as file:
        for values in csv.DictReader(file):
            rows[values["id"]] = Published(
                **{
                    **values,
                    "value": float(values["value"]),
                    "subtracted_bytes": int(values["subtracted_bytes"]),
                    "bound": float(values["bound"]),
                }
            )
    return rows


def compare_published(
    ids: Sequence[str] | None = None, *, progress: Callable[[str], None] = lambda text: None
) -> list[PublishedRow]:
    """Predict what was published.

    Args:
        ids: Rows of the table; all of them by default, which takes about a minute.
        progress: Is told what is done next.

    Raises:
        PredictError: An id is not in the table.
    """
    table = read_published()
    if unknown := sorted(set(ids or ()) - set(table)):
        raise PredictError(
            f"{', '.join(unknown)} is not among the published rows: {', '.join(table)}."
        )
    rows, tokens = [], None
    for row_id in ids or table:
        if row_id.startswith("peft-") and tokens is None:
            progress(f"the length of the batches of {FITTED_ON}")
            tokens = _fitted_tokens()
        progress(row_id)
        note = find_step(row_id, tokens).note
        rows.append(PublishedRow(table[row_id], _predicted_bytes(row_id, tokens), note))
    return rows


@cache
def _predicted_bytes(row_id: str, tokens: int | None) -> int:
    """The statistic of a row as predicted."""
    row, step = read_published()[row_id], find_step(row_id, tokens)
    report = predict_step(step.build, row.card, name=row.id, warm_up_bytes=step.warm_up_bytes)
    peak = {
        "allocated": report.memory.peak_allocated_bytes,
        "reserved": report.memory.peak_reserved_bytes,
    }
    return peak[row.counted] - row.subtracted_bytes


@cache
def _fitted_tokens() -> int:
    """The length at which the row that it is fitted on comes out as published."""
    return fit_length(
        lambda tokens: _predicted_bytes(FITTED_ON, tokens), read_published()[FITTED_ON].bytes
    )


def fit_length(bytes_at: Callable[[int], int], wanted_bytes: int) -> int:
    """The length whose bytes come nearest to those wanted.

    Bytes are nearly a straight line in the length, so few lengths have to be tried: each next
    one lies on the line between the nearest below and above.
    """
    tried = {tokens: bytes_at(tokens) for tokens in LENGTHS}
    below, above = LENGTHS
    while above - below > 1:
        share = (wanted_bytes - tried[below]) / (tried[above] - tried[below])
        tokens = below + round(share * (above - below))
        tokens = min(max(tokens, below + 1), above - 1)
        tried[tokens] = bytes_at(tokens)
        if abs(tried[tokens] / wanted_bytes - 1) <= NEAR:
            break
        if tried[tokens] < wanted_bytes:
            below = tokens
        else:
            above = tokens
    return min(tried, key=lambda tokens: abs(tried[tokens] - wanted_bytes))
