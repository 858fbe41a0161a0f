"""The whole ladder in one figure."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.canvas import (
    columns,
    draw_peak,
    draw_ratio,
    draw_row_gap,
    finish,
    scale_bytes,
    write,
)
from labkit.captions import provenance, speed_words, why_missing
from labkit.report import Comparison


def plot_ladder(
    comparisons: dict[str, Comparison], axes: tuple[Axes, Axes] | None = None
) -> tuple[Axes, Axes]:
    """Draw the peak of each step of the ladder, and its speed against the step before it.

    Args:
        comparisons: By slug, in the order of the course.
        axes: Two Axes side by side that share their y axis: for the peaks, for the speeds.
    """
    if axes is None:
        figure = Figure((7, 1.6 + 0.5 * len(comparisons)), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
    left, right = axes
    for row, comparison in enumerate(comparisons.values()):
        draw_peak(left, row, comparison.after, why_missing(comparison.after), 32)
        _draw_ratio(right, row, comparison)
    reports = [comparison.after for comparison in comparisons.values()]
    peaks = [report.memory.peak_allocated_bytes for report in reports if report.memory]
    scale_bytes(left.xaxis, max(peaks, default=0), "Peak bytes alive", room=1.4)
    left.set_yticks(range(len(comparisons)), comparisons)
    for ax in axes:
        ax.set_ylim(len(comparisons) - 0.5, -0.5)
    right.axvline(1, color="black", linewidth=0.8, zorder=0)
    right.margins(x=0.25)
    right.tick_params(left=False)
    right.set_xlabel("Speed against the previous step (×)\nhollow: no clear effect")
    right.spines[["top", "right"]].set_visible(False)
    what = "Peak memory, and speed with its quartiles"
    finish(left, what, provenance(*reports), width=2 * columns(left))
    return left, right


def _draw_ratio(ax: Axes, row: int, comparison: Comparison) -> None:
    """Draw a point for the speed ratio of one step of the ladder, its quartiles as a bar."""
    ratio = comparison.speed_ratio
    if comparison.before is None:
        write(ax, 0.5, row, "first step", transform=ax.get_yaxis_transform())
        return
    if ratio is None:
        draw_row_gap(ax, row, speed_words(comparison), 32)
        return
    draw_ratio(ax, row, comparison, f"{ratio:.2f} ×")
