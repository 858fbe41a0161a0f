"""How ``labkit plan`` answers: tables and sentences, or values for JSON."""

from dataclasses import replace

import typer

from labkit.captions import checkpoint_words
from labkit.cli_output import print_json, show_table
from labkit.job import Job
from labkit.limits import LARGEST_BATCH
from labkit.plan import Search
from labkit.plan_words import (
    batch_words,
    gives_up,
    headline,
    margin_words,
    plan_notes,
    plan_row,
    plan_rows,
    precision_words,
    remedy_words,
)
from labkit.recipe import Recipe, command_options, profile_named

PREDICT_PROFILE = "0.6b"  # what labkit predict starts from


def show_largest(job: Job, gpu, largest: str, found: dict[Recipe, int], *, as_json) -> None:
    """By kind of recipe, the largest batch or length that fits."""
    field = largest.replace("-", "_")
    if as_json:
        rows = [{"recipe": kind.to_dict(), field: most} for kind, most in found.items()]
        print_json({"gpu": gpu.name, "tokens": job.tokens, "largest": rows})
        return
    if largest == "batch-size":
        asked = f"pairs of {job.round_tokens:,} tokens, {_parts(job.parts()[0])}"
    else:
        asked = f"{job.recipe.batch_size} pairs, {_parts(job.parts()[-1])}"
    typer.echo(
        f"{gpu.title}, {job.recipe.model}, {asked}: the largest {field} predicted to fit with "
        f"{job.margin:.0%} of the card ({margin_words(job, gpu)}) left free."
    )
    rows = sorted(found.items(), key=lambda item: -item[1])
    limit = LARGEST_BATCH if largest == "batch-size" else job.length_limit
    show_table(
        {
            "Precision": precision_words(kind.to_dict()),
            "Checkpointing": checkpoint_words(kind.checkpoint_every),
            field: _limited(most, limit),
        }
        for kind, most in rows
    )
    if largest == "batch-size" and "micro_batches" not in job.fixed:
        typer.echo("That is at once; in parts (--micro-batches), a larger batch fits as well.")


def _limited(most: int, limit: int) -> str:
    if not most:
        return "nothing fits"
    return f"{most:,}" + (" or more" if most == limit else "")


def _parts(count: int) -> str:
    return "in one part" if count == 1 else f"in {count} parts"


def show_plans(found: Search) -> None:
    """The plans for one card."""
    typer.echo(headline(found))
    if not found.plans:
        for sentence in remedy_words(found):
            typer.echo(sentence)
        return
    show_table({"": str(number), **row} for number, row in enumerate(plan_rows(found), start=1))
    for number, one in enumerate(found.plans, start=1):
        typer.echo(f"{number} gives up: {'; '.join(gives_up(one))}.")
    for sentence in plan_notes(found.plans):
        typer.echo(sentence)
    typer.echo(
        "torch.compile is not searched, and these figures are without it: what it does is not "
        "predicted but measured (labkit measure --compile default)."
    )
    padded = replace(found.plans[0].recipe, padding="max", max_length=found.job.tokens)
    flags = " ".join(command_options(padded, profile_named(PREDICT_PROFILE).recipe))
    typer.echo(f"The first in detail: labkit predict --gpu {found.gpu.name} {flags}")


def show_cards(found: list[Search]) -> None:
    """The best plan for every card, and the smallest that will do."""
    job = found[0].job
    typer.echo(
        f"{job.recipe.model}, {batch_words(job)}: the fastest recipe that fits each card with "
        f"{job.margin:.0%} of it left free, against the fastest of all."
    )
    fastest = min((one.plans[0].seconds for one in found if one.plans), default=0)
    empty = {"Precision": "nothing fits"}
    show_table(
        {"Card": one.gpu.title.split(" ", 1)[1]}
        | (plan_row(one.plans[0], fastest) if one.plans else empty)
        for one in found
    )
    fitting = [one.gpu for one in found if one.plans]
    if fitting:
        for sentence in plan_notes([plan for one in found for plan in one.plans[:1]]):
            typer.echo(sentence)
        smallest = fitting[0]
        typer.echo(f"The card with the least memory that will do: {smallest.title} "
                   f"({smallest.name}).")  # fmt: skip
    else:
        typer.echo("No card of the catalogue will do: shorten the pairs, or free more fields.")


def plain(found: Search) -> dict:
    """A search as JSON values."""
    job = found.job
    return {
        "gpu": found.gpu.name,
        "batch_size": job.recipe.batch_size,
        "tokens": job.tokens,
        "mean_tokens": job.mean_tokens,
        "margin": job.margin,
        "plans": [
            {
                "recipe": one.recipe.to_dict(),
                "modelled_seconds": one.seconds,
                "against_the_fastest": one.seconds / found.plans[0].seconds,
                "gives_up": gives_up(one),
                "report": one.report.to_dict(),
            }
            for one in found.plans
        ],
        "remedies": found.remedies,
    }
