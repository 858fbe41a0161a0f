"""The figures of notebook 08: gradients by layer, and what each choice costs and brings."""

from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.canvas import (
    BARS,
    POINT,
    columns,
    draw_peak,
    draw_ratio,
    draw_row_gap,
    finish,
    scale_bytes,
    write,
)  # fmt: skip
from labkit.captions import STATUS_WORDS
from labkit.gradients import MEASURES
from labkit.lora_candidates import QKV, Choice, LoraStudy, gain
from labkit.lora_words import MEASURE_NAMES, provenance_words
from labkit.report import Comparison

WRITTEN_LAYERS = 8  # more columns are too narrow for a number in each
RINGS = {"marker": "o", "linestyle": "", "color": "#777777", "markerfacecolor": "none"}


def plot_gradients(study: LoraStudy) -> tuple[Axes, ...]:
    """A heat map for each measure: kinds of layers by number of the layer.

    Colours and numbers are multiples of the mean over the q, k and v of all layers, or over all
    layers in a model that has none.
    """
    figure = Figure((7, 1.5 + 0.35 * len(study.kinds)), layout="constrained")
    axes = figure.subplots(1, len(MEASURES), sharey=True)
    for ax, measure in zip(axes, MEASURES, strict=True):
        _draw_map(ax, study, measure)
    axes[0].set_yticks(range(len(study.kinds)), study.kinds)
    what = "Gradient norms, as multiples of the mean of q, k and v"
    figure.suptitle(f"{what}\n{provenance_words(study)}", x=0.02, ha="left", fontsize=10)
    return tuple(axes)


def multiples(study: LoraStudy, measure: str) -> list[list[float]]:
    """What a heat map shows: a row for each kind, a column for each layer; 0 where none is."""
    norms = {(n.kind, n.layer): fmean(getattr(n, measure)) for n in study.norms}
    chosen = [norm for (kind, _), norm in norms.items() if kind in QKV] or list(norms.values())
    layers = 1 + max(layer for _, layer in norms)
    return [
        [norms.get((kind, layer), 0.0) / fmean(chosen) for layer in range(layers)]
        for kind in study.kinds
    ]


def plot_lora_costs(study: LoraStudy) -> tuple[Axes, Axes, Axes]:
    """Draw LoRA parameters, measured peak, and speed against the first choice."""
    figure = Figure((7, 1.6 + 0.5 * len(study.choices)), layout="constrained")
    axes = counts, peaks, speeds = figure.subplots(1, 3, sharey=True)
    most = max(choice.lora_parameters for choice in study.choices)
    memories = [choice.report.memory for choice in study.choices if choice.report.memory]
    top = max((memory.peak_allocated_bytes for memory in memories), default=0)
    for row, choice in enumerate(study.choices):
        bar = counts.barh(row, choice.lora_parameters / 1000, 0.6, **BARS[1])
        counts.bar_label(bar, [f"{choice.lora_parameters / 1000:,.0f}"], padding=3, fontsize=9)
        status = STATUS_WORDS[choice.report.status]
        draw_peak(peaks, row, choice.report, status, 18)
        _draw_speed(speeds, row, choice.comparison)
    counts.set(xlim=(0, 1.5 * most / 1000), xlabel="LoRA parameters\n(thousands)")
    counts.set_yticks(range(len(study.choices)), [choice.name for choice in study.choices])
    counts.set_ylim(len(study.choices) - 0.5, -0.5)
    scale_bytes(peaks.xaxis, top, "Peak bytes alive\n", room=1.8)
    speeds.axvline(1, color="black", linewidth=0.8, zorder=0)
    speeds.margins(x=0.3)
    speeds.set_xlabel("Speed, the first: 1\nhollow: not clear")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    what = "What each choice of layers and rank costs"
    finish(counts, what, provenance_words(study), width=3 * columns(counts))
    return counts, peaks, speeds


def plot_lora_quality(study: LoraStudy) -> tuple[Axes, Axes]:
    """Draw macro-F1 of each seed, and its difference from the first choice with an interval."""
    figure = Figure((7, 1.6 + 0.45 * len(study.choices)), layout="constrained")
    axes = scores, gains = figure.subplots(1, 2, sharey=True)
    first = study.choices[0]
    for row, choice in enumerate(study.choices):
        if not choice.macro_f1:
            draw_row_gap(scores, row, "not trained", 30)
            continue
        scores.plot(choice.macro_f1, [row] * len(choice.macro_f1), **RINGS)
        scores.plot(fmean(choice.macro_f1), row, "D", color=BARS[1]["facecolor"], zorder=3)
        if choice is first:
            write(gains, 0.5, row, "the first", transform=gains.get_yaxis_transform())
        else:
            _draw_gain(gains, row, choice, first)
    scores.set_yticks(range(len(study.choices)), [choice.name for choice in study.choices])
    scores.set_ylim(len(study.choices) - 0.4, -0.6)
    scores.set_xlabel("Macro-F1 on held-out pairs\nrings: seeds; diamond: mean")
    gains.axvline(0, color="black", linewidth=0.8, zorder=0)
    gains.set_xlabel(
        "Difference from the first, seed by seed\nhollow: 95\u00a0% interval holds 0"
    )
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.xaxis.set_major_locator(MaxNLocator(4))
    what = f"Quality after {study.training_steps} steps"
    finish(scores, what, provenance_words(study), width=2 * columns(scores))
    return scores, gains


def _draw_map(ax: Axes, study: LoraStudy, measure: str) -> None:
    """Draw one measure, its numbers written where the columns are wide enough."""
    rows = multiples(study, measure)
    high = max(map(max, rows))
    ax.imshow(rows, cmap="cividis", vmin=0, vmax=high, aspect="auto")
    ax.set_title(MEASURE_NAMES[measure], fontsize=10)
    ax.set_xlabel("layer")
    if len(rows[0]) > WRITTEN_LAYERS:
        return
    ax.set_xticks(range(len(rows[0])))
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            color = "black" if value > 0.55 * high else "white"
            text = f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
            ax.text(x, y, text, ha="center", va="center", fontsize=9, color=color)


def _draw_gain(ax: Axes, row: int, choice: Choice, first: Choice) -> None:
    """Draw the difference from the first choice: each seed's, the mean, its interval."""
    mean, low, high = gain(choice.macro_f1, first.macro_f1)
    seeds = [here - there for here, there in zip(choice.macro_f1, first.macro_f1, strict=True)]
    ax.plot(seeds, [row] * len(seeds), **RINGS)
    filled = "white" if low <= 0 <= high else POINT
    spread = [[mean - low], [high - mean]]
    ax.errorbar(mean, row, xerr=spread, fmt="D", color=POINT, capsize=4, mfc=filled, zorder=3)


def _draw_speed(ax: Axes, row: int, comparison: Comparison) -> None:
    """Draw a point for the speed against the first choice, its quartiles as a bar."""
    ratio = comparison.speed_ratio
    if comparison.before is None:
        write(ax, 0.5, row, "the first", transform=ax.get_yaxis_transform())
        return
    if ratio is None:
        draw_row_gap(ax, row, STATUS_WORDS[comparison.after.status], 18)
        return
    draw_ratio(ax, row, comparison, f"{ratio:.2f}")
