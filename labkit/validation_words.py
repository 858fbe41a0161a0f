"""A validation in words: a text for each cell of its table, and what stands below it."""

from collections.abc import Iterable

from labkit.captions import format_seconds, verdict_words, why_missing
from labkit.predict.published import FITTED_ON, PublishedRow
from labkit.report import Report, format_bytes
from labkit.table import markdown_cells
from labkit.validation import Row, Validation

OWNERS_SHOWN = 3
SMALLEST_PERCENT = 0.0001
HEADINGS = {  # and whether a column is for cards only
    "Step": False,
    "Measured": False,
    "Predicted": False,
    "Error": False,
    "Error, %": False,
    "Reserved": True,
    "Predicted reserved": True,
    "Error, % of reserved": True,
    "Seconds": True,
    "At best": True,
    "What differs": False,
}
NOTHING = "-"


def row_words(row: Row) -> dict[str, str]:
    """The cells of a row, by heading."""
    measured, predicted = row.measured, row.predicted
    return {
        "Step": row.slug,
        "Measured": _bytes(measured, "peak_allocated_bytes"),
        "Predicted": _bytes(predicted, "peak_allocated_bytes"),
        "Error": NOTHING if row.error_bytes is None else _signed(row.error_bytes),
        "Error, %": _percent(row.error),
        "Reserved": _bytes(measured, "peak_reserved_bytes"),
        "Predicted reserved": _bytes(predicted, "peak_reserved_bytes"),
        "Error, % of reserved": _percent(row.reserved_error),
        "Seconds": _seconds(row.seconds),
        "At best": _seconds(row.modelled_seconds),
        "What differs": "; ".join(_differences(row)),
    }


def notes(validation: Validation) -> list[str]:
    """What the table leaves to say."""
    first = validation.rows[0].measured
    lines = [f"On {validation.machine['name']}: {first.model['name']}, random weights."]
    if batch := first.batch:
        lines[0] = f"{lines[0][:-1]}, {batch['pairs']} pairs of {batch['tokens']} tokens."
    if (card := validation.card) and card["known"]:
        lines.append(f"Predicted for {card['title']}, the catalogue's {card['name']}.")
    elif card:
        lines.append(f"{card['name']} is not in the catalogue: no seconds are modelled for it.")
    if any(row.compiled for row in validation.rows):
        lines.append("Compiled steps are predicted without compile; no bound counts for them.")
    bounds = [row.bound for row in validation.rows if row.bound is not None]
    if bounds:
        missed = [row.slug for row in validation.rows if row.within is False]
        verdict = f"missed by {', '.join(missed)}" if missed else "kept by all"
        lines.append(f"Bound of {bounds[0]:.1%} for steps without compile: {verdict}.")
    if any(row.bound is None and not row.compiled for row in validation.rows):
        lines.append("A bound counts for no step on a card, nor for a tiny one in 16 bits.")
    return lines


def shown_headings(validation: Validation) -> list[str]:
    """The columns that the device has something for."""
    on_card = validation.machine["device"] == "cuda"
    return [name for name, of_card in HEADINGS.items() if on_card or not of_card]


def validation_markdown(validation: Validation) -> str:
    """The table as Markdown, with the notes below it."""
    names = shown_headings(validation)
    rows = ([row_words(row)[name] for name in names] for row in validation.rows)
    lines = "".join(f"- {note}\n" for note in notes(validation))
    return f"{markdown_cells(names, rows)}\n{lines}"


def published_words(row: PublishedRow) -> dict[str, str]:
    """The cells of a published figure and its prediction, by heading."""
    known = row.published
    return {
        "Figure": known.id,
        "Statistic": known.statistic,
        "Card": known.card,
        "Published": format_bytes(known.bytes),
        "Predicted": format_bytes(row.predicted_bytes),
        "Error": f"{row.error:+.2%}".replace("-", "−") + (", fitted" * (known.id == FITTED_ON)),
        "Bound": f"{known.bound:.1%}",
        "": "" if row.within else "missed",
    }


def published_markdown(rows: Iterable[PublishedRow]) -> str:
    """That table as Markdown, without the statistics: the table of figures has them."""
    cells = [published_words(row) for row in rows]
    names = [name for name in cells[0] if name not in ("Statistic", "")]
    return markdown_cells(names, ([cell[name] for name in names] for cell in cells))


def _differences(row: Row) -> list[str]:
    """What is not alike in a row, or why there is nothing to compare."""
    parts = []
    if row.within is False:
        parts.append("bound missed")
    if not row.measured.ok:
        parts.append(why_missing(row.measured))
    fit = row.predicted and row.predicted.fit
    if fit and not (row.measured.ok and fit.fits):
        parts.append(f"predicted: {verdict_words(row.predicted)}")
    if row.reason:
        parts.append(f"not predicted: {row.reason}")
    if row.compiled:
        parts.append("without compile")
    if row.predicted and row.predicted.precision != row.measured.precision:
        parts.append("other number formats")
    errors = list(row.owner_errors.items())
    owners = [f"{name.replace('_', ' ')} {_signed(error)}" for name, error in errors]
    more = [f"{len(owners) - OWNERS_SHOWN} more"] if len(owners) > OWNERS_SHOWN else []
    if shown := ", ".join(owners[:OWNERS_SHOWN] + more):
        parts.append(shown)
    return parts or ["nothing"]


def _bytes(report: Report | None, name: str) -> str:
    if report is None or report.memory is None:
        return NOTHING
    return format_bytes(getattr(report.memory, name))


def _signed(count: int) -> str:
    """Bytes with their sign; small numbers in full."""
    if count == 0:
        return "0"
    return f"{'+' if count > 0 else '−'}{format_bytes(abs(count))}"


def _percent(fraction: float | None) -> str:
    if fraction is None:
        return NOTHING
    if not fraction:
        return "0"
    sign, percent = "+" if fraction > 0 else "−", 100 * abs(fraction)
    return (
        f"{sign}{percent:.4f}" if percent >= SMALLEST_PERCENT else f"{sign}<{SMALLEST_PERCENT}"
    )


def _seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_seconds(seconds)
