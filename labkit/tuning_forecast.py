"""What the recipes of a tuning are predicted to need on the machine that tunes."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from labkit.data import Pairs
from labkit.predict.local_card import has_expandable_segments, local_card
from labkit.predict.prediction import predict
from labkit.recipe import Recipe
from labkit.report import Memory
from labkit.shapes import BatchShape, worst_shape
from labkit.tokenizer import load_tokenizer


def peak_bytes(memory: Memory) -> int:
    """What decides whether a step fits: what is reserved on a card, allocated on a CPU."""
    if memory.peak_reserved_bytes is not None:
        return memory.peak_reserved_bytes
    return memory.peak_allocated_bytes


class Forecast:
    """Predicts the recipes of a tuning, each step and each batch once."""

    def __init__(self, pairs: Pairs, device: torch.device) -> None:
        self.pairs = pairs
        self.card = local_card() if device.type == "cuda" else None
        self.memories: dict[Recipe, Memory] = {}
        self.shapes: dict[tuple, BatchShape] = {}

    def memory(self, recipe: Recipe) -> Memory:
        """The predicted bytes of the recipe's largest batch.

        Raises:
            ModelError, PredictError, TraceError: As ``predict`` says.
        """
        plain = replace(recipe, compile="none", cached=False, num_workers=0)
        if plain not in self.memories:
            self.memories[plain] = predict(
                plain,
                self.card,
                pairs=self.pairs,
                shape=self._shape(plain),
                expandable_segments=self.card is not None and has_expandable_segments(),
            ).memory
        return self.memories[plain]

    def peak_bytes(self, recipe: Recipe) -> int:
        """The predicted peak that has to fit."""
        return peak_bytes(self.memory(recipe))

    def together_bytes(self, recipes: Sequence[Recipe]) -> int:
        """What recipes need that are all built and run one at a time."""
        held = [self.memory(each).by_phase["before"] for each in recipes]
        peaks = [self.peak_bytes(each) for each in recipes]
        return sum(held) + max(peak - own for peak, own in zip(peaks, held, strict=True))

    def _shape(self, recipe: Recipe) -> BatchShape:
        key = (recipe.padding, recipe.shared_prefix)
        if key not in self.shapes:
            tokenizer = load_tokenizer(recipe.model)
            self.shapes[key] = worst_shape(recipe, self.pairs, tokenizer)
        return self.shapes[key]
