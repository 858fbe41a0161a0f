"""The explorer in words: verdict, summary, table, and the sentences of its notebook."""

from labkit.captions import checkpoint_words, count_words, format_seconds, verdict_words
from labkit.explorer_answer import Answer
from labkit.explorer_setting import Setting
from labkit.report import OWNERS, Report, format_bytes
from labkit.space import MARGIN


def verdict(report: Report) -> tuple[str, str]:
    """A sign, and whether the step fits: the sign says the same to those who see no colour."""
    fit = report.fit
    if not fit.fits and not fit.fails_in:  # a CPU: no allocator says where
        return "✖", f"does not fit, {format_bytes(-fit.margin_bytes)} too little"
    sign = "▲" if fit.gives_back_cache else "✔" if fit.fits else "✖"
    return sign, verdict_words(report)


def setting_words(setting: Setting) -> str:
    """What is predicted, in one line."""
    parts = setting.micro_batches
    return (
        f"{setting.model} on {setting.place}: {count_words(setting.batch_size, 'pair')} of "
        f"{count_words(setting.max_length, 'token')}"
        + (f" in {parts} parts" if parts > 1 else "")
        + f", {setting.precision}, checkpointing {checkpoint_words(setting.checkpoint_every)}"
    )


def peak_words(report: Report) -> str:
    """The peak: what tensors hold, and on a card what the allocator reserves for them."""
    memory = report.memory
    words = f"peak {format_bytes(memory.peak_allocated_bytes)} allocated"
    if memory.peak_reserved_bytes is not None:
        words += f", {format_bytes(memory.peak_reserved_bytes)} reserved"
    return words


def summary(answer: Answer) -> str:
    """The setting and its peak in sentences; the verdict stands beside them."""
    report = answer.report
    name, most = holders(report)[0]
    sentences = [
        setting_words(answer.setting),
        f"Predicted {peak_words(report)}; {name} hold most of it, {format_bytes(most)}",
    ]
    if report.modelled:
        seconds = max(report.modelled["seconds"], report.modelled["launch_seconds"])
        sentences.append(
            f"A step takes {format_seconds(seconds)} at best, counted and not measured"
        )
    sentences += [note[0].upper() + note[1:] for note in report.notes]
    return " ".join(f"{sentence}." for sentence in sentences)


def holders(report: Report) -> list[tuple[str, int]]:
    """Who holds the peak, largest first."""
    held = report.memory.by_owner
    names = sorted(OWNERS, key=held.__getitem__, reverse=True)
    return [(name.replace("_", " "), held[name]) for name in names if held[name]]


def segments(report: Report) -> list[tuple[str, int]]:
    """What fills the memory, from the left: the owners, what is reserved, what is outside.

    All of it has to be no more than the capacity.
    """
    memory, fit = report.memory, report.fit
    parts = [(owner, memory.by_owner[owner]) for owner in OWNERS]
    if memory.peak_reserved_bytes is None:
        return [*parts, ("other programs", fit.context_bytes)]
    idle = memory.peak_reserved_bytes - memory.peak_allocated_bytes
    return [*parts, ("reserved besides", idle), ("CUDA context", fit.context_bytes)]


def measured_words(predicted: Report, measured: Report) -> str:
    """A measurement beside its prediction, in one sentence."""
    found, expected, tokens = measured.memory, predicted.memory, measured.batch["tokens"]
    difference = expected.peak_allocated_bytes - found.peak_allocated_bytes
    more = f"{abs(difference):,} bytes {'more' if difference > 0 else 'less'} than that"
    return (
        f"Measured on {measured.machine['name']}: peak "
        f"{format_bytes(found.peak_allocated_bytes)}; predicted for it was "
        f"{more if difference else 'exactly that'}. A step took "
        f"{format_seconds(measured.median_step_seconds)}."
        + (
            ""
            if measured.batch["padded"]
            else f" No pair was shorter than {tokens} tokens, so "
            "nothing was padded; the prediction takes it that some are."
        )
    )


def alt_explorer(answer: Answer) -> str:
    """The alternative text of ``plot_explorer``."""
    _, words = verdict(answer.report)
    held = ", ".join(f"{name} {format_bytes(count)}" for name, count in holders(answer.report))
    curves = "; ".join(
        f"over {name} from {format_bytes(curve[0][1])} at {curve[0][0]} to "
        f"{format_bytes(curve[-1][1])} at {curve[-1][0]:,}"
        for name, curve in (("batch", answer.over_batch), ("length", answer.over_length))
    )
    return (
        f"A bar of who holds the predicted peak beside the memory there is: {words}. "
        f"{summary(answer)} Of the peak: {held}. Two curves of the peak: {curves}."
    )


def markdown_table(answer: Answer) -> str:
    """A setting and its answer, one figure in a row."""
    setting, report = answer.setting, answer.report
    sign, words = verdict(report)
    rows = [
        ("Model", setting.model),
        ("Card", setting.place),
        ("Batch", f"{setting.batch_size} pairs"),
        ("Parts, one after the other", setting.micro_batches),
        ("Length", f"{setting.max_length} tokens, all padded"),
        ("Precision", setting.precision),
        ("Checkpointing", checkpoint_words(setting.checkpoint_every)),
        ("Verdict", f"{sign} {words}"),
        ("Peak allocated", format_bytes(report.memory.peak_allocated_bytes)),
        *((f"– {name}", format_bytes(count)) for name, count in holders(report)),
    ]
    if report.memory.peak_reserved_bytes is not None:
        rows.append(("Peak reserved", format_bytes(report.memory.peak_reserved_bytes)))
    rows += [
        ("Held by others", format_bytes(report.fit.context_bytes)),
        ("Memory there is", format_bytes(report.fit.capacity_bytes)),
    ]
    lines = ["| | predicted |", "| --- | --- |"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows])


def findings(answer: Answer, largest_batch: int) -> list[str]:
    """What an answer says, in sentences for the notebook."""
    setting, report = answer.setting, answer.report
    sign, words = verdict(report)
    name, most = holders(report)[0]
    share = f"{most / report.memory.peak_allocated_bytes:.0%}".replace("%", "\u00a0%")
    growth = [
        f"from {format_bytes(curve[0][1])} at {curve[0][0]} to {format_bytes(curve[-1][1])} at "
        f"{curve[-1][0]:,} {unit}"
        for curve, unit in ((answer.over_batch, "pairs"), (answer.over_length, "tokens"))
    ]
    fitting = f"{largest_batch} pairs" if largest_batch else "none at all"
    return [
        f"{sign} {setting_words(setting)}: {words}.",
        f"At the peak, {name} hold {share} of what is allocated: {format_bytes(most)}.",
        f"With all else as set, the largest batch that fits is {fitting}, with nothing left "
        f"free; labkit plan leaves {MARGIN:.0%}.",
        f"The peak goes {growth[0]}, and {growth[1]}.",
    ]
