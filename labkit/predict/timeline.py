"""The bytes of a step as polynomials: any batch and length in milliseconds.

A tensor of a step has a size that is a polynomial in the batch b and the length l: one of 1, l
and l² with or without b. Kernels round lengths up, so l may stand for the next multiple of 8,
32, 64 or 128. Six points of the plane settle the coefficients of each block, a seventh shows
which rounding it is. All seven have to make the same blocks in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit.predict.layers import Stretched, Unlike
from labkit.predict.roofline import OpCosts
from labkit.predict.trace import Trace

ROUNDINGS = (1, 8, 32, 64, 128)
# Lengths that these roundings tell apart: for each they round to other numbers.
FIT_LENGTHS = (37, 69, 133)
CHECK_LENGTH = 200


def points(batch_of: Sequence[int]) -> list[tuple[int, int]]:
    """The seven (batch, length) to trace.

    Args:
        batch_of: Three batch sizes.
    """
    first, second, third = batch_of
    return [(b, l) for b in (first, second) for l in FIT_LENGTHS] + [(third, CHECK_LENGTH)]  # noqa: E741


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
    def fit(cls, at: list[tuple[int, int]], values: np.ndarray) -> "Polynomials":
        """The polynomials through whole numbers at seven points.

        Args:
            at: The points; the last one is the check.
            values: (7, n).

        Raises:
            Unlike: A number follows none of the polynomials.
        """
        terms = np.array([_terms(*point) for point in at])  # (7, roundings, 6)
        coefficients = np.zeros((values.shape[1], 6))
        roundings = np.full(values.shape[1], -1)
        for number in range(len(ROUNDINGS)):
            left = np.flatnonzero(roundings < 0)
            if not left.size:
                break
            solved = np.linalg.solve(terms[:-1, number], values[:-1, left])  # (6, left)
            right = np.abs(terms[-1, number] @ solved - values[-1, left]) < 0.5
            coefficients[left[right]] = solved[:, right].T
            roundings[left[right]] = number
        if (roundings < 0).any():
            raise Unlike("a size that is no polynomial in batch and length")
        return cls(coefficients, roundings)

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
    """A step whose batch and length are open."""

    def __init__(self, trace, sizes, flops, moved_bytes) -> None:
        self._trace = trace
        self._sizes, self._flops, self._moved_bytes = sizes, flops, moved_bytes

    def at(self, batch: int, length: int) -> Trace:
        """The trace of the step on ``batch`` rows of ``length`` tokens."""
        costs = self._trace.costs
        return replace(
            self._trace,
            sizes=self._sizes.at(batch, length),
            costs=OpCosts(
                self._flops.at(batch, length),
                self._moved_bytes.at(batch, length),
                costs.dtypes,
                costs.phases,
            ),
        )
