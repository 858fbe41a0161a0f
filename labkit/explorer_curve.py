"""The explorer's curves: the peak over batch or over length, with the present point."""

from math import log2

from labkit.captions import count_words
from labkit.report import Report, format_bytes

IN_SIGHT = 20  # a line further away than this many times what is used would leave that a dot
ABOVE = 1.25  # the curves end this far above what matters: beyond, they only go up
HEIGHT = 140  # of the part between the axis and the top, in pixels


def curve(
    report: Report, name: str, points: list[tuple[int, int]], unit: str, here: int
) -> str:
    """The peak over batch or length as an HTML figure, and the room that the memory leaves.

    Args:
        points: (pairs or tokens, bytes), on a logarithmic axis.
        unit: What the first of a point counts.
        here: The present place, one of the points.
    """
    memory, fit = report.memory, report.fit
    room = fit.capacity_bytes - fit.context_bytes
    now = memory.peak_allocated_bytes
    top = ABOVE * max(room if room <= IN_SIGHT * now else 0, now)
    first, last = points[0][0], points[-1][0]

    def x(place: int) -> float:
        return 100 * log2(place / first) / log2(last / first)

    def y(count: int) -> float:
        return 100 - 100 * count / top

    line = " ".join(f"{x(place):.2f},{y(count):.2f}" for place, count in points)
    words = f"Peak over {name}: {format_bytes(now)} at {count_words(here, unit)}"
    early = any(count > room for place, count in points if x(place) < 35)
    return (
        f'<figure><figcaption>{words}</figcaption><svg height="{HEIGHT + 26}" role="img">'
        f'<title>{words}</title><svg y="4" height="{HEIGHT}">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<polyline points="{line}" fill="none" stroke="#0072B2" stroke-width="3" '
        'vector-effect="non-scaling-stroke"/></svg>'
        f"{_limit(room, y(room), early)}</svg>"
        f'<svg y="4" height="{HEIGHT}" style="overflow: visible">'
        '<line x1="0" x2="100%" y1="100%" y2="100%" stroke="currentColor"/>'
        f'<circle cx="{x(here):.2f}%" cy="{y(now):.2f}%" r="6" fill="#0072B2" '
        'stroke="currentColor" stroke-width="2"/></svg>'
        + "".join(
            f'<text x="{x(first * 4**n):.2f}%" y="{HEIGHT + 22}" '
            f'text-anchor="{"middle" if n else "start"}">{first * 4**n:,}</text>'
            for n in range(5)
            if first * 4**n <= last
        )
        + "</svg></figure>"
    )


def _limit(room: int, y: float, early: bool) -> str:
    """The line of the room there is, and its words where the curve is not.

    Args:
        room: In bytes.
        y: Where the line is, in percent from the top; above the top it is not drawn.
        early: Whether the curve crosses it on the left.
    """
    words = f"room: {format_bytes(room)}"
    if y < 0:  # the curve leaves the picture on the way there; the corner below is free
        return f'<text x="100%" y="96%" text-anchor="end">{words}, far above ↑</text>'
    place = 'x="100%" text-anchor="end"' if early else 'x="0"'
    return (
        f'<line x1="0" x2="100%" y1="{y:.2f}%" y2="{y:.2f}%" stroke="currentColor" '
        'stroke-width="2" stroke-dasharray="6 3"/>'
        f'<text {place} y="{y:.2f}%" dy="{14 if early and y < 85 else -5}">{words}</text>'
    )
