"""The timeline of a recipe's step: recorded with the lab, or fitted here."""

import gc
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from labkit.predict.attention import stand_in
from labkit.predict.events import Trace
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.recorded import Recorded, find_recorded
from labkit.predict.stack import Unlike
from labkit.predict.timeline import LENGTHS, LONGEST, Pattern, Timeline
from labkit.recipe import Recipe
from labkit.trainable import trainable_parameters

# Fields that a timeline of padded batches does not depend on: they have their defaults in it.
BESIDE_TIMELINES = (
    "group_window", "last_token_only", "instruction", "shared_prefix", "num_workers",
    "prefetch_factor", "pin_memory", "threads", "fast_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """A step's timeline, the pattern that it is made of, and what both leave open.

    ``one_row`` says whether the timeline holds for parts of one row, None where nobody has
    tried.
    """

    pattern: Pattern
    timeline: Timeline
    trained: dict[str, int]
    one_row: bool | None


def general(step: RecipeStep) -> RecipeStep:
    """The step that stands for all whose timeline is the same."""
    formats = step.precision.to_dict()  # what is computed in, whatever was asked for
    recipe = replace(
        step.recipe,
        weights=formats["weights"],
        autocast=formats["autocast"],
        **{"batch_size": max(2, step.recipe.micro_batches), "max_length": LONGEST},
        **{"padding": "max", "compile": "none", "cached": False},
        **{"learning_rate": 1e-4, "seed": 0},
        **{name: getattr(Recipe(), name) for name in BESIDE_TIMELINES},
    )
    config = step.source.config
    heads = getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return replace(
        step,
        recipe=recipe,
        precision=replace(step.precision, reason=""),
        gpu=step.gpu and stand_in(step.gpu, head_dim),
        pad_token_id=0,
    )


def recorded_key(step: RecipeStep, left_over: int, *, aligned: bool) -> dict:
    """What tells the pattern of a general step from others of the same model and card."""
    recipe = step.recipe.to_dict()
    for name in ("model", *BESIDE_TIMELINES):
        del recipe[name]
    return {
        "recipe": recipe,
        "precision": step.precision.to_dict(),
        "padded": step.padded,
        "left_over": left_over,
        "aligned": aligned,
    }


@lru_cache(maxsize=256)
def fit_step(step: RecipeStep, left_over: int, *, aligned: bool) -> Fitted | None:
    """The timeline for batches that leave this many rows over when they are split into parts.

    And for lengths that are multiples of 8, or are not.

    Args:
        step: A general one.

    Returns:
        None where layers or points are not alike.
    """
    config, recorded = step.source.config, None
    if step.gpu:
        key = recorded_key(step, left_over, aligned=aligned)
        recorded = find_recorded(config, step.gpu.name, key)
    collecting = gc.isenabled()
    try:
        recorded = recorded or record_step(step, left_over, aligned=aligned)
        gc.disable()  # tens of thousands of short-lived tuples, none of them in a cycle
        timeline = recorded.pattern.timeline(config.num_hidden_layers)
    except Unlike:
        return None
    finally:
        if collecting:
            gc.enable()
    return Fitted(recorded.pattern, timeline, recorded.trained, recorded.one_row)


def record_step(step: RecipeStep, left_over: int, *, aligned: bool) -> Recorded:
    """Fit the pattern of a general step; whether it holds for one row stays open.

    Raises:
        Unlike: Layers or points are not alike.
    """
    trained: dict[int, dict[str, int]] = {}  # by depth

    def trace_at(depth: int, shapes: list[tuple[int, int]]) -> tuple[Trace, str]:
        prefixes = []

        def see(model: torch.nn.Module) -> None:
            trained[depth] = trainable_parameters(model)
            prefixes.append(_stack_prefix(model, depth))

        return step.trace(shapes, depth, see), prefixes[0]

    parts, depth = step.recipe.micro_batches, step.source.config.num_hidden_layers
    pattern = Pattern.fit(
        trace_at,
        [times * parts + left_over for times in (2, 3, 5)],
        parts,
        aligned=aligned,
        period=_period(step),
        depth=depth,
    )
    (shallow, few), *deeper = trained.items()
    for deep, more in deeper:
        units = (depth - shallow) // (deep - shallow)
        few = {kind: few[kind] + units * (more[kind] - few[kind]) for kind in few}
    return Recorded(pattern, few, one_row=None)


@lru_cache(maxsize=256)
def fits_one_row(step: RecipeStep, left_over: int, *, aligned: bool) -> bool:
    """Whether the timeline of a general step is right where parts have one row."""
    fitted = fit_step(step, left_over, aligned=aligned)
    if fitted.one_row is not None:
        return fitted.one_row
    return holds_for_one_row(step, fitted.pattern, left_over, aligned=aligned)


def holds_for_one_row(
    step: RecipeStep, pattern: Pattern, left_over: int, *, aligned: bool
) -> bool:
    """Trace parts of one row, in few layers, and compare them with the pattern."""
    pairs, tokens = step.recipe.micro_batches + left_over, LENGTHS[aligned][1]
    depth = pattern.stack.depth
    guess = pattern.timeline(depth).at(pairs, tokens)
    trace = step.trace([(pairs, tokens)] * 2, depth)
    return (
        np.array_equal(guess.events, trace.events)
        and np.array_equal(guess.sizes, trace.sizes)
        and guess.blocks == trace.blocks
    )


def has_timeline(step: RecipeStep) -> bool:
    """Whether few points, and few layers of a deep model, can stand for all."""
    config = step.source.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    depth = getattr(config, "num_hidden_layers", 0)
    of_layers = (
        value
        for value in config.to_dict().values()
        if isinstance(value, list) and len(value) == depth
    )
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        step.recipe.padding != "none"  # whose sizes depend on each pair's length
        and depth >= 1
        and all(value == value[:1] * depth for value in of_layers)  # layers are alike
        and getattr(config, "max_position_embeddings", 0) >= LONGEST
        and kinds == {"full_attention"}  # a window is another path for longer rows
        and not getattr(config, "sliding_window", None)
        and not getattr(config, "attention_chunk_size", None)
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
    )


def _period(step: RecipeStep) -> int:
    """Layers after which the stack repeats itself."""
    return step.recipe.checkpoint_every or 1


def _stack_prefix(model: torch.nn.Module, depth: int) -> str:
    """The path of the list that holds the layers."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
            return path
    raise Unlike("no list of layers")
