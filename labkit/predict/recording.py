"""Making the timelines that come with the lab, and comparing them with what is made now."""

import json
from collections.abc import Iterator
from dataclasses import replace

from labkit.model_source import SIZES, find_model
from labkit.predict.gpus import Gpu
from labkit.predict.prediction import precision_on
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.recipe_timeline import (
    general,
    holds_for_one_row,
    record_step,
    recorded_key,
)
from labkit.predict.recorded import (
    Recorded,
    file_of,
    find_recorded,
    save_recorded,
    to_plain,
)
from labkit.recipe import Recipe
from labkit.space import half_format, kinds

MODELS = tuple(SIZES)
CARDS = ("t4", "a100-40gb", "h100")  # those that ``stand_in`` gives for heads of usual width
PARTS = (1, 2)  # two stand for more


def recorded_steps(model: str, gpu: Gpu) -> Iterator[RecipeStep]:
    """The general steps that a card's archive holds."""
    source = find_model(model)
    for parts in PARTS:
        base = Recipe(model=model, optimizer="adamw_fused", micro_batches=parts)
        for recipe in kinds(base, half_format(gpu)):
            precision = precision_on(gpu, recipe)
            yield general(RecipeStep(recipe, source, precision, gpu, True, pad_token_id=0))


def record(step: RecipeStep) -> Recorded:
    """Fit a general step, and see whether it holds for one row."""
    recorded = record_step(step, 0, aligned=True)
    return replace(recorded, one_row=holds_for_one_row(step, recorded.pattern, 0, aligned=True))


def record_card(model: str, gpu: Gpu) -> Iterator[str]:
    """Write the archive of a model on a card, a line for each step that is fitted."""
    entries = []
    for step in recorded_steps(model, gpu):
        entries.append((recorded_key(step, 0, aligned=True), record(step)))
        yield f"{model} on {gpu.name}: {_words(step.recipe)}"
    save_recorded(file_of(model, gpu.name), entries)


def differs(step: RecipeStep) -> str:
    """How a recorded timeline differs from what is fitted now; empty where it does not."""
    key = recorded_key(step, 0, aligned=True)
    there = find_recorded(step.source.config, step.gpu.name, key)
    where = f"{step.recipe.model} on {step.gpu.name}: {_words(step.recipe)}"
    if there is None:
        return f"{where}: nothing is recorded for these versions"
    now, then = (json.loads(json.dumps(to_plain(one))) for one in (record(step), there))
    fields = [name for name in now if now[name] != then[name]]
    return f"{where}: {', '.join(fields)} differ" if fields else ""


def _words(recipe: Recipe) -> str:
    return (
        f"weights {recipe.weights}, autocast {recipe.autocast}, checkpoint_every "
        f"{recipe.checkpoint_every}, micro_batches {recipe.micro_batches}"
    )
