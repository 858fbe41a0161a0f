"""What the explorer shows for a setting: its report, and the peak over batch and length."""

from dataclasses import dataclass, replace
from functools import lru_cache

from labkit.explorer_setting import LARGEST_BATCH, LENGTHS, Setting
from labkit.machine import free_memory_bytes, memory_bytes
from labkit.predict.gpus import Gpu
from labkit.predict.outlook import Outlook
from labkit.recipe import Recipe
from labkit.report import Fit, Report

CURVE_LENGTHS = tuple(length for length in LENGTHS if length & (length - 1) == 0)


@dataclass(frozen=True)
class Answer:
    """A setting, what it costs, and its neighbours.

    ``report.fit`` is always there: for this machine's CPU it is made of the memory that is free
    now. The curves are (pairs, bytes) and (tokens, bytes), the present point among them.
    """

    setting: Setting
    report: Report
    over_batch: list[tuple[int, int]]
    over_length: list[tuple[int, int]]


def answer(setting: Setting) -> Answer:
    """Predict a setting.

    Raises:
        ModelError, TokenizerError, PredictError, TraceError: As ``predict`` says.
    """
    recipe, gpu = setting.recipe, setting.gpu
    report = predicted(recipe, gpu)
    parts, pairs, tokens = recipe.micro_batches, recipe.batch_size, recipe.max_length
    batches = [parts << n for n in range(10) if parts << n <= LARGEST_BATCH]
    over_batch = _peaks(_kind(recipe), gpu, tuple((batch, tokens) for batch in batches))
    over_length = _peaks(_kind(recipe), gpu, tuple((pairs, n) for n in CURVE_LENGTHS))
    now = report.memory.peak_allocated_bytes
    return Answer(
        setting,
        report,
        sorted({pairs: now, **dict(zip(batches, over_batch, strict=True))}.items()),
        sorted({tokens: now, **dict(zip(CURVE_LENGTHS, over_length, strict=True))}.items()),
    )


def predicted(recipe: Recipe, gpu: Gpu | None) -> Report:
    """The report of a recipe whose pairs are all padded, on a card or here, with a verdict."""
    report = _outlook(_kind(recipe), gpu).report(recipe.batch_size, recipe.max_length)
    if report.fit is None:
        report.fit = _fit_here(report.memory.peak_allocated_bytes)
    return report


def largest_batch(setting: Setting) -> int:
    """The largest batch that fits with all else as set, 0 where none does.

    Of the batches that the explorer offers; a larger one never needs less.
    """
    parts = setting.micro_batches
    fitting, failing = 0, LARGEST_BATCH // parts + 1
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if predicted(replace(setting.recipe, batch_size=middle * parts), setting.gpu).fit.fits:
            fitting = middle
        else:
            failing = middle
    return fitting * parts


def _fit_here(peak_bytes: int) -> Fit:
    """Whether a peak has room in the memory that other programs leave."""
    total, free = memory_bytes(), free_memory_bytes()
    margin = free - peak_bytes
    return Fit(total, total - free, margin, fits=margin >= 0)


def _kind(recipe: Recipe) -> Recipe:
    """What an outlook is made for: the recipe whatever its batch and its length."""
    return replace(recipe, batch_size=recipe.micro_batches, max_length=LENGTHS[0])


@lru_cache(maxsize=64)
def _outlook(kind: Recipe, gpu: Gpu | None) -> Outlook:
    return Outlook(kind, gpu)


@lru_cache(maxsize=256)  # a slider that moves leaves the curve over itself as it is
def _peaks(kind: Recipe, gpu: Gpu | None, points: tuple[tuple[int, int], ...]) -> list[int]:
    return _outlook(kind, gpu).peaks(points)
