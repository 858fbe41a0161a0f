"""The answers to the notebooks' exercises, computed from what the notebook has measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labkit.model_source import find_model
from labkit.precision import choose_precision
from labkit.recipe import Recipe
from labkit.report import Comparison
from labkit.step import build_step, count_layer_forwards
from labkit.tokens import collate


class Hint(ValueError):
    """A word to the reader of a notebook, which shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [str(self)]


class WrongAnswer(Hint):
    """A wrong answer to an exercise."""


UNANSWERED = "Not answered yet: put your answer above and run both cells again."


@dataclass(frozen=True)
class Exercise:
    """A question with a number for an answer.

    ``answer`` works it out from the comparison; ``hint`` is shown to a wrong answer.
    """

    answer: Callable[[Comparison], float]
    hint: str
    tolerance: float = 0.01  # relative


def check_answer(slug: str, answer: float | None, comparison: Comparison) -> str:
    """Say whether an answer is right; no answer is no error, so that a course can run alone.

    Raises:
        WrongAnswer: With a hint.
    """
    if answer is None:
        return UNANSWERED
    if not comparison.after.ok or (comparison.before and not comparison.before.ok):
        return "This step was not measured here, so there is nothing to check against."
    exercise = EXERCISES[slug]
    return judge(answer, exercise.answer(comparison), exercise.hint, exercise.tolerance)


def judge(answer: float, right: float, hint: str, tolerance: float = 0.01) -> str:
    """Praise an answer within the relative tolerance; any other is a WrongAnswer."""
    if not isinstance(answer, int | float):
        raise WrongAnswer(f"The answer is a number, not {answer!r}. {hint}")
    if not abs(answer - right) <= tolerance * abs(right):
        raise WrongAnswer(f"{answer:,} is not it. {hint}")
    return f"Right: {right:,}."


def _runs_when_every_second_layer_is_recomputed(_: Comparison) -> float:
    recipe, cpu = Recipe(model="qwen3-tiny", checkpoint_every=2), torch.device("cpu")
    source, precision = find_model(recipe.model), choose_precision(recipe, cpu)
    step = build_step(recipe, source, precision, cpu, pad_token_id=0)
    return count_layer_forwards(step, collate([[1, 2], [3]], [0, 1], pad_id=0, length=None))


def _smallest_step_lost_in_bfloat16(_: Comparison) -> int:
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    return next(n for n in range(1, 64) if one + 2.0**-n == one)


def _share_of_first_part(comparison: Comparison) -> float:
    batch_size = comparison.after.recipe.batch_size
    return len(torch.arange(batch_size).tensor_split(3)[0]) / batch_size


EXERCISES = {
    "00_baseline": Exercise(
        lambda c: c.after.memory.state_bytes["optimizer_state"],
        "AdamW keeps two float32 numbers for each parameter it trains, and one float32 step "
        "counter for each tensor; the base is not among them.",
    ),
    "01_freeze_base": Exercise(
        lambda c: c.before.trainable["base"] * 4,
        "One float32 gradient for each base parameter that had one.",
    ),
    "02_checkpointing": Exercise(
        _runs_when_every_second_layer_is_recomputed,
        "Half the layers run forward once, the other half once more in backward.",
    ),
    "03_amp": Exercise(
        _smallest_step_lost_in_bfloat16,
        "bfloat16 keeps 7 bits after the leading one; what lies half a step above 1 is rounded "
        "to even, that is, back to 1.",
        tolerance=0,
    ),
    "04_accumulation": Exercise(
        _share_of_first_part,
        "Its weight is its number of pairs divided by the pairs of the whole batch.",
        tolerance=1e-3,
    ),
    "05_compile": Exercise(
        lambda c: (
            (c.after.compile["first_step_seconds"] - c.after.median_step_seconds)
            / c.after.median_step_seconds
        ),
        "What the first step costs beyond an ordinary one, divided by an ordinary one.",
        tolerance=0.05,
    ),
    "06_cached_data": Exercise(
        lambda c: 1 - sum(c.after.real_tokens) / sum(c.after.computed_tokens),
        "Add up computed_tokens and real_tokens of the timed steps.",
    ),
    "07_no_padding": Exercise(
        lambda c: sum(c.before.computed_tokens) / sum(c.after.computed_tokens),
        "Divide the tokens that the step before computed by those that this one computed.",
    ),
}
