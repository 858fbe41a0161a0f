"""The fastest recipes that fit a card, found with the predictor.

What is searched is in ``labkit.space``: the precision of the base and of products, which layers
are recomputed, and the number of equal parts a batch comes in. Nothing has to be tried where
one value is never worse than another: ``adamw_fused`` makes the update of ``adamw`` with less
traffic, ``longest`` pads no batch further than ``max``, and cached tokens are read, not made.
``compile`` is left as it is, because a prediction does not see what it does.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from labkit.model_source import ModelSource, check_recipe_fits, find_model
from labkit.predict.gpus import GPUS, Gpu
from labkit.predict.outlook import Outlook
from labkit.recipe import Recipe
from labkit.report import Report
from labkit.space import MARGIN, PlanError, even_parts, half_format, kinds

BEST = 3
ALIGNED = 8  # lengths are planned in multiples of it: kernels work in tiles, and timelines so
SEARCHED = ("weights", "autocast", "checkpoint_every", "micro_batches")
NEVER_WORSE = {"optimizer": "adamw_fused", "padding": "longest", "cached": True}
LARGEST_BATCH = LARGEST_LENGTH = 2**16


def aligned(tokens: float) -> int:
    """The next multiple of ``ALIGNED``."""
    return -int(-tokens // ALIGNED) * ALIGNED


@dataclass(frozen=True)
class Job:
    """What is to be trained on what, before a recipe is chosen for it.

    Attributes:
        recipe: Model, batch size, length, and the values of ``fixed``.
        tokens: Of the longest pair: it decides the peak. 0 stands for ``recipe.max_length``.
        mean_tokens: Of the longest pair of a batch on average: it decides the time. 0 stands
            for ``tokens``; it is made a multiple of 8.
        fixed: Fields of the recipe that the search leaves as they are.
        margin: Share of the card's memory that has to be left.

    Raises:
        PlanError: A given number of parts does not divide the batch, or pairs are longer than
            the recipe says.
        ModelError: There is no such model, or it has fewer positions.
    """

    recipe: Recipe
    tokens: int = 0
    mean_tokens: int = 0
    fixed: frozenset[str] = frozenset()
    margin: float = MARGIN

    def __post_init__(self) -> None:
        tokens = self.tokens or self.recipe.max_length
        mean = min(aligned(self.mean_tokens or tokens), self.length_limit)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "mean_tokens", mean)
        if tokens > self.recipe.max_length or mean > aligned(tokens):
            raise PlanError(
                f"pairs of {tokens} tokens, {mean} on average, do not belong to a max_length "
                f"of {self.recipe.max_length}."
            )
        batch, parts = self.recipe.batch_size, self.recipe.micro_batches
        if "micro_batches" in self.fixed and batch % parts:
            known = ", ".join(map(str, even_parts(batch)))
            raise PlanError(
                f"batch_size {batch} has no {parts} equal parts (micro_batches); {known} are "
                "possible."
            )
        check_recipe_fits(self.source, self.recipe, tokenizer_size=0)

    @property
    def round_tokens(self) -> int:
        """``tokens`` as a multiple of 8, where the model has so many positions."""
        rounded = aligned(self.tokens)
        return rounded if rounded <= self.length_limit else self.tokens

    def kinds(self, gpu: Gpu) -> list[Recipe]:
        """The recipes to choose from, their parts aside."""
        changes = {name: v for name, v in NEVER_WORSE.items() if name not in self.fixed}
        recipe = replace(self.recipe, **changes, micro_batches=1)
        given = [
            getattr(recipe, name) for name in ("weights", "autocast") if name in self.fixed
        ]
        half = next((name for name in given if name.endswith("16")), half_format(gpu))
        layers = getattr(self.source.config.get_text_config(), "num_hidden_layers", 0)
        return [
            kind
            for kind in kinds(recipe, half, self.fixed)
            if kind.checkpoint_every <= layers or "checkpoint_every" in self.fixed
        ]

    def parts(self) -> list[int]:
        """The numbers of parts to choose from, fewest first."""
        if "micro_batches" in self.fixed:
            return [self.recipe.micro_batches]
        return even_parts(self.recipe.batch_size)

    def outlook(self, kind: Recipe, parts: int, gpu: Gpu) -> Outlook:
        """What a recipe in so many parts would need on a card."""
        return Outlook(replace(kind, micro_batches=parts), gpu, source=self.source)

    @property
    def length_limit(self) -> int:
        """The longest pairs that the model can read, and that are looked at."""
        config = self.source.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", LARGEST_LENGTH)
        return positions // ALIGNED * ALIGNED

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
        found.remedies = _remedies(job, gpu)
    return found


def _remedies(job: Job, gpu: Gpu) -> list[str]:
    """What would fit instead: another recipe, shorter pairs, a smaller batch, a larger card."""
    remedies = []
    if given := [name for name in SEARCHED if name in job.fixed]:
        free = replace(job, fixed=job.fixed - set(SEARCHED))
        if _any_fits(free, gpu):
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            remedies.append(f"on this card, another recipe (leave out {flags})")
    tokens = max(longest(job, gpu).values(), default=0)
    if 0 < tokens < job.tokens:
        remedies.append(
            f"on this card, pairs of at most {tokens} tokens (--max-length {tokens})"
        )
    batch = max(largest_batch(job, gpu).values(), default=0)
    if 0 < batch < job.recipe.batch_size:
        remedies.append(f"at this length, a batch of at most {batch} (--batch-size {batch})")
    if card := smallest_card(job, above=gpu):
        remedies.append(f"as it is, {card.title} (--gpu {card.name})")
    return remedies


def largest_batch(job: Job, gpu: Gpu) -> dict[Recipe, int]:
    """By kind, the largest batch in the fewest parts that the job allows; 0 where none fits."""
    parts, budget, largest = job.parts()[0], job.budget_bytes(gpu), {}
    for kind in job.kinds(gpu):
        outlook = job.outlook(replace(kind, batch_size=parts), parts, gpu)
        points = range(parts, LARGEST_BATCH + 1, parts)
        shapes = [(pairs, job.round_tokens) for pairs in points]
        largest[kind], _ = _largest(outlook, shapes, budget)
    return largest


def longest(job: Job, gpu: Gpu) -> dict[Recipe, int]:
    """By kind, the longest pairs in the most parts that the job allows; 0 where none fit."""
    parts, budget, lengths = job.parts()[-1], job.budget_bytes(gpu), {}
    points = range(ALIGNED, job.length_limit + 1, ALIGNED)
    shapes = [(job.recipe.batch_size, tokens) for tokens in points]
    for kind in job.kinds(gpu):
        _, lengths[kind] = _largest(job.outlook(kind, parts, gpu), shapes, budget)
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
        _fits(job.outlook(kind, parts, gpu), (pairs, job.round_tokens), budget)
        for kind in job.kinds(gpu)
    )


def _fits(outlook: Outlook, shape: tuple[int, int], budget: int) -> bool:
    """Whether what a step allocates is within a budget and, if so, what it reserves."""
    if outlook.peaks([shape])[0] > budget:
        return False
    return _reserved(outlook.report(*shape)) <= budget


def _reserved(report: Report) -> int:
    return report.memory.peak_reserved_bytes


def _largest(outlook: Outlook, shapes: list[tuple[int, int]], budget: int) -> tuple[int, int]:
    """The last of growing shapes that fits a budget, (0, 0) if none does.

    What is allocated grows with the shape, what is reserved does not always: so the last whose
    allocated bytes fit is found by halving, and from there on down each is tried, in steps of
    half a percent first.
    """
    if not _fits(outlook, shapes[0], budget):
        return 0, 0
    beyond = bisect_right(shapes, budget, key=lambda shape: outlook.peaks([shape])[0])
    stride = max(1, beyond // 200)
    for start in range(beyond, 0, -stride):
        if _fits(outlook, shapes[start - 1], budget):
            between = range(min(start + stride, beyond + 1) - 1, start, -1)
            better = (at for at in between if _fits(outlook, shapes[at - 1], budget))
            return shapes[next(better, start) - 1]
    return shapes[0]
