"""``labkit plan``: the fastest recipes that fit a card, or what fits at most."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli_options import (
    AsJson,
    Data,
    LabGroup,
    Profile,
    SkipBad,
    examples,
    recipe_options,
)
from labkit.cli_output import print_json
from labkit.recipe import Recipe
from labkit.space import MARGIN, PlanError

if TYPE_CHECKING:
    from labkit.plan import Search

LARGEST = ("batch-size", "max-length")

app = typer.Typer(cls=LabGroup, rich_markup_mode="rich")


@app.command(
    epilog=examples(
        "labkit plan --gpu rtx-4090 --max-length 512 --batch-size 128",
        "labkit plan --gpu t4 --data pairs.tsv --export my-plan",
        "labkit plan --gpu a100-40gb --max-length 2048 --largest batch-size",
        "labkit plan --gpu l4 --batch-size 32 --largest max-length",
        "labkit plan --weights float32 --checkpoint-every 1   (which card is large enough?)",
    )
)
@recipe_options
def plan(
    recipe: Recipe,
    given: frozenset[str],
    profile: Profile = "0.6b",
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The card; without it, every card is planned for."),
    ] = None,
    data: Data = None,
    skip_bad: SkipBad = False,
    margin: Annotated[
        float,
        typer.Option(min=0, max=0.9, help="Share of the card's memory that has to stay free."),
    ] = MARGIN,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(LARGEST), help="Find the largest that fits, for each recipe."
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the best plan as scripts for labkit, Hugging Face's Trainer and "
            "sentence-transformers.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest recipes that fit a card: precision, checkpointing, parts of a batch.

    Recipe fields that are given stay as they are; the others are searched. Without --data every
    pair is taken to be as long as --max-length. Exit status 1 where nothing fits.
    """
    from labkit.predict.gpus import GPUS, find_gpu

    if largest is not None and largest not in LARGEST:
        raise PlanError(f"--largest is {' or '.join(LARGEST)}, not {largest!r}.")
    if (largest or export) and gpu is None:
        raise PlanError(f"{'--largest' if largest else '--export'} needs a card: add --gpu.")
    if largest and export:
        raise PlanError("--largest makes no plan to export: leave out one of them.")
    cards = list(GPUS.values()) if gpu is None else [find_gpu(gpu)]
    from labkit.cli_plan_output import plain, show_cards, show_largest, show_plans
    from labkit.limits import largest_batch, longest
    from labkit.plan import search

    pairs, job = _job(recipe, given, data, skip_bad=skip_bad, margin=margin)
    with _console().status("planning") as status:
        if largest:
            find = largest_batch if largest == "batch-size" else longest
            most = find(job, cards[0])
        else:
            found = [search(job, card, progress=status.update) for card in cards]
    if largest:
        show_largest(job, cards[0], largest, most, as_json=as_json)
        raise typer.Exit(int(not any(most.values())))
    if as_json:
        print_json({"searches": [plain(one) for one in found]})
    elif gpu is not None:
        show_plans(found[0])
    else:
        show_cards(found)
    if export and found[0].plans:
        _export(found[0], pairs, export, is_synthetic=data is None)
    raise typer.Exit(int(not any(one.plans for one in found)))


def _job(recipe: Recipe, given: frozenset[str], data: str | None, *, skip_bad, margin):
    """The pairs to train on, and what is to be planned for them."""
    from labkit.data import read_pairs
    from labkit.job import Job
    from labkit.model_source import check_recipe_fits
    from labkit.shapes import mean_longest, pair_lengths
    from labkit.tokenizer import load_tokenizer

    pairs, tokenizer = read_pairs(data, skip_bad=skip_bad), load_tokenizer(recipe.model)
    job = Job(recipe, fixed=given, margin=margin)
    check_recipe_fits(job.source, recipe, len(tokenizer))
    if data is None:
        return pairs, job
    limit, whole = recipe.max_length, pair_lengths(pairs, tokenizer)
    lengths = [min(length, limit) for length in whole]
    if cut := sum(length > limit for length in whole):
        typer.echo(
            f"{cut:,} of {len(whole):,} pairs are longer than {limit} tokens and are cut there "
            f"(the longest has {max(whole):,}: --max-length {max(whole)}).",
            err=True,
        )
    if len(whole) < recipe.batch_size:
        typer.echo(
            f"{pairs.name} has {len(whole)} pairs: a batch of {recipe.batch_size} is planned "
            "for as if it had more like them.",
            err=True,
        )
    if recipe.padding == "max":
        return pairs, job
    mean = mean_longest(lengths, recipe.batch_size)
    return pairs, Job(recipe, max(lengths), mean, given, margin)


def _console():
    """Where the line is that says what is being done; there is none outside of a terminal."""
    from rich.console import Console

    return Console(stderr=True)


def _export(found: "Search", pairs, folder: Path, *, is_synthetic: bool) -> None:
    """Write the best plan as scripts."""
    from labkit.export import export_recipe
    from labkit.plan_words import comment_words

    recipe = found.plans[0].recipe
    for path in export_recipe(recipe, pairs, folder, comment=comment_words(found)):
        typer.echo(f"Written: {path}", err=True)
    typer.echo(f"Try it: python {folder / 'train_transformers.py'} --max-steps 2", err=True)
    if is_synthetic:
        typer.echo("Its pairs are the lab's synthetic ones: --data exports yours.", err=True)
