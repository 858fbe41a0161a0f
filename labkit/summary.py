"""One report in words: a name and a text for each thing that was measured."""

from statistics import quantiles

from labkit.captions import PHASE_NAMES, format_seconds, provenance, why_missing
from labkit.report import Report, format_bytes


def report_summary(report: Report) -> dict[str, str]:
    """What a report says, in the order in which people ask; nothing that was not measured."""
    lines = {"Status": "ok" if report.ok else why_missing(report)}
    if report.memory:
        memory = report.memory
        lines["Peak memory"] = format_bytes(memory.peak_allocated_bytes)
        if memory.peak_reserved_bytes is not None:
            lines["Peak reserved"] = format_bytes(memory.peak_reserved_bytes)
        if memory.process_bytes is not None:
            lines["Whole process"] = format_bytes(memory.process_bytes)
        lines["Peak by phase"] = _named_bytes(memory.by_phase)
        lines["Peak by owner"] = _named_bytes(memory.by_owner)
    if report.step_seconds:
        lines["Time a step"] = _times(report.step_seconds)
        lines["Of it, making the batch"] = _times(report.data_seconds)
        lines["Real tokens a second"] = f"{report.real_tokens_per_second:,.0f}"
        padded = 1 - sum(report.real_tokens) / sum(report.computed_tokens)
        lines["Padding"] = f"{padded:.0%} of the computed tokens"
    if report.compile:
        lines["Compiling"] = facts_text(report.compile)
    if report.layer_forwards is not None:
        lines["Each layer runs"] = f"{report.layer_forwards:g} times forward a micro-batch"
    lines["Trained parameters"] = facts_text(report.trainable)
    lines["Precision"] = facts_text(report.precision)
    lines["Model"] = facts_text(report.model)
    lines["Data"] = facts_text(report.data)
    lines["Source"] = provenance(report)
    lines["Notes"] = "; ".join(report.notes)
    return {name: text for name, text in lines.items() if text}


def facts_text(facts: dict) -> str:
    """Facts in a line; a hash is shortened to what people compare."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_value(value, is_hash=name.endswith('sha256'))}"
        for name, value in facts.items()
        if value not in (None, "", {}, [])
    )


def _named_bytes(sizes: dict[str, int]) -> str:
    return ", ".join(
        f"{PHASE_NAMES.get(name, name).replace('_', ' ')} {format_bytes(size)}"
        for name, size in sizes.items()
    )


def _times(seconds: list[float]) -> str:
    """Median, quartiles and number of some times."""
    if len(seconds) < 2:
        return ", ".join(format_seconds(value) for value in seconds)
    first, middle, third = (
        format_seconds(value) for value in quantiles(seconds, n=4, method="inclusive")
    )
    return f"{middle} (quartiles {first} to {third}, {len(seconds)} steps)"


def _value(value, *, is_hash: bool) -> str:
    if is_hash:
        return value[:12]
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if type(value) is int else str(value)
