"""A candidate that races: a trial of its own, whose failures are results."""

import math
import time
from collections.abc import Callable, Sequence

from labkit.report import Report
from labkit.trial import Trial
from labkit.tuning_record import Row

BESIDE_OTHERS = "memory ran out beside the recipes it raced with"


class Entrant:
    """A row of the table and the trial that fills it.

    Attributes:
        prepare_seconds: What it took to build and warm up, compiling included.
    """

    def __init__(self, row: Row, trial: Trial) -> None:
        self.row, self.trial, self.prepare_seconds = row, trial, 0.0

    @property
    def report(self) -> Report:
        """The figures so far."""
        return self.trial.report

    @property
    def status(self) -> str:
        """What the table says."""
        return self.row.status

    @status.setter
    def status(self, value: str) -> None:
        self.row.status = value

    def prepare(self) -> bool:
        """Build, warm up, take the bytes where others do not disturb; whether it can race."""
        start = time.perf_counter()
        if not self._try(self.trial.prepare):
            return False
        self.prepare_seconds = time.perf_counter() - start
        if self.trial.device.type == "cpu" and not self._try(self.trial.observe_memory):
            return False  # a card's counters would see every model on it
        return self._try(self.trial.start_timing)

    def again(self, row: Row) -> None:
        """Race once more, in another row, over the same batches from the first on."""
        self.row = row
        for name in ("step_seconds", "data_seconds", "real_tokens", "computed_tokens"):
            setattr(self.report, name, [])
        self._try(self.trial.start_timing)

    def run(self) -> bool:
        """One timed step."""
        return self._try(self.trial.time_step)

    def fail(self, reason: str) -> None:
        """Be out of the race, and say why."""
        self.row.status, self.row.reason = "failed", reason
        self.release()

    def release(self) -> None:
        """Give memory and worker processes back."""
        self.trial.timed_batches = iter(())
        self.trial.release()

    def _try(self, work: Callable[[], None]) -> bool:
        """Do a part of the work; whether it was done."""
        try:
            self.trial.attempt(work)
        except Exception as error:  # a compiler, a kernel or a model may refuse in many ways
            self.fail(f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}")
            return False
        if not self.report.ok:
            self.fail(f"{self.report.status.replace('_', ' ')}: {self.report.reason}")
        elif self.trial.step is None:
            self.fail(BESIDE_OTHERS)
        self.row.take(self.report)
        return self.row.status != "failed"


def if_it_pays(
    winner: Entrant, incumbent: Entrant, compiled: Sequence[Entrant], steps: int
) -> Entrant:
    """The winner, or the incumbent where compiling has not paid when training is over."""
    for entrant in compiled:
        cost, saved = _compile_cost(entrant, incumbent)
        entrant.row.pays_after_steps = cost / saved if saved > 0 else math.inf
    if winner is incumbent or winner.row.pays_after_steps < steps:
        return winner
    winner.row.reason = (
        f"faster, but that pays after {winner.row.pays_after_steps:,.0f} steps, and {steps:,} "
        "are planned"
    )
    return incumbent


def _compile_cost(compiled: Entrant, other: Entrant) -> tuple[float, float]:
    """Seconds until all shapes are compiled, and seconds that each step then saves."""
    seconds = compiled.row.step_seconds or math.inf
    first = (compiled.report.compile or {}).get("first_step_seconds", 0.0) - seconds
    cost = max(first, compiled.prepare_seconds - other.prepare_seconds)
    return cost, (other.row.step_seconds or 0.0) - seconds
