"""What notebook 08 does with each LoRA choice: predict it, measure it, train it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from labkit.data import Pairs
from labkit.forecast import this_machine
from labkit.lora_candidates import Choice, LoraStudy, take_out_lora, train_candidate
from labkit.measure import compare
from labkit.predict.gpus import Gpu, GpuError
from labkit.predict.prediction import PredictError, predict
from labkit.recipe import Profile, Recipe
from labkit.report import Comparison, Report
from labkit.shapes import BatchShape, shape_of
from labkit.tokens import batches, load_tokenizer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is done of everything."""

    seeds: int
    training_steps: int  # of each training that is scored
    gradient_steps: int = 10
    gradient_batches: int = 8
    held_out: int = 2000  # pairs at most
    few: bool = False  # only the first choice and all linear layers


TINY = Size(2, 2, gradient_steps=2, gradient_batches=2, held_out=50, few=True)


def predict_choices(
    recipes: dict[str, Recipe], shape: BatchShape, gpu: str, say: Say
) -> list[Choice]:
    """Count and predict each choice, here and on a card; nothing is measured yet."""
    places: dict[str, Gpu | str | None] = {"card": gpu}
    with suppress(GpuError, PredictError):  # a device whose bytes nothing models
        places["here"] = this_machine()
    choices = []
    for name, recipe in recipes.items():
        say(f"predicting: {name}")
        reports = {
            place: predict(recipe, where, shape=shape) for place, where in places.items()
        }
        choice = Choice(
            name,
            recipe,
            reports["card"].trainable["lora"],
            Comparison(after=Report(recipe, status="skipped", reason="not measured yet")),
        )
        choice.comparison.predicted = {
            place: Comparison(after=report) for place, report in reports.items()
        }
        choices.append(choice)
    return choices


def largest_batch(
    recipe: Recipe, pairs: Pairs, profile: Profile, cache_folder: Path
) -> BatchShape:
    """Of the batches that a measurement sees; layers and rank change nothing about them."""
    count = profile.warmup_steps + profile.timed_steps
    tokenizer = load_tokenizer(recipe.model)
    stream = batches(recipe, pairs, tokenizer, cache_folder=cache_folder)
    largest = max(islice(stream, count), key=lambda batch: batch.computed_tokens)
    return shape_of(largest, "the largest of the timed steps")


def measure_choices(
    choices: list[Choice], pairs: Pairs, profile: Profile, cache_folder: Path, say: Say
) -> None:
    """Bytes and times of each choice, its timed steps alternating with those of the first."""
    first, *others = choices
    for choice in others:
        found = compare(
            first.recipe,
            choice.recipe,
            pairs,
            warmup_steps=profile.warmup_steps,
            timed_steps=profile.timed_steps,
            cache_folder=cache_folder,
            progress=lambda text, name=choice.name: say(f"{name}: {text}"),
        )
        choice.comparison.before, choice.comparison.after = found.before, found.after
        if not first.report.ok:
            first.comparison.after = found.before


def train_choices(
    study: LoraStudy, pairs: Pairs, held_out: Pairs, seeds: int, cache_folder: Path, say: Say
) -> None:
    """Train and score each choice with each seed; the first once more without its matrices."""
    study.without_lora = []
    for choice in study.choices:
        choice.macro_f1 = []
    for seed in range(seeds):
        for choice in study.choices:
            say(f"seed {seed + 1} of {seeds}: {choice.name}")
            trained = train_candidate(
                replace(choice.recipe, seed=seed),
                pairs,
                held_out,
                steps=study.training_steps,
                cache_folder=cache_folder,
            )
            choice.macro_f1.append(trained.scores.macro_f1)
            if choice is study.choices[0]:
                take_out_lora(trained.step.model)
                scores = trained.evaluate(held_out, cache_folder=cache_folder)
                study.without_lora.append(scores.macro_f1)
