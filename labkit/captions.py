"""The words of a figure: what was run where, what changed, and a full sentence for each plot.

A plot and its alternative text are written from the same reports, so they cannot disagree.
"""

from collections.abc import Callable, Iterable
from statistics import median
from textwrap import shorten

from labkit.recipe import differences
from labkit.report import OWNERS, PHASES, Comparison, Report, format_bytes
from labkit.waterfall import waterfall

PHASE_NAMES = {phase: phase for phase in PHASES} | {"before": "before the step"}
STATUS_WORDS = {
    "ok": "not measured",
    "out_of_memory": "out of memory",
    "skipped": "skipped",
    "error": "failed",
    "interrupted": "interrupted",
}


def format_seconds(seconds: float) -> str:
    """Seconds for people: ``1.23 s``, ``45.6 ms``, ``53 µs``."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def count_words(count: int, name: str) -> str:
    """A number of things: ``1 pair``, ``8 pairs``."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def checkpoint_words(every: int) -> str:
    """A value of ``checkpoint_every`` in words."""
    return {0: "off", 1: "every layer", 2: "every 2nd layer", 3: "every 3rd layer"}.get(
        every, f"every {every}th layer"
    )


def why_missing(report: Report) -> str:
    """Why a report has no figures: its status in words, and the reason it gives."""
    words, reason = STATUS_WORDS[report.status], " ".join(report.reason.split()).rstrip(".")
    return f"{words}: {shorten(reason, 200, placeholder=' …')}" if reason else words


def why_no_timeline(report: Report) -> str:
    """Why a report has no timeline; an accelerator counts its peaks without recording one."""
    if report.memory is None or not report.memory.method:
        return why_missing(report)
    return f"no timeline, bytes come from {report.memory.method}"


def provenance(*reports: Report) -> str:
    """Which oracle answered, for which machine and model; says when that is no result."""
    sources = []
    for report in reports:
        verb = "measured on" if report.oracle == "measured" else f"{report.oracle} for"
        machine = report.machine.get("name") or "an unnamed machine"
        sources.append(f"{verb} {machine}, {model_name(report)}")
    tiny = any(model_name(report) == "qwen3-tiny" for report in reports)
    return "; ".join(dict.fromkeys(sources)) + (" (tiny: not a result)" if tiny else "")


def verdict_words(report: Report) -> str:
    """Whether a step runs, in words: on the card it was predicted for, or where it ran."""
    if not report.ok:
        return why_missing(report)
    fit = report.fit
    if fit is None:
        return "ok" if report.oracle == "measured" else "no verdict without a card"
    gap = format_bytes(abs(fit.margin_bytes))
    if fit.gives_back_cache:
        return f"fits, but only by giving back cached memory: {gap} less than it would reserve"
    if fit.fits:
        return f"fits, {gap} to spare"
    return f"does not fit, {gap} too little; first fails in {fit.fails_in}"


def model_name(report: Report) -> str:
    """The model of a report, as its recipe or, without one, its maker calls it."""
    return report.recipe.model if report.recipe else report.model.get("name", "a step")


def named_reports(comparison: Comparison) -> list[tuple[str, Report]]:
    """The reports of a comparison, the previous step first, each named by what differs."""
    before, after = comparison.before, comparison.after
    if before is None:
        return [("this step", after)]
    changed = differences(before.recipe, after.recipe)
    return [
        (_name("previous step", before, changed), before),
        (_name("this step", after, changed), after),
    ]


def _name(step: str, report: Report, changed: Iterable[str]) -> str:
    """A step with the fields in which it differs: ``this step (autocast=bfloat16)``."""
    listed = ", ".join(f"{field}={_value(report, field)}" for field in changed)
    return f"{step} ({listed})" if listed else step


def _value(report: Report, field: str) -> str:
    """What a recipe asks for in a field, and whether it is a format that was not used."""
    asked = getattr(report.recipe, field)
    unused = report.precision.get(field, asked) != asked
    text = " ".join(asked) if isinstance(asked, tuple) else str(asked)
    return f"{text}, not used here" if unused else text


def peak_words(comparison: Comparison) -> str:
    """How the peak changed, in words."""
    change = comparison.peak_change_bytes
    if comparison.before is None:
        return "first step, nothing to compare with"
    if change is None:
        return "no comparison, " + _missing_steps(comparison, lambda report: report.memory)
    if change == 0:
        return "the same as the previous step, to the byte"
    share = change / comparison.before.memory.peak_allocated_bytes
    direction = "less" if change < 0 else "more"
    percent = f"{share:+.1%}".replace("-", "−").replace("%", "\u00a0%")
    return f"{format_bytes(abs(change))} {direction} than the previous step ({percent})"


def speed_words(comparison: Comparison) -> str:
    """How the speed changed: the median ratio with its quartiles, in words."""
    if comparison.before is None:
        return "first step, nothing to compare with"
    if comparison.speed_ratio is None:
        return "no ratio, " + _missing_steps(comparison, lambda report: report.step_seconds)
    if comparison.speed_ratio_spread is None:
        spread = "one pair, no quartiles"
    else:
        spread = "quartiles {:.2f} to {:.2f}".format(*comparison.speed_ratio_spread)
    return f"{comparison.speed_ratio:.2f} times as fast as the previous step ({spread})"


def _missing_steps(comparison: Comparison, measured: Callable) -> str:
    """Which of the two steps lacks the figures, and its status."""
    steps = {"previous step": comparison.before, "this step": comparison.after}
    return ", ".join(
        f"{name} {STATUS_WORDS[report.status]}"
        for name, report in steps.items()
        if not measured(report)
    )


def alt_phases(comparison: Comparison) -> str:
    """The alternative text of ``plot_phases``."""
    return _alt("Bars of the peak memory in each phase", comparison, _say_phases)


def alt_peaks(comparison: Comparison) -> str:
    """The alternative text of ``plot_peaks``."""
    kind = f"Stacked bars of the peak memory by owner: {peak_words(comparison)}"
    return _alt(kind, comparison, _say_owners)


def alt_step_times(comparison: Comparison) -> str:
    """The alternative text of ``plot_step_times``."""
    kind = f"Points, one for each timed step: {speed_words(comparison)}"
    return _alt(kind, comparison, _say_times)


def alt_timeline(comparison: Comparison) -> str:
    """The alternative text of ``plot_timeline``."""
    return _alt("Lines of the bytes alive during one step", comparison, _say_timeline)


def alt_ladder(comparisons: dict[str, Comparison]) -> str:
    """The alternative text of ``plot_ladder``."""
    reports = [comparison.after for comparison in comparisons.values()]
    sentences = [
        f"{slug}: {_say_peak(comparison.after)}; {speed_words(comparison)}."
        for slug, comparison in comparisons.items()
    ]
    kind = "Bars of the peak memory of each step, and points of its speed against the previous"
    return f"{kind}, {provenance(*reports)}. " + " ".join(sentences)


def alt_padding(shares: dict[str, float]) -> str:
    """The alternative text of ``plot_padding``."""
    words = "; ".join(f"{name}: {share:.1%}" for name, share in shares.items())
    return f"Bars: padding as a share of the computed tokens of an epoch. {words}."


def alt_owner_timeline(report: Report) -> str:
    """The alternative text of ``plot_owner_timeline``."""
    kind = "Stacked areas of the bytes that each owner holds during one step"
    verdict, timeline = verdict_words(report), _sentence(_say_timeline(report))
    return f"{kind}, {provenance(report)}: {verdict}. {timeline}."


def alt_waterfall(report: Report) -> str:
    """The alternative text of ``plot_waterfall``."""
    kind = "Bars of who holds the peak, and of the modules that made it"
    words = [_sentence(_say_peak(report))]
    for row in waterfall(report.memory) if report.memory else []:
        held = f"{row.name} {format_bytes(row.held_bytes)} ({row.share_words})"
        words.append(f". {_sentence(held)}" if row.is_owner else f", {held}")
    return f"{kind}, {provenance(report)}. {''.join(words)}."


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _alt(kind: str, comparison: Comparison, say: Callable[[Report], str | None]) -> str:
    """What kind of figure it is, then one sentence for each report."""
    sentences = [
        f"{_sentence(name)}: {say(report) or why_missing(report)}."
        for name, report in named_reports(comparison)
    ]
    return f"{kind}, {provenance(comparison.after)}. " + " ".join(sentences)


def _say_peak(report: Report) -> str:
    """The peak, or why there is none."""
    if report.memory is None:
        return why_missing(report)
    return f"peak {format_bytes(report.memory.peak_allocated_bytes)}"


def _say_phases(report: Report) -> str | None:
    """The peak of each phase."""
    return report.memory and ", ".join(
        f"{PHASE_NAMES[phase]} {format_bytes(report.memory.by_phase.get(phase))}"
        for phase in PHASES
    )


def _say_owners(report: Report) -> str | None:
    """The peak and who holds it."""
    return report.memory and f"{_say_peak(report)}, of it " + ", ".join(
        f"{owner.replace('_', ' ')} {format_bytes(report.memory.by_owner.get(owner))}"
        for owner in OWNERS
    )


def _say_times(report: Report) -> str | None:
    """How many steps were timed, their range and their median."""
    times = report.step_seconds
    if len(times) < 2:
        return f"one step of {format_seconds(times[0])}" if times else None
    return (
        f"{len(times)} steps of {format_seconds(min(times))} to {format_seconds(max(times))}, "
        f"median {format_seconds(median(times))}"
    )


def _say_timeline(report: Report) -> str:
    """Where the line begins, peaks and ends."""
    if report.memory is None or not report.memory.timeline:
        return why_no_timeline(report)
    timeline = report.memory.timeline
    peak, phase = max(timeline, key=lambda event: event[0])
    return (
        f"begins at {format_bytes(timeline[0][0])}, peaks at {format_bytes(peak)} "
        f"({PHASE_NAMES[phase]}), ends at {format_bytes(timeline[-1][0])}"
    )
