"""Figures of a ``Comparison``: a step of the ladder beside the step before it.

Each function draws into ``ax``, or into a new figure 700 pixels wide, and returns the Axes.
Bytes and seconds are drawn as they are, only ticks and labels are scaled. What was not measured
is a hatched gap with the reason, never a zero. ``captions`` has an ``alt_…`` text for each.
"""

from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.canvas import (
    BARS,
    GAP,
    LINES,
    OWNER_STYLES,
    draw_gaps,
    draw_phases,
    draw_row_gap,
    finish,
    legend_below,
    new_axes,
    scale,
    scale_bytes,
    split_off_strip,
    write,
)
from labkit.captions import (
    PHASE_NAMES,
    STATUS_WORDS,
    format_seconds,
    named_reports,
    peak_words,
    provenance,
    speed_words,
    why_missing,
    why_no_timeline,
)
from labkit.report import OWNERS, PHASES, Comparison, Report, format_bytes


def plot_phases(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw the peak bytes alive in each phase, the previous step beside this one."""
    ax = ax or new_axes()
    handles, top = [], 0
    for name, report, style, offset in _series(comparison, BARS, 0.4):
        by_phase = report.memory.by_phase if report.memory else {}
        places = {phase: place + offset for place, phase in enumerate(PHASES)}
        gaps = [place for phase, place in places.items() if phase not in by_phase]
        gap = draw_gaps(ax, gaps, 0.38, f"{name}: {why_missing(report)}")
        if not by_phase:
            handles.append(gap)
            continue
        heights = list(by_phase.values())
        bars = ax.bar([places[phase] for phase in by_phase], heights, 0.38, label=name, **style)
        texts = [format_bytes(height).replace(" ", "\n") for height in heights]
        ax.bar_label(bars, texts, padding=2, fontsize=9)
        handles.append(bars)
        top = max(top, *heights)
    ax.set_xticks(range(len(PHASES)), PHASE_NAMES.values())
    ax.set_xlabel("Phase of the step")
    scale_bytes(ax.yaxis, top, "Peak bytes alive", room=1.2)
    legend_below(ax, handles)
    return finish(ax, "Peak memory in each phase of a step", provenance(comparison.after))


def plot_peaks(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw the peak of the previous step and of this one, stacked by who holds the bytes."""
    ax = ax or new_axes()
    series = named_reports(comparison)
    memories = [report.memory for _, report in series if report.memory]
    top = max((memory.peak_allocated_bytes for memory in memories), default=0)
    for place, (_, report) in enumerate(series):
        if report.memory is None:
            draw_gaps(ax, [place], 0.6, "")
            words = fill(why_missing(report), 20)
            write(ax, place, 0.5, words, transform=ax.get_xaxis_transform())
            continue
        base = 0
        for owner in OWNERS:
            height = report.memory.by_owner.get(owner)
            if height is None:  # counters tell temporaries from activations not at all
                continue
            bar = ax.bar(place, height, 0.6, base, **OWNER_STYLES[owner])
            if height > 0.08 * top:
                write(ax, place, base + height / 2, format_bytes(height))
            base += height
        total = format_bytes(report.memory.peak_allocated_bytes)
        ax.bar_label(bar, [total], padding=3, weight="bold")
    handles = []
    for owner in reversed(OWNERS):
        change = " → ".join(format_bytes(memory.by_owner.get(owner)) for memory in memories)
        label = f"{owner.replace('_', ' ')}\n{change}"
        handles.append(Patch(label=label, **OWNER_STYLES[owner]))
    if memories:
        ax.legend(handles=handles, loc="center right", frameon=False, fontsize=9)
    ax.set_xticks(range(len(series)), [_two_lines(name) for name, _ in series])
    ax.set_xlim(-0.5, len(series) + 0.3)
    scale_bytes(ax.yaxis, top, "Bytes alive at the peak")
    return finish(ax, f"Peak memory: {peak_words(comparison)}", provenance(comparison.after))


def plot_step_times(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw every timed step as a point, pair by pair as they ran, and the medians as lines."""
    ax = ax or new_axes()
    series = _series(comparison, LINES, 0.3)
    pairs = max(1, *(len(report.step_seconds) for _, report, *_ in series))
    handles, top = [], 0
    for name, report, style, offset in series:
        times = report.step_seconds
        if not times:
            words = f"{name}: {why_missing(report)}"
            handles.append(draw_gaps(ax, [(1 + pairs) / 2], pairs + 0.2, words))
            continue
        middle = report.median_step_seconds
        ax.axhline(middle, **style | {"marker": "", "linewidth": 1.5})
        places = [pair + offset for pair in range(1, len(times) + 1)]
        label = f"{name}: median {format_seconds(middle)}"
        handles += ax.plot(places, times, label=label, **style | {"linestyle": ""})
        top = max(top, *times)
    ax.set_xlim(0.4, pairs + 0.6)
    ax.set_xticks(range(1, pairs + 1, 1 + pairs // 12))
    counted = "Timed step" if len(series) == 1 else "Pair of timed steps"
    ax.set_xlabel(f"{counted}, in the order run")
    unit, size = ("s", 1) if top >= 1 else ("ms", 1e-3)
    scale(ax.yaxis, top, unit, size, "Time of one step")
    legend_below(ax, handles)
    return finish(ax, f"Step times: {speed_words(comparison)}", provenance(comparison.after))


def plot_timeline(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw the bytes alive after each allocation and free; a strip below shows the phases.

    Args:
        comparison: What to draw.
        ax: A subplot; the strip takes the lower part of its place.
    """
    ax = ax or new_axes(height=5)
    series = _series(comparison, LINES)
    strip = split_off_strip(ax, ["previous", "this step"][-len(series) :])
    phases, handles, top = [], [], 0
    for row, (name, report, style, _) in enumerate(series):
        timeline = report.memory.timeline if report.memory else []
        if not timeline:
            draw_row_gap(strip, row, STATUS_WORDS[report.status], 70)
            handles.append(Patch(label=f"{name}: {why_no_timeline(report)}", **GAP))
            continue
        phases = draw_phases(strip, row, [phase for _, phase in timeline])
        values = [alive for alive, _ in timeline]
        progress = [100 * index / len(values) for index in range(len(values))]
        peak, phase = max(timeline, key=lambda event: event[0])
        mark = [values.index(peak)]
        label = f"{name}: peak {format_bytes(peak)}, {PHASE_NAMES[phase]}"
        handles += ax.step(progress, values, where="post", label=label, markevery=mark, **style)
        top = max(top, peak)
    scale_bytes(ax.yaxis, top, "Bytes alive", room=1.2)
    ax.legend(handles=phases, loc="upper left", ncols=len(PHASES), frameon=False, fontsize=9)
    legend_below(strip, handles)
    return finish(ax, "Memory alive during one step", provenance(comparison.after))


def _two_lines(name: str) -> str:
    """The name of a series with its recipe values under it, for the place under a bar."""
    return "\n".join(fill(part, 28) for part in name.replace(" (", "\n(").splitlines())


def _series(
    comparison: Comparison, styles: tuple[dict, dict], spacing: float = 0
) -> list[tuple[str, Report, dict, float]]:
    """Name, report, style and offset of what is drawn, the previous step on the left."""
    named = named_reports(comparison)
    if len(named) == 1:
        return [(*named[0], styles[1], 0)]
    (previous, this), offset = named, spacing / 2
    return [(*previous, styles[0], -offset), (*this, styles[1], offset)]
