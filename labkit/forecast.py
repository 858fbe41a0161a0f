"""A step and the step before it, predicted for this machine and for a chosen card."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from labkit.data import Pairs
from labkit.machine import default_device
from labkit.predict.gpus import Gpu, GpuError, find_gpu
from labkit.predict.local_card import has_expandable_segments
from labkit.predict.prediction import PredictError, predict
from labkit.predict.trace import TraceError
from labkit.recipe import Recipe
from labkit.report import Comparison, Report


@dataclass
class Forecast:
    """What could be predicted, and in sentences what could not.

    ``predicted`` is what ``Comparison.predicted`` keeps.
    """

    predicted: dict[str, Comparison] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def forecast(
    before: Recipe | None,
    after: Recipe,
    pairs: Pairs,
    gpu: str,
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> Forecast:
    """Predict two steps for this machine and for a card; what cannot be is no error.

    Args:
        before: ``None`` predicts ``after`` alone.
        pairs: The data: the steps are those of its worst batch.
        gpu: The chosen card, anything that ``find_gpu`` understands.
        progress: Told what is being done.
    """
    found = Forecast()
    for place, find in (("here", this_machine), ("card", lambda: find_gpu(gpu))):
        try:
            card = find()
            progress(f"predicting for {card.title if card else 'this machine'}")
            expandable = place == "here" and has_expandable_segments()
            ask = partial(predict, gpu=card, pairs=pairs, expandable_segments=expandable)
            found.predicted[place] = Comparison(
                before=before and _without_timeline(ask(before)), after=ask(after)
            )
        except (GpuError, PredictError, TraceError) as error:
            words = "this machine" if place == "here" else gpu
            found.missing.append(f"No prediction for {words}: {error}")
    return found


def this_machine() -> Gpu | None:
    """The card that is measured, None for the CPU.

    Raises:
        GpuError: It is not in the catalogue.
        PredictError: Nothing models its bytes.
    """
    device = default_device()
    if device == "cuda":
        return find_gpu(torch.cuda.get_device_name())
    if device != "cpu":
        raise PredictError(
            f"its device is {device}, whose allocator is not modelled; CPUs and CUDA cards are."
        )
    return None


def _without_timeline(report: Report) -> Report:
    """The report of a step that no figure shows in full."""
    report.memory.timeline, report.memory.owner_timeline = [], {}
    return report
