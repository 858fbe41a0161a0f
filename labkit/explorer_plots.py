"""The explorer as a figure: what stands in where no kernel runs, and what the page keeps."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.canvas import LINES, OWNER_STYLES, finish, legend_below, scale_bytes
from labkit.captions import provenance
from labkit.explorer_answer import Answer
from labkit.explorer_words import segments, verdict
from labkit.report import format_bytes

FILLS = OWNER_STYLES | {
    "reserved besides": {"facecolor": "white", "hatch": "//", "edgecolor": "#555555"},
    "outside": {"facecolor": "#888888"},
}
END = {"color": "black", "linestyle": "--", "linewidth": 1.5}


def plot_explorer(answer: Answer) -> tuple[Axes, Axes, Axes]:
    """Draw who holds the peak beside the memory there is, and the peak's two curves."""
    figure = Figure((7, 6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 2])
    bar = figure.add_subplot(grid[0, :])
    _draw_bar(bar, answer)
    setting = answer.setting
    axes = [figure.add_subplot(grid[1, column]) for column in (0, 1)]
    for ax, name, points, here in (
        (axes[0], "pairs", answer.over_batch, setting.batch_size),
        (axes[1], "tokens", answer.over_length, setting.max_length),
    ):
        _draw_curve(ax, answer, name, points, here)
    return bar, *axes


def _draw_bar(ax: Axes, answer: Answer) -> None:
    """The bar, its legend, and a line where the memory ends."""
    report, start, handles = answer.report, 0, []
    for name, count in segments(report):
        style = FILLS.get(name, FILLS["outside"])
        ax.barh(0, count, 0.8, start, **style)
        label = f"{name.replace('_', ' ')} {format_bytes(count)}"
        handles.append(Patch(label=label, **style))
        start += count
    capacity = report.fit.capacity_bytes
    ax.axvline(capacity, **END)
    handles.append(Line2D([], [], label=f"memory there is {format_bytes(capacity)}", **END))
    ax.set_yticks([])
    scale_bytes(ax.xaxis, max(start, capacity), "In use at the peak", room=1.04)
    legend_below(ax, handles, ncols=2)
    _, words = verdict(report)
    finish(ax, words[0].upper() + words[1:], provenance(report))


def _draw_curve(
    ax: Axes, answer: Answer, name: str, points: list[tuple[int, int]], here: int
) -> None:
    """The peak over batch or length; beyond what matters it only goes up."""
    fit, now = answer.report.fit, answer.report.memory.peak_allocated_bytes
    room = fit.capacity_bytes - fit.context_bytes
    ax.plot(*zip(*points, strict=True), **LINES[1] | {"marker": ""})
    ax.plot(here, now, **LINES[1])
    ax.axhline(room, **END)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel({"pairs": "Pairs a batch", "tokens": "Tokens a pair"}[name])
    scale_bytes(ax.yaxis, max(now, room), "Peak allocated")
    finish(ax, f"{format_bytes(now)} at {here:,} {name}", f"room: {format_bytes(room)}")
