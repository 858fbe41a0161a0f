"""Measures and predicts the ladder's steps on the device at hand: how far off is a prediction?

Each step is built with random weights, runs twice on one batch, and the second run is observed;
the same two steps on the same shape are predicted. What differs is an error of the prediction.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from labkit.compiling import compile_cache
from labkit.data import Pairs
from labkit.machine import machine_facts
from labkit.model_source import ModelSource, find_model, with_layers
from labkit.predict.gpus import Gpu
from labkit.predict.local_card import (
    has_expandable_segments,
    is_known,
    local_card,
    outside_bytes,
)
from labkit.predict.prediction import predict
from labkit.recipe import Recipe, ladder
from labkit.report import Report
from labkit.shapes import BatchShape, shape_of
from labkit.trainable import check_gradients
from labkit.trial import Trial
from labkit.validation import Row, Validation

TIMED_STEPS = 5  # on a card, where seconds are modelled


class ValidationError(ValueError):
    """A validation that cannot be made as asked; the message says what to change."""


class TwoSteps(Trial):
    """A trial of what a prediction is made of: two steps on one batch, the second observed."""

    def prepare(self) -> None:
        """Build the step and make one update."""
        if self.device.type == "cuda":
            _clear_card(self.report)
        self.build()
        self.largest = next(self.stream())
        self._run(iter([self.largest]))
        check_gradients(self.step.model)

    def observe_memory(self) -> None:
        """Take the bytes of the second step."""
        super().observe_memory()
        self.report.batch["why"] = "the first batch"

    def shape(self) -> BatchShape:
        """Of the batch, also where memory ran out before it was measured."""
        return shape_of(next(self.stream()), "the first batch")


def _clear_card(report: Report) -> None:
    """Leave on the card what a new process would find there."""
    if clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None):
        clear()
    torch.cuda.empty_cache()
    if left := torch.cuda.memory_allocated():
        report.notes.append(f"{left:,} bytes were allocated before the step was built")


def model_of(recipe: Recipe, layers: int | None) -> ModelSource:
    """The recipe's model with random weights, all of it or its first layers.

    Raises:
        ModelError: There is no such model, or it has fewer layers.
    """
    source = find_model(recipe.model)
    return with_layers(source, layers) if layers else replace(source, weights_from=None)


def chosen_steps(
    recipe: Recipe, steps: Sequence[str] = (), *, compiled: bool = True
) -> dict[str, Recipe]:
    """The steps of the ladder from ``recipe``, by slug.

    Args:
        steps: The slugs that are wanted; all of them by default.
        compiled: Whether compiled steps are wanted.

    Raises:
        ValidationError: A slug is none, or nothing is left.
    """
    all_steps = ladder(recipe)
    if unknown := [slug for slug in steps if slug not in all_steps]:
        raise ValidationError(
            f"{', '.join(unknown)} is no step; the steps are {', '.join(all_steps)}."
        )
    chosen = {
        slug: step
        for slug, step in all_steps.items()
        if slug in (steps or all_steps) and (compiled or step.compile == "none")
    }
    if not chosen:
        raise ValidationError("no step is left: those asked for are compiled.")
    return chosen


def validate(
    steps: dict[str, Recipe],
    pairs: Pairs,
    device: torch.device,
    *,
    profile: str,
    layers: int | None = None,
    emulate: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[Validation], None] = lambda validation: None,
) -> Validation:
    """Measure and predict each step; one that runs out of memory or fails is a result, too.

    Args:
        steps: Recipes by slug.
        device: A CPU or a CUDA card.
        profile: Whose recipes they are; it is only kept.
        layers: Of the model; None for all of them.
        emulate: Use number formats that the hardware only imitates.
        progress: Told what is being done.
        keep: Handed the validation after each row, so that an interruption loses only one.

    Raises:
        ValidationError: The device keeps no peak.
        ModelError, TokenizerError: As for a measurement.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValidationError(f"{device.type} keeps no peak of its bytes; use cpu or cuda.")
    result = Validation(profile, layers, machine_facts(device.type))
    card = None
    with TemporaryDirectory() as folder, compile_cache(Path(folder), cold=True):
        for slug, recipe in steps.items():
            say = _prefixed(progress, slug)
            source = model_of(recipe, layers)
            trial = TwoSteps(
                recipe,
                pairs,
                device,
                warmup_steps=1,
                timed_steps=TIMED_STEPS if device.type == "cuda" else 0,
                cache_folder=Path(folder),
                emulate=emulate,
                progress=say,
                source=source,
            )
            row = Row(slug, measure_row(trial))
            if device.type == "cuda" and card is None:  # kernels are loaded by now
                card = local_card()
                result.card = card_facts(card)
            say("predicting")
            try:
                row.predicted = predict_row(row, source, card, trial.shape(), emulate=emulate)
            except Exception as error:
                row.reason = _reason(error)
            result.rows.append(row)
            keep(result)
    return result


def measure_row(trial: TwoSteps) -> Report:
    """Run the trial; an error that is not labkit's own ends it, and is kept in its report."""
    try:
        trial.attempt(trial.prepare)
        trial.attempt(trial.observe_memory)
        if trial.timed_steps:
            trial.attempt(trial.start_timing)
            for index in range(trial.timed_steps):
                trial.progress(f"timed step {index + 1} of {trial.timed_steps}")
                trial.attempt(trial.time_step)
    except Exception as error:
        if type(error).__module__.startswith("labkit."):
            raise
        trial.report.status, trial.report.reason = "error", _reason(error)
    trial.release()
    if trial.recipe.compile != "none":
        torch.compiler.reset()  # or what is compiled keeps its model alive
    return trial.report


def predict_row(
    row: Row, source: ModelSource, card: Gpu | None, shape: BatchShape, *, emulate: bool
) -> Report:
    """The prediction of a row that was measured."""
    report = predict(
        row.measured.recipe,
        card,
        shape=shape,
        source=source,
        expandable_segments=has_expandable_segments(),
        emulate=emulate,
    )
    if card is not None and not is_known(card):
        report.modelled = None
    return report


def card_facts(card: Gpu) -> dict:
    """The card that is predicted for, beside what is seen of the one that is here."""
    return asdict(card) | {
        "known": is_known(card),
        "seen_name": torch.cuda.get_device_name(),
        "seen_memory_bytes": torch.cuda.mem_get_info()[1],
        "seen_outside_bytes": outside_bytes(),
    }


def _prefixed(progress: Callable[[str], None], slug: str) -> Callable[[str], None]:
    return lambda text: progress(f"{slug}: {text}")


def _reason(error: Exception) -> str:
    """What went wrong, in a line."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"
