"""What a measured step shows, in sentences that are filled from its record.

No sentence holds a figure of its own, and one that claims an effect is written only where the
figures show it: the same notebook runs on machines where an optimisation does nothing.
"""

from collections.abc import Callable, Iterator

from labkit.captions import format_seconds, peak_words, speed_words, why_missing
from labkit.recipe import describe_change
from labkit.report import Comparison, Memory, Report, format_bytes


def findings(slug: str, comparison: Comparison) -> list[str]:
    """The sentences of a step; for one that was not measured, why."""
    after, before = comparison.after, comparison.before
    if not after.ok:
        return [f"This step has no figures: {why_missing(after)}."]
    sentences = [f"Peak memory is {format_bytes(after.memory.peak_allocated_bytes)}"]
    if before is not None:
        sentences[0] += f": {peak_words(comparison)}"
        if after.step_seconds and before.step_seconds:
            sentences.append(f"It is {speed_words(comparison)}{_clear(comparison)}")
        else:
            sentences.append(f"Speed: {speed_words(comparison)}")
    if before is None or before.ok:
        sentences += SPECIAL[slug](comparison)
    return [f"{sentence}." for sentence in [*sentences, *after.notes]]


def variant_findings(comparison: Comparison) -> list[str]:
    """What two variants of a step show when they are measured against each other."""
    before, after = comparison.before, comparison.after
    for report in (before, after):
        if not report.ok:
            return [f"There are no figures of one variant: {why_missing(report)}."]
    sentences = [
        f"What changes: {describe_change(before.recipe, after.recipe)}",
        f"Peak memory is {format_bytes(after.memory.peak_allocated_bytes)}: "
        f"{peak_words(comparison)}",
        f"It is {speed_words(comparison)}{_clear(comparison)}",
        _losses(comparison),
    ]
    return [f"{sentence}." for sentence in [*sentences, *after.notes]]


def _clear(comparison: Comparison) -> str:
    if comparison.speed_change_is_clear:
        return ""
    if comparison.speed_change_is_clear is None:
        return f"; {len(comparison.speed_ratios)} pairs are too few to exclude chance"
    return "; the pairs do not agree enough to show an effect on speed"


def _baseline(comparison: Comparison) -> Iterator[str]:
    report = comparison.after
    state, counts = report.memory.state_bytes, report.trainable
    yield (
        f"The base gets {counts['base']:,} gradients and no update; what is trained is "
        f"{counts['lora']:,} LoRA parameters and {counts['head']:,} of the head"
    )
    yield (
        f"Between steps {format_bytes(state['weights'])} of weights, "
        f"{format_bytes(state['gradients'])} of gradients and "
        f"{format_bytes(state['optimizer_state'])} of optimizer state stay alive"
    )
    yield (
        f"At the peak, in {_peak_phase(report)}, activations and temporaries hold "
        f"{_made_bytes(report.memory) / report.memory.peak_allocated_bytes:.0%} of it"
    )


def _freeze_base(comparison: Comparison) -> Iterator[str]:
    before, after = comparison.before.memory, comparison.after.memory
    gradients = before.state_bytes["gradients"] - after.state_bytes["gradients"]
    activations = _made_bytes(before) - _made_bytes(after)
    yield (
        f"Gradients that stay alive shrink by {format_bytes(gradients)}; activations and "
        f"temporaries at the peak change by {_signed(-activations)}, because a weight that "
        "needs no gradient need not keep the input it was multiplied with"
    )
    yield _losses(comparison)


def _checkpointing(comparison: Comparison) -> Iterator[str]:
    before, after = comparison.before, comparison.after
    yield (
        "Activations and temporaries at the peak: "
        f"{format_bytes(_made_bytes(before.memory))} before, "
        f"{format_bytes(_made_bytes(after.memory))} now"
    )
    yield (
        "Counted runs of each layer's forward for a micro-batch: "
        f"{before.layer_forwards:g} before, {after.layer_forwards:g} now"
    )
    yield _losses(comparison)


def _amp(comparison: Comparison) -> Iterator[str]:
    report = comparison.after
    precision = report.precision
    used = precision["weights"] if precision["autocast"] == "none" else precision["autocast"]
    yield (
        f"Matrix products ran in {used}; the frozen weights are stored in "
        f"{precision['weights']}, the trained parameters in float32"
    )
    if report.product_seconds:
        (native, fast), (imitated, slow) = report.product_seconds.items()
        yield (
            f"One matrix product took {format_seconds(fast)} in {native} and "
            f"{format_seconds(slow)} in {imitated} here, {slow / fast:,.0f} times as long; "
            f"that is why the step did not use {imitated}"
        )
        if precision["autocast"] == "none":
            yield "So both recipes ran the same code here, and what differs is noise"
    if report.skipped_steps:
        yield f"The GradScaler skipped {report.skipped_steps} updates"
    yield _losses(comparison)


def _accumulation(comparison: Comparison) -> Iterator[str]:
    before, after = comparison.before.memory, comparison.after.memory
    made = _made_bytes(after) / _made_bytes(before)
    whole = after.peak_allocated_bytes / before.peak_allocated_bytes
    yield (
        f"Activations and temporaries at the peak are {made:.0%} of what they were, the whole "
        f"peak {whole:.0%}: weights do not shrink with the batch"
    )
    yield _losses(comparison)


def _compile(comparison: Comparison) -> Iterator[str]:
    compiled = comparison.after.compile
    if not comparison.speed_ratios:
        return
    yield (
        f"The first step took {format_seconds(compiled['first_step_seconds'])}, an ordinary "
        f"one takes {format_seconds(comparison.after.median_step_seconds)}; graphs compiled: "
        f"{compiled['graphs']}, recompilations while timing: "
        f"{compiled['recompilations_while_timed']}"
    )
    steps = comparison.steps_until_paid
    if steps is not None and steps < float("inf"):
        yield f"By the medians, compiling has paid for itself after {steps:,.0f} steps"
    else:
        yield "The median step is no faster than before: compiling never pays for itself here"
    yield _losses(comparison)


def _cached_data(comparison: Comparison) -> Iterator[str]:
    timed = (("Before", comparison.before), ("Now", comparison.after))
    for name, report in timed if comparison.speed_ratios else ():
        data, whole = sum(report.data_seconds), sum(report.step_seconds)
        yield (
            f"{name}, making a batch took {format_seconds(data / len(report.data_seconds))} of "
            f"each step on average, {data / whole:.2%} of the time"
        )
    yield _losses(comparison)


def _no_padding(comparison: Comparison) -> Iterator[str]:
    before, after = comparison.before, comparison.after
    if comparison.speed_ratios:
        computed, real = sum(before.computed_tokens), sum(before.real_tokens)
        yield (
            f"Of the tokens that the step before computed, {1 - real / computed:.1%} were "
            f"padding; this one computed {sum(after.computed_tokens):,} for {real:,} real ones"
        )
        yield (
            f"It trains on {after.real_tokens_per_second:,.0f} real tokens a second, the step "
            f"before on {before.real_tokens_per_second:,.0f}"
        )
    yield _losses(comparison)


def ladder_findings(comparisons: dict[str, Comparison]) -> list[str]:
    """The sentences about a whole run."""
    sentences = [
        f"{slug} has no figures: {why_missing(comparison.after)}"
        for slug, comparison in comparisons.items()
        if not comparison.after.ok
    ]
    measured = {slug: c for slug, c in comparisons.items() if c.after.ok}
    if len(measured) < 2:
        return [f"{sentence}." for sentence in [*sentences, "There is nothing to compare"]]
    (first, start), *_, (last, end) = measured.items()
    sentences.append(
        f"Peak memory went from {format_bytes(start.after.memory.peak_allocated_bytes)} "
        f"({first}) to {format_bytes(end.after.memory.peak_allocated_bytes)} ({last})"
    )
    changes = {
        slug: c.peak_change_bytes
        for slug, c in measured.items()
        if c.peak_change_bytes is not None
    }
    if changes and min(changes.values()) < 0:
        slug = min(changes, key=changes.get)
        sentences.append(f"{slug} lowered it most, by {format_bytes(-changes[slug])}")
    clear = {slug: c.speed_ratio for slug, c in measured.items() if c.speed_change_is_clear}
    for verb, slugs in (
        ("faster", [slug for slug, ratio in clear.items() if ratio > 1]),
        ("slower", [slug for slug, ratio in clear.items() if ratio < 1]),
    ):
        sentences.append(f"Clearly {verb} than the step before: {', '.join(slugs) or 'none'}")
    product = speed_product(measured)
    sentences.append(
        f"How fast {last} is against {first} is not known: a ratio in between is missing"
        if product is None
        else f"The ratios multiply to {product:.2f}: that is how fast {last} is against "
        f"{first}, modelled as a product, unclear ratios included"
    )
    losses = {
        slug: max(abs(a - b) for a, b in zip(start.after.losses, c.after.losses, strict=False))
        for slug, c in measured.items()
    }
    sentences.append(
        "Largest difference of a step's loss from that of "
        f"{first}: " + ", ".join(f"{slug} {loss:.1e}" for slug, loss in losses.items())
    )
    return [f"{sentence}." for sentence in sentences]


def speed_product(comparisons: dict[str, Comparison]) -> float | None:
    """How fast the last step is against the first: the product of the ratios between them.

    None if the chain is broken: a ratio is missing, or one is against another recipe.
    """
    product, previous = 1.0, None
    for comparison in comparisons.values():
        if previous is not None:
            if comparison.speed_ratio is None or comparison.before.recipe != previous:
                return None
            product *= comparison.speed_ratio
        previous = comparison.after.recipe
    return product


SPECIAL: dict[str, Callable[[Comparison], Iterator[str]]] = {
    "00_baseline": _baseline,
    "01_freeze_base": _freeze_base,
    "02_checkpointing": _checkpointing,
    "03_amp": _amp,
    "04_accumulation": _accumulation,
    "05_compile": _compile,
    "06_cached_data": _cached_data,
    "07_no_padding": _no_padding,
}


def _losses(comparison: Comparison) -> str:
    pairs = list(zip(comparison.before.losses, comparison.after.losses, strict=False))
    largest = max(abs(before - after) for before, after in pairs)
    if largest == 0:
        return f"The loss of each of the {len(pairs)} steps is the same, to the last bit"
    return f"Over {len(pairs)} steps the two losses differ by {largest:.1e} at most"


def _peak_phase(report: Report) -> str:
    return max(report.memory.by_phase, key=report.memory.by_phase.get)


def _made_bytes(memory: Memory) -> int:
    """What the step itself has made and still holds at its peak."""
    lasting = ("weights", "gradients", "optimizer_state", "inputs")
    return memory.peak_allocated_bytes - sum(memory.by_owner[owner] for owner in lasting)


def _signed(count: int) -> str:
    return f"{'+' if count > 0 else '−' if count < 0 else ''}{format_bytes(abs(count))}"
