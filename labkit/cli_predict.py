"""``labkit predict``: what a recipe would cost on a card that is not here."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli_options import (
    AsJson,
    Data,
    Emulate,
    LabGroup,
    Profile,
    SkipBad,
    examples,
    recipe_options,
)
from labkit.cli_output import check_target, print_json, show_gpus, show_report
from labkit.recipe import Recipe

SUFFIXES = (".png", ".html")

app = typer.Typer(cls=LabGroup, rich_markup_mode="rich")


@app.command(
    epilog=examples(
        "labkit predict --gpu a100-40gb --profile 0.6b --checkpoint-every 1",
        "labkit predict --gpu t4 --padding max --batch-size 16 --max-length 512",
        "labkit predict --gpu rtx-4090 --data pairs.tsv --timeline step.html",
        "labkit predict --list-gpus",
    )
)
@recipe_options
def predict(
    recipe: Recipe,
    profile: Profile = "0.6b",
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The card; without it, this machine's CPU."),
    ] = None,
    data: Data = None,
    skip_bad: SkipBad = False,
    expandable_segments: Annotated[
        bool,
        typer.Option(
            "--expandable-segments", help="As set in PYTORCH_CUDA_ALLOC_CONF on the card."
        ),
    ] = False,
    emulate: Emulate = False,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Write the step as a figure (.png) or as a page (.html)."
        ),
    ] = None,
    list_gpus: Annotated[
        bool, typer.Option("--list-gpus", help="Show the cards that are known, and stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict one training step without the hardware: bytes, whether it fits, seconds at best.

    The step is traced on tensors without data and replayed through the allocator of the card.
    It is that of the worst batch: with --padding longest the data decides how long that is,
    with --padding max --max-length does. A step that does not fit is an answer: exit status 0.
    """
    from labkit.predict.gpus import GPUS, find_gpu

    if list_gpus:
        if as_json:
            print_json({"gpus": [asdict(known) for known in GPUS.values()]})
        else:
            show_gpus(GPUS.values())
        return
    card = find_gpu(gpu) if gpu is not None else None
    if timeline:
        check_target(timeline, "--timeline", SUFFIXES)
    from labkit.data import read_pairs
    from labkit.predict.prediction import predict as predict_recipe

    report = predict_recipe(
        recipe,
        card,
        pairs=read_pairs(data, skip_bad=skip_bad),
        expandable_segments=expandable_segments,
        emulate=emulate,
    )
    if timeline:
        from labkit.predicted_page import write_prediction

        write_prediction(report, timeline)
    if as_json:
        print_json(report.to_dict())
    else:
        show_report(report)
    if timeline:
        typer.echo(f"Written: {timeline}", err=True)
