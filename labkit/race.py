"""Several recipes timed in turn, until it is clear which of them is the fastest.

Recipes run the same batches one after the other, so the times of one batch are a pair: a
machine that slows down slows all. What is judged are the pairs' ratios.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from labkit.report import Comparison, Report

ROUND_STEPS = 2  # timed steps of each between two looks
PAIRS_TO_DROP = 3  # the least number after which a recipe can be out
WIDE = 1.3  # so many times slower in the median, and slower in each pair: no need to go on


class Entrant(Protocol):
    """What races: a recipe that can do a timed step."""

    report: Report
    status: str  # set to ``out`` here

    def run(self) -> bool:
        """Do one timed step and add its seconds to the report; whether that was possible."""


def race(
    incumbent: Entrant,
    challengers: Sequence[Entrant],
    *,
    rounds: int,
    see: Callable[[Entrant], None] = lambda leader: None,
) -> Entrant:
    """The winner: a challenger that is clearly faster, else the incumbent.

    Challengers that are clearly slower than the leader drop out after each round. The
    incumbent runs to the end: all are measured by it.

    Args:
        rounds: At most so many, of ``ROUND_STEPS`` steps each.
        see: Told the leader after each step.
    """
    alive, leader = list(challengers), incumbent
    for step in range(rounds * ROUND_STEPS):
        if not alive:
            break
        line = [incumbent, *alive]
        could = {id(each): each.run() for each in (line if step % 2 == 0 else line[::-1])}
        if not could[id(incumbent)]:
            break
        alive = [each for each in alive if could[id(each)]]
        leader = _leader(incumbent, alive)
        if step % ROUND_STEPS == ROUND_STEPS - 1:
            for each in alive:
                if each is not leader and is_beaten(each, leader):
                    each.status = "out"
            alive = [each for each in alive if each.status != "out"]
        see(leader)
        if alive == [leader] and is_faster(leader, incumbent):
            break
    return leader if leader is incumbent or is_faster(leader, incumbent) else incumbent


def pairs_of(entrant: Entrant, other: Entrant) -> Comparison:
    """The entrant's steps beside those of another one; above 1 the entrant is faster."""
    return Comparison(after=entrant.report, before=other.report)


def is_faster(entrant: Entrant, other: Entrant) -> bool:
    """Whether a sign test says so; fewer than six pairs never do."""
    pairs = pairs_of(entrant, other)
    return bool(pairs.speed_change_is_clear) and pairs.speed_ratio > 1


def is_beaten(entrant: Entrant, leader: Entrant) -> bool:
    """Whether it is slower: by a sign test, or much slower in every pair of a few."""
    ratios = pairs_of(leader, entrant).speed_ratios
    far_behind = (
        len(ratios) >= PAIRS_TO_DROP
        and min(ratios) > 1
        and pairs_of(leader, entrant).speed_ratio > WIDE
    )
    return far_behind or is_faster(leader, entrant)


def _leader(incumbent: Entrant, alive: Sequence[Entrant]) -> Entrant:
    """Who is the fastest so far, by the median of its pairs with the incumbent."""
    return max([incumbent, *alive], key=lambda each: pairs_of(each, incumbent).speed_ratio)
