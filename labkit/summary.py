"""One report in words: a name and a text for each thing that was measured."""

from statistics import quantiles

from labkit.captions import PHASE_NAMES, format_seconds, provenance, verdict_words
from labkit.report import Report, format_bytes


def report_summary(report: Report) -> dict[str, str]:
    """What a report says, in the order in which people ask; nothing that nobody found out."""
    lines = {"Status": verdict_words(report), "Source": provenance(report)}
    mark = "" if report.oracle == "measured" else f", {report.oracle}"
    if report.memory:
        memory = report.memory
        lines[f"Peak memory{mark}"] = format_bytes(memory.peak_allocated_bytes)
        if memory.peak_reserved_bytes is not None:
            lines[f"Peak reserved{mark}"] = format_bytes(memory.peak_reserved_bytes)
        if memory.process_bytes is not None:
            lines["Whole process"] = format_bytes(memory.process_bytes)
        if report.fit:
            lines["Outside the allocator"] = (
                f"{format_bytes(report.fit.context_bytes)} (context)"
            )
            lines["Capacity of the card"] = format_bytes(report.fit.capacity_bytes)
        lines["Worst batch"] = _batch(report)
        lines[f"Peak by phase{mark}"] = _named_bytes(memory.by_phase)
        if not memory.by_module:  # a waterfall says it better
            lines[f"Peak by owner{mark}"] = _named_bytes(memory.by_owner)
    if report.step_seconds:
        lines["Time a step"] = _times(report.step_seconds)
        lines["Of it, making the batch"] = _times(report.data_seconds)
        lines["Real tokens a second"] = f"{report.real_tokens_per_second:,.0f}"
        padded = 1 - sum(report.real_tokens) / sum(report.computed_tokens)
        lines["Padding"] = f"{padded:.0%} of the computed tokens"
    if report.modelled and report.modelled["seconds"]:
        lines |= _modelled(report)
    if report.compile:
        lines["Compiling"] = facts_text(report.compile)
    if report.layer_forwards is not None:
        lines["Each layer runs"] = f"{report.layer_forwards:g} times forward a micro-batch"
    lines["Trained parameters"] = facts_text(report.trainable)
    lines["Precision"] = facts_text(report.precision)
    lines["Model"] = facts_text(report.model)
    lines["Data"] = facts_text(report.data)
    lines["Notes"] = "; ".join(
        note for note in report.notes if note != report.precision.get("reason")
    )
    return {name: text for name, text in lines.items() if text}


def facts_text(facts: dict) -> str:
    """Facts in a line; a hash is shortened to what people compare."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_value(value, is_hash=name.endswith('sha256'))}"
        for name, value in facts.items()
        if value not in (None, "", {}, [])
    )


def _batch(report: Report) -> str:
    """The batch that was predicted, and why it is that one."""
    if not (batch := report.batch):
        return ""
    words = f"{batch['pairs']} pairs of {batch['tokens']} tokens"
    if report.recipe:
        words += f", padding {report.recipe.padding}"
    if not batch["padded"]:
        words += ", none padded"
    return f"{words}: {batch['why']}" if batch["why"] else words


def _modelled(report: Report) -> dict[str, str]:
    """Seconds at best, and what follows from them."""
    seconds, batch = report.modelled["seconds"], report.batch
    shares = ", ".join(
        f"{PHASE_NAMES[phase]} {part / seconds:.0%}"
        for phase, part in report.modelled["seconds_by_phase"].items()
        if part >= 0.005 * seconds
    )
    time = f"{format_seconds(seconds)} a step without launching kernels: {shares}"
    lines = {"Modelled time, at best": time}
    if batch:
        speed = batch["pairs"] * batch["tokens"] / seconds
        lines["Modelled speed, at best"] = f"{speed:,.0f} tokens a second, padding counted"
    return lines


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
