"""What is to be trained on what, and the recipes to choose from for it."""

from dataclasses import dataclass, replace
from functools import cached_property

from labkit.model_source import ModelSource, check_recipe_fits, find_model
from labkit.predict.gpus import Gpu
from labkit.predict.outlook import Outlook
from labkit.recipe import Recipe
from labkit.space import MARGIN, PlanError, even_parts, half_format, kinds

ALIGNED = 8  # lengths are planned in multiples of it: kernels work in tiles, and timelines so
LARGEST_LENGTH = 2**16  # of models that have no number of positions
NEVER_WORSE = {"optimizer": "adamw_fused", "padding": "longest", "cached": True}


def aligned(tokens: float) -> int:
    """The next multiple of ``ALIGNED``."""
    return -int(-tokens // ALIGNED) * ALIGNED


@dataclass(frozen=True)
class Job:
    """What is to be trained on what, before a recipe is chosen for it.

    Attributes:
        recipe: Model, batch size, length, and the values of ``fixed``.
        tokens: Of the longest pair: it decides the peak. 0 stands for ``recipe.max_length``.
        mean_tokens: Of the longest pair of a batch on average: it decides the time. 0 stands
            for ``tokens``; it is made a multiple of 8.
        fixed: Fields of the recipe that the search leaves as they are.
        margin: Share of the card's memory that has to be left.

    Raises:
        PlanError: A given number of parts does not divide the batch, or pairs are longer than
            the recipe says.
        ModelError: There is no such model, or it has fewer positions.
    """

    recipe: Recipe
    tokens: int = 0
    mean_tokens: int = 0
    fixed: frozenset[str] = frozenset()
    margin: float = MARGIN

    def __post_init__(self) -> None:
        if self.recipe.padding == "none" or self.recipe.instruction:
            raise PlanError(
                "a plan looks at padded batches of pairs: leave padding none and instruction "
                "out, and put the instruction's tokens into max_length; labkit predict answers "
                "for one such recipe."
            )
        tokens = self.tokens or self.recipe.max_length
        mean = min(aligned(self.mean_tokens or tokens), self.length_limit)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "mean_tokens", mean)
        if tokens > self.recipe.max_length or mean > aligned(tokens):
            raise PlanError(
                f"pairs of {tokens} tokens, {mean} on average, do not belong to a max_length "
                f"of {self.recipe.max_length}."
            )
        batch, parts = self.recipe.batch_size, self.recipe.micro_batches
        if "micro_batches" in self.fixed and batch % parts:
            known = ", ".join(map(str, even_parts(batch)))
            raise PlanError(
                f"batch_size {batch} has no {parts} equal parts (micro_batches); {known} are "
                "possible."
            )
        check_recipe_fits(self.source, self.recipe, tokenizer_size=0)

    @property
    def round_tokens(self) -> int:
        """``tokens`` as a multiple of 8, where the model has so many positions."""
        rounded = aligned(self.tokens)
        return rounded if rounded <= self.length_limit else self.tokens

    def kinds(self, gpu: Gpu) -> list[Recipe]:
        """The recipes to choose from, their parts aside."""
        changes = {name: v for name, v in NEVER_WORSE.items() if name not in self.fixed}
        recipe = replace(self.recipe, **changes, micro_batches=1)
        given = [
            getattr(recipe, name) for name in ("weights", "autocast") if name in self.fixed
        ]
        half = next((name for name in given if name.endswith("16")), half_format(gpu))
        layers = getattr(self.source.config.get_text_config(), "num_hidden_layers", 0)
        return [
            kind
            for kind in kinds(recipe, half, self.fixed)
            if kind.checkpoint_every <= layers or "checkpoint_every" in self.fixed
        ]

    def parts(self) -> list[int]:
        """The numbers of parts to choose from, fewest first."""
        if "micro_batches" in self.fixed:
            return [self.recipe.micro_batches]
        return even_parts(self.recipe.batch_size)

    def outlook(self, kind: Recipe, parts: int, gpu: Gpu) -> Outlook:
        """What a recipe in so many parts would need on a card."""
        return Outlook(replace(kind, micro_batches=parts), gpu, source=self.source)

    @property
    def length_limit(self) -> int:
        """The longest pairs that the model can read, and that are looked at."""
        config = self.source.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", LARGEST_LENGTH)
        return positions // ALIGNED * ALIGNED

    @cached_property
    def source(self) -> ModelSource:
        """The model."""
        return find_model(self.recipe.model)

    def budget_bytes(self, gpu: Gpu) -> int:
        """What may be reserved: what the card has, less its context and the margin."""
        return int(gpu.memory_bytes * (1 - self.margin)) - gpu.context_bytes
