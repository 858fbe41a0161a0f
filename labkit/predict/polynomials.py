"""Sums of two terms through numbers that depend on batch and length.

A tensor of a step has a size that is a sum of one or two of 1, b, l, bl, l² and bl², where b
is the batch and l the length. Kernels round lengths up, so for one l may stand the next
multiple of 8, 32, 64 or 128.
"""

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from labkit.predict.stack import Unlike

ROUNDINGS = (1, 8, 32, 64, 128)
PAIRS = tuple(combinations(range(6), 2))
# Each sum: a rounding, and two of its six terms.
SUMS = np.array([(rounding, *pair) for rounding in range(len(ROUNDINGS)) for pair in PAIRS])


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
    """Numbers that depend on batch and length, each by its own sum of two terms.

    ``sums`` is an index into ``SUMS`` for each, ``coefficients`` (n, 2), ``further`` what is
    added to each.
    """

    sums: np.ndarray
    coefficients: np.ndarray
    further: np.ndarray

    @classmethod
    def fit(
        cls, at: list[tuple[int, int]], values: np.ndarray, parts: int, *, exact: bool = True
    ) -> "Polynomials":
        """The sums through whole numbers at five points.

        Args:
            at: The points.
            values: (5, n).
            parts: What the batch is split into: a block of one part grows by fractions of that.
            exact: Whether all points have to come out to the last unit. Without it the nearest
                sum is taken: an operation may move a rounded and an unrounded tensor.

        Raises:
            Unlike: A number follows none of the sums.
        """
        terms = np.array([_terms(*point)[SUMS[:, :1], SUMS[:, 1:]] for point in at])
        terms = terms.swapaxes(0, 1)  # (sums, 5, 2)
        solved = np.linalg.pinv(terms) @ values  # (sums, 2, n)
        # Coefficients are whole bytes for each tile of at most 1024 and each part: without the
        # error of solving, they hold for lengths of thousands, too.
        solved = np.rint(solved * 1024 * parts) / (1024 * parts)
        errors = np.abs(terms @ solved - values).max(1)  # (sums, n)
        best = errors.round().argmin(0)  # the first of equals: the one that rounds least
        if exact and (errors.min(0) > 0.5).any():
            raise Unlike("a size that is no such sum")
        count = np.arange(values.shape[1])
        return cls(best, solved[best, :, count], np.zeros(len(count)))

    def at(self, batch: int, length: int) -> np.ndarray:
        """The numbers at a point, int64."""
        terms = _terms(batch, length)[SUMS[:, :1], SUMS[:, 1:]]  # (sums, 2)
        numbers = (terms[self.sums] * self.coefficients).sum(1) + self.further
        return np.rint(numbers).astype(np.int64)

    def take(self, sources: np.ndarray) -> "Polynomials":
        """Those of the given numbers."""
        return Polynomials(
            self.sums[sources], self.coefficients[sources], self.further[sources]
        )

    def plus(self, further: np.ndarray) -> "Polynomials":
        """The same with something added to each, whatever batch and length."""
        return replace(self, further=self.further + further)
