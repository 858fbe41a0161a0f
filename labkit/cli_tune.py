"""``labkit tune``: the fastest recipe on this machine that computes the same."""

from pathlib import Path
from typing import Annotated

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
from labkit.cli_output import check_target, print_json
from labkit.cli_tune_output import show_next, show_tuning, tuning_display
from labkit.recipe import Recipe

app = typer.Typer(cls=LabGroup, rich_markup_mode="rich")


@app.command(
    epilog=examples(
        "labkit tune --data pairs.tsv",
        "labkit tune --profile 0.6b --budget 80% --steps 2000",
        "labkit tune --weights float32 --autocast none   (without rounding to 16 bits)",
        "labkit tune --compile none --budget 512MiB --out tuned.json",
        "labkit train --recipe tuned.json",
    )
)
@recipe_options
def tune(
    recipe: Recipe,
    given: frozenset[str],
    profile: Profile = "small",
    data: Data = None,
    skip_bad: SkipBad = False,
    budget: Annotated[
        str,
        typer.Option(
            metavar="4GiB|512MiB|BYTES|80%",
            help="What the peak may take; a share is one of the free memory.",
        ),
    ] = "90%",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps to be trained, in which compiling pays; 3 epochs."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of a race at most.")] = 5,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="By default the fastest there is.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The recipe; by default below runs/tuned/."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest recipe here that computes the same loss and gradients.

    Fields that are given stay as they are. Batch, lengths, LoRA, learning rate, seed and model
    are never changed. Whether a recipe fits is predicted, which one is faster is measured in
    turn. A .record.json beside the recipe holds every step. Ctrl-C writes the best recipe so
    far and exits with 130.
    """
    if out:
        check_target(out, "--out", [".json"])
    from labkit.data import read_pairs
    from labkit.tuning import tune as search
    from labkit.tuning_proof import NotExact
    from labkit.tuning_record import save_recipe, save_record

    path, pairs = out or default_path(recipe), read_pairs(data, skip_bad=skip_bad)
    try:
        with tuning_display() as progress:
            tuning = search(
                recipe, pairs, fixed=given, budget=budget, steps=steps, rounds=rounds,
                device=device, progress=progress,
            )  # fmt: skip
    except NotExact as error:
        typer.echo(f"Record: {save_record(error.tuning, path)}", err=True)
        raise
    except KeyboardInterrupt:
        typer.echo("Stopped before a recipe was found; nothing is written.", err=True)
        raise typer.Exit(130) from None
    record = save_recipe(tuning, path)
    if as_json:
        print_json(tuning.to_dict() | {"path": str(path), "record": str(record)})
    elif not tuning.interrupted:
        show_tuning(tuning)
        show_next(path, data)
    if tuning.interrupted:
        typer.echo(f"Stopped: the best so far, not checked, is in {path}", err=True)
        raise typer.Exit(130)


def default_path(recipe: Recipe) -> Path:
    """Where a recipe is written that nobody named: after its model, batch and length."""
    from labkit.machine import PROJECT

    model = Path(recipe.model).name.removesuffix(".json")
    name = f"{model}-{recipe.batch_size}-pairs-of-{recipe.max_length}.json"
    return PROJECT / "runs" / "tuned" / name
