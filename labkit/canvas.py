"""What all figures share: the palette, axes in bytes or seconds, gaps, titles and legends."""

from collections.abc import Iterable
from textwrap import fill

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation


def _style(color: str, hatch: str = "") -> dict:
    """How a bar or a patch is filled."""
    return {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0}


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
    "temporaries": _style("#F0E442", "++"),
}
PHASE_STYLES = {
    "before": _style("#999999"),
    "forward": _style("#56B4E9", "//"),
    "backward": _style("#E69F00", "\\\\"),
    "optimizer": _style("#009E73", ".."),
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


def legend_below(ax: Axes, handles: list[Artist]) -> None:
    """Put the legend under the label of the x axis, where it can hide nothing."""
    labels = [fill(handle.get_label(), columns(ax)) for handle in handles]
    down = ScaledTranslation(0, -38 / 72, ax.figure.dpi_scale_trans)
    place = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 0, "borderpad": 0}
    place["bbox_transform"] = ax.transAxes + down
    ax.legend(handles, labels, frameon=False, fontsize=9, **place)


def columns(ax: Axes) -> int:
    """How many characters of a title or a legend fit above or below an Axes."""
    inches = ax.get_position().width * ax.figure.get_figwidth()
    return max(20, round(inches * 13))


def finish(ax: Axes, what: str, where: str, width: int | None = None) -> Axes:
    """Say in the title what is drawn and where it comes from, and take off needless lines."""
    lines = [fill(line, width or columns(ax)) for line in (what, where)]
    ax.set_title("\n".join(lines), loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
