"""The words of predictions beside measurements: errors, tables, alternative texts."""

from collections.abc import Iterator

from labkit.captions import format_seconds, peak_words, provenance, verdict_words, why_missing
from labkit.report import Comparison, Report, format_bytes

SMALL_SHARE = 0.0001  # below it a percentage would be a row of zeros
NOT_MADE = "no prediction was made"
LADDER_HEADINGS = (
    "Step",
    "Predicted peak here",
    "On the card",
    "Change",
    "Reserved",
    "Does it fit",
    "Time a step, modelled at best",
)


def signed_bytes(count: int) -> str:
    """A difference in bytes with its sign: ``−96 B``, ``+3.0 MiB``."""
    return f"{'+' if count > 0 else '−' if count < 0 else ''}{format_bytes(abs(count))}"


def percent(share: float, digits: int = 2) -> str:
    """A share with its sign; a little is not called nothing."""
    if 0 < abs(share) < SMALL_SHARE:
        return f"less than {SMALL_SHARE:.2%}".replace("%", "\u00a0%")
    return f"{share:+.{digits}%}".replace("-", "−").replace("%", "\u00a0%")


def error_bytes(comparison: Comparison) -> int | None:
    """Predicted peak less measured peak, of this step on this machine."""
    here = comparison.predicted.get("here")
    if here is None or here.after.memory is None or comparison.after.memory is None:
        return None
    return here.after.memory.peak_allocated_bytes - comparison.after.memory.peak_allocated_bytes


def is_compiled(comparison: Comparison) -> bool:
    """Whether the step is compiled, which no prediction is."""
    return comparison.after.recipe.compile != "none"


def error_words(error: int | None, measured: int | None, *, compiled: bool) -> str:
    """The error of a predicted peak in a few words; of a compiled step it would be none.

    Args:
        error: Predicted less measured, None without one of them.
        measured: The measured peak.
        compiled: Whether the step that ran was compiled, which the predicted one is not.
    """
    if compiled:
        return "not compiled"
    if error is None:
        return "not measured"
    words = "exact" if error == 0 else signed_bytes(error)
    is_small = abs(error) < SMALL_SHARE * measured
    return words if is_small else f"{words}, {percent(error / measured)}"


def error_share(comparison: Comparison) -> float:
    """That error as a share of the measured peak."""
    return error_bytes(comparison) / comparison.after.memory.peak_allocated_bytes


def change_words(comparison: Comparison) -> str:
    """How a peak changes from the step before, in a few words."""
    change = comparison.peak_change_bytes
    if change is None:
        return "the first step" if comparison.before is None else "unknown"
    if change == 0:
        return "the same"
    return f"{signed_bytes(change)} ({percent(change / peak(comparison.before), 1)})"


def peak(report: Report) -> int:
    """The peak allocated bytes of a report that has some."""
    return report.memory.peak_allocated_bytes


def forecast_table(predicted: dict[str, Comparison]) -> str:
    """The two steps as they are predicted, as a Markdown table with its provenance."""
    rows = [row for place, pair in predicted.items() for row in _rows(place, pair)]
    pairs = list(predicted.values())
    steps = ["step before"] * bool(pairs[0].before) + ["this step"]
    change = ["change"] * bool(pairs[0].before)
    lines = [["predicted", *steps, *change], ["---"] * (1 + len(steps) + len(change)), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    reports = [pair.after for pair in pairs]
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    below = [f"- {text}." for text in (provenance(*reports), _batch_words(reports[0]), *notes)]
    return "\n".join([table, "", *below])


def _rows(place: str, pair: Comparison) -> Iterator[list[str]]:
    """The rows of one machine: a name, a text for each step, and the change of the peak."""
    steps = [report for report in (pair.before, pair.after) if report]
    gap = [""] * (len(steps) - 1)
    change = [change_words(pair)] if pair.before else []
    where = "here" if place == "here" else f"on {pair.after.machine['name']}"
    yield [f"peak {where}", *(format_bytes(peak(report)) for report in steps), *change]
    if pair.after.fit is None:
        return
    reserved = (format_bytes(report.memory.peak_reserved_bytes) for report in steps)
    yield [f"reserved for it {where}", *reserved, *gap]
    if place == "card":
        yield ["does it fit", *(verdict_words(report) for report in steps), *gap]
        seconds = (format_seconds(report.modelled["seconds"]) for report in steps)
        yield ["time a step, modelled at best", *seconds, *gap]


def _batch_words(report: Report) -> str:
    batch = report.batch
    return f"Worst batch: {batch['pairs']} pairs of {batch['tokens']} tokens; {batch['why']}"


def forecast_rows(comparisons: dict[str, Comparison]) -> str:
    """The ladder as it was predicted, as a Markdown table with its provenance."""
    made = {slug: c.predicted for slug, c in comparisons.items() if c.predicted}
    if not made:
        return f"In these records {NOT_MADE}."
    lines = [LADDER_HEADINGS, ["---"] * len(LADDER_HEADINGS)]
    for slug in comparisons:
        here, card = (made.get(slug, {}).get(place) for place in ("here", "card"))
        mine = format_bytes(peak(here.after)) if here else NOT_MADE
        theirs = _card_cells(card) if card else [NOT_MADE, *[""] * 4]
        lines.append([slug, mine, *theirs])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    reports = [pair.after for predicted in made.values() for pair in predicted.values()]
    return f"{table}\n\n{provenance(*reports)}."


def _card_cells(card: Comparison) -> list[str]:
    report = card.after
    return [
        format_bytes(peak(report)),
        change_words(card),
        format_bytes(report.memory.peak_reserved_bytes),
        verdict_words(report),
        format_seconds(report.modelled["seconds"]),
    ]


def alt_forecast(comparison: Comparison) -> str:
    """The alternative text of ``plot_forecast``."""
    if not comparison.predicted:
        return f"An empty figure: {NOT_MADE}."
    lines = [f"measured here: {_say(comparison)}"]
    for place, pair in comparison.predicted.items():
        where = "here" if place == "here" else f"for {pair.after.machine['name']}"
        lines.append(f"predicted {where}: {_say(pair)}")
    reports = [comparison.after, *(pair.after for pair in comparison.predicted.values())]
    return f"Bars of peak memory, {provenance(*reports)}. {'; '.join(lines)}."


def _say(pair: Comparison) -> str:
    if pair.after.memory is None:
        return why_missing(pair.after)
    return f"{format_bytes(peak(pair.after))}, {peak_words(pair)}"


def alt_forecast_ladder(comparisons: dict[str, Comparison]) -> str:
    """The alternative text of ``plot_forecast_ladder``."""
    lines = [f"{slug}: {_say_step(comparison)}" for slug, comparison in comparisons.items()]
    return f"Bars of each step's peak, predicted and measured. {'; '.join(lines)}."


def _say_step(comparison: Comparison) -> str:
    here, card = comparison.predicted.get("here"), comparison.predicted.get("card")
    words = []
    if here:
        words.append(f"predicted {format_bytes(peak(here.after))} here")
    if here and comparison.after.memory:
        measured = peak(comparison.after)
        compiled = is_compiled(comparison)
        error = error_words(error_bytes(comparison), measured, compiled=compiled)
        words.append(f"error: {error}")
    if card:
        reserved = format_bytes(card.after.memory.peak_reserved_bytes)
        words.append(
            f"predicted {format_bytes(peak(card.after))} on the card, {reserved} reserved"
        )
    return ", ".join(words) or NOT_MADE
