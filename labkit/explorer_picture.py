"""The explorer's picture: SVG as text, with no library between, so that a slider can drive it.

matplotlib takes a tenth of a second or more for a figure, and its pixels know no theme. Places
and sizes along the width are in percent and texts in pixels: the picture takes the width that
there is, and its words stay readable. Lines and texts have the colour of the text around them.
"""

from html import escape

from labkit.canvas import OWNER_STYLES, ScaledLocator
from labkit.explorer_answer import Answer
from labkit.explorer_curve import IN_SIGHT, curve
from labkit.explorer_words import measured_words, segments, summary, verdict
from labkit.report import OWNERS, Report, format_bytes

# What matplotlib's hatches look like, on a tile of 8 by 8.
HATCHES = {
    "": "",
    "//": "M-1,1 L1,-1 M0,8 L8,0 M7,9 L9,7",
    "\\\\": "M-1,7 L1,9 M0,0 L8,8 M7,-1 L9,1",
    "xx": "M0,8 L8,0 M0,0 L8,8",
    "++": "M4,0 V8 M0,4 H8",
    "..": "M1,2 h2 M5,6 h2",
}
FILLS = {owner: f"url(#labkit-{owner})" for owner in OWNERS}
FILLS["reserved besides"] = "url(#labkit-idle)"
OUTSIDE = "#888888"
COLORS = {"✔": "#009E73", "✖": "#D55E00", "▲": "#E69F00"}  # the sign says it as well

STYLE = """<style>
.labkit-picture { font: 13px/1.5 sans-serif; overflow: hidden; }
.labkit-picture svg { display: block; overflow: visible; width: 100%; }
.labkit-picture svg svg { overflow: hidden; }
.labkit-picture text { fill: currentColor; font: 12px sans-serif; }
.labkit-picture p, .labkit-picture ul { margin: 8px 0; padding: 0; }
.labkit-picture .verdict { border-left: 8px solid; font-size: 17px; padding-left: 10px; }
.labkit-picture ul, .labkit-curves { display: flex; flex-wrap: wrap; gap: 4px 20px; }
.labkit-picture li { align-items: center; display: flex; gap: 6px; }
.labkit-picture li svg { height: 14px; width: 14px; }
.labkit-curves { align-items: flex-end; }
.labkit-curves figure { flex: 1 1 260px; margin: 8px 0; min-width: 0; padding: 0 8px; }
</style>"""


def picture(answer: Answer, here: tuple[Report, Report] | None = None) -> str:
    """Words, bar, legend and curves of an answer, as HTML that is well-formed XML.

    Args:
        here: The same recipe predicted for this machine, and measured on it.
    """
    setting, report = answer.setting, answer.report
    sign, words = verdict(report)
    batch, length = setting.batch_size, setting.max_length
    curves = curve(report, "batch", answer.over_batch, "pair", batch)
    curves += curve(report, "length", answer.over_length, "token", length)
    return (
        f'<div class="labkit-picture">{STYLE}{_patterns()}'
        f'<div class="labkit-words"><p class="verdict" style="border-color: {COLORS[sign]}">'
        f"<strong>{sign} {escape(words)}</strong></p><p>{escape(summary(answer))}</p></div>"
        f"{_bar(report)}{_legend(report)}{_measured(*here) if here else ''}"
        f'<div class="labkit-curves">{curves}</div></div>'
    )


def message(text: str) -> str:
    """A sentence in the place of the picture."""
    return (
        f'<div class="labkit-picture">{STYLE}<p class="labkit-words">{escape(text)}</p></div>'
    )


def _patterns() -> str:
    """The fills of the owners: the colours and hatches of the lab's other figures."""
    idle = {"facecolor": "none", "hatch": "//", "edgecolor": "currentColor"}
    tiles = "".join(
        f'<pattern id="labkit-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{style["facecolor"]}"/>'
        f'<path d="{HATCHES[style["hatch"]]}" stroke="{style["edgecolor"]}" fill="none"/>'
        "</pattern>"
        for name, style in {**OWNER_STYLES, "idle": idle}.items()
    )
    return f'<svg style="height: 0" aria-hidden="true"><defs>{tiles}</defs></svg>'


def _rects(parts: list[tuple[str, int]], top: float, y: int, height: int) -> str:
    """Segments beside each other, on an axis that ends at ``top``."""
    start, rects = 0, []
    for name, count in parts:
        rects.append(
            f'<rect x="{100 * start / top:.3f}%" y="{y}" width="{100 * count / top:.3f}%" '
            f'height="{height}" fill="{FILLS.get(name, OUTSIDE)}" stroke="currentColor" '
            'stroke-opacity=".4"/>'
        )
        start += count
    return "".join(rects)


def _bar(report: Report) -> str:
    """Who holds the peak, and a line where the memory ends."""
    parts, capacity = segments(report), report.fit.capacity_bytes
    used = sum(count for _, count in parts)
    in_sight = capacity <= IN_SIGHT * used
    top = 1.04 * max(used, capacity if in_sight else 0)
    there = f"memory there is: {format_bytes(capacity)}"
    if in_sight:
        x = 100 * capacity / top
        anchor = "end" if x > 50 else "start"
        line = (
            f'<line x1="{x:.3f}%" x2="{x:.3f}%" y1="2" y2="66" stroke="currentColor" '
            f'stroke-width="3" stroke-dasharray="6 3"/>'
            f'<text x="{x:.3f}%" dx="{-6 if anchor == "end" else 6}" y="12" '
            f'text-anchor="{anchor}">{there}</text>'
        )
    else:
        line = f'<text x="100%" y="12" text-anchor="end">{there}, far to the right →</text>'
    words = f"Who holds the peak: {format_bytes(used)} of {format_bytes(capacity)} in use"
    return (
        f'<svg height="86" role="img" class="labkit-bar"><title>{words}</title>'
        f"{_rects(parts, top, 18, 42)}{line}{_ticks(top)}</svg>"
    )


def _ticks(top: float) -> str:
    """Round numbers of bytes below the bar."""
    unit, size = ("GiB", 2**30) if top >= 2**30 else ("MiB", 2**20)
    ticks = [tick for tick in ScaledLocator(size).tick_values(0, top) if 0 < tick < 0.95 * top]
    return '<text x="0" y="80">0</text>' + "".join(
        f'<line x1="{100 * tick / top:.2f}%" x2="{100 * tick / top:.2f}%" y1="60" y2="66" '
        f'stroke="currentColor"/><text x="{100 * tick / top:.2f}%" y="80" '
        f'text-anchor="middle">{tick / size:,g} {unit}</text>'
        for tick in ticks
    )


def _legend(report: Report) -> str:
    """Each segment's fill, name and bytes."""
    items = "".join(
        '<li><svg aria-hidden="true"><rect width="14" height="14" '
        f'fill="{FILLS.get(name, OUTSIDE)}" stroke="currentColor" stroke-opacity=".4"/></svg>'
        f"{name.replace('_', ' ')} {format_bytes(count)}</li>"
        for name, count in segments(report)
    )
    return f"<ul>{items}</ul>"


def _measured(predicted: Report, measured: Report) -> str:
    """The same recipe on this machine, predicted above measured."""
    reports = {"predicted": predicted, "measured": measured}
    top = 1.04 * max(report.memory.peak_allocated_bytes for report in reports.values())
    words = measured_words(predicted, measured)
    bars = "".join(
        f'<text y="{12 + 42 * row}">{name} here: '
        f"{format_bytes(report.memory.peak_allocated_bytes)}</text>"
        + _rects(list(report.memory.by_owner.items()), top, 17 + 42 * row, 18)
        for row, (name, report) in enumerate(reports.items())
    )
    return (
        f'<p class="labkit-measured">{escape(words)}</p>'
        f'<svg height="82" role="img"><title>{escape(words)}</title>{bars}</svg>'
    )
