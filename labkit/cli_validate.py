"""``labkit validate``: what is predicted, beside what is measured or was published."""

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
from labkit.cli_output import check_target, print_json, show_published, show_validation
from labkit.recipe import Recipe

app = typer.Typer(cls=LabGroup, rich_markup_mode="rich")


def _say(text: str) -> None:
    typer.echo(text, err=True)


@app.command(
    epilog=examples(
        "labkit validate --profile small",
        "labkit validate --profile 0.6b --layers 4 --batch-size 4 --no-compile",
        "labkit validate --profile 0.6b --device cuda --out validation.json",
        "labkit validate --published",
    )
)
@recipe_options
def validate(
    recipe: Recipe,
    profile: Profile = "small",
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="The model's first layers only, with random weights."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="By default the fastest there is."),
    ] = None,
    emulate: Emulate = False,
    data: Data = None,
    skip_bad: SkipBad = False,
    step: Annotated[
        list[str] | None, typer.Option(metavar="SLUG", help="This step of the ladder only.")
    ] = None,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Leave out the compiled steps.")
    ] = False,
    published: Annotated[
        bool,
        typer.Option("--published", help="Compare with published figures; nothing is run."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write every report to this JSON file, step by step."
        ),
    ] = None,
    save_reference: Annotated[
        bool,
        typer.Option("--save-reference", help="Keep it in data/reference/ for this machine."),
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Answer in a Markdown table.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the steps of the course and measure them here: how far off are the predictions?

    Bytes are those of a second step on one batch, with random weights. Exits with 1 when an
    error is above its bound (on a CPU, where steps are not compiled; and with --published) or
    when a step could not be predicted. Out of memory is a result.
    """
    if out:
        check_target(out, "--out", (".json",))
    keep = (lambda document: _write(out, document)) if out else (lambda document: None)
    if published:
        _published(keep, as_json, markdown)
        return
    from labkit.data import read_pairs
    from labkit.machine import default_device
    from labkit.measure import usable_device
    from labkit.validation import save_validation
    from labkit.validator import chosen_steps
    from labkit.validator import validate as validate_steps

    result = validate_steps(
        chosen_steps(recipe, step or (), compiled=not no_compile),
        read_pairs(data, skip_bad=skip_bad),
        usable_device(device or default_device()),
        profile=profile,
        layers=layers,
        emulate=emulate,
        progress=_say,
        keep=lambda validation: keep(validation.to_dict()),
    )
    if as_json:
        print_json(result.to_dict())
    elif markdown:
        from labkit.validation_words import validation_markdown

        typer.echo(validation_markdown(result), nl=False)
    else:
        show_validation(result)
    if save_reference:
        _say(f"Kept as {save_validation(result)}")
    raise typer.Exit(int(bool(result.failed)))


def _published(keep, as_json: bool, markdown: bool) -> None:
    from labkit.predict.published import compare_published

    rows = compare_published(progress=_say)
    document = {"published": [row.to_dict() for row in rows]}
    keep(document)
    if as_json:
        print_json(document)
    elif markdown:
        from labkit.validation_words import published_markdown

        typer.echo(published_markdown(rows), nl=False)
    else:
        show_published(rows)
    raise typer.Exit(int(not all(row.within for row in rows)))


def _write(path: Path, document: dict) -> None:
    from labkit.records import to_json, write_text

    write_text(path, to_json(document) + "\n")
