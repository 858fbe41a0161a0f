"""How a tuning is shown: a table that fills in a terminal, lines elsewhere, and its end."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from labkit.captions import format_seconds
from labkit.cli_output import show_table
from labkit.recipe import describe_change
from labkit.report import Report, format_bytes

if TYPE_CHECKING:
    from labkit.tuning_record import Row, Tuning

STATUS_STYLES = {"winner": "bold green", "racing": "cyan", "pruned": "yellow", "failed": "red"}
HEADINGS = {
    "Stage": "left", "Candidate": "left", "Predicted peak": "right", "A step": "right",
    "Speed to leader": "right", "Status": "left",
}  # fmt: skip

OVER = ("done", "stopped")  # what a tuning says last


@contextmanager
def tuning_display() -> Iterator[Callable[["Tuning"], None]]:
    """What to give a tuning as ``progress``, on stderr."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield Lines(lambda text: console.print(text, markup=False, soft_wrap=True))
        return
    with Live(console=console, refresh_per_second=4, vertical_overflow="visible") as live:
        yield lambda tuning: live.update(live_table(tuning))


class Lines:
    """Says a line where a row's status changes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.said = say, set()

    def __call__(self, tuning: "Tuning") -> None:
        """Say what is new."""
        for row in tuning.rows:
            words = row_words(row)
            now = (row.stage, row.change, words["Status"])
            if row.status != "waiting" and now not in self.said:
                self.said.add(now)
                stage, change, *figures, status = words.values()
                self.say(" | ".join([stage, change, status, ", ".join(filter(None, figures))]))


def row_words(row: "Row") -> dict[str, str]:
    """A candidate as a row of the table; what nobody knows yet is empty."""
    peak, seconds, ratio = row.predicted_peak_bytes, row.step_seconds, row.speed_to_leader
    status = f"{row.status}: {row.reason}" if row.reason else row.status
    if (row.report.get("compile") or {}).get("graphs"):  # it did not find those of another one
        first = format_seconds(row.report["compile"]["first_step_seconds"])
        status += f"; first step {first}"
        if row.pays_after_steps is not None:
            never = row.pays_after_steps == float("inf")
            status += ", pays " + ("never" if never else f"after {row.pays_after_steps:,.0f}")
    words = (
        row.stage,
        row.change,
        "" if peak is None else format_bytes(peak),
        "" if seconds is None else format_seconds(seconds),
        "" if ratio is None else f"{ratio:.2f}×",
        status,
    )
    return dict(zip(HEADINGS, words, strict=True))


def live_table(tuning: "Tuning"):
    """The candidates, and what is being done.

    Until the end stages that are over have one row, their winner: a table that is higher than
    the terminal cannot be drawn over.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, justify in HEADINGS.items():
        table.add_column(heading, justify=justify, overflow="fold")
    stage, last = "", tuning.rows[-1].stage if tuning.rows else ""
    for row in tuning.rows:
        if row.stage != last and row.status != "winner" and tuning.doing not in OVER:
            continue
        words = row_words(row) | ({"Stage": ""} if row.stage == stage else {})
        stage = row.stage
        table.add_row(*map(escape, words.values()), style=STATUS_STYLES.get(row.status))
    budget = f"Budget {format_bytes(tuning.budget_bytes)}, {tuning.steps:,} steps planned"
    return Group(Text(budget), table, Text(tuning.doing))


def show_tuning(tuning: "Tuning") -> None:
    """The tuned recipe beside the given one, how it was checked, and what to know."""
    change = describe_change(tuning.given, tuning.recipe)
    typer.echo(f"Tuned: {change}" if change else "Tuned: the given recipe, as it was.")
    compared = tuning.comparison
    if compared:
        pairs = [("given", compared.before), ("tuned", compared.after)]
        show_table(
            _measured(name, report, tuning.predicted[name]) for name, report in pairs if report
        )
        if compared.speed_ratio is not None:
            first, third = compared.speed_ratio_spread
            clear = "" if compared.speed_change_is_clear else ", unclear"
            typer.echo(
                f"Found beside given: {compared.speed_ratio:.2f}× as fast (quartiles "
                f"{first:.2f} to {third:.2f}, {len(compared.speed_ratios)} pairs{clear})."
            )
    for check in tuning.checks:
        typer.echo(
            f"The same, in {check.formats} and without dropout: over {len(check.losses)} steps "
            f"losses differ by {check.loss_difference:.1e} at most, gradients by "
            f"{check.gradient_difference:.1e}."
        )
    for note in tuning.notes:
        typer.echo(f"Note: {note}.")


def _measured(name: str, report: Report, predicted: int) -> dict[str, str]:
    """A recipe of the last comparison as a row."""
    from labkit.tuning_forecast import peak_bytes

    seconds, speed = report.median_step_seconds, report.real_tokens_per_second
    peak = peak_bytes(report.memory) if report.memory else None
    return {
        "Recipe": name,
        "Measured peak": format_bytes(peak),
        "Predicted, worst batch": format_bytes(predicted),
        "A step": report.status if seconds is None else format_seconds(seconds),
        "Real tokens/s": "-" if speed is None else f"{speed:,.0f}",
    }


def show_next(path: Path, data: str | None) -> None:
    """The commands to go on with."""
    options = ["--recipe", str(path), *(["--data", data] if data else [])]
    typer.echo(f"Recipe: {path}")
    for verb in ("measure", "train"):
        typer.echo(f"  $ labkit {verb} {shlex.join(options)}")
