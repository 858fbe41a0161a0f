"""A trace while it is being written."""

from itertools import groupby

import numpy as np

from labkit.predict.events import Block, Trace
from labkit.predict.roofline import OpCosts
from labkit.report import PHASES


class Log:
    """Blocks and events as they come.

    Attributes:
        blocks: Made so far; ``sizes`` are their bytes.
        phase: Of what happens next.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.sizes: list[int] = []
        self.phase = "before"
        self._events: list[int] = []
        self._phases: list[str] = []
        self._modules: list[str] = []
        self._made_at: list[int] = []  # event at which each block was made
        self._outside: set[int] = set()  # events that happened in no module, nor for one
        self._step_starts: list[int] = []
        self._costs: list[list[tuple[int, int, str, str, str]]] = []  # of each step
        self._emptied: list[int] = []

    def begin_step(self) -> None:
        """The next step begins."""
        self._step_starts.append(len(self._events))
        self._costs.append([])
        self.phase = "before"

    def make(self, size_bytes: int, op: str, where: str, owner: str) -> int:
        """A block is made; returns its number."""
        number = len(self.blocks)
        self._made_at.append(len(self._events))
        self.blocks.append(Block(op, where, owner))
        self.sizes.append(size_bytes)
        self._add(number, where)
        return number

    def free(self, number: int, where: str) -> None:
        """A block is freed; in no place in particular, where it belongs."""
        if not where:
            self._outside.add(len(self._events))
        self._add(~number, where or self.blocks[number].module)

    def _add(self, event: int, where: str) -> None:
        self._events.append(event)
        self._phases.append(self.phase)
        self._modules.append(where)

    def count(self, flops: int, moved_bytes: int, dtype: str, where: str) -> None:
        """An operation of the step that is running."""
        self._costs[-1].append((flops, moved_bytes, dtype, self.phase, where))

    def empty_cache(self) -> None:
        """The step gives back to the driver what the allocator has cached."""
        self._emptied.append(len(self._events))

    def assign(self, number: int, owner: str, home: str) -> None:
        """A block turns out to belong to a parameter, and to have been made for it."""
        block, made_at = self.blocks[number], self._made_at[number]
        if block.owner != owner:
            block.owner, block.module = owner, home
            self._modules[made_at] = self._modules[made_at] or home

    def trace(self) -> Trace:
        """What was written."""
        self._finish_owners()
        self._sort_frees()
        return Trace(
            blocks=self.blocks,
            sizes=np.array(self.sizes, np.int64),
            events=np.array(self._events, np.int64),
            phases=np.array([PHASES.index(phase) for phase in self._phases], np.int8),
            modules=list(self._modules),
            step_starts=self._step_starts,
            costs=[
                OpCosts(
                    np.array([cost[0] for cost in step], np.int64),
                    np.array([cost[1] for cost in step], np.int64),
                    [cost[2] for cost in step],
                    [cost[3] for cost in step],
                )
                for step in self._costs
            ],
            cost_modules=[cost[4] for cost in self._costs[-1]],
            emptied=self._emptied,
        )

    def _finish_owners(self) -> None:
        """Of the rest, what is made in forward and outlives it is an activation."""
        changes = [a != b for a, b in zip(["", *self._phases], self._phases, strict=False)]
        stretch = np.cumsum(changes)
        freed = {~event: at for at, event in enumerate(self._events) if event < 0}
        for number, (block, made_at) in enumerate(zip(self.blocks, self._made_at, strict=True)):
            if not block.owner:
                end = freed.get(number)
                kept = end is None or stretch[end] != stretch[made_at]
                saved = kept and self._phases[made_at] == "forward"
                block.owner = "activations" if saved else "temporaries"

    def _sort_frees(self) -> None:
        """Put frees in a row, in one place, into the order in which the blocks were made.

        Autocast drops its copies of weights in another order each time. What is free afterwards
        is the same.
        """
        events, modules = self._events, self._modules
        steps = np.searchsorted(self._step_starts, np.arange(len(events)), side="right")

        def row(at: int) -> tuple:
            if events[at] >= 0:
                return (at,)
            place = None if at in self._outside else modules[at]
            return place, self._phases[at], steps[at]

        for _, group in groupby(range(len(events)), key=row):
            start, *rest = group
            if rest:
                order = sorted((start, *rest), key=lambda at: ~events[at])
                events[start : rest[-1] + 1] = [events[at] for at in order]
                modules[start : rest[-1] + 1] = [modules[at] for at in order]
