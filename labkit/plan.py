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
from functools import cached_property, partial

from labkit.model_source import ModelSource, find_model
from labkit.predict.gpus import GPUS, Gpu
from labkit.predict.outlook import Outlook
from labkit.recipe import Recipe
from labkit.report import Report
from labkit.space import MARGIN, even_parts, half_format, kinds

BEST = 3
ALIGNED = 8  # lengths are planned in multiples of it: kernels work in tiles, and timelines so
NEVER_WORSE = {"optimizer": "adamw_fused", "padding": "longest", "cached": True}
LARGEST_BATCH = LARGEST_LENGTH = 2**16


@dataclass(frozen=True)
class Job:
    """What is to be trained on what, before a recipe is chosen for it.

    Attributes:
        recipe: Model, batch size, and the values of ``fixed``.
        tokens: Of the longest pair: it decides the peak.
        mean_tokens: Of the longest pair of a batch on average: it decides the time.
        fixed: Fields of the recipe that the search leaves as they are.
        margin: Share of the card's memory that has to be left.
    """

    recipe: Recipe
    tokens: int
    mean_tokens: int
    fixed: frozenset[str] = frozenset()
    margin: float = MARGIN

    def kinds(self, gpu: Gpu) -> list[Recipe]:
        """The recipes to choose from, their parts aside."""
        changes = {name: v for name, v in NEVER_WORSE.items() if name not in self.fixed}
        recipe = replace(self.recipe, **changes, micro_batches=1)
        return kinds(recipe, half_format(gpu), self.fixed)

    def parts(self) -> list[int]:
        """The numbers of parts to choose from, fewest first."""
        if "micro_batches" in self.fixed:
            return [self.recipe.micro_batches]
        return even_parts(self.recipe.batch_size)

    def outlook(self, kind: Recipe, parts: int, gpu: Gpu) -> Outlook:
        """What a recipe in so many parts would need on a card."""
        return Outlook(replace(kind, micro_batches=parts), gpu, source=self.source)

    @cached_property
    def source(self) -> ModelSource:
        """The model."""
        return find_model(self.recipe.model)

    def budget_bytes(self, gpu: Gpu) -> int:
        """What may be reserved: what the card has, less its context and the margin."""
        return int(gpu.memory_bytes * (1 - self.margin)) - gpu.context_bytes


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


def aligned(tokens: float) -> int:
    """The next multiple of ``ALIGNED``."""
    return -int(-tokens // ALIGNED) * ALIGNED


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
            if outlook.peaks([(pairs, job.tokens)])[0] <= budget:
                seconds = outlook.least_seconds(pairs, job.mean_tokens)
                heapq.heappush(queue, (seconds, number, place, kind, outlook))
                return

    for number, kind in enumerate(job.kinds(gpu)):
        progress(f"{gpu.title}: weights {kind.weights}, autocast {kind.autocast}, "
                 f"checkpoint_every {kind.checkpoint_every}")  # fmt: skip
        enqueue(number, kind, 0)
    while queue and len(found.plans) < BEST:
        seconds, number, place, kind, outlook = heapq.heappop(queue)
        report = outlook.report(pairs, job.tokens)
        if report.memory.peak_reserved_bytes <= budget:
            recipe = replace(outlook.recipe, max_length=job.recipe.max_length)
            found.plans.append(Plan(recipe, report, seconds))
        else:
            enqueue(number, kind, place + 1)
    if not found.plans:
        progress(f"{gpu.title}: nothing fits, looking for what would")
        found.remedies = _remedies(job, gpu)
    return found


def _remedies(job: Job, gpu: Gpu) -> list[str]:
    """What would fit instead: shorter pairs, a smaller batch, a larger card."""
    remedies = []
    if tokens := max(longest(job, gpu).values(), default=0):
        remedies.append(
            f"on this card, pairs of at most {tokens} tokens (--max-length {tokens})"
        )
    if batch := max(largest_batch(job, gpu).values(), default=0):
        remedies.append(f"at this length, a batch of at most {batch} (--batch-size {batch})")
    if card := smallest_card(job, above=gpu):
        remedies.append(f"as it is, {card.title} (--gpu {card.name})")
    return remedies


def largest_batch(job: Job, gpu: Gpu) -> dict[Recipe, int]:
    """By kind, the largest batch in the fewest parts that the job allows; 0 where none fits."""
    parts, budget, largest = job.parts()[0], job.budget_bytes(gpu), {}
    for kind in job.kinds(gpu):
        outlook = job.outlook(replace(kind, batch_size=parts), parts, gpu)
        fits = partial(_fits_rows, outlook, job.tokens, budget)
        largest[kind] = parts * _largest(fits, LARGEST_BATCH // parts)
    return largest


def longest(job: Job, gpu: Gpu) -> dict[Recipe, int]:
    """By kind, the longest pairs in the most parts that the job allows; 0 where none fit."""
    parts, budget, lengths = job.parts()[-1], job.budget_bytes(gpu), {}
    config = job.source.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", LARGEST_LENGTH) // ALIGNED
    for kind in job.kinds(gpu):
        outlook = job.outlook(kind, parts, gpu)
        fits = partial(_fits_eights, outlook, job.recipe.batch_size, budget)
        lengths[kind] = ALIGNED * _largest(fits, limit)
    return lengths


def smallest_card(job: Job, *, above: Gpu | None = None) -> Gpu | None:
    """The card with the least memory on which some recipe of the job fits."""
    for gpu in GPUS.values():
        larger = above is None or gpu.memory_bytes > above.memory_bytes
        if larger and _any_fits(job, gpu):
            return gpu
    return None


def _any_fits(job: Job, gpu: Gpu) -> bool:
    """Whether a recipe fits in the most parts, which need least."""
    parts, pairs, budget = job.parts()[-1], job.recipe.batch_size, job.budget_bytes(gpu)
    return any(
        _fits(job.outlook(kind, parts, gpu), pairs, job.tokens, budget)
        for kind in job.kinds(gpu)
    )


def _fits(outlook: Outlook, pairs: int, tokens: int, budget: int) -> bool:
    """Whether what a step allocates is within a budget and, if so, what it reserves."""
    if outlook.peaks([(pairs, tokens)])[0] > budget:
        return False
    return outlook.report(pairs, tokens).memory.peak_reserved_bytes <= budget


def _fits_rows(outlook: Outlook, tokens: int, budget: int, rows: int) -> bool:
    return _fits(outlook, rows * outlook.recipe.micro_batches, tokens, budget)


def _fits_eights(outlook: Outlook, pairs: int, budget: int, eights: int) -> bool:
    return _fits(outlook, pairs, ALIGNED * eights, budget)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, 0 if none; smaller ones need less."""
    fitting, failing = 0, 1
    while failing <= limit and fits(failing):
        fitting, failing = failing, 2 * failing
    failing = min(failing, limit + 1)
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting
