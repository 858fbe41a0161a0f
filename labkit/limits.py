"""What fits at most: the largest batch, the longest pairs, the smallest card."""

from bisect import bisect_right
from dataclasses import replace

from labkit.job import ALIGNED, Job
from labkit.predict.gpus import GPUS, Gpu
from labkit.predict.outlook import Outlook
from labkit.recipe import Recipe

LARGEST_BATCH = 2**16
SEARCHED = ("weights", "autocast", "checkpoint_every", "micro_batches")


def remedies_for(job: Job, gpu: Gpu) -> list[str]:
    """What would fit instead: another recipe, shorter pairs, a smaller batch, a larger card."""
    remedies = []
    if given := [name for name in SEARCHED if name in job.fixed]:
        free = replace(job, fixed=job.fixed - set(SEARCHED))
        if _any_fits(free, gpu):
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            remedies.append(f"on this card, another recipe (leave out {flags})")
    parts, outlook = job.parts()[-1], job.outlook
    tokens = _last_of_any(
        [outlook(kind, parts, gpu) for kind in job.kinds(gpu)],
        [(job.recipe.batch_size, n) for n in range(ALIGNED, job.tokens, ALIGNED)],
        job.budget_bytes(gpu),
    )[1]
    if tokens:
        remedies.append(
            f"on this card, pairs of at most {tokens} tokens (--max-length {tokens})"
        )
    parts = job.parts()[0]
    batch = _last_of_any(
        [outlook(replace(kind, batch_size=parts), parts, gpu) for kind in job.kinds(gpu)],
        [(n, job.round_tokens) for n in range(parts, job.recipe.batch_size, parts)],
        job.budget_bytes(gpu),
    )[0]
    if batch:
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
    return outlook.report(*shape).memory.peak_reserved_bytes <= budget


def _last_of_any(
    outlooks: list[Outlook], shapes: list[tuple[int, int]], budget: int
) -> tuple[int, int]:
    """The last of growing shapes that fits with any recipe, (0, 0) if none does."""
    last = 0, 0
    for outlook in sorted(outlooks, key=lambda each: each.peaks(shapes[-1:])):
        larger = [shape for shape in shapes if shape > last]
        if larger and outlook.peaks(larger[:1])[0] <= budget:
            last = max(last, _largest(outlook, larger, budget))
    return last


def _largest(outlook: Outlook, shapes: list[tuple[int, int]], budget: int) -> tuple[int, int]:
    """The last of growing shapes that fits a budget, (0, 0) if none does.

    What is allocated grows with the shape, what is reserved does not always: so the last whose
    allocated bytes fit is found by halving, and from there on down each is tried; where they
    are many, every so manieth first.
    """
    if not _fits(outlook, shapes[0], budget):
        return 0, 0
    beyond = bisect_right(shapes, budget, key=lambda shape: outlook.peaks([shape])[0])
    stride = max(1, beyond // 50)
    for start in range(beyond, 0, -stride):
        if _fits(outlook, shapes[start - 1], budget):
            between = range(min(start + stride, beyond + 1) - 1, start, -1)
            better = (at for at in between if _fits(outlook, shapes[at - 1], budget))
            return shapes[next(better, start) - 1]
    return shapes[0]
