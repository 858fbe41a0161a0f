"""Whether two recipes compute the same: the losses and gradients of their first steps.

Dropout is off: its masks follow the layout of a batch, so that two layouts draw other ones.
"""

import gc
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from labkit.data import Pairs
from labkit.model_source import find_model
from labkit.precision import choose_precision
from labkit.recipe import Recipe
from labkit.step import TrainingStep, build_step
from labkit.tokens import batches, load_tokenizer

STEPS = 3
IN_FLOAT32 = {"weights": "float32", "autocast": "none"}
# relative: rounding of sums in another order, and of numbers of 8 significant bits
LOSS_TOLERANCE = {"float32": 1e-5, "16 bits": 2**-7}
GRADIENT_TOLERANCE = {"float32": 1e-4, "16 bits": 2**-3}


@dataclass
class Exactness:
    """How far two recipes are apart after each of their first steps.

    Attributes:
        formats: ``float32`` where both were computed in it, else ``16 bits``.
        losses: Of the one and of the other, a pair a step.
        gradients: Norm of the difference of all gradients by the norm of the first, a step.
    """

    formats: str
    losses: list[tuple[float, float]] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)

    @property
    def loss_difference(self) -> float:
        """The largest of the losses' relative differences."""
        return _largest(abs(b - a) / abs(a) for a, b in self.losses)

    @property
    def gradient_difference(self) -> float:
        """The largest relative difference of the gradients."""
        return _largest(self.gradients)

    @property
    def ok(self) -> bool:
        """Whether losses and gradients are the same, up to rounding; what is NaN is not."""
        return (
            self.loss_difference <= LOSS_TOLERANCE[self.formats]
            and self.gradient_difference <= GRADIENT_TOLERANCE[self.formats]
        )

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self) | {
            "loss_difference": self.loss_difference,
            "gradient_difference": self.gradient_difference,
            "loss_tolerance": LOSS_TOLERANCE[self.formats],
            "gradient_tolerance": GRADIENT_TOLERANCE[self.formats],
            "ok": self.ok,
        }


def _largest(values: Iterable[float]) -> float:
    """The largest; NaN if one is, which ``max`` may overlook."""
    return float(np.max(list(values)))


def check_exact(
    one: Recipe,
    other: Recipe,
    pairs: Pairs,
    device: torch.device,
    *,
    cache_folder: Path | None = None,
) -> Exactness:
    """Run the first steps of both, one recipe after the other, and compare."""
    is_float32 = all(replace(each, **IN_FLOAT32) == each for each in (one, other))
    (losses, gradients), (losses_2, gradients_2) = (
        _first_steps(each, pairs, device, cache_folder) for each in (one, other)
    )
    return Exactness(
        formats="float32" if is_float32 else "16 bits",
        losses=list(zip(losses, losses_2, strict=True)),
        gradients=[
            float((b - a).norm() / a.norm())
            for a, b in zip(gradients, gradients_2, strict=True)
        ],
    )


def _collect(step: TrainingStep, gradients: list[torch.Tensor], phase: str) -> None:
    """Keep all gradients, in a row, before clipping can hide how large they are."""
    if phase == "optimizer":
        rows = [parameter.grad.detach().flatten().cpu() for parameter in step.trained]
        gradients.append(torch.cat(rows) / step.scaler.get_scale())


def _first_steps(
    recipe: Recipe, pairs: Pairs, device: torch.device, cache_folder: Path | None
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and all gradients, in a row, of the first steps."""
    recipe = replace(recipe, lora_dropout=0.0, num_workers=0)
    tokenizer = load_tokenizer(recipe.model)
    step = build_step(
        recipe, find_model(recipe.model), choose_precision(recipe, device), device,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    losses, gradients = [], []
    stream = batches(
        recipe, pairs, tokenizer, cache_folder=cache_folder, device_type=device.type
    )
    for batch in islice(stream, STEPS):
        losses.append(step(batch.to(device), mark=partial(_collect, step, gradients)))
    del step
    gc.collect()
    return losses, gradients
