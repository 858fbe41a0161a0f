"""How a training is shown: a bar in a terminal, lines elsewhere, and a table at its end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from labkit.cli_output import show_table

if TYPE_CHECKING:
    from labkit.quality import Scores
    from labkit.training import Trained

QUIET_SECONDS = 30  # a plain log says at least this often how far it is
TICK = "evaluated "  # how a text begins that follows the one before within a moment


class TensorBoardError(RuntimeError):
    """TensorBoard was asked for and is not installed."""


class Display:
    """What a training says while it runs; a subclass says it in a terminal."""

    def __init__(self, console, writer) -> None:
        self.console, self.writer = console, writer
        self.said, self.real_tokens, self.seconds = time.monotonic(), 0, 0.0

    def progress(self, text: str) -> None:
        """What is being done."""
        if not text.startswith(TICK) or self._was_quiet():
            self.say(text)

    def watch(self, line: dict) -> None:
        """A step or an evaluation is done."""
        if self.writer is not None:
            _write(self.writer, line)
        if "scores" in line:
            self.evaluated(line["step"], line["scores"])
        else:
            self.real_tokens += line["real_tokens"]
            self.seconds += line["seconds"]
            self.stepped(line["step"], line["loss"])

    def stepped(self, step: int, loss: float) -> None:
        """Say, now and then, that a step is done."""
        if step == 1 or self._was_quiet():
            self.say(f"step {step:,}: loss {loss:.4f}, {self.speed}")

    def evaluated(self, step: int, scores: dict) -> None:
        """Say how good the model is."""
        self.say(
            f"step {step:,}: validation macro-F1 {scores['macro_f1']:.4f}, accuracy "
            f"{scores['accuracy']:.4f}, loss {scores['loss']:.4f}"
        )

    @property
    def speed(self) -> str:
        """Real tokens a second, of the steps so far."""
        return f"{self.real_tokens / max(self.seconds, 1e-9):,.0f} real tokens/s"

    def say(self, text: str) -> None:
        """A line that stays."""
        self.said = time.monotonic()
        self.console.print(text, markup=False, soft_wrap=True)

    def _was_quiet(self) -> bool:
        return time.monotonic() - self.said >= QUIET_SECONDS


class BarDisplay(Display):
    """The same with a bar that shows the last step."""

    def __init__(self, console, writer, bar, total: int | None) -> None:
        super().__init__(console, writer)
        self.bar, self.macro_f1 = bar, "not yet validated"
        self.task = bar.add_task("training", total=total, figures="")

    def progress(self, text: str) -> None:
        """What is being done, in place of the last such text."""
        self.bar.update(self.task, description=text)

    def stepped(self, step: int, loss: float) -> None:
        """The last loss, the last macro-F1 and the speed beside the bar."""
        figures = f"loss {loss:.4f}, {self.macro_f1}, {self.speed}"
        self.bar.update(self.task, completed=step, description="training", figures=figures)

    def evaluated(self, step: int, scores: dict) -> None:
        """A line that stays, and the macro-F1 beside the bar."""
        self.macro_f1 = f"macro-F1 {scores['macro_f1']:.4f}"
        super().evaluated(step, scores)


@contextmanager
def training_display(last_step: int, writer) -> Iterator[Display]:
    """What to give a training as ``progress`` and ``watch``, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    console = Console(stderr=True, highlight=False)
    try:
        if not console.is_terminal:
            yield Display(console, writer)
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        with Progress(
            TextColumn("{task.description}"), *columns, Left(), console=console, transient=True
        ) as bar:
            yield BarDisplay(console, writer, bar, last_step)
    finally:
        if writer is not None:
            writer.close()


def check_tensorboard() -> None:
    """See to it that there is TensorBoard.

    Raises:
        TensorBoardError: It is not installed.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401 - it imports TensorBoard
    except ImportError as error:
        raise TensorBoardError(
            "TensorBoard is not installed: pip install tensorboard, or leave out --tensorboard."
        ) from error


def tensorboard_writer(folder: Path):
    """Where TensorBoard reads what a training writes."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder / "tensorboard")


def _write(writer, line: dict) -> None:
    """A line of the history as TensorBoard's scalars."""
    if "scores" not in line:
        writer.add_scalar("loss/training", line["loss"], line["step"])
        return
    for name in ("macro_f1", "accuracy", "average_precision", "loss"):
        if line["scores"][name] is not None:
            tag = "loss/validation" if name == "loss" else f"validation/{name}"
            writer.add_scalar(tag, line["scores"][name], line["step"])


def show_training(
    trained: "Trained",
    scored: "dict[str, Scores]",
    shifted: "Scores | None",
    notes: list[str],
) -> None:
    """Scores beside those of always giving one answer, by class, and how it went.

    Args:
        scored: Scores by the name of the pairs that they are on.
        shifted: Those on the test pairs, with the threshold best on the validation pairs.
    """
    for name, scores in scored.items():
        typer.echo(f"On {scores.pairs:,} pairs of {name}:")
        show_table(_overall(scores))
        show_table(_by_class(scores))
    best = trained.scores
    text = (
        f"A pair counts as the same above a probability of {best.threshold:g}. Above "
        f"{best.best_threshold:.3f}, which is best on the validation pairs, macro-F1 is "
        f"{best.best_macro_f1:.4f} there (flattering, because chosen there)"
    )
    if shifted is not None:
        text += f", and {shifted.macro_f1:.4f} on the test pairs"
    typer.echo(text + ".")
    typer.echo(
        f"Best after {trained.best_step:,} of {trained.steps:,} steps ({trained.stopped}); "
        f"steps and evaluations took {trained.seconds:,.0f} s."
    )
    for note in notes:
        typer.echo(note)
    typer.echo(f"Adapter: {trained.adapter}")


def _overall(scores: "Scores") -> Iterator[dict[str, str]]:
    """Each score, beside that of always giving the more frequent label."""
    frequent = max(scores.classes, key=lambda name: scores.classes[name].support)
    average_precision = scores.average_precision
    for name, value, majority in (
        ("macro-F1", scores.macro_f1, scores.majority_macro_f1),
        ("accuracy", scores.accuracy, scores.majority_accuracy),
        ("average precision", average_precision, scores.classes["same"].support / scores.pairs),
        ("mean loss", scores.loss, None),
    ):
        words = ("-" if each is None else f"{each:.4f}" for each in (value, majority))
        yield dict(
            zip(("Score", "trained", f'always "{frequent}"'), (name, *words), strict=True)
        )


def _by_class(scores: "Scores") -> Iterator[dict[str, str]]:
    for name, each in scores.classes.items():
        yield {
            "Label": f'"{name}"',
            "precision": f"{each.precision:.4f}",
            "recall": f"{each.recall:.4f}",
            "F1": f"{each.f1:.4f}",
            "pairs": f"{each.support:,}",
        }
