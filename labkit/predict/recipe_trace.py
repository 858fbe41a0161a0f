"""The trace of a recipe's step, at any batch and length: from its timeline where it has one."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from labkit.predict.events import Trace
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.recipe_timeline import fit_step, fits_one_row, general, has_timeline
from labkit.predict.stack import UNITS
from labkit.predict.timeline import LENGTHS
from labkit.report import OWNERS
from labkit.shapes import BatchShape
from labkit.trainable import trainable_parameters

# A timeline takes a step of UNITS layers at each point and two steps of one layer more: as many
# layers as two steps of a model of this depth.
FEW_LAYERS = (len(LENGTHS[True]) * UNITS + 2 * (UNITS + 1)) // 2


def step_trace(
    step: RecipeStep,
    shape: BatchShape,
    *,
    more_to_come: bool = False,
    with_costs: bool = True,
) -> tuple[Trace, dict[str, int]]:
    """The first two steps on batches of the given shape, and the numbers of parameters trained.

    From a timeline, whose first call takes seconds and every further shape milliseconds; a
    model of few layers is traced sooner than a timeline is fitted.

    From the second on, equal parts of a batch are alike: they do the same with memory, and the
    allocator hands them the same blocks. So two parts stand for any number of them.

    Args:
        more_to_come: Whether other shapes will be asked for, so that a timeline always pays.
        with_costs: Whether arithmetic and traffic are wanted, too.
    """
    parts = step.recipe.micro_batches
    if parts <= 2 or shape.pairs % parts or step.recipe.padding == "none":
        return _step_trace(step, shape, more_to_come, with_costs)
    two = replace(step, recipe=replace(step.recipe, micro_batches=2))
    both = replace(shape, pairs=2 * shape.pairs // parts)
    trace, trained = _step_trace(two, both, more_to_come, with_costs)
    return with_parts(trace, parts), trained


def with_parts(trace: Trace, parts: int) -> Trace:
    """The trace of two parts as that of a batch of more: its inputs, and its operations."""
    is_input = trace.owner_numbers == OWNERS.index("inputs")
    sizes = np.where(is_input, trace.sizes * parts // 2, trace.sizes)
    costs = [replace(of_step, times=_times(of_step.phases, parts)) for of_step in trace.costs]
    return replace(trace, sizes=sizes, costs=costs)


def _times(phases: list[str], parts: int) -> np.ndarray:
    """How often each operation of two parts runs where there are more: those of the second."""
    passes = np.cumsum([a != b and b == "forward" for a, b in pairwise(["", *phases])])
    second = (passes == 2) & np.isin(phases, ("forward", "backward"))
    return np.where(second, parts - 1, 1)


def _step_trace(
    step: RecipeStep, shape: BatchShape, more_to_come: bool, with_costs: bool
) -> tuple[Trace, dict[str, int]]:
    """``step_trace`` with the number of parts that the recipe says."""
    parts, left_over = step.recipe.micro_batches, shape.pairs % step.recipe.micro_batches
    pays = more_to_come or getattr(step.source.config, "num_hidden_layers", 0) > FEW_LAYERS
    # a part of one row, or a row of one token, may take another path than larger ones
    if pays and shape.pairs >= parts and shape.tokens >= 2 and has_timeline(step):
        open_step, aligned = general(step), shape.tokens % 8 == 0
        fitted = fit_step(open_step, left_over, aligned=aligned)
        one_row = shape.pairs < 2 * parts
        if fitted and (not one_row or fits_one_row(open_step, left_over, aligned=aligned)):
            trace = fitted.timeline.at(shape.pairs, shape.tokens, with_costs=with_costs)
            if step.gpu:
                trace.sizes[fitted.timeline.workspaces] = step.gpu.cublas_workspace_bytes
            return trace, fitted.trained
    trained = {}
    trace = step.trace(
        [(shape.pairs, shape.tokens)] * 2,
        see=lambda model: trained.update(trainable_parameters(model)),
    )
    return trace, trained
