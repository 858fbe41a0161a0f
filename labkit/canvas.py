"""What all figures share: the palette, axes in bytes or seconds, gaps, titles and legends."""

from collections.abc import Iterable
from itertools import groupby
from textwrap import fill

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from labkit.captions import PHASE_NAMES
from labkit.report import Comparison, Report, format_bytes


def _style(color: str, hatch: str = "", hatch_color: str = "white") -> dict:
    """How a bar or a patch is filled."""
    return {"facecolor": color, "hatch": hatch, "edgecolor": hatch_color, "linewidth": 0}


# The palette of Okabe and Ito, safe for every colour vision; the hatch says the same again.
# The first of a pair is for the previous step: grey, hatched or dashed, its markers hollow.
BARS = (_style("#777777", "//"), _style("#0072B2"))
LINES = (
    {"color": "#777777", "linestyle": "--", "linewidth": 2.5, "marker": "o", "mfc": "white"},
    {"color": "#0072B2", "linestyle": "-", "linewidth": 1.5, "marker": "D"},
)
OWNER_STYLES = {
    "weights": _style("#0072B2"),
    "gradients": _style("#E69F00", "//"),
    "optimizer_state": _style("#CC79A7", ".."),
    "inputs": _style("#D55E00", "xx"),
    "activations": _style("#56B4E9", "\\\\"),
    "temporaries": _style("#F0E442", "++", "#7A7000"),
}
POINT = "#D55E00"  # a ratio, or a difference, with its spread
PHASE_STYLES = {
    "before": _style("#999999"),
    "forward": _style("#56B4E9", "//"),
    "backward": _style("#E69F00", "\\\\"),
    "optimizer": _style("#009E73", ".."),
}
GREY_PHASE_STYLES = {  # beside the colours of the owners
    "before": _style("#D0D0D0"),
    "forward": _style("#B0B0B0", "//"),
    "backward": _style("#888888", "\\\\"),
    "optimizer": _style("#505050", ".."),
}
GAP = {"facecolor": "none", "hatch": "xxx", "edgecolor": "#CCCCCC", "linewidth": 0}
BOX = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none"}


class ScaledLocator(MaxNLocator):
    """Ticks at round numbers of a unit that the data is not stored in."""

    def __init__(self, size: float) -> None:
        super().__init__(nbins=6, steps=[1, 2, 2.5, 5, 10])
        self.size = size

    def tick_values(self, vmin: float, vmax: float) -> Iterable[float]:
        """The ticks between two values, all three in the unit of the data."""
        return super().tick_values(vmin / self.size, vmax / self.size) * self.size


def new_axes(height: float = 4.2) -> Axes:
    """Axes of a figure 700 pixels wide; pyplot does not know it, so nobody has to close it."""
    figure = Figure((7, height), layout="constrained")
    return figure.subplots(gridspec_kw={"left": 0.1, "right": 0.98})


def scale(
    axis: Axis, top: float, unit: str, size: float, label: str, room: float = 1.15
) -> None:
    """Start an axis at zero, end it at ``top`` times ``room``, tick it in units of ``size``."""
    axis.axes.set(**{f"{axis.axis_name}lim": (0, top * room or size)})
    axis.set_label_text(f"{label} ({unit})")
    axis.set_major_locator(ScaledLocator(size))
    axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick / size:,g}"))
    if not top:
        axis.set_ticks([])  # nothing was measured, so there is nothing to read off


def scale_bytes(axis: Axis, top: int, label: str, room: float = 1.15) -> None:
    """``scale`` in GiB, or in MiB where everything is smaller than one GiB."""
    unit, size = ("GiB", 2**30) if top >= 2**30 else ("MiB", 2**20)
    scale(axis, top, unit, size, label, room)


def write(ax: Axes, x: float, y: float, text: str, **options) -> Text:
    """Write small centred text on white, readable on top of any hatch."""
    centred = {"ha": "center", "va": "center", "fontsize": 9, "bbox": BOX}
    return ax.text(x, y, text, **centred | options)


def draw_gaps(ax: Axes, places: Iterable[float], width: float, words: str) -> Patch:
    """Hatch the places of bars or points that were not measured.

    Returns:
        The legend entry that says why.
    """
    for place in places:
        ax.axvspan(place - width / 2, place + width / 2, **GAP)
    return Patch(label=words, **GAP)


def draw_row_gap(ax: Axes, row: float, words: str, width: int) -> None:
    """Hatch a whole row that was not measured, and say why in two lines at most."""
    ax.axhspan(row - 0.4, row + 0.4, **GAP)
    short = fill(words, width, max_lines=2, placeholder=" …")
    write(ax, 0.5, row, short, transform=ax.get_yaxis_transform())


def split_off_strip(ax: Axes, names: list[str]) -> Axes:
    """Give the lower part of an Axes to a strip, a named row for each timeline."""
    grid = ax.get_subplotspec().subgridspec(2, 1, height_ratios=[8, len(names)])
    ax.set_subplotspec(grid[0])
    strip = ax.figure.add_subplot(grid[1], sharex=ax)
    ax.tick_params(labelbottom=False)
    ax.set_xlim(0, 100)
    strip.set_xlabel("Progress through the recorded allocations and frees (%)")
    strip.set_yticks(range(len(names)), names)
    strip.set_ylim(len(names) - 0.5, -0.5)
    strip.spines[:].set_visible(False)
    return strip


def draw_phases(
    ax: Axes, row: int, phases: list[str], styles: dict[str, dict] = PHASE_STYLES
) -> list[Patch]:
    """Draw the phases of a timeline as one strip, named where the name fits.

    Returns:
        A legend entry for each phase.
    """
    start = 0
    for phase, group in groupby(phases):
        width = 100 * len(list(group)) / len(phases)
        ax.barh(row, width, 0.8, start, **styles[phase])
        if width > 2 * len(PHASE_NAMES[phase]):
            write(ax, start + width / 2, row, PHASE_NAMES[phase])
        start += width
    return [Patch(label=PHASE_NAMES[phase], **style) for phase, style in styles.items()]


def legend_below(ax: Axes, handles: list[Artist], ncols: int = 1) -> None:
    """Put the legend under the label of the x axis, where it can hide nothing."""
    labels = [fill(handle.get_label(), columns(ax) // ncols) for handle in handles]
    down = ScaledTranslation(0, -38 / 72, ax.figure.dpi_scale_trans)
    place = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 0, "borderpad": 0}
    place["bbox_transform"] = ax.transAxes + down
    ax.legend(handles, labels, frameon=False, fontsize=9, ncols=ncols, **place)


def columns(ax: Axes) -> int:
    """How many characters of a title or a legend fit above or below an Axes."""
    inches = ax.get_position().width * ax.get_figure(root=True).get_figwidth()
    return max(20, round(inches * 13))


def draw_peak(ax: Axes, row: float, report: Report, why_none: str, width: int) -> None:
    """Draw a bar for a report's peak, or say in its row why there is none."""
    if report.memory is None:
        draw_row_gap(ax, row, why_none, width)
        return
    peak = report.memory.peak_allocated_bytes
    bar = ax.barh(row, peak, 0.6, **BARS[1])
    ax.bar_label(bar, [format_bytes(peak)], padding=3, fontsize=9)


def draw_ratio(ax: Axes, row: float, comparison: Comparison, words: str) -> None:
    """Draw a measured ratio of speeds, its quartiles as a bar; hollow where it is not clear."""
    ratio = comparison.speed_ratio
    low, high = comparison.speed_ratio_spread or (ratio, ratio)
    filled = POINT if comparison.speed_change_is_clear else "white"
    spread = [[ratio - low], [high - ratio]]
    ax.errorbar(ratio, row, xerr=spread, fmt="D", color=POINT, capsize=4, mfc=filled)
    write(ax, ratio, row - 0.3, words)


def finish(ax: Axes, what: str, where: str, width: int | None = None) -> Axes:
    """Say in the title what is drawn and where it comes from, and take off needless lines."""
    lines = [fill(line, width or columns(ax)) for line in (what, where)]
    ax.set_title("\n".join(lines), loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
