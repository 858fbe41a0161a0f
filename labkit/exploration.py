"""What the notebook about planning calls: the explorer, and what stands in without a kernel."""

from pathlib import Path

from IPython.display import Markdown, display

from labkit.cells import show_bullets, show_figure
from labkit.exercises import UNANSWERED, Hint, judge
from labkit.explorer import Explorer
from labkit.explorer_answer import answer, largest_batch
from labkit.explorer_plots import plot_explorer
from labkit.explorer_setting import LARGEST_BATCH, Setting
from labkit.explorer_words import findings, markdown_table, setting_words, verdict
from labkit.notebook import BY_HAND
from labkit.page import PLAN_NOTEBOOK
from labkit.predict.gpus import find_gpu


class Exploration:
    """One sitting with the explorer.

    Attributes:
        start: Where the controls stood at first; guess and exercise are about it.
    """

    def __init__(self, start: Setting, run_folder: str | None) -> None:
        self.start = start
        self.folder = Path(run_folder) if run_folder else BY_HAND
        self.explorer = None if run_folder else Explorer(start)
        self.guess_pairs: int | None = None

    @property
    def setting(self) -> Setting:
        """Where the controls stand now."""
        return self.explorer.setting if self.explorer else self.start

    def guess(self, pairs: int | None) -> None:
        """Note how many pairs the reader expects to fit."""
        if not isinstance(pairs, int | None):
            raise Hint(f"A guess is a number of pairs, such as 32, not {pairs!r}.")
        self.guess_pairs = pairs
        words = "No guess yet." if pairs is None else f"You expect that {pairs} pairs fit."
        display(Markdown(words))

    def predict(self) -> None:
        """The verdict on the start, before anything is moved."""
        sign, words = verdict(answer(self.start).report)
        display(Markdown(f"{setting_words(self.start)}: {sign} {words}."))

    def explore(self) -> None:
        """Show the controls; a course that runs by itself has nobody to move them."""
        if self.explorer:
            self.explorer.show()
        else:
            text = (
                "Here are the controls when somebody runs the notebook: `make notebook`. "
                "A figure and a table of where they start stand in for them below."
            )
            display(Markdown(text))

    def show(self) -> None:
        """Figure and table of where the controls stand now; the page keeps the figure."""
        found = answer(self.setting)
        show_figure(plot_explorer, found, self.folder, PLAN_NOTEBOOK)
        display(Markdown(markdown_table(found)))

    def say(self) -> None:
        """What the prediction says about where the controls stand now."""
        sentences = findings(answer(self.setting), largest_batch(self.setting))
        if self.guess_pairs is not None:
            right = largest_batch(self.start)
            sentences.insert(0, f"You expected {self.guess_pairs} pairs to fit; {right} do.")
        show_bullets(sentences)

    def check(self, pairs: int | None) -> None:
        """Check the answer to the exercise: the largest batch at the start that fits."""
        display(Markdown(check_largest_batch(self.start, pairs)))


def check_largest_batch(setting: Setting, pairs: int | None) -> str:
    """Say whether ``pairs`` is the largest batch that fits with all else as set.

    Raises:
        WrongAnswer: It is not.
    """
    if pairs is None:
        return UNANSWERED
    hint = (
        "Put all controls back, move the batch by the arrow keys, and read the verdict: the "
        f"largest of 1 to {LARGEST_BATCH} pairs that fits, 0 if none does."
    )
    return judge(pairs, largest_batch(setting), hint, tolerance=0)


def open_explorer(
    *, gpu: str | None = None, run_folder: str | None = None, **choices
) -> Exploration:
    """Prepare the explorer, and show where its controls start.

    Args:
        gpu: The card, anything that ``find_gpu`` understands; this machine's CPU by default.
        run_folder: Where a course that runs by itself keeps its figures; None shows controls.
        choices: Other fields of ``Setting``.
    """
    setting = Setting(gpu=find_gpu(gpu) if gpu else None, **choices)
    show_bullets([f"Start: {setting_words(setting)}"])
    return Exploration(setting, run_folder)
