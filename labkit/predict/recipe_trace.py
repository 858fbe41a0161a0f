"""The trace of a recipe's step, at any batch and length: from its timeline where it has one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from labkit.model_source import ModelSource, with_depth
from labkit.precision import Precision
from labkit.predict.events import Trace
from labkit.predict.gpus import Gpu
from labkit.predict.layers import UNITS, Unlike
from labkit.predict.timeline import LENGTHS, LONGEST, Timeline
from labkit.predict.trace import trace_step
from labkit.recipe import Recipe
from labkit.shapes import BatchShape
from labkit.step import build_step
from labkit.tokens import Batch
from labkit.trainable import trainable_parameters

CPU = torch.device("cpu")
# A timeline takes a step of UNITS layers at each point and two steps of one layer more: as many
# layers as two steps of a model of this depth.
FEW_LAYERS = (len(LENGTHS[True]) * UNITS + 2 * (UNITS + 1)) // 2


@dataclass(frozen=True)
class RecipeStep:
    """What a recipe's step does to memory, its batch left open.

    ``model`` says which model it is, and tells two of them apart.
    """

    recipe: Recipe
    source: ModelSource
    precision: Precision
    gpu: Gpu | None
    padded: bool
    pad_token_id: int

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other) -> bool:
        return isinstance(other, RecipeStep) and self._key == other._key

    @property
    def _key(self) -> tuple:
        source = self.source.config.to_json_string()
        rest = (self.precision, self.gpu, self.padded, self.pad_token_id)
        return (self.recipe, self.source.name, source, *rest)

    def trace(
        self,
        shapes: Sequence[tuple[int, int]],
        depth: int | None = None,
        see: Callable[[torch.nn.Module], None] = lambda model: None,
    ) -> Trace:
        """Trace one step on each of the given (pairs, tokens).

        Args:
            depth: Layers to give the model instead of its own number.
            see: Shown the model, once it is built.
        """
        source = replace(self.source, weights_from=None)
        if depth is not None:
            source = replace(source, config=with_depth(source.config, depth))
        recipe = replace(self.recipe, compile="none")
        waiting = iter(shapes)

        def build():
            step = build_step(
                recipe, source, self.precision, CPU, pad_token_id=self.pad_token_id,
                build_on=torch.device("meta"),
            )  # fmt: skip
            see(step.model)

            def run(mark) -> None:
                pairs, tokens = next(waiting)
                ids = torch.zeros(pairs, tokens, dtype=torch.int64)
                mask = torch.ones(pairs, tokens, dtype=torch.int64)
                labels = torch.zeros(pairs, dtype=torch.int64)
                step(Batch(ids, mask, labels, real_tokens=None), mark=mark)

            return step.model, step.optimizer, run

        with torch.random.fork_rng(devices=[]):  # building seeds it
            return trace_step(build, self.gpu, steps=len(shapes), padded=self.padded)


def step_trace(
    step: RecipeStep, shape: BatchShape, *, more_to_come: bool = False
) -> tuple[Trace, dict[str, int]]:
    """The first two steps on batches of the given shape, and the numbers of parameters trained.

    From a timeline, whose first call takes seconds and every further shape milliseconds; a
    model of few layers is traced sooner than a timeline is fitted.

    Args:
        more_to_come: Whether other shapes will be asked for, so that a timeline always pays.
    """
    parts = step.recipe.micro_batches
    recipe = replace(
        step.recipe,
        **{"batch_size": max(2, parts), "max_length": LONGEST, "padding": "max"},
        **{"compile": "none", "cached": False, "learning_rate": 1e-4, "seed": 0},
    )  # no other values of these change a byte: recipes that differ in them share a timeline
    general = replace(step, recipe=recipe)
    # a part of one row, or a row of one token, may take another path than larger ones
    pays = more_to_come or getattr(step.source.config, "num_hidden_layers", 0) > FEW_LAYERS
    if pays and shape.pairs >= 2 * parts and shape.tokens >= 2 and _has_timeline(step):
        fitted = _timeline(general, shape.pairs % parts, aligned=shape.tokens % 8 == 0)
        if fitted is not None:
            timeline, trained = fitted
            return timeline.at(shape.pairs, shape.tokens), trained
    trained = {}
    trace = step.trace(
        [(shape.pairs, shape.tokens)] * 2,
        see=lambda model: trained.update(trainable_parameters(model)),
    )
    return trace, trained


@lru_cache(maxsize=64)
def _timeline(
    step: RecipeStep, left_over: int, *, aligned: bool
) -> tuple[Timeline, dict[str, int]] | None:
    """The timeline for batches that leave this many rows over when they are split into parts.

    And for lengths that are multiples of 8, or are not.

    None where layers or points are not alike.
    """
    trained: dict[int, dict[str, int]] = {}  # by depth

    def trace_at(depth: int, shapes: list[tuple[int, int]]) -> tuple[Trace, str]:
        prefixes = []

        def see(model: torch.nn.Module) -> None:
            trained[depth] = trainable_parameters(model)
            prefixes.append(_stack_prefix(model, depth))

        return step.trace(shapes, depth, see), prefixes[0]

    parts, depth = step.recipe.micro_batches, step.source.config.num_hidden_layers
    try:
        timeline = Timeline.fit(
            trace_at,
            [times * parts + left_over for times in (2, 3, 5)],
            parts,
            aligned=aligned,
            period=_period(step),
            depth=depth,
        )
    except Unlike:
        return None
    (shallow, few), (deeper, more) = trained.items()
    units = (depth - shallow) // (deeper - shallow)
    return timeline, {kind: few[kind] + units * (more[kind] - few[kind]) for kind in few}


def _has_timeline(step: RecipeStep) -> bool:
    """Whether a few layers and seven points can stand for the model."""
    config = step.source.config
    depth = getattr(config, "num_hidden_layers", 0)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        depth // _period(step) > UNITS
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
