"""The bytes of a step as polynomials: any batch and length in milliseconds.

Five points of the plane of batch and length are traced. They have to make the same blocks in
the same order, and each block's five sizes have to follow one sum of two terms exactly: two of
them settle its coefficients, the other three check it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from labkit.predict.events import WORKSPACE, Trace
from labkit.predict.layers import Growth, growth, stretch
from labkit.predict.polynomials import Polynomials
from labkit.predict.stack import UNITS, Stack, Unlike

# Lengths that the roundings tell apart: multiples of 8, whose masks are handed to a card's
# kernels as they are, and others, whose masks are padded first.
LENGTHS = {True: (40, 72, 136, 208, 136), False: (37, 70, 132, 201, 132)}
LONGEST = 208


def points(batch_sizes: Sequence[int], *, aligned: bool) -> list[tuple[int, int]]:
    """The five (batch, length) to trace.

    Args:
        batch_sizes: Three to fit with, each larger than the one before.
        aligned: Whether the lengths are multiples of 8.
    """
    small, middle, large = batch_sizes
    return list(zip((small, middle, small, large, middle), LENGTHS[aligned], strict=True))


@dataclass(frozen=True)
class Pattern:
    """A step of a model of few layers, batch and length open: all that a timeline is made of.

    Attributes:
        trace: The first two steps, at some point.
        sizes: Of its blocks.
        flops: Of the operations of its last step; ``moved_bytes`` the same.
        stack: Where the layers are, and how many.
        growth: What each further unit of layers adds elsewhere; None where none can be added.
    """

    trace: Trace
    sizes: Polynomials
    flops: Polynomials
    moved_bytes: Polynomials
    stack: Stack
    growth: Growth | None

    @classmethod
    def fit(
        cls,
        trace_at: Callable[[int, list[tuple[int, int]]], tuple[Trace, str]],
        batch_sizes: Sequence[int],
        parts: int,
        *,
        aligned: bool,
        period: int,
        depth: int,
    ) -> "Pattern":
        """The pattern of a model, from traces of few of its layers.

        Args:
            trace_at: Traces a model of the given depth, one step on each of the given points,
                and says where in it the layers are.
            batch_sizes: Three to fit with.
            parts: What the recipe splits a batch into.
            aligned: Whether it is for lengths that are multiples of 8.
            period: Layers after which the stack repeats itself.
            depth: Layers of the model.

        Raises:
            Unlike: Layers or points do not line up.
        """
        at = points(batch_sizes, aligned=aligned)
        is_deep = depth // period > UNITS
        shallow = UNITS * period + depth % period if is_deep else depth
        many, prefix = trace_at(shallow, at)
        stack = Stack(prefix, period, shallow)
        short, sizes = _first_two_steps(many)
        costs = many.costs[1:]
        sizes = Polynomials.fit(at, sizes, parts)
        grown = None
        if is_deep:
            deeper, _ = trace_at(shallow + period, at[:2])
            grown = growth(short, deeper, stack)
            if (sizes.at(*at[0]) != sizes.at(*at[3]))[grown.sizes != 0].any():
                raise Unlike("a block outside of the layers that depends on depth and batch")
        flops, moved_bytes = (
            Polynomials.fit(at[1:], np.array(values), parts, exact=False)
            for values in ([c.flops for c in costs], [c.moved_bytes for c in costs])
        )
        return cls(short, sizes, flops, moved_bytes, stack, grown)

    def timeline(self, depth: int) -> "Timeline":
        """The timeline of a model with ``depth`` layers.

        Raises:
            Unlike: A block cannot be told for layers that were not traced.
        """
        blocks = self.trace.blocks
        fixed = [number for number, block in enumerate(blocks) if block.op == WORKSPACE]
        if self.growth is None:
            return Timeline(self.trace, self.sizes, self.flops, self.moved_bytes, fixed)
        further = (depth - self.stack.depth) // self.stack.period
        long, grown = stretch(self.trace, self.stack, depth), self.growth
        return Timeline(
            long.trace,
            self.sizes.plus(further * grown.sizes).take(long.block_sources),
            self.flops.plus(further * grown.flops).take(long.cost_sources),
            self.moved_bytes.plus(further * grown.moved_bytes).take(long.cost_sources),
            np.flatnonzero(np.isin(long.block_sources, fixed)).tolist(),
        )


@dataclass(frozen=True)
class Timeline:
    """A step whose batch and length are open.

    Attributes:
        trace: The step at some point.
        sizes: Of its blocks.
        flops: Of the operations of its last step; ``moved_bytes`` the same.
        workspaces: The blocks that the matrix library keeps, of another size on every card.
    """

    trace: Trace
    sizes: Polynomials
    flops: Polynomials
    moved_bytes: Polynomials
    workspaces: list[int]

    def at(self, batch: int, length: int, *, with_costs: bool = True) -> Trace:
        """The trace of two steps on ``batch`` rows of ``length`` tokens.

        Args:
            with_costs: Whether arithmetic and traffic are wanted, too.
        """
        costs = []
        if with_costs:
            flops, moved_bytes = (
                self.flops.at(batch, length),
                self.moved_bytes.at(batch, length),
            )
            costs = [replace(self.trace.costs[-1], flops=flops, moved_bytes=moved_bytes)]
        return replace(self.trace, sizes=self.sizes.at(batch, length), costs=costs)


def _first_two_steps(trace: Trace) -> tuple[Trace, np.ndarray]:
    """The trace up to the end of its second step, and the sizes of its blocks at each point.

    The first step creates the optimizer's state; the second and all later ones are alike, and
    the first one makes what they make and that state.

    Returns:
        The shorter trace, and (steps, blocks) sizes: one row for each step.

    Raises:
        Unlike: The later steps are not alike.
    """
    bounds = [*trace.step_starts, len(trace.events)]
    steps = [trace.events[start:end] for start, end in pairwise(bounds)]
    made = [step[step >= 0] for step in steps]
    first, second = made[0], made[1]
    partner = _partners(trace, first, second)
    place = {int(block): number for number, block in enumerate(second)}
    previous = {block: place[other] for block, other in partner.items()}
    pattern = None
    for blocks, events in zip(made[1:], steps[1:], strict=True):
        own = {int(block): number for number, block in enumerate(blocks)}
        seen = [
            (event >= 0, own[block], "own") if block in own
            else (False, previous[block], "previous") if block in previous
            else (False, block, "older")
            for event in events.tolist()
            for block in (max(event, ~event),)
        ]  # fmt: skip
        if pattern is not None and (seen != pattern or len(blocks) != len(second)):
            raise Unlike("steps on batches of different sizes")
        pattern, previous = seen, own
    end, count = bounds[2], int(second[-1]) + 1
    sizes = np.tile(trace.sizes[:count], (len(steps), 1))
    ours, theirs = np.array(list(partner)), np.array(list(partner.values()))
    sizes[0, theirs] = trace.sizes[ours]
    for row, blocks in enumerate(made[1:], start=1):
        sizes[row, second] = trace.sizes[blocks]
        sizes[row, ours] = sizes[row, theirs]
    short = replace(
        trace,
        blocks=trace.blocks[:count],
        sizes=trace.sizes[:count],
        events=trace.events[:end],
        phases=trace.phases[:end],
        modules=trace.modules[:end],
        step_starts=trace.step_starts[:2],
        costs=trace.costs[1:2],
        owner_numbers=trace.owner_numbers[:count],
    )
    return short, sizes


def _partners(trace: Trace, first: np.ndarray, second: np.ndarray) -> dict[int, int]:
    """For blocks of the first step, the same of the second; the rest is made only once."""
    partner, waiting = {}, iter(second.tolist())
    other = next(waiting, None)
    for block in first.tolist():
        one = trace.blocks[block]
        if other is not None and (one.op, one.module) == (
            trace.blocks[other].op, trace.blocks[other].module,
        ):  # fmt: skip
            partner[block] = other
            other = next(waiting, None)
    if other is not None:
        raise Unlike("the first step and the second")
    return partner
