"""What the commands share: options, errors in one sentence, examples in their help."""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import Field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from labkit.recipe import CHOICES, PROFILES, Recipe, RecipeError, profile_named

RECIPE_PANEL = "Recipe (what is not given comes from the profile)"

Profile = Annotated[
    str, typer.Option(metavar="|".join(PROFILES), help="Defaults for a kind of machine.")
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Sentence pairs (JSONL, TSV, CSV or hub:ID) instead of labkit's own.",
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out rows that cannot be used, and count them.")
]
Emulate = Annotated[
    bool, typer.Option("--emulate", help="Use number formats the hardware only imitates.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in one JSON document.")]


class LabGroup(TyperGroup):
    """Commands whose expected errors are one sentence on stderr and exit status 1."""

    def main(self, *args, **options):
        """Start; a terminal that cannot write a character gets a question mark for it."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        return super().main(*args, **options)

    def invoke(self, ctx):
        """Run the command line; an error that is not ours to expect keeps its traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except Exception as error:
            ours = type(error).__module__.startswith("labkit.")
            if not ours and not isinstance(error, OSError):
                raise
            typer.echo(f"labkit: {error}", err=True)
            raise typer.Exit(1) from None


def examples(*commands: str) -> str:
    """The end of a command's help: one example a line."""
    return "\n".join(["[bold]Examples[/bold]", *(f"  $ {command}" for command in commands)])


def recipe_options(command: Callable) -> Callable:
    """Give a command an option for each field of Recipe, and pass it the recipe they make.

    The command takes ``recipe`` and ``profile``; options that are not given keep the values of
    the file that ``--recipe`` names, or else of the profile's recipe. One that takes ``given``
    is told which options were.
    """
    signature = inspect.signature(command)
    wants_given = "given" in signature.parameters

    @wraps(command)
    def with_recipe(**values):
        changes = {f.name: _value(f, values.pop(f.name)) for f in fields(Recipe)}
        given = {name: value for name, value in changes.items() if value is not None}
        recipe = profile_named(values["profile"]).recipe
        if file := values.pop(FILE_OPTION.name):
            recipe = read_recipe(file, recipe)
        recipe = replace(recipe, **given)
        if wants_given:
            values["given"] = frozenset(given)
        return command(recipe=recipe, **values)

    own = [p for p in signature.parameters.values() if p.name not in ("recipe", "given")]
    with_recipe.__signature__ = signature.replace(
        parameters=[*own, FILE_OPTION, *(_option(f) for f in fields(Recipe))]
    )
    return with_recipe


FILE_OPTION = inspect.Parameter(
    "recipe_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            help="JSON of recipe fields, in place of the profile's.",
            rich_help_panel=RECIPE_PANEL,
        ),
    ],
)


def read_recipe(file: Path, defaults: Recipe) -> Recipe:
    """The recipe in a JSON file; fields that it lacks are those of ``defaults``.

    Raises:
        RecipeError: The file cannot be read, or is no recipe.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecipeError(f"--recipe {file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise RecipeError(f"--recipe {file} is not JSON ({error}).") from error
    if not isinstance(values, dict) or isinstance(values.get("lora_targets"), str):
        raise RecipeError(
            f"--recipe {file} is no recipe: a JSON object of recipe fields, in which "
            "lora_targets is a list."
        )
    try:
        return Recipe.from_dict(defaults.to_dict() | values)
    except RecipeError as error:
        raise RecipeError(f"--recipe {file}: {error}") from error
    except TypeError as error:
        raise RecipeError(
            f"--recipe {file}: a value is of the wrong kind ({error})."
        ) from error


def _option(f: Field) -> inspect.Parameter:
    """The option of one recipe field."""
    flag, kind = "--" + f.name.replace("_", "-"), type(f.default)
    choices = f" One of {', '.join(CHOICES[f.name])}." if f.name in CHOICES else ""
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=f.metadata["help"] + choices,
        metavar="NAMES" if kind is tuple else None,
        rich_help_panel=RECIPE_PANEL,
    )
    return inspect.Parameter(
        f.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(list[str] if kind is tuple else kind) | None, option],
    )


def _value(f: Field, value):
    """An option's value as the field holds it; layer names may be listed with commas."""
    if isinstance(f.default, tuple) and value is not None:
        return tuple(name for item in value for name in item.split(",")) or None
    return value
