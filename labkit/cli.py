"""The command line: every verb answers in a table or, with ``--json``, in one JSON document."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli_data import app as data_app
from labkit.cli_explore import app as explore_app
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
from labkit.cli_output import print_json, show_report, show_run
from labkit.cli_plan import app as plan_app
from labkit.cli_predict import app as predict_app
from labkit.cli_train import app as train_app
from labkit.cli_tune import app as tune_app
from labkit.cli_validate import app as validate_app
from labkit.recipe import Recipe, profile_named

app = typer.Typer(
    cls=LabGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure what each training optimisation does to memory and speed on this machine.",
    epilog=examples("labkit run --profile small", "labkit measure --batch-size 64"),
)
app.add_typer(predict_app)
app.add_typer(plan_app)
app.add_typer(explore_app)
app.add_typer(train_app)
app.add_typer(tune_app)
app.add_typer(validate_app)
app.add_typer(data_app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        from labkit.machine import installed_version

        typer.echo(f"labkit {installed_version('labkit') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command(
    epilog=examples(
        "labkit run",
        "labkit run --profile tiny --name trial",
        "labkit run --gpu a100-80gb",
        "labkit run --resume",
        "labkit run --only 03_amp --only 90_ladder",
    )
)
def run(
    profile: Profile = "small",
    name: Annotated[
        str | None, typer.Option(help="Folder below runs/; by default the profile's name.")
    ] = None,
    data: Data = None,
    skip_bad: SkipBad = False,
    gpu: Annotated[
        str,
        typer.Option(metavar="NAME", help="A card to predict each step for, see predict."),
    ] = "rtx-4090",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what is finished for the same inputs.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SLUG", help="Run this notebook only, in the run's folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the course: every notebook, then a table and an HTML page.

    Exits with 0 when every notebook ran (out of memory is a result), with 1 when one failed,
    with 130 after Ctrl-C.
    """
    from labkit.runner import run_course

    result = run_course(
        profile,
        name=name,
        data=data,
        skip_bad=skip_bad,
        gpu=gpu,
        resume=resume,
        only=only or (),
    )
    notebooks = [asdict(notebook) for notebook in result.notebooks]
    show_run(result.folder, result.page, as_json, notebooks=notebooks)
    for notebook in result.notebooks:
        if notebook.reason:
            typer.echo(f"{notebook.slug}: {notebook.outcome}: {notebook.reason}", err=True)
    raise typer.Exit(result.exit_status)


@app.command(
    epilog=examples(
        "labkit measure",
        "labkit measure --batch-size 64 --micro-batches 4 --autocast bfloat16",
        "labkit measure --profile tiny --lora-targets q_proj,v_proj --json",
    )
)
@recipe_options
def measure(
    recipe: Recipe,
    profile: Profile = "small",
    data: Data = None,
    skip_bad: SkipBad = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda|mps", help="By default the fastest there is."),
    ] = None,
    timed_steps: Annotated[
        int | None,
        typer.Option(min=3, max=1000, help="Steps that are timed; the profile's number."),
    ] = None,
    emulate: Emulate = False,
    as_json: AsJson = False,
) -> None:
    """Measure one recipe on this machine: peak memory, who holds it, time a step."""
    from labkit.data import read_pairs
    from labkit.measure import measure as measure_recipe

    repeats = profile_named(profile)
    report = measure_recipe(
        recipe,
        read_pairs(data, skip_bad=skip_bad),
        device=device,
        warmup_steps=repeats.warmup_steps,
        timed_steps=timed_steps or repeats.timed_steps,
        emulate=emulate,
        progress=lambda text: typer.echo(text, err=True),
    )
    if as_json:
        print_json(
            report.to_dict()
            | {
                "median_step_seconds": report.median_step_seconds,
                "real_tokens_per_second": report.real_tokens_per_second,
            }
        )
    else:
        show_report(report)
    raise typer.Exit(int(report.status == "error"))


@app.command(
    epilog=examples(
        "labkit report", "labkit report runs/small --markdown", "labkit report --json"
    )
)
def report(
    run_folder: Annotated[
        Path | None, typer.Argument(help="A folder below runs/; by default the newest.")
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Answer in a Markdown table.")
    ] = False,
    save_reference: Annotated[
        bool,
        typer.Option(
            "--save-reference", help="Keep the run in data/reference/ for this machine."
        ),
    ] = False,
) -> None:
    """Show a finished run again and renew its page."""
    from labkit.machine import PROJECT
    from labkit.page import write_page
    from labkit.records import RecordError, load_records
    from labkit.reference import save_reference as save
    from labkit.run_folder import newest_run
    from labkit.table import markdown_table, table_rows

    folder = run_folder or newest_run(PROJECT / "runs")
    if not load_records(folder):
        raise RecordError(f"There is no run in {folder}. Make one with: labkit run")
    page = write_page(folder)
    if save_reference:
        typer.echo(f"Kept as {save(load_records(folder))}", err=True)
    if markdown:
        typer.echo(markdown_table(table_rows(load_records(folder))), nl=False)
    else:
        show_run(folder, page, as_json)
