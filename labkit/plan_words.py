"""The words of a plan: what a recipe gives up, rows for tables, sentences."""

from labkit.captions import checkpoint_words, count_words, format_seconds
from labkit.job import Job
from labkit.plan import Plan, Search
from labkit.predict.gpus import Gpu
from labkit.report import format_bytes

BITS = {"bfloat16": 8, "float16": 11}  # significant ones; float32 has 24
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def precision_words(precision: dict[str, str]) -> str:
    """The formats in which a step runs, in short: ``bf16 + autocast``."""
    weights, autocast = precision["weights"], precision["autocast"]
    if autocast == "none":
        return SHORT[weights]
    is_same = weights in (autocast, "float32")
    return f"{SHORT[weights]} + autocast" + ("" if is_same else f" {SHORT[autocast]}")


def gives_up(plan: Plan) -> list[str]:
    """What a recipe does without, against float32 in one part and nothing computed twice."""
    recipe, precision = plan.recipe, plan.report.precision
    weights, autocast = precision["weights"], precision["autocast"]
    given_up = []
    if weights != "float32":
        given_up.append(
            f"the base is kept and computed in {weights} ({BITS[weights]} significant bits)"
        )
    if autocast != "none":
        which = "LoRA's products" if weights == autocast else "products"
        given_up.append(f"{which} are computed in {autocast}")
    if "float16" in (weights, autocast):
        given_up.append("float16 ends at 65,504: updates with an infinite gradient are skipped")
    if recipe.checkpoint_every:
        given_up.append(
            f"the forward of {checkpoint_words(recipe.checkpoint_every)} is computed twice"
        )
    if (parts := recipe.micro_batches) > 1:
        rows = recipe.batch_size // parts
        given_up.append(
            f"{rows} pair{'s are' if rows > 1 else ' is'} computed at a time, which keeps a "
            "card less busy (the gradient is the same)"
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
        "Precision": precision_words(report.precision),
        "Checkpointing": checkpoint_words(recipe.checkpoint_every),
        "Parts × pairs": f"{parts} × {recipe.batch_size // parts}",
        "Peak reserved": format_bytes(report.memory.peak_reserved_bytes),
        "Left": format_bytes(report.fit.margin_bytes),
        "Step": format_seconds(plan.seconds),
        "Ratio": f"{plan.seconds / fastest_seconds:.2f}×",
    }


def plan_notes(plans: list[Plan]) -> list[str]:
    """What has to be said of the figures of all plans, once."""
    notes = dict.fromkeys(
        note for plan in plans for note in plan.report.notes if not note.startswith("timeline")
    )
    return [
        "Bytes are predicted. Step is modelled, at best, and Ratio against the fastest; they "
        "were compared with no card: take ratios near 1 as equal, and measure the candidates "
        "(labkit measure).",
        *(f"{note[0].upper()}{note[1:]}." for note in notes),
    ]


def headline(search: Search) -> str:
    """What was asked, and whether something fits."""
    job, gpu = search.job, search.gpu
    asked = f"{gpu.title}, {job.recipe.model}, {batch_words(job)}"
    left = f"with {job.margin:.0%} of the card ({margin_words(job, gpu)}) left free"
    if not search.plans:
        return f"{asked}: nothing fits {left}."
    return f"{asked}: the fastest recipes that fit {left}."


def comment_words(search: Search) -> str:
    """The first plan in two lines, for whoever reads an exported script."""
    row = plan_rows(search)[0]
    return (
        f"Planned for {search.gpu.title}, {batch_words(search.job)}.\n"
        f"Predicted peak: {row['Peak reserved']} reserved, {row['Left']} left on the card; a "
        f"step takes {row['Step']} at best (modelled)."
    )


def batch_words(job: Job) -> str:
    """The batch that is planned for."""
    words = f"{count_words(job.recipe.batch_size, 'pair')} of at most {job.tokens:,} tokens"
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
