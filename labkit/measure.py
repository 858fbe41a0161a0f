"""Measures what a recipe costs on this machine: exact bytes, and times of interleaved steps."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from labkit.compiling import compile_cache
from labkit.data import Pairs
from labkit.machine import default_device
from labkit.recipe import Recipe
from labkit.report import Comparison, Report
from labkit.trial import Trial


class MeasureError(ValueError):
    """A measurement that cannot be made as asked; the message says what to change."""


def _time(trials: list[Trial], timed_steps: int, progress: Callable[[str], None]) -> None:
    """Alternate the timed steps of the trials."""
    for trial in trials:
        trial.attempt(trial.start_timing)
    for index in range(timed_steps if any(trial.step for trial in trials) else 0):
        progress(f"timed step {index + 1} of {timed_steps}")
        for trial in trials if index % 2 == 0 else reversed(trials):
            trial.attempt(trial.time_step)


def usable_device(name: torch.device | str) -> torch.device:
    """The device of that name, if this machine has it."""
    here = ["cpu", default_device()]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in here:
        raise MeasureError(
            f"device {name!r}: this machine has {' and '.join(dict.fromkeys(here))}."
        )
    return device


def measure(recipe: Recipe, pairs: Pairs, **options) -> Report:
    """Measure one recipe; the options are those of ``compare``."""
    return compare(None, recipe, pairs, **options).after


def compare(
    before: Recipe | None,
    after: Recipe,
    pairs: Pairs,
    *,
    device: torch.device | str | None = None,
    warmup_steps: int = 2,
    timed_steps: int = 8,
    cache_folder: Path | None = None,
    emulate: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Measure a recipe against the one before it, in one session.

    Bytes are taken of each recipe alone. Then the timed steps of the two alternate, and which
    of them goes first alternates too, so that a machine that slows down slows both.

    Args:
        before: ``None`` measures ``after`` alone.
        warmup_steps: Untimed steps of each, at least 1: the first creates optimizer state.
        timed_steps: Timed steps of each, 3 to 1000; a median of fewer means nothing.
        cache_folder: Where recipes with ``cached`` keep token ids.
        emulate: Use number formats that the hardware only imitates.
        progress: Told what is being done.

    Returns:
        Both reports; one that ran out of memory or was skipped says so in its status.

    Raises:
        MeasureError: ``warmup_steps < 1``, ``timed_steps`` out of range, or no such device.
        ModelError, TokenizerError, CacheError: As the parts of the step say.
        TrainingError: The step does not train what the recipe says.
    """
    if warmup_steps < 1:
        raise MeasureError(f"warmup_steps must be at least 1, not {warmup_steps}.")
    if not 3 <= timed_steps <= 1000:
        raise MeasureError(f"timed_steps must be from 3 to 1000, not {timed_steps}.")
    device = usable_device(device or default_device())
    trials = [
        Trial(
            recipe,
            pairs,
            device,
            warmup_steps=warmup_steps,
            timed_steps=timed_steps,
            cache_folder=cache_folder,
            emulate=emulate,
            progress=lambda text, name=name: progress(f"{name}{text}"),
        )
        for name, recipe in (("step before: ", before), ("this step: ", after))
        if recipe is not None
    ]
    with ExitStack() as stack:
        if after.compile != "none":
            cold = before is None or before.compile == "none"
            stack.enter_context(compile_cache(cache_folder, cold=cold))
        for trial in trials:
            trial.attempt(trial.prepare)
            trial.attempt(trial.observe_memory)
            if device.type != "cpu" and len(trials) == 2:
                trial.release()  # a card's counters see every model on it
        if device.type != "cpu" and len(trials) == 2:
            for trial in trials:
                trial.attempt(trial.prepare)
        _time(trials, timed_steps, progress)
    for trial in trials:
        trial.release()
    *earlier, last = (trial.report for trial in trials)
    return Comparison(after=last, before=earlier[0] if earlier else None)
