"""``labkit data model``: train the lab's own small model again, from nothing."""

import hashlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli_options import AsJson
from labkit.cli_output import print_json
from labkit.data import DataError


def model(
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="By default data/model of the lab.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Updates; by default as many as the shipped model had.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="By default that of the shipped model.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train qwen3-mini from random weights on pairs of the lab's grammar: many minutes.

    Writes config.json, model.safetensors and a model card, and prints the weights' SHA-256.
    """
    from labkit.model_source import TRAINED_FOLDER
    from labkit.pretrain import SEED, STEPS, check_arguments, pretrain

    steps, seed = STEPS if steps is None else steps, SEED if seed is None else seed
    check_arguments(steps, seed)
    folder = out or TRAINED_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)  # now, not after all the training
        if not force and any(folder.iterdir()):
            raise DataError(f"{folder} is not empty; --force writes into it.")
        with _bar() as bar:
            task = bar.add_task("training", total=steps, loss="")
            trained = pretrain(
                steps,
                seed,
                progress=lambda step, loss: bar.update(
                    task, completed=step, loss=f"loss {loss:.3f}"
                ),
            )
        file = trained.save(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written to ({error.strerror}).") from error
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    if as_json:
        losses = {"first_loss": trained.losses[0], "last_loss": trained.losses[-1]}
        print_json({"file": str(file), "sha256": sha256, "steps": steps, "seed": seed} | losses)
        return
    typer.echo(f"{sha256}  {file}")


def _bar():
    """A bar on stderr, in a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}")),
        *(TextColumn("of {task.total:,} steps, {task.fields[loss]}"), TimeRemainingColumn()),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
