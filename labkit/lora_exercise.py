"""The exercise of notebook 08: how many parameters LoRA matrices have."""

from dataclasses import replace

from labkit.exercises import UNANSWERED, judge
from labkit.lora_candidates import outline
from labkit.recipe import Recipe
from labkit.trainable import trainable_parameters

EXERCISE = {"lora_targets": ("gate_proj",), "lora_rank": 16}


def check_parameters(recipe: Recipe, answer: int | None) -> str:
    """Say whether ``answer`` is what the exercise's recipe trains in LoRA matrices.

    Raises:
        WrongAnswer: It is not.
    """
    if answer is None:
        return UNANSWERED
    right = trainable_parameters(outline(replace(recipe, **EXERCISE)))["lora"]
    hint = (
        "From n inputs to m outputs, one matrix has n × rank parameters, the other rank × m, "
        "in each layer of the model. The table of linear layers has the sizes."
    )
    return judge(answer, right, hint, tolerance=0)
