"""The ladder as a table: a row a step, in figures for programs and in words for people."""

from collections.abc import Iterable

from labkit.captions import STATUS_WORDS, format_seconds, why_missing
from labkit.forecast_words import error_bytes, error_words, is_compiled
from labkit.recipe import Recipe, describe_change, differences, ladder
from labkit.records import Record
from labkit.report import format_bytes

HEADINGS = {
    "slug": "Step",
    "change": "Change",
    "peak": "Peak memory",
    "predicted": "Predicted peak (error)",
    "peak_change": "Peak vs step before",
    "speed": "Speed vs step before (quartiles)",
    "cumulative": "Speed vs step 00 (product)",
    "seconds": "Time a step",
    "tokens": "Real tokens/s",
}


def headings(rows: list[dict]) -> dict[str, str]:
    """The headings of a table; nothing is headed predicted where no row holds a prediction."""
    predicted = any(row["predicted_peak_allocated_bytes"] is not None for row in rows)
    return {name: text for name, text in HEADINGS.items() if predicted or name != "predicted"}


def table_rows(records: dict[str, Record]) -> list[dict]:
    """One row of figures for each step of the ladder; None is what was not measured.

    Args:
        records: Records by slug, as ``load_records`` returns them.

    Returns:
        Rows with ``slug``, ``change``, ``status`` (``not_run`` without a record),
        ``peak_allocated_bytes``, ``predicted_peak_allocated_bytes`` (for the same machine,
        before the run) with ``predicted_error_bytes`` (predicted less measured) and
        ``predicted_without_compile`` (whether only the measured step was compiled),
        ``peak_change_bytes`` and ``peak_change_share`` (of the step before, both from one
        session), ``speed_ratio`` with ``speed_ratio_quartiles`` and
        ``speed_change_is_clear`` (by a sign test over the pairs),
        ``cumulative_speed_product`` (the product of the ratios so far, 1 for the first step),
        ``median_step_seconds``, ``real_tokens_per_second`` and ``note``, the reason for a gap.
    """
    rows, speed_of, before = [], {}, None
    for slug, recipe in ladder(Recipe()).items():
        change = describe_change(before, recipe)
        if slug in records:
            rows.append(_measured_row(records[slug], speed_of) | _origin_note(slug, records))
        else:
            rows.append(_empty_row(slug, change, "not_run", "no record of this step"))
        before = recipe
    return rows


def row_words(row: dict) -> dict[str, str]:
    """The cells of a row as people read them, under ``HEADINGS``."""
    measured = row["status"] == "ok"
    gap = "not measured" if measured else row["status"].replace("_", " ")
    first = row["cumulative_speed_product"] == 1 and row["speed_ratio"] is None
    seconds, tokens = row["median_step_seconds"], row["real_tokens_per_second"]
    return {
        "slug": row["slug"],
        "change": row["change"],
        "peak": gap
        if row["peak_allocated_bytes"] is None
        else format_bytes(row["peak_allocated_bytes"]),
        "predicted": _predicted_words(row),
        "peak_change": "start" if first else _peak_change_words(row),
        "speed": "1.00× (start)" if first else _speed_words(row),
        "cumulative": _times(row["cumulative_speed_product"]),
        "seconds": gap if seconds is None else format_seconds(seconds),
        "tokens": gap if tokens is None else f"{tokens:,.0f}",
    }


def effect_words(row: dict) -> str:
    """What a step did, in a few words: ``−35 % peak, 1.20× speed``."""
    if row["status"] != "ok":
        return STATUS_WORDS.get(row["status"], "not run")
    share, ratio = row["peak_change_share"], row["speed_ratio"]
    words = []
    if share is not None:
        words.append("same peak" if share == 0 else f"{_percent(share)} peak")
    if ratio is not None:
        clear = row["speed_change_is_clear"]
        unclear = (
            "too few pairs to judge speed" if clear is None else "no clear change of speed"
        )
        words.append(f"{ratio:.2f}× speed" if clear else unclear)
    return ", ".join(words) or "where the ladder starts"


def markdown_table(rows: list[dict]) -> str:
    """The rows as a Markdown table, with the notes below it."""
    shown = headings(rows)
    table = markdown_cells(
        shown.values(), [[row_words(row)[name] for name in shown] for row in rows]
    )
    notes = "\n".join(f"- {note}" for note in table_notes(rows))
    return f"{table}\n{notes}\n" if notes else table


def markdown_cells(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Texts as a Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def table_notes(rows: list[dict]) -> list[str]:
    """A sentence for each row that has a note."""
    return [f"{row['slug']}: {row['note']}" for row in rows if row["note"]]


def _empty_row(slug: str, change: str, status: str, note: str) -> dict:
    """A row in which nothing was measured."""
    return {
        "slug": slug,
        "change": change,
        "status": status,
        "peak_allocated_bytes": None,
        "predicted_peak_allocated_bytes": None,
        "predicted_error_bytes": None,
        "predicted_without_compile": None,
        "peak_change_bytes": None,
        "peak_change_share": None,
        "speed_ratio": None,
        "speed_ratio_quartiles": None,
        "speed_change_is_clear": None,
        "cumulative_speed_product": None,
        "median_step_seconds": None,
        "real_tokens_per_second": None,
        "note": note,
    }


def _measured_row(record: Record, speed_of: dict[Recipe, float]) -> dict:
    """The row of a record; ``speed_of`` holds the cumulative speed of each recipe so far."""
    comparison = record.comparison
    before, after = comparison.before, comparison.after
    row = _empty_row(record.slug, _change(record), after.status, _note(record))
    if before is None and after.ok:
        row["cumulative_speed_product"] = 1.0
    elif comparison.speed_ratio and before.recipe in speed_of:
        row["cumulative_speed_product"] = speed_of[before.recipe] * comparison.speed_ratio
    if row["cumulative_speed_product"]:
        speed_of[after.recipe] = row["cumulative_speed_product"]
    if comparison.peak_change_bytes is not None:
        row["peak_change_share"] = (
            comparison.peak_change_bytes / before.memory.peak_allocated_bytes
        )
    row |= _prediction(record)
    return row | {
        "peak_allocated_bytes": after.memory.peak_allocated_bytes if after.memory else None,
        "peak_change_bytes": comparison.peak_change_bytes,
        "speed_ratio": comparison.speed_ratio,
        "speed_ratio_quartiles": comparison.speed_ratio_spread,
        "speed_change_is_clear": comparison.speed_change_is_clear,
        "median_step_seconds": after.median_step_seconds,
        "real_tokens_per_second": after.real_tokens_per_second,
    }


def _prediction(record: Record) -> dict:
    """What was predicted for the machine of a record; nothing where nothing was."""
    here = record.comparison.predicted.get("here")
    if here is None:
        return {}
    return {
        "predicted_peak_allocated_bytes": here.after.memory.peak_allocated_bytes,
        "predicted_error_bytes": error_bytes(record.comparison),
        "predicted_without_compile": is_compiled(record.comparison),
    }


def _change(record: Record) -> str:
    """What the step changed, against the step that it was really measured against."""
    before = record.comparison.before
    return describe_change(before.recipe if before else None, record.comparison.after.recipe)


def _note(record: Record) -> str:
    """Why figures are missing, or why the changed format was not used; else nothing."""
    before, after = record.comparison.before, record.comparison.after
    if not after.ok:
        return why_missing(after)
    if before is not None and not before.ok:
        return f"no ratio: the step before is not measured ({why_missing(before)})"
    if before is not None and {"weights", "autocast"} & set(
        differences(before.recipe, after.recipe)
    ):
        return after.precision.get("reason", "")
    return ""


def _origin_note(slug: str, records: dict[str, Record]) -> dict:
    """A note for a record that must not be compared with the first one of the table."""
    here, first = records[slug], next(iter(records.values()))
    origins = {
        "profile": (here.profile, first.profile),
        "machine": (here.machine.get("name"), first.machine.get("name")),
        "data": tuple(r.comparison.after.data.get("sha256") for r in (here, first)),
    }
    other = [name for name, (a, b) in origins.items() if a != b and a and b]
    return {"note": f"of another {' and '.join(other)} than {first.slug}"} if other else {}


def _predicted_words(row: dict) -> str:
    predicted, measured = row["predicted_peak_allocated_bytes"], row["peak_allocated_bytes"]
    if predicted is None:
        return "not predicted"
    compiled = row["predicted_without_compile"]
    words = error_words(row["predicted_error_bytes"], measured, compiled=compiled)
    return f"{format_bytes(predicted)} ({words})"


def _peak_change_words(row: dict) -> str:
    change, share = row["peak_change_bytes"], row["peak_change_share"]
    if change is None:
        return "not measured"
    if change == 0:
        return "the same, to the byte"
    return f"{_percent(share)} ({'+' if change > 0 else '−'}{format_bytes(abs(change))})"


def _speed_words(row: dict) -> str:
    if row["speed_ratio_quartiles"] is None:
        return _times(row["speed_ratio"])
    first, third = row["speed_ratio_quartiles"]
    mark = {True: "", False: ", unclear", None: ", too few pairs"}[row["speed_change_is_clear"]]
    return f"{_times(row['speed_ratio'])} ({first:.2f}–{third:.2f}){mark}"


def _times(ratio: float | None) -> str:
    return "not measured" if ratio is None else f"{ratio:.2f}×"


def _percent(share: float) -> str:
    return f"{share:+.1%}".replace("-", "−").replace("%", " %")
