"""``labkit train``: fine-tune until it gets no better, and say how good that is."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from labkit.cli_output import print_json
from labkit.cli_train_output import (
    check_tensorboard,
    show_training,
    tensorboard_writer,
    training_display,
)
from labkit.recipe import Recipe

if TYPE_CHECKING:
    from labkit.training import Schedule, Trained

app = typer.Typer(cls=LabGroup, rich_markup_mode="rich")


class TrainCommandError(ValueError):
    """Options of ``labkit train`` that do not go together, or memory that did not suffice."""


@app.command(
    epilog=examples(
        "labkit train --model qwen3-mini",
        "labkit train --data train.tsv --validation dev.tsv --test test.tsv",
        "labkit train --data pairs.csv --validation 0.2 --epochs 5 --name mine",
        "labkit train --profile 0.6b --model my-folder --evaluate-every 200 --light 500",
        "labkit train --recipe recipe.json --resume",
    )
)
@recipe_options
def train(
    recipe: Recipe,
    profile: Profile = "small",
    data: Data = None,
    validation: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|SHARE",
            help="Pairs to validate on, or the share of the training pairs to hold out; by "
            "default labkit's own for labkit's pairs, else a tenth.",
        ),
    ] = None,
    test: Annotated[
        str | None, typer.Option(metavar="PATH", help="Score the best adapter on these, too.")
    ] = None,
    skip_bad: SkipBad = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pairs at most.")] = 10,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps at most.")] = None,
    patience: Annotated[
        int, typer.Option(min=1, help="Evaluations without a better one, then it stops.")
    ] = 3,
    evaluate_every: Annotated[
        int | None, typer.Option(min=1, metavar="STEPS", help="By default an epoch.")
    ] = None,
    light: Annotated[
        int | None,
        typer.Option(min=1, metavar="PAIRS", help="Validate on so many, at the end on all."),
    ] = None,
    checkpoint_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="By default after each evaluation."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Folder below runs/train/; else the profile's name.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder elsewhere.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's checkpoint, bit for bit.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write losses and scores for TensorBoard.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda|mps", help="By default the fastest there is."),
    ] = None,
    emulate: Emulate = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune until validation macro-F1 no longer rises; save the best adapter.

    Ctrl-C ends the step, writes a checkpoint and exits with 130; --resume goes on from there.
    """
    if name and out:
        raise TrainCommandError("--name is below runs/train/, --out elsewhere: leave one out.")
    from labkit.data import read_pairs
    from labkit.machine import PROJECT
    from labkit.model_source import find_model
    from labkit.records import to_json, write_text
    from labkit.run_folder import open_run_folder
    from labkit.subsets import pairs_for_training, shared_pairs
    from labkit.tokenizer import load_tokenizer
    from labkit.training import Schedule

    schedule = Schedule(epochs, max_steps, evaluate_every, patience, light, checkpoint_steps)
    pairs, held = pairs_for_training(data, validation, skip_bad=skip_bad)
    if leaked := shared_pairs(pairs, held):
        _say(f"{leaked:,} of the {len(held):,} validation pairs are training pairs, too.")
    tested = read_pairs(test, skip_bad=skip_bad) if test else None
    if tensorboard:
        check_tensorboard()
    load_tokenizer(find_model(recipe.model).name)  # before an earlier run is put aside
    runs = out.absolute().parent if out else PROJECT / "runs" / "train"
    own_name = out.name if out else name or profile
    with open_run_folder(runs, own_name, keep=resume, say=_say) as folder:
        writer = tensorboard_writer(folder) if tensorboard else None
        options = {"resume": resume, "device": device, "emulate": emulate}
        trained = _train(recipe, pairs, held, folder, schedule, writer, options)
        threshold = trained.scores.best_threshold
        test_scores = shifted = None
        if tested:
            answers = trained.answer(tested)
            test_scores, shifted = answers.scores(), answers.scores(threshold)
        document = _document(trained, pairs, held, folder) | {
            "test": tested and tested.facts(),
            "test_scores": test_scores and test_scores.to_dict(),
            "test_scores_at_best_threshold": shifted and shifted.to_dict(),
        }
        write_text(folder / "training.json", to_json(document) + "\n")
    if as_json:
        print_json(document)
        return
    scored = {held.name: trained.scores} | ({tested.name: test_scores} if tested else {})
    show_training(trained, scored, shifted, document["notes"])


def _train(
    recipe: Recipe, pairs, held, folder: Path, schedule: "Schedule", writer, options: dict
) -> "Trained":
    """Train and show how it goes; signals end it after the step that is under way."""
    from labkit.interruption import Interruption
    from labkit.training import Interrupted, train
    from labkit.trial import is_out_of_memory

    last_step = schedule.last_step(math.ceil(len(pairs) / recipe.batch_size))
    try:
        with Interruption() as stop, training_display(last_step, writer) as display:
            return train(
                recipe, pairs, held, folder, schedule=schedule, stop=stop,
                progress=display.progress, watch=display.watch, **options,
            )  # fmt: skip
    except Interrupted as reason:
        _say(f"{reason} Go on with the same options and --resume.")
        raise typer.Exit(128 + stop.number) from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainCommandError(
            "memory ran out: lower --batch-size or raise --micro-batches; `labkit plan` finds "
            "what fits."
        ) from error


def _document(trained: "Trained", pairs, held, folder: Path) -> dict:
    """All that is known of the training, as JSON values."""
    from labkit.machine import machine_facts
    from labkit.model_source import ARCHITECTURE_ONLY, find_model

    model = find_model(trained.step.recipe.model).facts()
    notes = [reason] if (reason := trained.step.precision.reason) else []
    if model["weights"] == ARCHITECTURE_ONLY:
        notes.append(
            f"{model['name']}: {ARCHITECTURE_ONLY}. These scores say nothing of what the real "
            "model reaches; --model qwen3-mini begins with weights that were trained."
        )
    return {
        "recipe": trained.step.recipe.to_dict(),
        "model": model,
        "data": pairs.facts(),
        "validation": held.facts(),
        "precision": trained.step.precision.to_dict(),
        "machine": machine_facts(trained.step.device.type),
        "steps": trained.steps,
        "stopped": trained.stopped,
        "seconds": trained.seconds,
        "best_step": trained.best_step,
        "scores": trained.scores.to_dict(),
        "folder": str(folder),
        "adapter": str(trained.adapter),
        "notes": notes,
    }


def _say(text: str) -> None:
    typer.echo(text, err=True)
