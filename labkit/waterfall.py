"""Who holds the peak, as rows: each owner, and under it the modules that made its bytes."""

from dataclasses import dataclass

from labkit.report import Memory

MODULES_SHOWN = 6  # of an owner; the rest is summed up
NAME_LENGTH = 36
SHARE_SHOWN = 0.01  # of the peak: a smaller module is not named


@dataclass(frozen=True)
class Row:
    """One bar of the waterfall.

    ``start_bytes`` is where the bar begins: what the owners above hold, and the modules above
    of the same owner. ``is_owner`` tells an owner's row from the rows of its modules.
    """

    name: str
    owner: str
    is_owner: bool
    start_bytes: int
    held_bytes: int
    share: float  # of the peak

    @property
    def share_words(self) -> str:
        """The share for people: ``12.3%``; a little is not called nothing."""
        return f"{self.share:.1%}" if self.share >= 0.0005 else "<0.1%"


def waterfall(memory: Memory) -> list[Row]:
    """The rows of the peak, the largest first; owners add up to it, modules to their owner."""
    peak, rows, start = memory.peak_allocated_bytes, [], 0
    for owner, held in sorted(memory.by_owner.items(), key=lambda item: -item[1]):
        if not held:
            continue
        rows.append(Row(owner.replace("_", " "), owner, True, start, held, held / peak))
        for name, size in _parts(memory.by_module.get(owner, {}), peak):
            rows.append(Row(name, owner, False, start, size, size / peak))
            start += size
        start = rows[-1].start_bytes + rows[-1].held_bytes
    return rows


def _parts(modules: dict[str, int], peak: int) -> list[tuple[str, int]]:
    """The largest modules by name, then all others as one; none if none is large."""
    ordered = sorted(modules.items(), key=lambda item: -item[1])
    named = [
        (name, size) for name, size in ordered[:MODULES_SHOWN] if size >= SHARE_SHOWN * peak
    ]
    rest = ordered[len(named) :]
    if not named or set(modules) == {""}:
        return []
    if len(rest) > 1:
        rest = [(f"{len(rest)} more", sum(size for _, size in rest))]
    return [(_short(name), size) for name, size in named + rest]


def _short(name: str) -> str:
    """The end of a module's path, which tells more than its beginning."""
    name = name or "outside of any module"
    return name if len(name) <= NAME_LENGTH else f"…{name[1 - NAME_LENGTH :]}"
