"""What a training step does to memory, as plain data: blocks made and freed, in order."""

from dataclasses import dataclass, field

import numpy as np

from labkit.predict.roofline import OpCosts
from labkit.report import OWNERS

WORKSPACE = "cublas workspace"  # the operation of a block that the matrix library keeps


@dataclass(slots=True)
class Block:
    """What is known of one block of memory, its size aside.

    ``owner`` is one of ``report.OWNERS``; ``module`` the path of the module whose forward, or
    whose part of backward, made the block; empty outside of any.
    """

    op: str
    module: str
    owner: str


@dataclass(slots=True)
class Trace:
    """What steps do to memory.

    Attributes:
        blocks: In the order in which they are made.
        sizes: Bytes asked for by each block, int64.
        events: ``i`` where block i is made, ``~i`` where it is freed, int64.
        phases: Index into ``report.PHASES`` of each event; 0 before the first step.
        modules: Where each event happened, as in ``Block.module``.
        step_starts: Index of the first event of each step.
        costs: Arithmetic and traffic of the operations of each step.
        cost_modules: Where each operation of the last step happened.
        emptied: Index of each event before which the step emptied the allocator's cache.
        owner_numbers: Index into ``report.OWNERS`` of each block; taken from ``blocks``.
    """

    blocks: list[Block]
    sizes: np.ndarray
    events: np.ndarray
    phases: np.ndarray
    modules: list[str]
    step_starts: list[int]
    costs: list[OpCosts]
    cost_modules: list[str]
    emptied: list[int] = field(default_factory=list)
    owner_numbers: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.owner_numbers is None:
            self.owner_numbers = np.array([OWNERS.index(b.owner) for b in self.blocks], np.intp)
