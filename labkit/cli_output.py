"""How the commands answer: tables on stdout, or one JSON document."""

import sys
from pathlib import Path

import typer

from labkit.report import Report


def print_json(document: dict) -> None:
    """The one document on stdout."""
    from labkit.records import to_json

    typer.echo(to_json(document))


def show_run(folder: Path, page: Path, as_json: bool, **more) -> None:
    """A run as a table and the place of its page, or all of it as JSON."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from labkit.records import load_records
    from labkit.table import HEADINGS, row_words, table_notes, table_rows

    rows = table_rows(load_records(folder))
    if as_json:
        print_json({"folder": str(folder), "page": str(page), **more, "rows": rows})
        return
    out = _console()
    left_out = ("change", "tokens") if out.width < 120 else ()
    names = [name for name in HEADINGS if name not in left_out]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(HEADINGS[name], no_wrap=name == "slug", overflow="fold")
    for row in rows:
        table.add_row(*(row_words(row)[name] for name in names))
    out.print(table)
    for note in table_notes(rows):
        out.print(note, markup=False)
    out.print(f"Page: {page}", markup=False, soft_wrap=True)


def show_report(report: Report) -> None:
    """A report as a table of names and texts."""
    from rich.table import Table

    from labkit.summary import report_summary

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in report_summary(report).items():
        table.add_row(f"[bold]{name}[/bold]", text.replace("[", "\\["))
    _console().print(table)


def _console():
    """Where tables go: as wide as the terminal, wide enough for a row where there is none."""
    from rich.console import Console

    return Console(width=None if sys.stdout and sys.stdout.isatty() else 170, highlight=False)
