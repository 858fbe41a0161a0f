"""What a tuning found: every candidate with every step time, and the recipe to train with."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from labkit.exactness import Exactness
from labkit.recipe import Recipe
from labkit.records import to_json, write_text
from labkit.report import Comparison, Report
from labkit.tuning_forecast import peak_bytes

FORMAT = "labkit tuning 1"
STATUSES = (
    "waiting", "racing",
    "winner",  # the best recipe when its stage was over
    "out",  # clearly slower than another one
    "even",  # not clearly faster than what was the best before
    "pruned",  # over the budget
    "failed",
)  # fmt: skip
KEPT = ("step_seconds", "data_seconds", "real_tokens", "losses", "compile", "notes")


@dataclass
class Row:
    """A candidate of a stage: what it changes, what is predicted of it, and how it raced."""

    stage: str
    recipe: Recipe
    change: str  # from the best recipe of the stages before, in words
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None  # on a CPU, of those that raced
    status: str = "waiting"
    reason: str = ""  # why it was pruned, failed, or did not win
    speed_to_leader: float | None = None  # median of the paired steps; 1 for the leader
    pays_after_steps: float | None = None  # compiled: inf where it never does
    report: dict = field(default_factory=dict)  # the raw figures

    def take(self, report: Report) -> None:
        """Keep what a report holds by now."""
        self.report = {name: _copy(getattr(report, name)) for name in KEPT}
        if report.memory:
            self.measured_peak_bytes = peak_bytes(report.memory)

    @property
    def step_seconds(self) -> float | None:
        """Median of the timed steps, in seconds."""
        seconds = self.report.get("step_seconds")
        return median(seconds) if seconds else None

    @property
    def data_share(self) -> float:
        """Of the steps' time, what making their batches took; all of it where unknown."""
        if self.step_seconds is None:
            return 1.0
        return sum(self.report["data_seconds"]) / sum(self.report["step_seconds"])

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return vars(self) | {"recipe": self.recipe.to_dict(), "step_seconds": self.step_seconds}


def _copy(value):
    """A list or dict that goes on growing elsewhere, as it is now."""
    return value.copy() if isinstance(value, list | dict) else value


@dataclass
class Tuning:
    """A search as far as it is: the best recipe, all candidates, and how good the best is.

    Attributes:
        recipe: The best so far; None until one is predicted to fit.
        comparison: The given recipe beside the tuned one, measured afresh.
        predicted: Predicted peak bytes of ``given`` and ``tuned``.
        checks: Whether both compute the same.
        doing: What is being done.
    """

    given: Recipe
    fixed: frozenset[str]
    budget_bytes: int
    free_bytes: int
    steps: int
    rounds: int
    machine: dict = field(default_factory=dict)
    data: dict = field(default_factory=dict)
    recipe: Recipe | None = None
    rows: list[Row] = field(default_factory=list)
    checks: list[Exactness] = field(default_factory=list)
    comparison: Comparison | None = None
    predicted: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0  # that tuning took
    doing: str = ""

    def stop(self) -> None:
        """Say of what was under way that it was not decided."""
        self.interrupted = True
        for row in self.rows:
            if row.status in ("waiting", "racing"):
                row.reason = "stopped before it was decided"

    def to_dict(self) -> dict:
        """The record as JSON values."""
        compared = self.comparison
        return {"format": FORMAT} | vars(self) | {
            "given": self.given.to_dict(),
            "fixed": sorted(self.fixed),
            "recipe": self.recipe and self.recipe.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "checks": [check.to_dict() for check in self.checks],
            "comparison": compared
            and compared.to_dict()
            | {
                "speed_ratio": compared.speed_ratio,
                "speed_ratio_spread": compared.speed_ratio_spread,
                "speed_change_is_clear": compared.speed_change_is_clear,
            },
        }  # fmt: skip


def save_record(tuning: Tuning, path: Path) -> Path:
    """Write the whole record beside the recipe's file and return where."""
    record = path.with_name(f"{path.stem}.record.json")
    write_text(record, to_json(tuning.to_dict()) + "\n")
    return record


def save_recipe(tuning: Tuning, path: Path) -> Path:
    """Write the tuned recipe as ``--recipe`` reads it, and the record beside it.

    Returns:
        Where the record is.
    """
    text = json.dumps(tuning.recipe.to_dict(), indent=2, ensure_ascii=False)
    write_text(path, text + "\n")
    return save_record(tuning, path)
