"""A recipe's step, its batch left open: it can be traced at any batch, length and depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from labkit.model_source import ModelSource, with_depth
from labkit.packing import PackedBatch, lay_out
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

    ``lengths`` are those of the pairs of a batch without padding, where they are not all as
    long as the longest; ``shared`` tokens stand before them.
    """

    recipe: Recipe
    source: ModelSource
    precision: Precision
    gpu: Gpu | None
    padded: bool
    pad_token_id: int
    lengths: tuple[int, ...] = ()
    shared: int = 0

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other) -> bool:
        return isinstance(other, RecipeStep) and self._key == other._key

    @property
    def _key(self) -> tuple:
        rest = (self.precision, self.gpu, self.padded, self.pad_token_id)
        rest += (self.lengths, self.shared)
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
                step(self._batch(*next(waiting)), mark=mark)

            return step.model, step.optimizer, run

        with torch.random.fork_rng(devices=[]):  # building seeds it
            return trace_step(build, self.gpu, steps=len(shapes), padded=self.padded)

    def _batch(self, pairs: int, tokens: int) -> Batch | PackedBatch:
        """A batch of zeros, made of nothing, as one is that comes before the step."""
        if self.recipe.padding != "none":
            ids = torch.zeros(pairs, tokens, dtype=torch.int64)
            mask = torch.ones(pairs, tokens, dtype=torch.int64)
            labels = torch.zeros(pairs, dtype=torch.int64)
            return Batch(ids, mask, labels, real_tokens=None)
        lengths = self.lengths or (tokens,) * pairs
        ids = torch.zeros(self.shared + sum(lengths), dtype=torch.int64)
        labels = torch.zeros(pairs, dtype=torch.int64)
        batch = lay_out(ids, lengths, labels, labels, real_tokens=None)
        return batch.map(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
