"""What notebook 08 calls: which layers get LoRA matrices, and at which rank?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from IPython.display import DisplayHandle, Markdown, display

from labkit.captions import count_words
from labkit.cells import show_bullets, show_figure
from labkit.data import Pairs
from labkit.exercises import Hint
from labkit.gradients import linear_layers, measure_gradients, ratio
from labkit.lora_candidates import ARTICLE_ABOVE, QKV, Choice, LoraStudy, candidates, outline
from labkit.lora_exercise import check_parameters
from labkit.lora_tables import found_table, layers_table, predicted_table
from labkit.lora_trials import (
    TINY,
    Size,
    largest_batch,
    measure_choices,
    predict_choices,
    train_choices,
)
from labkit.lora_words import findings
from labkit.machine import machine_facts
from labkit.model_source import ModelError
from labkit.notebook import BY_HAND
from labkit.page import LORA_NOTEBOOK
from labkit.recipe import Profile, Recipe, profile_named
from labkit.records import to_json, write_text
from labkit.subsets import pairs_for_training, sample
from labkit.trainable import trainable_parameters

RECORD = "lora_choice.json"  # not named like a ladder step, whose records are of another kind


class LoraChoice:
    """One sitting with the LoRA choices.

    Attributes:
        recipe: The first choice, and the centre of the star.
        study: What was found out so far.
    """

    def __init__(
        self, recipe: Recipe, pairs: tuple[Pairs, Pairs], profile: Profile, size: Size,
        *, gpu: str, folder: Path,
    ) -> None:  # fmt: skip
        self.recipe, self.profile, self.size, self.gpu = recipe, profile, size, gpu
        self.pairs, held_out = pairs
        self.held_out = sample(held_out, size.held_out, seed=0)
        self.folder, self.cache = folder, folder / "cache"
        self.model = outline(recipe)
        kinds = list(dict.fromkeys(kind for _, kind in linear_layers(self.model)))
        self.study = LoraStudy(profile.name, kinds, size.training_steps, len(self.held_out))
        self.guess_ratio: float | None = None

    @property
    def choices(self) -> list[Choice]:
        """The choices; a Hint where none are made yet."""
        if not self.study.choices:
            raise Hint("There are no choices yet: run the cell with lora.predict() first.")
        return self.study.choices

    def guess(self, times: float | None) -> None:
        """Note how many times larger the reader expects the article's gradients to be."""
        if not isinstance(times, int | float | None):
            raise Hint(f"A guess is a number, such as 1.2, not {times!r}.")
        self.guess_ratio = times
        words = "No guess yet." if times is None else f"You expect {times:g} times."
        display(Markdown(words))

    def layers(self) -> None:
        """The linear layers that the model has."""
        display(Markdown(layers_table(self.model)))

    def try_targets(self, *targets: str) -> None:
        """What the lab says to a list of layers: how many parameters, or why not."""
        try:
            model = outline(replace(self.recipe, lora_targets=targets))
            words = f"{trainable_parameters(model)['lora']:,} LoRA parameters would be trained."
        except ModelError as refusal:
            words = f"Refused. {refusal}"
        display(Markdown(words))

    def predict(self) -> None:
        """Count and predict each choice, on the largest batch that will be timed."""
        recipes = candidates(self.recipe, self.study.kinds, few=self.size.few)
        shape = largest_batch(self.recipe, self.pairs, self.profile, self.cache)
        with _status() as say:
            self.study.choices = predict_choices(recipes, shape, self.gpu, say)
            say(predicted_table(self.study))

    def gradients(self) -> None:
        """Measure the gradients of all linear layers, LoRA matrices at each of them."""
        with _status() as say:
            self.study.norms = measure_gradients(
                replace(self.recipe, lora_targets=tuple(self.study.kinds)),
                self.pairs,
                steps=self.size.gradient_steps,
                batch_count=self.size.gradient_batches,
                cache_folder=self.cache,
                progress=say,
            )
            say(f"{len(self.study.norms)} layers, {self.size.gradient_batches} batches.")

    def measure(self) -> None:
        """Bytes and times of each choice, measured against the first."""
        with _status() as say:
            measure_choices(self.choices, self.pairs, self.profile, self.cache, say)
            others = count_words(len(self.choices) - 1, "choice")
            say(f"Measured against {self.choices[0].name}: {others}.")

    def train(self) -> None:
        """Train each choice with each seed, score it, and write the record."""
        seeds = self.size.seeds if self.choices else 0
        with _status() as say:
            train_choices(self.study, self.pairs, self.held_out, seeds, self.cache, say)
            write_text(self.folder / RECORD, to_json(self.study.to_dict()))
            say(f"Trained; the record is in `{RECORD}`.")

    def show(self, plot: Callable) -> None:
        """Draw the study with one of labkit's plots, and keep the figure for the page."""
        self._check_done()
        show_figure(plot, self.study, self.folder, LORA_NOTEBOOK)

    def say(self) -> None:
        """What was seen, as a table and in sentences filled from the study."""
        self._check_done()
        sentences = findings(self.study)
        if self.guess_ratio is not None:
            found = ratio(self.study.norms, ARTICLE_ABOVE, QKV).mean
            sentences.insert(0, f"You expected {self.guess_ratio:g} times; it is {found:.2f}.")
        display(Markdown(found_table(self.study)))
        show_bullets(sentences)

    def check(self, parameters: int | None) -> None:
        """Check the answer to the exercise."""
        display(Markdown(check_parameters(self.recipe, parameters)))

    def _check_done(self) -> None:
        if not (self.study.norms and self.choices[0].macro_f1 and self.choices[0].report.ok):
            raise Hint("Not everything is measured yet: run the cells under Run first.")


def open_lora_choice(
    *,
    profile: str = "small",
    run_folder: str | None = None,
    data: str | None = None,
    skip_bad: bool = False,
    gpu: str = "rtx-4090",
    model: str = "qwen3-mini",
    training_steps: int = 8,
    seeds: int = 5,
) -> LoraChoice:
    """Prepare the comparison, and show what will run where.

    Args:
        profile: Its batch size and repeat counts are used; ``tiny`` does little of everything.
        run_folder: Where record and figures go; ``runs/by-hand`` by default.
        data: A file of pairs, a tenth of them held out; the synthetic pairs by default.
        skip_bad: Leave out rows that cannot be used.
        gpu: The card to predict for.
        model: One with weights: with random ones a score says nothing.
        training_steps: Steps of each training that is scored.
        seeds: Trainings of each choice; at least 2, or there is no interval.
    """
    if seeds < 2:
        raise Hint(f"seeds must be at least 2, not {seeds}: one says nothing about others.")
    chosen, tiny = profile_named(profile), profile == "tiny"
    size = TINY if tiny else Size(seeds, training_steps)
    exact = {"padding": "none", "last_token_only": True, "cached": True}  # faster, same loss
    pairs = pairs_for_training(data, skip_bad=skip_bad)
    sitting = LoraChoice(
        replace(chosen.recipe, model=model, **exact), pairs, chosen, size,
        gpu=gpu, folder=Path(run_folder) if run_folder else BY_HAND,
    )  # fmt: skip
    show_bullets([
        f"Profile {profile}{': nothing here is a result' * tiny}; model {model}",
        f"{sitting.recipe.batch_size} pairs a step, without padding; each choice is trained "
        f"for {size.training_steps} steps with {size.seeds} seeds",
        f"Data: {pairs[0].name}, {len(pairs[0]):,} pairs; scored on {len(sitting.held_out):,}",
        f"Machine: {machine_facts()['name']}",
    ])  # fmt: skip
    return sitting


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A place in the notebook that is written over by what comes next."""
    handle = DisplayHandle()
    handle.display(Markdown("starting"))
    yield lambda text: handle.update(Markdown(text))
