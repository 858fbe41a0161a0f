"""Figures of predictions beside measurements: a step, and the whole ladder.

As in ``plots``, each function draws into Axes, or into a new figure 700 pixels wide.
``forecast_words`` has an ``alt_…`` text for each. What is predicted is hollow.
"""

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.canvas import (
    BARS,
    columns,
    draw_row_gap,
    finish,
    legend_below,
    new_axes,
    scale_bytes,
    write,
)
from labkit.captions import provenance, why_missing
from labkit.forecast_words import NOT_MADE, error_bytes, is_compiled, signed_bytes
from labkit.report import Comparison, Report, format_bytes

HOLLOW = {"facecolor": "white", "edgecolor": BARS[1]["facecolor"], "linewidth": 1.5}
RESERVED = {"color": "black", "marker": "|", "markersize": 12, "markeredgewidth": 2}
STEP_STYLES = dict(zip(("before", "after"), BARS, strict=True))
STEP_NAMES = {"before": "previous step", "after": "this step"}
LEGEND = [
    Patch(label="measured", **BARS[1]),
    Patch(label="predicted", **HOLLOW),
    Line2D([], [], linestyle="", label="reserved for it, predicted", **RESERVED),
]


def plot_forecast(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw the peaks of a step and of the one before: measured, predicted, and on the card."""
    rows = list(_rows(comparison))
    ax = ax or new_axes(height=1.7 + 0.42 * len(rows))
    ends = [_draw_peak(ax, place, *row) for place, (_, *row) in enumerate(rows)]
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=9)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    scale_bytes(ax.xaxis, max(ends), "Peak bytes alive", room=1.6)
    legend_below(ax, LEGEND, ncols=3)
    reports = [comparison.after, *(pair.after for pair in comparison.predicted.values())]
    what = "Peak memory, predicted and measured" if comparison.predicted else NOT_MADE
    return finish(ax, what[0].upper() + what[1:], provenance(*reports))


def plot_forecast_ladder(
    comparisons: dict[str, Comparison], axes: tuple[Axes, Axes] | None = None
) -> tuple[Axes, Axes]:
    """Draw the predicted peak of each step: beside the measured one, and on the card.

    Args:
        comparisons: By slug, in the order of the course.
        axes: Two Axes side by side that share their y axis: for this machine, for the card.
    """
    if axes is None:
        figure = Figure((7, 1.9 + 0.5 * len(comparisons)), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
    here, there = axes
    ends = {here: [0], there: [0]}
    for row, comparison in enumerate(comparisons.values()):
        ends[here].append(_draw_peak(here, row - 0.2, comparison.after, BARS[1], height=0.36))
        for ax, place, at, words in (
            (here, "here", row + 0.2, _short_error(comparison)),
            (there, "card", row, ""),
        ):
            if (pair := comparison.predicted.get(place)) is None:
                write(ax, 0.5, at, NOT_MADE, transform=ax.get_yaxis_transform())
            else:
                ends[ax].append(_draw_peak(ax, at, pair.after, HOLLOW, words, height=0.36))
    for ax, name in ((here, "here"), (there, "on the card")):
        scale_bytes(ax.xaxis, max(ends[ax]), f"Peak bytes alive {name}", room=2.1)
        ax.set_ylim(len(comparisons) - 0.5, -0.5)
        ax.spines[["top", "right"]].set_visible(False)
    here.set_yticks(range(len(comparisons)), comparisons)
    there.tick_params(left=False)
    legend_below(here, LEGEND)
    shown = [pair for c in comparisons.values() for pair in (c, *c.predicted.values())]
    what = "Peaks, predicted before the run and measured"
    finish(here, what, provenance(*(pair.after for pair in shown)), width=2 * columns(here))
    return here, there


def _rows(comparison: Comparison) -> Iterator[tuple[str, Report, dict, str]]:
    """Name, report, style and further words of each bar, a prediction below what it is of."""
    here, card = (comparison.predicted.get(place) for place in ("here", "card"))
    for step, style in STEP_STYLES.items():
        measured, predicted = (getattr(pair, step, None) for pair in (comparison, here))
        if measured is not None:
            yield f"{STEP_NAMES[step]}\nmeasured", measured, style, ""
        if predicted is not None:
            words = _short_error(comparison) if step == "after" else ""
            yield f"{STEP_NAMES[step]}\npredicted here", predicted, _hollow(style), words
    for step, style in STEP_STYLES.items():
        if (report := getattr(card, step, None)) is not None:
            name = f"{STEP_NAMES[step]}\npredicted, {report.machine['gpu']}"
            yield name, report, _hollow(style), ""


def _hollow(style: dict) -> dict:
    return HOLLOW | {"edgecolor": style["facecolor"]}


def _short_error(comparison: Comparison) -> str:
    """The error in as few words as fit beside a bar."""
    error = error_bytes(comparison)
    if is_compiled(comparison):
        return " (not compiled)"
    return "" if error is None else f" ({signed_bytes(error)})" if error else " (exact)"


def _draw_peak(
    ax: Axes, row: float, report: Report, style: dict, words: str = "", height: float = 0.6
) -> int:
    """Draw one bar, and what is reserved for it as a mark; returns the higher of the two."""
    memory = report.memory
    if memory is None:
        draw_row_gap(ax, row, why_missing(report), 30)
        return 0
    peak, reserved = memory.peak_allocated_bytes, memory.peak_reserved_bytes
    ax.barh(row, peak, height, **style)
    text = format_bytes(peak) + words
    if reserved:
        ax.plot(reserved, row, **RESERVED)
        text += f"\n{format_bytes(reserved)} reserved"
    end = max(peak, reserved or 0)
    place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    ax.annotate(text, (end, row), **place)
    return end
