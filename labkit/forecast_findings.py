"""What was predicted beside what was measured, in sentences that are filled from both.

A sentence is written only where the figures show what it says.
"""

from collections.abc import Iterator

from labkit.captions import verdict_words
from labkit.forecast_words import (
    change_words,
    error_bytes,
    error_share,
    is_compiled,
    peak,
    percent,
    signed_bytes,
)
from labkit.report import OWNERS, Comparison, Report, format_bytes


def forecast_findings(comparison: Comparison) -> list[str]:
    """What was predicted beside what was measured, then what the card would do.

    Nothing where no prediction was made.
    """
    sentences = []
    if "here" in comparison.predicted and comparison.after.ok:
        sentences += _here(comparison)
    if "card" in comparison.predicted:
        sentences += _there(comparison)
    return [f"{sentence}." for sentence in sentences]


def _here(comparison: Comparison) -> Iterator[str]:
    predicted, measured = comparison.predicted["here"].after, comparison.after
    error = error_bytes(comparison)
    start = f"Predicted {format_bytes(peak(predicted))}"
    if is_compiled(comparison):
        yield (
            f"{start} for this step without compile; compiled, it measured "
            f"{format_bytes(peak(measured))}, {signed_bytes(-error)}"
        )
    elif error == 0:
        yield f"{start}, measured the same, to the byte"
    else:
        yield (
            f"{start}, measured {format_bytes(peak(measured))}: error {signed_bytes(error)} "
            f"({percent(error_share(comparison))}){_largest_owner(predicted, measured)}"
        )
    reserved = measured.memory.peak_reserved_bytes
    if reserved and predicted.memory.peak_reserved_bytes:
        yield (
            f"Reserved: predicted {format_bytes(predicted.memory.peak_reserved_bytes)}, "
            f"measured {format_bytes(reserved)}"
        )
    shapes = [
        (report.batch["pairs"], report.batch["tokens"]) for report in (predicted, measured)
    ]
    if shapes[0] != shapes[1]:
        yield "The batch that was measured is another one than the worst, which was predicted"
    owners = predicted.memory.by_owner, measured.memory.by_owner
    held, really_held = (by_owner.get("temporaries", 0) for by_owner in owners)
    if not is_compiled(comparison) and held < really_held and _in_16_bits(predicted):
        yield (
            "On a CPU, products in 16 bits take scratch memory as their library sees fit; the "
            "prediction does not count it"
        )


def _largest_owner(predicted: Report, measured: Report) -> str:
    """Where the two differ most, as far as the measurement tells owners apart."""
    errors = {
        owner: predicted.memory.by_owner[owner] - measured.memory.by_owner[owner]
        for owner in OWNERS
        if owner in measured.memory.by_owner
    }
    if len(errors) < len(OWNERS):  # an accelerator's counters
        return ""
    owner = max(errors, key=lambda name: abs(errors[name]))
    return f", most of it {owner.replace('_', ' ')} ({signed_bytes(errors[owner])})"


def _in_16_bits(report: Report) -> bool:
    return "float16" in " ".join(_formats(report))


def _formats(report: Report) -> tuple[str, str]:
    """What weights are stored in and products are computed in."""
    weights, autocast = report.precision["weights"], report.precision["autocast"]
    return weights, weights if autocast == "none" else autocast


def _there(comparison: Comparison) -> Iterator[str]:
    card = comparison.predicted["card"]
    report, name = card.after, card.after.machine["name"]
    yield (
        f"On {name} this step is predicted to hold {format_bytes(peak(report))} and to "
        f"reserve {format_bytes(report.memory.peak_reserved_bytes)}: {verdict_words(report)}"
    )
    if card.before is None or comparison.peak_change_bytes is None:
        return
    if is_compiled(comparison) and comparison.before.recipe.compile == "none":
        yield "What compiling changes there is not predicted"
        return
    here, there = comparison.peak_change_bytes, card.peak_change_bytes
    words = f"change by {change_words(card)}" if there else "stay the same"
    same = (here > 0) - (here < 0) == (there > 0) - (there < 0)
    yield f"There its peak is predicted to {words}, {_beside(comparison, same=same)}"


def _beside(comparison: Comparison, *, same: bool) -> str:
    """Whether the card's change goes the way of the one that was measured, and if not, why."""
    unchanged = comparison.peak_change_bytes == 0
    if same:
        return "as it does here" if unchanged else "in the same direction as here"
    words = "here it stayed" if unchanged else f"here it was {change_words(comparison)}"
    used, used_there = (
        _formats(report) for report in (comparison.after, comparison.predicted["card"].after)
    )
    if used != used_there:
        words += f", because products ran in {used[1]} here and run in {used_there[1]} there"
    return words


def forecast_ladder_findings(comparisons: dict[str, Comparison]) -> list[str]:
    """What the predictions of a whole run show; nothing where none was made."""
    sentences = []
    errors = {
        slug: abs(error_share(c))
        for slug, c in comparisons.items()
        if error_bytes(c) is not None and not is_compiled(c)
    }
    if errors:
        slug = max(errors, key=errors.get)
        exact = sum(error == 0 for error in errors.values())
        sentences.append(
            f"Of {len(errors)} predicted peaks of steps that are not compiled, {exact} are "
            f"exact; the largest error is {signed_bytes(error_bytes(comparisons[slug]))}, "
            f"{percent(error_share(comparisons[slug]))} of the peak ({slug})"
        )
    cards = [c.predicted["card"].after for c in comparisons.values() if "card" in c.predicted]
    for name in dict.fromkeys(report.machine["name"] for report in cards):
        fits = [report.fit.fits for report in cards if report.machine["name"] == name]
        sentences.append(f"On {name}, {sum(fits)} of {len(fits)} steps are predicted to fit")
    return [f"{sentence}." for sentence in sentences]
