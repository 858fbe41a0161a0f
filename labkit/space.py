"""The recipes among which a plan chooses: the fields that cost or save memory and time.

One list serves the search, the sliders and the timelines that come with the lab.
"""

from collections.abc import Collection
from dataclasses import replace
from itertools import product

from labkit.predict.gpus import Gpu
from labkit.recipe import Recipe

PRECISIONS = (
    "float32", "float32 + autocast", "16-bit weights", "16-bit weights + autocast",
)  # fmt: skip
MARGIN = 0.05  # share of a card that a plan leaves free
CHECKPOINTS = (0, 1, 2)  # of checkpoint_every: fewer layers than every second save ever less


class PlanError(ValueError):
    """A plan that cannot be made as asked; the message says what to change."""


def half_format(gpu: Gpu) -> str:
    """The 16-bit format to use on a card: bfloat16, where it has it."""
    return "bfloat16" if "bfloat16" in gpu.native_dtypes else "float16"


def with_precision(recipe: Recipe, name: str, half: str) -> Recipe:
    """The recipe in one of ``PRECISIONS``, where the hardware's 16-bit format is ``half``."""
    return replace(
        recipe,
        weights=half if name.startswith("16-bit") else "float32",
        autocast=half if name.endswith("autocast") else "none",
    )


def kinds(recipe: Recipe, half: str, fixed: Collection[str] = ()) -> list[Recipe]:
    """Every precision with every checkpointing; batch, parts and the rest stay as they are.

    Args:
        fixed: Fields that stay as they are, too.
    """
    choices = {
        "weights": ("float32", half),
        "autocast": ("none", half),
        "checkpoint_every": CHECKPOINTS,
    }
    for field in choices.keys() & set(fixed):
        choices[field] = (getattr(recipe, field),)
    return [
        replace(recipe, **dict(zip(choices, values, strict=True)))
        for values in product(*choices.values())
    ]


def even_parts(batch_size: int) -> list[int]:
    """The numbers of equal parts that a batch can be split into, fewest first."""
    return [parts for parts in range(1, batch_size + 1) if batch_size % parts == 0]
