"""How the commands answer: tables on stdout, or one JSON document."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import typer

from labkit.report import Report, format_bytes

BAR_LENGTH = 20  # of the whole peak
TEXTS = (  # columns set to the left
    "Step", "What differs", "Figure", "Statistic", "Card", "Precision", "Checkpointing",
    "Score", "Label",
)  # fmt: skip
FORMATS = {"float32": "fp32", "tf32": "TF32", "float16": "fp16", "bfloat16": "bf16"}


class TargetError(ValueError):
    """A file that an answer cannot be written to; the message says why."""


def check_target(path: Path, option: str, suffixes: Iterable[str]) -> None:
    """Refuse, before the work, a file that cannot be written after it.

    Raises:
        TargetError: The option takes other suffixes, or there is no place to write.
    """
    if path.suffix.lower() not in suffixes:
        raise TargetError(f"{option} writes {' or '.join(suffixes)}, not {path.name!r}.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise TargetError(f"{path} cannot be written: there is no folder {folder}.")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise TargetError(f"{path} cannot be written to.")


def print_json(document: dict) -> None:
    """The one document on stdout."""
    from labkit.records import to_json

    typer.echo(to_json(document))


def show_run(folder: Path, page: Path, as_json: bool, **more) -> None:
    """A run as a table and the place of its page, or all of it as JSON."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from labkit.records import load_records
    from labkit.table import headings, row_words, table_notes, table_rows

    rows = table_rows(load_records(folder))
    if as_json:
        print_json({"folder": str(folder), "page": str(page), **more, "rows": rows})
        return
    out = _console()
    left_out = ("change", "predicted", "tokens") if out.width < 120 else ()
    shown = {name: text for name, text in headings(rows).items() if name not in left_out}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, heading in shown.items():
        table.add_column(heading, no_wrap=name == "slug", overflow="fold")
    for row in rows:
        table.add_row(*(row_words(row)[name] for name in shown))
    out.print(table)
    for note in table_notes(rows):
        out.print(note, markup=False)
    out.print(f"Page: {page}", markup=False, soft_wrap=True)


def show_report(report: Report) -> None:
    """A report as a table of names and texts, and who holds the peak where it is known."""
    from rich.markup import escape
    from rich.table import Table

    from labkit.summary import report_summary

    out, table = _console(), Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    for name, text in report_summary(report).items():
        table.add_row(f"[bold]{name}[/bold]", escape(text))
    out.print(table)
    if report.memory and report.memory.by_module:
        out.print()
        out.print(_waterfall(report, mark="#" if out.options.ascii_only else "█"))


def _waterfall(report: Report, mark: str):
    """Who holds the peak, an owner or a module a row, each with a bar of its share."""
    from rich.markup import escape
    from rich.table import Table

    from labkit.waterfall import waterfall

    title = f"Who holds the peak, {report.oracle}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.pad_edge = table.show_header = False
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for row in waterfall(report.memory):
        name = f"[bold]{escape(row.name)}[/bold]" if row.is_owner else f"  {escape(row.name)}"
        bar = mark * round(BAR_LENGTH * row.share)
        table.add_row(name, format_bytes(row.held_bytes), row.share_words, bar)
    return table


def show_gpus(gpus: Iterable) -> None:
    """The cards of the catalogue, one a row, with the sources where there is room."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = _console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("Name", no_wrap=True)
    for heading in ("Memory", "Outside", "GB/s", *FORMATS.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    if wide := out.width >= 120:
        table.add_column("Source of rates; of memory; of what is outside", overflow="fold")
    for gpu in gpus:
        rates = gpu.matrix_flops_per_second | {"tf32": gpu.tf32_flops_per_second}
        cells = [gpu.name, format_bytes(gpu.memory_bytes), format_bytes(gpu.context_bytes)]
        cells.append(f"{gpu.bandwidth_bytes_per_second / 1e9:,.0f}")
        cells += [f"{rates[name] / 1e12:g}" if rates.get(name) else "-" for name in FORMATS]
        sources = (gpu.source, gpu.memory_source, gpu.context_source)
        table.add_row(*cells, *(["; ".join(sources)] if wide else []))
    out.print(table)
    out.print(
        "Memory as PyTorch sees it; outside is what a process holds besides PyTorch's "
        "allocator. Formats: TFLOPS at best, without sparsity; - where the card has no such "
        "format." + ("" if wide else " A wider terminal or --json shows the sources.")
    )


def show_validation(validation) -> None:
    """Each step as predicted and as measured, a step a row, and what differs."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from labkit.validation_words import notes, row_words, shown_headings

    names = shown_headings(validation)
    out = _console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold", justify="left" if name in TEXTS else "right")
    for row in validation.rows:
        words = row_words(row)
        table.add_row(*(escape(words[name]) for name in names))
    out.print(table)
    for note in notes(validation):
        out.print(note, markup=False)


def show_published(rows: Iterable) -> None:
    """Published figures and their predictions, one a row."""
    from labkit.validation_words import published_words

    rows = list(rows)
    show_table(map(published_words, rows))
    for row in rows:
        if row.note:
            _console().print(f"{row.published.id}: {row.note}", markup=False)


def show_table(rows: Iterable[dict[str, str]]) -> None:
    """Rows by heading; a row may lack the last ones."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    rows = list(rows)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in max(rows, key=len):
        table.add_column(name, overflow="fold", justify="left" if name in TEXTS else "right")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    _console().print(table)


def _console():
    """Where tables go: as wide as the terminal, wide enough for a row where there is none."""
    from rich.console import Console

    return Console(width=None if sys.stdout and sys.stdout.isatty() else 170, highlight=False)
