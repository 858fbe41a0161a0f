"""What tests read off a figure, and what holds for every figure."""

from matplotlib.axis import Tick, XTick
from matplotlib.text import Text


def title(ax) -> str:
    return " ".join(ax.get_title(loc="left").split())


def texts(ax) -> str:
    """All words in an Axes: texts, tick labels and legend."""
    legend = ax.get_legend()
    found = ax.texts + (legend.get_texts() if legend else []) + ax.get_xticklabels()
    return " ".join(" ".join(text.get_text() for text in found).split())


def hatched_gaps(ax) -> list:
    return [patch for patch in ax.patches if patch.get_hatch() == "xxx"]


def is_out_of_sight(tick) -> bool:
    """Whether a tick is beyond the limits of its axis: Matplotlib keeps it, but undrawn."""
    axis = tick.axes.xaxis if isinstance(tick, XTick) else tick.axes.yaxis
    low, high = sorted(axis.get_view_interval())
    return not low <= tick.get_loc() <= high


def assert_tidy(figure):
    """Everything lies inside the figure, 700 pixels wide, and no text covers another."""
    figure.draw_without_rendering()
    assert figure.bbox.width == 700
    inside = figure.get_tightbbox().extents * figure.dpi
    assert (inside[:2] >= 0).all()
    assert (inside[2:] <= figure.bbox.size).all()
    undrawn = {tick.label1 for tick in figure.findobj(Tick) if is_out_of_sight(tick)}
    texts = [text for text in figure.findobj(Text) if text not in undrawn]
    written = [text for text in texts if text.get_visible() and text.get_text()]
    assert min(text.get_fontsize() for text in written) >= 9
    boxes = [Text.get_window_extent(text) for text in written]
    for text, box in zip(written, boxes, strict=True):
        assert box.count_overlaps(boxes) == 1, text
