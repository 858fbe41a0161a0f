"""What a course notebook calls: measure one step, show it, and keep it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from IPython.display import DisplayHandle, Markdown, display

from labkit import captions, forecast_words
from labkit.cells import show_bullets, show_figure
from labkit.data import read_pairs
from labkit.exercises import UNANSWERED, Hint, check_answer, judge
from labkit.findings import findings, ladder_findings, speed_product, variant_findings
from labkit.forecast import forecast
from labkit.forecast_findings import forecast_findings, forecast_ladder_findings
from labkit.machine import PROJECT, machine_facts
from labkit.measure import compare
from labkit.paddings import padding_shares
from labkit.precision import choose_precision
from labkit.recipe import describe_change, ladder, profile_named
from labkit.records import Record, input_key, load_records, save_record
from labkit.report import Comparison, format_bytes
from labkit.run_folder import newest_run
from labkit.summary import facts_text
from labkit.table import markdown_table, table_rows

BY_HAND = PROJECT / "runs" / "by-hand"  # where notebooks write that nobody runs as a course


class Run:
    """One step of the ladder in its notebook.

    Attributes:
        before: Recipe of the step before, None for the first.
        after: Recipe of this step.
    """

    def __init__(
        self,
        slug: str,
        *,
        profile: str,
        run_folder: str | None,
        data: str | None,
        skip_bad: bool,
    ) -> None:
        self.slug = slug
        self.profile = profile_named(profile)
        steps = ladder(self.profile.recipe)
        if slug not in steps:
            raise Hint(f"There is no step {slug!r}. The steps are {', '.join(steps)}.")
        slugs = list(steps)
        self.after = steps[slug]
        self.before = steps[slugs[slugs.index(slug) - 1]] if slug != slugs[0] else None
        self.folder = Path(run_folder) if run_folder else BY_HAND
        self.pairs = read_pairs(data, skip_bad=skip_bad)
        self.guess_bytes: int | None = None
        self.predicted: dict[str, Comparison] = {}
        self._comparison: Comparison | None = None

    @property
    def comparison(self) -> Comparison:
        """What was measured.

        Raises:
            Hint: Nothing was, yet.
        """
        if self._comparison is None:
            raise Hint("Nothing is measured yet: run the cell with run.measure() first.")
        return self._comparison

    def guess(self, peak_bytes: float | None) -> None:
        """Note what the reader expects, to be held against what is measured."""
        if not isinstance(peak_bytes, int | float | None):
            raise Hint(
                f"A guess is a number of bytes, such as 300 * 2**20, not {peak_bytes!r}."
            )
        self.guess_bytes = peak_bytes
        text = (
            "No guess yet." if peak_bytes is None else f"You expect {format_bytes(peak_bytes)}."
        )
        display(Markdown(text))

    def predict(self, gpu: str) -> None:
        """Predict this step and the one before, here and on a card; ``measure`` keeps that.

        Args:
            gpu: The card, a name that ``labkit predict --list-gpus`` shows.
        """
        status = DisplayHandle()
        status.display(Markdown("predicting"))
        found = forecast(
            self.before,
            self.after,
            self.pairs,
            gpu,
            progress=lambda text: status.update(Markdown(text)),
        )
        self.predicted = found.predicted
        parts = [forecast_words.forecast_table(self.predicted)] if self.predicted else []
        parts += [f"- {sentence}" for sentence in found.missing]
        status.update(Markdown("\n".join(parts)))

    def measure(self) -> Comparison:
        """Measure this step against the one before, and keep the record."""
        status = DisplayHandle()
        status.display(Markdown("starting"))
        self._comparison = compare(
            self.before,
            self.after,
            self.pairs,
            warmup_steps=self.profile.warmup_steps,
            timed_steps=self.profile.timed_steps,
            cache_folder=self.folder / "cache",
            progress=lambda text: status.update(Markdown(text)),
        )
        self._comparison.predicted = self.predicted
        record = Record(
            self.slug,
            self.profile.name,
            self.comparison,
            key=input_key(
                self.before,
                self.after,
                profile=self.profile,
                data_sha256=self.pairs.sha256,
                machine=machine_facts(),
            ),
        )
        path = save_record(self.folder, record)
        status.update(Markdown(f"Measured; the record is in `{path.name}`."))
        return self.comparison

    def try_out(self, before: dict, after: dict) -> Comparison:
        """Measure two variants of this step against each other; no record is kept of them.

        Args:
            before: Fields of the recipe to change for the first one.
            after: Those to change for the second one.
        """
        status = DisplayHandle()
        status.display(Markdown("starting"))
        comparison = compare(
            replace(self.after, **before),
            replace(self.after, **after),
            self.pairs,
            warmup_steps=self.profile.warmup_steps,
            timed_steps=self.profile.timed_steps,
            cache_folder=self.folder / "cache",
            progress=lambda text: status.update(Markdown(text)),
        )
        lines = variant_findings(comparison)
        status.update(Markdown("\n".join(f"- {line}" for line in lines)))
        return comparison

    def show_padding(self, plot: Callable) -> None:
        """Draw how much padding each way of making batches leaves in one epoch."""
        show_figure(plot, padding_shares(self.after, self.pairs), self.folder, self.slug)

    def show(self, plot: Callable) -> None:
        """Draw the comparison with one of labkit's plots, and keep the figure for the page."""
        show_figure(plot, self.comparison, self.folder, self.slug)

    def say(self) -> None:
        """What was seen, in sentences filled from the record."""
        sentences = findings(self.slug, self.comparison) + forecast_findings(self.comparison)
        memory = self.comparison.after.memory
        if self.guess_bytes is not None and memory is not None:
            error = self.guess_bytes / memory.peak_allocated_bytes - 1
            sentences.insert(
                0,
                f"You expected {format_bytes(self.guess_bytes)}, {error:+.0%} from what was "
                "measured.",
            )
        show_bullets(sentences)

    def check(self, answer: float | None) -> None:
        """Check the answer to the exercise."""
        display(Markdown(check_answer(self.slug, answer, self.comparison)))


def open_run(
    slug: str,
    *,
    profile: str = "small",
    run_folder: str | None = None,
    data: str | None = None,
    skip_bad: bool = False,
) -> Run:
    """Start a step of the course, and show what will run where.

    Args:
        profile: Name of a profile.
        run_folder: Where the record goes; ``runs/by-hand`` by default.
        data: Pairs to train on, anything ``read_pairs`` takes; the synthetic ones by default.
        skip_bad: Leave out rows that cannot be used, and count them.
    """
    run = Run(slug, profile=profile, run_folder=run_folder, data=data, skip_bad=skip_bad)
    machine, pairs = machine_facts(), run.pairs.facts()
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    recipe = run.after
    precision = choose_precision(recipe, torch.device(machine["device"])).to_dict()
    lines = [
        f"**{slug}**, profile {profile}: {describe_change(run.before, recipe)}",
        f"Model {recipe.model}; {recipe.batch_size} pairs a step, at most {recipe.max_length} "
        "tokens each",
        f"Number formats: {facts_text(precision)}",
        f"Data: {pairs['name']}, {pairs['pairs']:,} pairs; rows skipped: "
        f"{pairs['skipped_rows']}",
        f"Machine: {machine['name']}, {machine['device']}; {versions}",
    ]
    show_bullets(lines)
    return run


class Ladder:
    """The records of a whole run; nothing is measured here."""

    def __init__(self, run_folder: str | None) -> None:
        self.folder = Path(run_folder) if run_folder else newest_run(PROJECT / "runs")
        self.records = load_records(self.folder)
        self.comparisons = {slug: record.comparison for slug, record in self.records.items()}

    def table(self) -> None:
        """The steps with their measured figures, and where they come from."""
        reports = [comparison.after for comparison in self.comparisons.values()]
        display(Markdown(f"Run {self.folder.name}: {captions.provenance(*reports)}."))
        display(Markdown(markdown_table(table_rows(self.records))))

    def predict(self) -> None:
        """The steps as they were predicted before they ran, here and on the chosen card."""
        display(Markdown(forecast_words.forecast_rows(self.comparisons)))

    def show(self, plot: Callable) -> None:
        """Draw all comparisons with one of labkit's plots, and keep the figure."""
        show_figure(plot, self.comparisons, self.folder, "90_ladder")

    def say(self) -> None:
        """What the whole run shows."""
        show_bullets(
            ladder_findings(self.comparisons) + forecast_ladder_findings(self.comparisons)
        )

    def check(self, answer: float | None) -> None:
        """Check the answer to the exercise."""
        right = speed_product({s: c for s, c in self.comparisons.items() if c.after.ok})
        if answer is None:
            text = UNANSWERED
        elif right is None:
            text = "A ratio is missing in this run, so there is nothing to check against."
        else:
            text = judge(answer, right, "Multiply speed_ratio over the steps that have one.")
        display(Markdown(text))


def open_ladder(run_folder: str | None = None) -> Ladder:
    """The records in a run folder; those of the newest run by default."""
    return Ladder(run_folder)
