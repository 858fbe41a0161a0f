"""The LoRA choices that notebook 08 compares, and what it finds out about each.

A star, not a grid: from the recipe as it is, either the layers change or the rank. One choice
that changes both is an article's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from labkit.data import Pairs
from labkit.gradients import GradientNorm
from labkit.model import build_model
from labkit.model_source import find_model
from labkit.precision import choose_precision
from labkit.quality import Interval, interval
from labkit.recipe import Recipe
from labkit.report import Comparison, Report
from labkit.schedule import Schedule
from labkit.tokenizer import load_tokenizer
from labkit.training import Trained, train

QKV = ("q_proj", "k_proj", "v_proj")
TARGETS = (("q_proj", "v_proj"), (*QKV, "o_proj"))
RANKS = (2, 32)
# The claims of "Qwen3-Embedding-0.6B提速秘籍", section 3: these layers, at this rank, because
# the gradients of o_proj and gate_proj were so many times those of q_proj, k_proj and v_proj.
ARTICLE_CHOICE = ((*QKV, "o_proj", "gate_proj"), 4)
ARTICLE_ABOVE, ARTICLE_RATIO = ("o_proj", "gate_proj"), 1.7


@dataclass
class Choice:
    """What is known of one choice of layers and rank.

    Attributes:
        name: Its layers and rank, short: ``q k v, rank 8``.
        lora_parameters: That it trains, counted in the model.
        comparison: Measured against the first choice; the first has nothing before it.
            ``predicted`` holds the same step as predicted, here and on the card.
        macro_f1: On the held-out pairs, one a seed.
    """

    name: str
    recipe: Recipe
    lora_parameters: int
    comparison: Comparison
    macro_f1: list[float] = field(default_factory=list)

    @property
    def report(self) -> Report:
        """What was measured of it."""
        return self.comparison.after

    def to_dict(self) -> dict:
        """The choice as JSON values."""
        plain = {"recipe": self.recipe.to_dict(), "comparison": self.comparison.to_dict()}
        return vars(self) | plain


@dataclass
class LoraStudy:
    """What notebook 08 finds out; its figures and sentences are made from this.

    Attributes:
        choices: The first is the recipe as it is.
        without_lora: Macro-F1 of the first choice's models, their LoRA matrices taken out
            again and their heads kept.
        held_out: Pairs that are scored.
    """

    profile: str
    kinds: list[str]
    training_steps: int
    held_out: int
    norms: list[GradientNorm] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    without_lora: list[float] = field(default_factory=list)

    def to_dict(self) -> dict:
        """The study as JSON values."""
        return vars(self) | {
            "norms": [norm.to_dict() for norm in self.norms],
            "choices": [choice.to_dict() for choice in self.choices],
        }


def with_rank(recipe: Recipe, rank: int) -> Recipe:
    """The recipe at another rank, alpha moved with it so that alpha / rank stays."""
    alpha = max(1, round(recipe.lora_alpha * rank / recipe.lora_rank))
    return replace(recipe, lora_rank=rank, lora_alpha=alpha)


def candidates(recipe: Recipe, kinds: Sequence[str], *, few: bool = False) -> dict[str, Recipe]:
    """The choices by name: only layers that the model has, none twice.

    Args:
        recipe: The centre of the star, and the first choice.
        kinds: Names of the linear layers that the model has.
        few: Only the first choice and all linear layers.
    """
    everywhere = replace(recipe, lora_targets=tuple(kinds))
    article_targets, article_rank = ARTICLE_CHOICE
    article = replace(with_rank(recipe, article_rank), lora_targets=article_targets)
    found = [recipe, everywhere]
    if not few:
        others = [replace(recipe, lora_targets=targets) for targets in TARGETS]
        found[1:1] = others
        found += [with_rank(recipe, rank) for rank in RANKS] + [article]
    return {
        choice_name(each, kinds): each for each in found if set(each.lora_targets) <= set(kinds)
    }


def choice_name(recipe: Recipe, kinds: Sequence[str]) -> str:
    """Layers and rank, short: ``q k v, rank 8``."""
    short = " ".join(target.removesuffix("_proj") for target in recipe.lora_targets)
    layers = "all linear" if set(recipe.lora_targets) == set(kinds) else short
    return f"{layers}, rank {recipe.lora_rank}"


def outline(recipe: Recipe) -> torch.nn.Module:
    """The recipe's model without memory: names and shapes, no weights.

    Raises:
        ModelError: ``lora_targets`` names a layer that the model does not have.
    """
    source = replace(find_model(recipe.model), weights_from=None)
    precision = choose_precision(recipe, torch.device("cpu"))
    pad_token_id = load_tokenizer(recipe.model).pad_token_id
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(recipe, source, precision, pad_token_id=pad_token_id)


def train_candidate(
    recipe: Recipe,
    pairs: Pairs,
    held_out: Pairs,
    *,
    steps: int,
    cache_folder: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Train for so many steps and look once, at the end: nobody picks the best moment."""
    return train(
        recipe,
        pairs,
        held_out,
        schedule=Schedule(epochs=steps, max_steps=steps, evaluate_every=steps),
        cache_folder=cache_folder,
        progress=progress,
    )


def take_out_lora(model: torch.nn.Module) -> None:
    """Set every ``lora_B`` to zero: what is left is the base with the trained head."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()


def gain(scores: Sequence[float], others: Sequence[float]) -> Interval:
    """By how much some scores are above others, seed by seed, with its interval.

    Seeds differ far more among each other than choices do: the head begins at random. Two
    choices with one seed begin with the same head and see the same pairs in the same order.
    """
    return interval([here - there for here, there in zip(scores, others, strict=True)])
