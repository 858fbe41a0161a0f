"""The layers of a model that do the same work, and what is known of one for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import eq

import numpy as np

UNITS = 3  # first, middle, last


class Unlike(Exception):
    """Layers or steps that do not line up; the model has to be traced as it is."""


@dataclass(frozen=True)
class Stack:
    """The repeated layers of a model, in units that are alike.

    Attributes:
        prefix: Path of the list that holds the layers.
        period: Layers of a unit: 2 where every second layer is recomputed.
        depth: Layers there are.
    """

    prefix: str
    period: int
    depth: int

    def with_depth(self, depth: int) -> "Stack":
        """The same stack with another number of layers."""
        return Stack(self.prefix, self.period, depth)

    @property
    def units(self) -> int:
        """How many units there are; what is left over belongs to the last."""
        return self.depth // self.period

    def unit_of(self, path: str) -> int | None:
        """The unit that a module belongs to; None outside of the stack."""
        if not path.startswith(self.prefix + "."):
            return None
        index = int(path[len(self.prefix) + 1 :].partition(".")[0])
        return min(index // self.period, self.units - 1)

    def moved(self, path: str, by_units: int) -> str:
        """The path of the same module some units further on; outside of the stack, the same."""
        if not by_units or self.unit_of(path) is None:
            return path
        head = self.prefix + "."
        index, dot, rest = path[len(head) :].partition(".")
        return f"{head}{int(index) + by_units * self.period}{dot}{rest}"


class Repeated(Sequence):
    """What a short trace knows, for each place of a long one; made when somebody asks.

    Few ask, and a long trace has tens of thousands of places.

    Args:
        sources: The place in the short trace of each.
        shifts: How many units further on each is.
        make: Makes one of these from the other two.
    """

    def __init__(self, sources: list[int], shifts: list[int], make: Callable) -> None:
        self._sources = np.array(sources, np.int32)
        self._shifts = np.array(shifts, np.int32)
        self._make = cache(make)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int):
        return self._make(int(self._sources[index]), int(self._shifts[index]))

    def __eq__(self, other) -> bool:
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None
