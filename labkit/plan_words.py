"""The words of a plan: what a recipe gives up, rows for tables, sentences."""

from labkit.captions import format_seconds
from labkit.plan import Job, Plan, Search
from labkit.predict.gpus import Gpu
from labkit.recipe import Recipe
from labkit.report import format_bytes

BITS = {"bfloat16": 8, "float16": 11}  # significant ones; float32 has 24


def gives_up(recipe: Recipe) -> list[str]:
    """What a recipe does without, against float32 in one part and nothing computed twice."""
    given_up = []
    if recipe.weights != "float32":
        given_up.append(
            f"base weights are rounded to {BITS[recipe.weights]} significant bits "
            f"({recipe.weights})"
        )
    if recipe.autocast != "none":
        given_up.append(
            f"products are rounded to {BITS[recipe.autocast]} significant bits "
            f"({recipe.autocast})"
        )
    if "float16" in (recipe.weights, recipe.autocast):
        given_up.append("float16 ends at 65,504: updates with an infinite gradient are skipped")
    if recipe.checkpoint_every:
        layers = {1: "every layer", 2: "every second layer"}.get(
            recipe.checkpoint_every, f"one of {recipe.checkpoint_every} layers"
        )
        given_up.append(f"the forward of {layers} is computed twice")
    if (parts := recipe.micro_batches) > 1:
        given_up.append(
            f"only {recipe.batch_size // parts} pairs are computed at a time, so kernels are "
            "smaller; the gradient is the same"
        )
    return given_up or ["nothing"]


def plan_rows(search: Search) -> list[dict[str, str]]:
    """The plans as rows of a table."""
    return [plan_row(plan, search.plans[0].seconds) for plan in search.plans]


def plan_row(plan: Plan, fastest_seconds: float) -> dict[str, str]:
    """One plan as a row; its time against the fastest."""
    recipe, report = plan.recipe, plan.report
    parts = recipe.micro_batches
    return {
        "Weights": recipe.weights,
        "Autocast": recipe.autocast,
        "Recomputed": {0: "no layer", 1: "every layer"}.get(
            recipe.checkpoint_every, f"1 of {recipe.checkpoint_every} layers"
        ),
        "Parts × pairs": f"{parts} × {recipe.batch_size // parts}",
        "Peak reserved": format_bytes(report.memory.peak_reserved_bytes),
        "Left on the card": format_bytes(report.fit.margin_bytes),
        "Step, modelled at best": format_seconds(plan.seconds),
        "Against the fastest": f"{plan.seconds / fastest_seconds:.2f}×",
    }


def headline(search: Search) -> str:
    """What was asked, and whether something fits."""
    job, gpu = search.job, search.gpu
    asked = f"{gpu.title}, {job.recipe.model}, {batch_words(job)}"
    left = f"with {job.margin:.0%} of the card ({margin_words(job, gpu)}) left free"
    if not search.plans:
        return f"{asked}: nothing fits {left}."
    return f"{asked}: the fastest recipes that fit {left}."


def batch_words(job: Job) -> str:
    """The batch that is planned for."""
    words = f"{job.recipe.batch_size} pairs of at most {job.tokens} tokens"
    if job.mean_tokens != job.tokens:
        words += f" (time for {job.mean_tokens}, the longest of a batch on average)"
    return words


def margin_words(job: Job, gpu: Gpu) -> str:
    """The margin in bytes."""
    return format_bytes(int(job.margin * gpu.memory_bytes))


def remedy_words(search: Search) -> list[str]:
    """What would fit where nothing does."""
    if not search.remedies:
        return ["No card of the catalogue would do, nor a shorter pair or a smaller batch."]
    return [f"What would fit: {remedy}." for remedy in search.remedies]
