"""Making the timelines that come with the lab, and comparing them with what is made now."""

import json
from collections.abc import Iterator
from dataclasses import replace

from labkit.model_source import SIZES, TRAINED_GEOMETRY, find_model
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

MODELS = tuple(name for name in SIZES if name != TRAINED_GEOMETRY)  # that is for quality
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


def record_card(model: str, gpu: Gpu) -> Iterator[tuple[str, bool]]:
    """Write the archive of a model on a card; a line for each step that is fitted."""
    entries = []
    for step in recorded_steps(model, gpu):
        entries.append((recorded_key(step, 0, aligned=True), record(step)))
        yield f"fitted: {_words(step)}", True
    save_recorded(file_of(model, gpu.name), entries)


def check_card(model: str, gpu: Gpu) -> Iterator[tuple[str, bool]]:
    """For each step of an archive, whether it is what is fitted now."""
    for step in recorded_steps(model, gpu):
        difference = differs(step)
        yield f"{difference or 'the same'}: {_words(step)}", not difference


def differs(step: RecipeStep) -> str:
    """What of a recorded timeline is not what is fitted now; empty where all is."""
    key = recorded_key(step, 0, aligned=True)
    there = find_recorded(step.source.config, step.gpu.name, key)
    if there is None:
        return "not recorded for these versions"
    now, then = (json.loads(json.dumps(to_plain(one))) for one in (record(step), there))
    fields = [name for name in now if now[name] != then[name]]
    return f"{', '.join(fields)} differ" if fields else ""


def _words(step: RecipeStep) -> str:
    recipe = step.recipe
    return (
        f"{recipe.model} on {step.gpu.name}, weights {recipe.weights}, autocast "
        f"{recipe.autocast}, checkpoint_every {recipe.checkpoint_every}, micro_batches "
        f"{recipe.micro_batches}"
    )
