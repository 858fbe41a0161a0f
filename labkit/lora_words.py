"""The words of notebook 08: sentences and alternative texts, all from one study."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from labkit.captions import peak_words, speed_words, why_missing
from labkit.gradients import MEASURES, by_kind, ratio
from labkit.lora_candidates import (
    ARTICLE_ABOVE,
    ARTICLE_CHOICE,
    ARTICLE_RATIO,
    QKV,
    LoraStudy,
    gain,
)
from labkit.quality import Interval
from labkit.report import Comparison, Report, format_bytes

MEASURE_NAMES = {
    "whole": "whole gradient",
    "per_entry": "per entry",
    "lora": "LoRA matrices",
}


def provenance_words(study: LoraStudy) -> str:
    """Where the figures come from; says when that is no result."""
    recipe = study.choices[0].recipe
    machine = study.choices[0].report.machine.get("name") or "this machine"
    tiny = " (tiny: not a result)" if study.profile == "tiny" else ""
    return f"measured on {machine}, {recipe.model}{tiny}"


def interval_words(found: Interval, digits: int = 3, sign: str = "") -> str:
    """A mean and its interval: ``0.912 (0.887 to 0.937)``."""
    mean, low, high = (f"{value:{sign}.{digits}f}".replace("-", "−") for value in found)
    return f"{mean} ({low} to {high})"


def findings(study: LoraStudy) -> list[str]:
    """What was seen, in sentences."""
    sentences = [*_gradient_sentences(study), *_cost_sentences(study)]
    if study.choices and study.choices[0].macro_f1:
        sentences += _quality_sentences(study)
    return [f"{sentence}." for sentence in sentences]


def article_words(study: LoraStudy) -> str:
    """Whether the article's ratio of gradients is what was measured here.

    It is rounded to one digit after the point, so it holds if anything that rounds to it is in
    the interval.
    """
    above, below = " and ".join(ARTICLE_ABOVE), ", ".join(QKV)
    if missing := [kind for kind in (*ARTICLE_ABOVE, *QKV) if kind not in study.kinds]:
        return f"The article's ratio has no meaning here: there is no {', '.join(missing)}"
    found = {m: ratio(study.norms, ARTICLE_ABOVE, QKV, m) for m in MEASURES}
    inside = [
        MEASURE_NAMES[measure]
        for measure, (_, low, high) in found.items()
        if low < ARTICLE_RATIO + 0.05 and high >= ARTICLE_RATIO - 0.05
    ]
    words = "; ".join(f"{MEASURE_NAMES[m]} {interval_words(i, 2)}" for m, i in found.items())
    verdict = f"in the interval of: {', '.join(inside)}" if inside else "in none of them"
    return (
        f"An article says that the gradients of {above} are {ARTICLE_RATIO} times those of "
        f"{below}. Here, with the interval over batches: {words}. That figure is {verdict}"
    )


def difference_words(scores: Sequence[float], others: Sequence[float]) -> str:
    """Whether some scores differ from others that were made with the same seeds."""
    found = gain(scores, others)
    if found.low > 0:
        verdict = "better"
    elif found.high < 0:
        verdict = "worse"
    elif found.low == found.high == 0:
        return "no difference with any seed"
    else:
        verdict = "no difference shown"
    return f"{verdict}: {interval_words(found, sign='+')}"


def _gradient_sentences(study: LoraStudy) -> Iterator[str]:
    for measure in ("whole", "per_entry"):
        means = by_kind(study.norms, measure)
        largest, smallest = max(means, key=means.get), min(means, key=means.get)
        yield (
            f"Gradients, {MEASURE_NAMES[measure]}: largest in {largest}, "
            f"{means[largest] / means[smallest]:.1f} times those of {smallest}, the smallest"
        )
    yield article_words(study)
    if set(ARTICLE_ABOVE) | set(QKV) <= set(study.kinds):
        words = [
            f"{k} {interval_words(ratio(study.norms, [k], QKV), 2)}" for k in ARTICLE_ABOVE
        ]
        yield f"One by one, whole gradients: {', '.join(words)}"


def _cost_sentences(study: LoraStudy) -> Iterator[str]:
    first, *others = study.choices
    for choice in others:
        comparison = choice.comparison
        if not comparison.after.ok:
            yield f"{choice.name} has no figures: {why_missing(comparison.after)}"
            continue
        times = choice.lora_parameters / first.lora_parameters
        yield (
            f"{choice.name}: {times:.2f} times the LoRA parameters of {first.name}, peak "
            f"{_than_first(peak_words(comparison))}, {speed(comparison)}"
        )
        if (choice.recipe.lora_targets, choice.recipe.lora_rank) == ARTICLE_CHOICE:
            yield f"The article says of {choice.name}: half the parameters, and faster"


def _quality_sentences(study: LoraStudy) -> Iterator[str]:
    first, *others = study.choices
    seeds = len(first.macro_f1)
    yield (
        f"After {study.training_steps} steps, {seeds} seeds, {study.held_out:,} held-out "
        f"pairs: {first.name} has macro-F1 {_mean_and_range(first.macro_f1)}"
    )
    for choice in others:
        words = difference_words(choice.macro_f1, first.macro_f1)
        yield f"Macro-F1 of {choice.name} less that, seed by seed: {words}"
    if len(others) > 1:
        yield (
            f"These are {len(others)} comparisons, each with an interval of 95 %: the more "
            "there are, the likelier one is found by chance"
        ).replace(" %", "\u00a0%")
    if study.without_lora:
        words = difference_words(first.macro_f1, study.without_lora)
        yield (
            f"With its LoRA matrices taken out and the trained head kept, {first.name} has "
            f"macro-F1 {_mean_and_range(study.without_lora)}. With them, seed by seed, {words}"
        )


def alt_gradients(study: LoraStudy) -> str:
    """The alternative text of ``plot_gradients``."""
    parts = []
    for measure in MEASURES:
        words = ", ".join(f"{k} {v:.2g}" for k, v in by_kind(study.norms, measure).items())
        parts.append(f"{MEASURE_NAMES[measure]}, the norm itself, mean over layers: {words}")
    return (
        "Three heat maps of gradient norms by kind and number of the layer, as multiples of "
        f"the mean of q, k and v, {provenance_words(study)}. {'. '.join(parts)}."
    )


def alt_lora_costs(study: LoraStudy) -> str:
    """The alternative text of ``plot_lora_costs``."""
    words = "; ".join(
        f"{choice.name}: {choice.lora_parameters:,} parameters, "
        f"peak {format_bytes(measured_peak(choice.report))}, {speed(choice.comparison)}"
        for choice in study.choices
    )
    kind = (
        "Bars of LoRA parameters and peak memory, and points of speed against the first choice"
    )
    return f"{kind}, {provenance_words(study)}. {words}."


def alt_lora_quality(study: LoraStudy) -> str:
    """The alternative text of ``plot_lora_quality``."""
    first, parts = study.choices[0], []
    for choice in study.choices:
        words = f"mean {fmean(choice.macro_f1):.3f}" if choice.macro_f1 else "not trained"
        if choice.macro_f1 and choice is not first:
            words += f", {difference_words(choice.macro_f1, first.macro_f1)}"
        parts.append(f"{choice.name}: {words}")
    kind = "Points of macro-F1, one a seed, and of its differences from the first choice"
    return f"{kind}, {provenance_words(study)}. {'; '.join(parts)}."


def _mean_and_range(scores: Sequence[float]) -> str:
    return f"{fmean(scores):.3f} on average, {min(scores):.3f} to {max(scores):.3f} by seed"


def measured_peak(report: Report) -> int | None:
    """The peak allocated bytes, None where nothing was measured."""
    return report.memory and report.memory.peak_allocated_bytes


def speed(comparison: Comparison) -> str:
    """The speed against the first choice; one that is not clear is called so."""
    words = _than_first(speed_words(comparison))
    if comparison.before is None or comparison.speed_ratio is None:
        return words
    return words if comparison.speed_change_is_clear else f"{words}, unclear"


def _than_first(words: str) -> str:
    """What is measured against the step before elsewhere is here against the first choice."""
    return words.replace("the previous step", "the first choice").replace(
        "first step, nothing to compare with", "the first choice"
    )
