"""A recipe's step, its batch left open: it can be traced at any batch, length and depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from labkit.model_source import ModelSource, with_depth
from labkit.precision import Precision
from labkit.predict.events import Trace
from labkit.predict.gpus import Gpu
from labkit.predict.trace import trace_step
from labkit.recipe import Recipe
from labkit.step import build_step
from labkit.tokens import Batch

CPU = torch.device("cpu")


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
        rest = (self.precision, self.gpu, self.padded, self.pad_token_id)
        return (self.recipe, self.source.name, self.source.config_json, *rest)

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
