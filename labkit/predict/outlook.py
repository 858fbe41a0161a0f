"""A recipe's step with batch and length left open: what a slider and a plan ask."""

from collections.abc import Sequence
from dataclasses import replace

from labkit.model_source import ModelSource, check_recipe_fits, find_model
from labkit.predict.events import Trace
from labkit.predict.gpus import Gpu
from labkit.predict.peaks import peak_bytes
from labkit.predict.prediction import check_attention, complete, precision_on
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.recipe_trace import step_trace
from labkit.predict.roofline import model_time
from labkit.recipe import Recipe
from labkit.report import Report
from labkit.shapes import BatchShape


class Outlook:
    """One recipe on one card; every batch and length costs milliseconds.

    The first question takes seconds where no timeline comes recorded with the lab.

    Args:
        recipe: Its batch size and length are of no account.
        gpu: None for this machine's CPU.
        source: Stands in for the model that the recipe names.

    Raises:
        ModelError: There is no such model.
        PredictError: An attention that cannot be traced.
    """

    def __init__(
        self, recipe: Recipe, gpu: Gpu | None, *, source: ModelSource | None = None
    ) -> None:
        check_attention(recipe)
        self.recipe, self.gpu = recipe, gpu
        self.source = source or find_model(recipe.model)
        self.precision = precision_on(gpu, recipe)
        plain = replace(recipe, compile="none", cached=False)
        self._step = RecipeStep(
            plain, self.source, self.precision, gpu, padded=True, pad_token_id=0
        )

    def report(self, pairs: int, tokens: int) -> Report:
        """The brief report of a step on ``pairs`` rows of ``tokens`` tokens, some padded.

        Raises:
            ModelError: The model has fewer positions.
        """
        recipe = replace(self.recipe, batch_size=pairs, max_length=tokens)
        check_recipe_fits(self.source, recipe, tokenizer_size=0)
        trace, trainable = self._trace(pairs, tokens, with_costs=True)
        report = Report(
            recipe=recipe,
            oracle="predicted",
            precision=self.precision.to_dict(),
            model={"name": self.source.name},
            batch=BatchShape(pairs, tokens, padded=True).to_dict(),
            trainable=trainable,
            notes=[self.precision.reason] if self.precision.reason else [],
        )
        return complete(report, trace, self.gpu, brief=True)

    def least_seconds(self, pairs: int, tokens: int) -> float:
        """The modelled seconds of a step: what the card needs, or the host to launch it all."""
        trace, _ = self._trace(pairs, tokens, with_costs=True)
        return model_time(trace.costs[-1], self.gpu).least_seconds

    def peaks(self, points: Sequence[tuple[int, int]]) -> list[int]:
        """The allocated peak at each of some (pairs, tokens)."""
        return [
            peak_bytes(self._trace(pairs, tokens, with_costs=False)[0], self.gpu)
            for pairs, tokens in points
        ]

    def _trace(
        self, pairs: int, tokens: int, *, with_costs: bool
    ) -> tuple[Trace, dict[str, int]]:
        shape = BatchShape(pairs, tokens, padded=True)
        return step_trace(self._step, shape, more_to_come=True, with_costs=with_costs)
