"""The bytes of a step as polynomials: any batch and length in milliseconds.

A tensor of a step has a size that is a polynomial in the batch b and the length l: one of 1, l
and l² with or without b. Kernels round lengths up, so l may stand for the next multiple of 8,
32, 64 or 128. Six points of the plane settle the coefficients of each block, a seventh shows
which rounding it is. All seven have to make the same blocks in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from labkit.predict.layers import UNITS, Stack, Unlike, growth, stretch
from labkit.predict.roofline import OpCosts
from labkit.predict.trace import Trace

ROUNDINGS = (1, 8, 32, 64, 128)
# Lengths that these roundings tell apart, three to fit and one to check: multiples of 8, whose
# masks are handed to a card's kernels as they are, and others, whose masks are padded first.
LENGTHS = {True: (40, 72, 136, 208), False: (37, 69, 133, 201)}
LONGEST = 208


def points(batch_sizes: Sequence[int], *, aligned: bool) -> list[tuple[int, int]]:
    """The seven (batch, length) to trace.

    Args:
        batch_sizes: Two to fit with and one to check.
        aligned: Whether the lengths are multiples of 8.
    """
    *fit, check = batch_sizes
    *lengths, last = LENGTHS[aligned]
    return [*product(fit, lengths), (check, last)]


def _terms(batch: int, length: int) -> np.ndarray:
    """(roundings, 6): the value of each term at a point, for each rounding."""
    rounded = [-(-length // multiple) * multiple for multiple in ROUNDINGS]
    return np.array(
        [
            [factor * term for factor in (1, batch) for term in (1, near, length * near)]
            for near in rounded
        ],
        np.float64,
    )


@dataclass(frozen=True)
class Polynomials:
    """Numbers that depend on batch and length, each by its own polynomial.

    ``coefficients`` is (n, 6), ``roundings`` an index into ``ROUNDINGS`` for each.
    """

    coefficients: np.ndarray
    roundings: np.ndarray

    @classmethod
    def fit(
        cls, at: list[tuple[int, int]], values: np.ndarray, *, exact: bool = True
    ) -> "Polynomials":
        """The polynomials through whole numbers at seven points.

        Args:
            at: The points; the last one is the check.
            values: (7, n).
            exact: Whether the check has to come out to the last unit. Without it the nearest
                polynomial is taken: an operation may move a rounded and an unrounded tensor.

        Raises:
            Unlike: A number follows none of the polynomials.
        """
        terms = np.array([_terms(*point) for point in at]).swapaxes(0, 1)  # (roundings, 7, 6)
        solved = np.linalg.solve(terms[:, :-1], values[:-1])  # (roundings, 6, n)
        errors = np.abs(terms[:, -1:] @ solved - values[-1])[:, 0].round()  # (roundings, n)
        roundings = errors.argmin(0)  # the first of equals: the one that rounds least
        if exact and errors.min(0).any():
            raise Unlike("a size that is no polynomial in batch and length")
        return cls(solved[roundings, :, np.arange(values.shape[1])], roundings)

    def at(self, batch: int, length: int) -> np.ndarray:
        """The numbers at a point, int64."""
        terms = _terms(batch, length)[self.roundings]  # (n, 6)
        return np.rint((terms * self.coefficients).sum(1)).astype(np.int64)

    def take(self, sources: np.ndarray) -> "Polynomials":
        """Those of the given numbers."""
        return Polynomials(self.coefficients[sources], self.roundings[sources])

    @property
    def is_constant(self) -> np.ndarray:
        """Which do not depend on batch and length."""
        return np.abs(self.coefficients[:, 1:]).max(1) < 1e-6


class Timeline:
    """A step whose batch and length are open.

    Args:
        trace: The step at some point.
        sizes: Of its blocks.
        flops: Of the operations of its last step; ``moved_bytes`` the same.
        moved_bytes: See there.
    """

    def __init__(
        self, trace: Trace, sizes: Polynomials, flops: Polynomials, moved_bytes: Polynomials
    ) -> None:
        self._trace = trace
        self._sizes, self._flops, self._moved_bytes = sizes, flops, moved_bytes

    @classmethod
    def fit(
        cls,
        trace_at: Callable[[int, list[tuple[int, int]]], tuple[Trace, str]],
        batch_sizes: Sequence[int],
        *,
        aligned: bool,
        period: int,
        depth: int,
    ) -> "Timeline":
        """The timeline of a model, from traces of few of its layers.

        Args:
            trace_at: Traces a model of the given depth, one step on each of the given points,
                and says where in it the layers are.
            batch_sizes: Two to fit with and one to check.
            aligned: Whether it is for lengths that are multiples of 8.
            period: Layers after which the stack repeats itself.
            depth: Layers of the model.

        Raises:
            Unlike: Layers or points do not line up.
        """
        at = points(batch_sizes, aligned=aligned)
        left_over = depth % period
        shallow = UNITS * period + left_over
        many, prefix = trace_at(shallow, [at[0], *at])
        deeper, _ = trace_at(shallow + period, [at[0], at[0]])
        stack = Stack(prefix, period, shallow)
        short, sizes = _first_two_steps(many)
        grown = growth(short, deeper, stack)
        polynomials = Polynomials.fit(at, sizes)
        if (~polynomials.is_constant & (grown.sizes != 0)).any():
            raise Unlike("a block outside of the layers that depends on depth and batch")
        further = (depth - shallow) // period
        polynomials.coefficients[:, 0] += further * grown.sizes
        costs = many.costs[1:]
        flops = Polynomials.fit(at, np.array([c.flops for c in costs]), exact=False)
        moved = Polynomials.fit(at, np.array([c.moved_bytes for c in costs]), exact=False)
        flops.coefficients[:, 0] += further * grown.flops
        moved.coefficients[:, 0] += further * grown.moved_bytes
        long = stretch(short, stack, depth)
        return cls(
            long.trace,
            polynomials.take(long.block_sources),
            flops.take(long.cost_sources),
            moved.take(long.cost_sources),
        )

    def at(self, batch: int, length: int) -> Trace:
        """The trace of the step on ``batch`` rows of ``length`` tokens."""
        costs = self._trace.costs[-1]
        return replace(
            self._trace,
            sizes=self._sizes.at(batch, length),
            costs=[
                OpCosts(
                    self._flops.at(batch, length),
                    self._moved_bytes.at(batch, length),
                    costs.dtypes,
                    costs.phases,
                )
            ],
        )


def _first_two_steps(trace: Trace) -> tuple[Trace, np.ndarray]:
    """The trace up to the end of its second step, and the sizes of its blocks at each point.

    The first step creates the optimizer's state; the second and all later ones are alike, and
    the first one makes what they make and that state.

    Returns:
        The shorter trace, and (steps - 1, blocks) sizes: one row for each later step.

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
    sizes = np.tile(trace.sizes[:count], (len(steps) - 1, 1))
    for row, blocks in enumerate(made[1:]):
        sizes[row, second] = trace.sizes[blocks]
        for block, other in partner.items():
            sizes[row, block] = trace.sizes[blocks[place[other]]]
    short = replace(
        trace,
        blocks=trace.blocks[:count],
        sizes=trace.sizes[:count],
        events=trace.events[:end],
        phases=trace.phases[:end],
        modules=trace.modules[:end],
        step_starts=trace.step_starts[:2],
        costs=trace.costs[1:2],
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
