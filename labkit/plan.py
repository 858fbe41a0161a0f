"""The fastest recipes that fit a card, found with the predictor.

What is searched is in ``labkit.space``: the precision of the base and of products, which layers
are recomputed, and the number of equal parts a batch comes in. Nothing has to be tried where
one value is never worse than another: ``adamw_fused`` makes the update of ``adamw`` with less
traffic, ``longest`` pads no batch further than ``max``, and cached tokens are read, not made.
``compile`` is left as it is, because a prediction does not see what it does.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from labkit.job import Job
from labkit.limits import remedies_for
from labkit.predict.gpus import Gpu
from labkit.recipe import Recipe
from labkit.report import Report

BEST = 3


@dataclass
class Plan:
    """A recipe that fits, with what it needs at most and the seconds it takes at best.

    ``report`` is that of the largest batch, ``seconds`` is modelled for the average one.
    """

    recipe: Recipe
    report: Report
    seconds: float


@dataclass
class Search:
    """What was found for a job on a card.

    ``plans`` are the best recipes, the fastest first, each of another kind: none of them, where
    nothing fits; then ``remedies`` says what would.
    """

    job: Job
    gpu: Gpu
    plans: list[Plan] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)


def search(
    job: Job, gpu: Gpu, *, progress: Callable[[str], None] = lambda text: None
) -> Search:
    """The fastest recipes that fit, ``BEST`` of different kinds.

    More parts of a batch never make a step faster. So for each kind the fewest parts that can
    fit are taken, the fastest of all kinds is tried first, and if it does not fit after all, is
    tried again with more parts.
    """
    pairs, budget, parts = job.recipe.batch_size, job.budget_bytes(gpu), job.parts()
    found, queue = Search(job, gpu), []

    def enqueue(number: int, kind: Recipe, first: int) -> None:
        for place in range(first, len(parts)):
            outlook = job.outlook(kind, parts[place], gpu)
            if outlook.peaks([(pairs, job.round_tokens)])[0] <= budget:
                seconds = outlook.least_seconds(pairs, job.mean_tokens)
                heapq.heappush(queue, (seconds, number, place, kind, outlook))
                return

    for number, kind in enumerate(job.kinds(gpu)):
        progress(f"{gpu.title}: weights {kind.weights}, autocast {kind.autocast}, "
                 f"checkpoint_every {kind.checkpoint_every}")  # fmt: skip
        enqueue(number, kind, 0)
    while queue and len(found.plans) < BEST:
        seconds, number, place, kind, outlook = heapq.heappop(queue)
        # A length that is no multiple of 8 pads its masks first, which can take more.
        lengths = {job.tokens, job.round_tokens}
        report = max((outlook.report(pairs, length) for length in lengths), key=_reserved)
        if _reserved(report) <= budget:
            recipe = replace(outlook.recipe, max_length=job.recipe.max_length)
            found.plans.append(Plan(recipe, report, seconds))
        else:
            enqueue(number, kind, place + 1)
    if not found.plans:
        progress(f"{gpu.title}: nothing fits, looking for what would")
        found.remedies = remedies_for(job, gpu)
    return found


def _reserved(report: Report) -> int:
    return report.memory.peak_reserved_bytes
