"""The explorer's measurement: the chosen recipe, run on this machine beside its prediction."""

import atexit
import json
import sys
from collections.abc import Callable
from subprocess import PIPE, Popen
from tempfile import TemporaryFile

from labkit.explorer_answer import predicted
from labkit.forecast import this_machine
from labkit.predict.gpus import Gpu, GpuError
from labkit.predict.prediction import PredictError
from labkit.recipe import Recipe, command_options
from labkit.report import Report, format_bytes


class ExplorerError(ValueError):
    """A measurement that cannot be made; the message says why in one sentence."""


def card_here() -> Gpu | None:
    """The card here, None where the CPU is what can be both predicted and measured."""
    try:
        return this_machine()
    except (GpuError, PredictError):
        return None


def measure_here(recipe: Recipe, progress: Callable[[str], None]) -> tuple[Report, Report]:
    """Predict a recipe for this machine, and measure it there.

    Raises:
        ExplorerError: It needs more memory than is free, or the measurement failed.
    """
    card = card_here()
    progress("predicting for this machine")
    expected = predicted(recipe, card)
    if not expected.fit.fits:
        free = expected.fit.capacity_bytes - expected.fit.context_bytes
        raise ExplorerError(
            f"Not measured: {format_bytes(expected.memory.peak_allocated_bytes)} are needed "
            f"at the peak, and {format_bytes(free)} are free on this machine."
        )
    return expected, _measure_apart(recipe, "cuda" if card else "cpu", progress)


def _measure_apart(recipe: Recipe, device: str, progress: Callable[[str], None]) -> Report:
    """Measure in a process of its own, so that running out of memory can end no other."""
    command = [sys.executable, "-m", "labkit", "measure", *command_options(recipe)]
    command += ["--device", device, "--timed-steps", "3", "--json"]
    with (
        TemporaryFile("w+", encoding="utf-8") as answer,
        Popen(command, stdout=answer, stderr=PIPE, encoding="utf-8") as process,
    ):
        atexit.register(process.kill)
        last = ""
        for line in process.stderr:
            last = line.strip().removeprefix("this step: ")
            progress(last)
        status = process.wait()
        atexit.unregister(process.kill)
        if status < 0:
            raise ExplorerError("Not measured: the system ended it, most likely out of memory.")
        answer.seek(0)
        try:
            values = json.load(answer)
        except ValueError:
            raise ExplorerError(f"Not measured: {last.removeprefix('labkit: ')}") from None
    for derived in ("median_step_seconds", "real_tokens_per_second"):
        del values[derived]
    report = Report.from_dict(values)
    if not report.ok:
        raise ExplorerError(f"Not measured: {report.reason}.")
    return report
