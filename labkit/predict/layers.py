"""A trace of a few layers, stretched to the depth of the real model.

The layers of a stack do the same work. So what happens in the first, one in the middle and the
last is traced, and the middle one is repeated: in the order of the layers where they run
forward or an optimizer goes through its parameters, in reverse where they run backward.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from labkit.predict.events import Block, Trace
from labkit.predict.stack import UNITS, Repeated, Stack, Unlike
from labkit.report import PHASES


@dataclass(frozen=True)
class Stretched:
    """A trace of the whole depth, and where each part of it comes from.

    ``block_sources`` and ``cost_sources`` are the blocks and operations of the short trace that
    the long one's are like.
    """

    trace: Trace
    block_sources: np.ndarray
    cost_sources: np.ndarray


def stretch(trace: Trace, stack: Stack, depth: int) -> Stretched:
    """The trace that a stack of ``depth`` layers would give.

    Args:
        trace: Of a model whose stack has ``UNITS`` units.
        depth: Layers of the model that is wanted; what is left over by the period, the same.

    Raises:
        Unlike: A block cannot be told for layers that were not traced.
    """
    target = stack.with_depth(depth)
    units = {path: stack.unit_of(path) for path in {*trace.modules, *trace.cost_modules}}
    labels = _labels(trace, [units[path] for path in trace.modules])
    places = _Places(trace, stack, labels)
    sources: list[int] = []
    source_shifts: list[int] = []
    events: list[int] = []
    positions: list[int] = []
    shifts: list[int] = []
    numbers: dict[tuple[int, int | None], int] = {}  # (source block, unit) → block
    order = list(_unrolled(labels, trace, target.units))
    last = dict(order)  # the unit that a position is repeated for last
    for position, unit in order:
        event, label = int(trace.events[position]), labels[position]
        if event < 0 and places.units[~event] is None and unit != last[position]:
            continue  # what all layers share goes with the last that needs it
        shift = unit - label if unit is not None else 0
        if event >= 0:
            numbers[event, unit] = len(sources)
            events.append(len(sources))
            sources.append(event)
            source_shifts.append(shift)
        else:
            source, home_unit = places.find(~event, label, unit, target.units)
            if (source, home_unit) not in numbers:
                raise Unlike(f"block {~event} of {trace.blocks[~event].module}")
            events.append(~numbers[source, home_unit])
        positions.append(position)
        shifts.append(shift)
    cost_labels = [units[path] for path in trace.cost_modules]
    cost_sources = [place for place, _ in _unrolled(cost_labels, None, target.units)]
    starts = np.searchsorted(positions, trace.step_starts)

    def block(source: int, shift: int) -> Block:
        known = trace.blocks[source]
        return Block(known.op, stack.moved(known.module, shift), known.owner)

    def module(position: int, shift: int) -> str:
        return stack.moved(trace.modules[position], shift)

    long = Trace(
        blocks=Repeated(sources, source_shifts, block),
        sizes=trace.sizes[sources],
        events=np.array(events, np.int64),
        phases=trace.phases[positions],
        modules=Repeated(positions, shifts, module),
        step_starts=starts.tolist(),
        costs=[trace.costs[-1].take(cost_sources)],
        cost_modules=[],
        owner_numbers=trace.owner_numbers[sources],
    )
    return Stretched(long, np.array(sources), np.array(cost_sources))


def _labels(trace: Trace, units: list[int | None]) -> list[int | None]:
    """The unit that each event belongs to: whose work it is.

    What the model itself lets go of between two layers, such as the output of the one before,
    belongs to the layer that has just been at work.
    """
    made_in = {
        event: unit
        for event, unit in zip(trace.events.tolist(), units, strict=True)
        if event >= 0
    }
    labels: list[int | None] = []
    for position, (event, unit) in enumerate(zip(trace.events.tolist(), units, strict=True)):
        home = made_in.get(~event)
        if event < 0 and unit is None and home is not None:
            last = labels[-1]
            near = last is not None and trace.phases[position] == trace.phases[position - 1]
            labels.append(last if near and abs(last - home) <= 1 else home)
        else:
            labels.append(unit)
    return labels


@dataclass(frozen=True)
class Growth:
    """What each further unit adds to blocks and operations outside of the layers.

    Blocks of the layers do not grow. Others may: one that lists a number for each parameter.
    """

    sizes: np.ndarray
    flops: np.ndarray
    moved_bytes: np.ndarray


def growth(short: Trace, deeper: Trace, stack: Stack) -> Growth:
    """Compare a short trace with that of a model which is one unit deeper.

    Args:
        short: Of a model whose stack has ``UNITS`` units, ``stack``.
        deeper: Of the same model with one unit more.

    Raises:
        Unlike: The deeper trace is another one than the short one stretched.
    """
    stretched = stretch(short, stack, stack.depth + stack.period)
    guess = stretched.trace
    alike = (
        np.array_equal(guess.events, deeper.events)
        and np.array_equal(guess.phases, deeper.phases)
        and guess.step_starts == deeper.step_starts
        and guess.blocks == deeper.blocks
        and len(guess.costs[-1].flops) == len(deeper.costs[-1].flops)
    )
    if not alike:
        raise Unlike("a model that is one unit deeper does something else")
    grown = np.zeros(len(short.blocks), np.int64)
    grown[stretched.block_sources] = deeper.sizes - guess.sizes
    for block in np.flatnonzero(grown):
        if stack.unit_of(short.blocks[block].module) is not None:
            raise Unlike("layers that are not alike")
    flops, moved_bytes = np.zeros((2, len(short.costs[-1].flops)), np.int64)
    one, other = guess.costs[-1], deeper.costs[-1]
    flops[stretched.cost_sources] = other.flops - one.flops
    moved_bytes[stretched.cost_sources] = other.moved_bytes - one.moved_bytes
    return Growth(grown, flops, moved_bytes)


class _Places:
    """Which block of the short trace stands for a block of a layer that was not traced."""

    def __init__(self, trace: Trace, stack: Stack, labels: list[int | None]) -> None:
        self.units = {
            int(event): label
            for event, label in zip(trace.events, labels, strict=True)
            if event >= 0
        }
        stretches = np.cumsum(np.r_[0, np.diff(trace.phases) != 0])
        # A block is known by the stretch of one phase and the place in its unit in which it was
        # made, the operation, and the how-manieth of those it is.
        self.keys: dict[int, tuple] = {}
        self.blocks: dict[tuple, int] = {}  # unit and key → block
        counts: Counter = Counter()
        for position, (event, label) in enumerate(
            zip(trace.events.tolist(), labels, strict=True)
        ):
            if event >= 0 and label is not None:
                place = stack.moved(trace.modules[position], -label)
                key = (stretches[position], place, trace.blocks[event].op)
                self.keys[event] = (*key, counts[label, *key])
                self.blocks[label, *self.keys[event]] = event
                counts[label, *key] += 1

    def find(
        self, block: int, label: int | None, unit: int | None, units: int
    ) -> tuple[int, int | None]:
        """The source and the unit of a block that is freed at work on ``unit``.

        Args:
            block: What is freed in the short trace, at work on its unit ``label``.
            unit: Where that work is in the long one, which has ``units`` units.
        """
        made_in = self.units[block]
        if made_in is None:
            return block, None
        if label is None:
            return block, made_in + (units - UNITS) * (made_in == UNITS - 1)
        wanted = unit + made_in - label
        stand_in = 0 if wanted == 0 else UNITS - 1 if wanted == units - 1 else 1
        if stand_in == made_in:
            return block, wanted
        other = self.blocks.get((stand_in, *self.keys[block]))
        if other is None:
            raise Unlike(f"unit {stand_in} makes no {self.keys[block]}")
        return other, wanted


def _unrolled(
    labels: list[int | None], trace: Trace | None, units: int
) -> Iterator[tuple[int, int | None]]:
    """Positions in the short trace, each with the unit it is repeated for, in the new order.

    A chain is a row of neighbouring units, up or down; within it the middle one is repeated.
    """
    if trace is None:
        parts = [0] * len(labels)
    else:  # a chain does not go beyond its phase
        steps = np.searchsorted(trace.step_starts, np.arange(len(labels)), side="right")
        parts = (steps * len(PHASES) + trace.phases).tolist()
    runs = [
        (label, [position for position, _ in group])
        for (label, _), group in groupby(
            enumerate(zip(labels, parts, strict=True)), key=lambda item: item[1]
        )
    ]
    for index, (label, positions) in enumerate(runs):
        if label != 1:
            last = units - 1 if label == UNITS - 1 else label
            yield from ((position, last) for position in positions)
            continue
        before = runs[index - 1][0] if index else None
        after = runs[index + 1][0] if index + 1 < len(runs) else None
        downward = before == UNITS - 1 or (before != 0 and after == 0)
        order = range(units - 2, 0, -1) if downward else range(1, units - 1)
        for unit in order:
            yield from ((position, unit) for position in positions)
