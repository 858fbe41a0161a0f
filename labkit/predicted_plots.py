"""Figures of one predicted step: who holds its bytes, over the step and at the peak.

As in ``plots``, each function draws into ``ax``, or into a new figure 700 pixels wide, and
returns the Axes; ``captions`` has an ``alt_…`` text for each.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.canvas import (
    GREY_PHASE_STYLES,
    OWNER_STYLES,
    draw_phases,
    draw_row_gap,
    finish,
    legend_below,
    new_axes,
    scale_bytes,
    split_off_strip,
    write,
)
from labkit.captions import (
    PHASE_NAMES,
    provenance,
    verdict_words,
    why_missing,
    why_no_timeline,
)
from labkit.report import OWNERS, Memory, Report, format_bytes
from labkit.waterfall import Row, waterfall

IN_SIGHT = 1.6  # a line higher than this many times the peak would flatten the picture
PEAK = {"color": "black", "marker": "D", "linestyle": ""}
RESERVED = {"color": "black", "linestyle": ":", "linewidth": 1.5}
ROOM = {"color": "#D55E00", "linestyle": "--", "linewidth": 1.5}


def plot_prediction(report: Report) -> Figure:
    """Draw both figures below each other."""
    rows = len(waterfall(report.memory)) if report.memory else 1
    heights = [5.4, _waterfall_height(rows)]
    figure = Figure((7, sum(heights)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    plot_owner_timeline(report, above.subplots(gridspec_kw={"left": 0.1, "right": 0.98}))
    plot_waterfall(report, below.subplots())
    return figure


def plot_owner_timeline(report: Report, ax: Axes | None = None) -> Axes:
    """Draw the bytes alive during one step, stacked by who holds them.

    Lines show what the allocator reserves at most, and what the card has for it.

    Args:
        report: What to draw.
        ax: A subplot; a strip with the phases takes the lower part of its place.
    """
    ax = ax or new_axes(height=5.4)
    strip = split_off_strip(ax, ["phase"])
    memory, top = report.memory, 0
    if memory and memory.owner_timeline:
        phases = [phase for _, phase in memory.timeline]
        handles = draw_phases(strip, 0, phases, GREY_PHASE_STYLES)
        handles += _stack_owners(ax, memory)
        lines, top = _draw_lines(ax, report)
        handles += [_mark_peak(ax, memory, top), *lines]
        legend_below(strip, handles, ncols=4)
    else:
        draw_row_gap(strip, 0, why_no_timeline(report), 70)
    scale_bytes(ax.yaxis, top, "Bytes alive", room=1.2)
    return finish(ax, f"Memory during one step: {verdict_words(report)}", provenance(report))


def _stack_owners(ax: Axes, memory: Memory) -> list[Patch]:
    """Draw the areas of the owners on top of each other, and a line where they end."""
    points = len(memory.timeline)
    progress = [100 * index / points for index in range(points + 1)]
    base = [0] * (points + 1)
    for owner in OWNERS:
        curve = memory.owner_timeline[owner]
        upper = [low + held for low, held in zip(base, [*curve, curve[-1]], strict=True)]
        ax.fill_between(progress, base, upper, step="post", **OWNER_STYLES[owner])
        base = upper
    ax.step(progress, base, where="post", color="#333333", linewidth=0.6)
    return [Patch(label=owner.replace("_", " "), **OWNER_STYLES[owner]) for owner in OWNERS]


def _draw_lines(ax: Axes, report: Report) -> tuple[list[Line2D], int]:
    """Draw what is reserved and what the card has; two handles and the highest in sight."""
    handles, top = [], report.memory.peak_allocated_bytes
    if (reserved := report.memory.peak_reserved_bytes) is not None:
        label = f"peak reserved {_unbroken(reserved)}"
        handles.append(ax.axhline(reserved, label=label, **RESERVED))
        top = max(top, reserved)
    if report.fit:
        room = report.fit.capacity_bytes - report.fit.context_bytes
        label = f"room on the card {_unbroken(room)}"
        if room <= IN_SIGHT * top:
            handles.append(ax.axhline(room, label=label, **ROOM))
            top = max(top, room)
        else:
            handles.append(Line2D([], [], label=f"{label}, far above", **ROOM))
    empty = Line2D([], [], linestyle="", label=" ")  # keeps the columns of the legend
    return handles + [empty] * (2 - len(handles)), top


def _unbroken(count: int) -> str:
    """Bytes whose unit stays on the line of their number."""
    return format_bytes(count).replace(" ", "\u00a0")


def _mark_peak(ax: Axes, memory: Memory, top: int) -> Line2D:
    """Mark the peak, and name it above all lines."""
    held = [alive for alive, _ in memory.timeline]
    index = held.index(max(held))
    place, phase = 100 * index / len(held), PHASE_NAMES[memory.timeline[index][1]]
    words = f"peak {format_bytes(held[index])}, {phase}"
    ax.vlines(place, held[index], 1.05 * top, color="black", linewidth=0.6)
    write(ax, min(max(place, 20), 80), 1.05 * top, words, weight="bold", va="bottom")
    (mark,) = ax.plot(place, held[index], label="peak allocated", **PEAK)
    return mark


def plot_waterfall(report: Report, ax: Axes | None = None) -> Axes:
    """Draw who holds the peak: a bar for each owner, below it one for each of its modules."""
    rows = waterfall(report.memory) if report.memory else []
    ax = ax or new_axes(height=_waterfall_height(len(rows)))
    peak = report.memory.peak_allocated_bytes if report.memory else 0
    for place, row in enumerate(rows):
        height = 0.8 if row.is_owner else 0.5
        style = OWNER_STYLES[row.owner]
        ax.barh(place, row.held_bytes, height, row.start_bytes, **style)
        _write_beside(ax, place, row, peak)
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    for label, row in zip(ax.get_yticklabels(), rows, strict=True):
        label.set(fontsize=9, weight="bold" if row.is_owner else "normal")
    ax.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    if not rows:
        draw_row_gap(ax, 0, why_missing(report), 50)
    scale_bytes(ax.xaxis, peak, "Bytes held at the peak", room=1.02)
    total = format_bytes(peak) if rows else "nothing to show"
    return finish(ax, f"Who holds the peak: {total}", provenance(report), width=66)


def _waterfall_height(rows: int) -> float:
    return 1.2 + 0.25 * max(rows, 2)


def _write_beside(ax: Axes, place: int, row: Row, peak: int) -> None:
    """Write a row's bytes and share to the right of its bar, or to the left at the edge."""
    end = row.start_bytes + row.held_bytes
    words = f"{format_bytes(row.held_bytes)}, {row.share_words}"
    weight = "bold" if row.is_owner else "normal"
    gap = 0.01 * peak
    if end < 0.7 * peak:
        write(ax, end + gap, place, words, ha="left", weight=weight)
    elif row.start_bytes > 0.3 * peak:
        write(ax, row.start_bytes - gap, place, words, ha="right", weight=weight)
    else:
        write(ax, row.start_bytes + row.held_bytes / 2, place, words, weight=weight)
