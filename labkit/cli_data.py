"""``labkit data``: make what comes with the lab, and check a file before training on it."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli_options import AsJson, LabGroup, SkipBad, examples
from labkit.cli_output import print_json
from labkit.cli_pretrain import model
from labkit.data import DATA_FOLDER, DataError, Pairs, read_pairs
from labkit.synthetic import TRAINING_PAIRS, make_splits

SHOWN_BAD_ROWS = 20

app = typer.Typer(
    cls=LabGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make what comes with the lab, or check a file of pairs.",
    epilog=examples("labkit data check my_pairs.jsonl", "labkit data make --out my_pairs"),
)


@app.command(
    epilog=examples(
        "labkit data make",
        "labkit data make --pairs 34334 --seed 7 --out big_pairs",
    )
)
def make(
    pairs: Annotated[
        int,
        typer.Option(min=8, help="Training pairs; dev and test get an eighth of that each."),
    ] = TRAINING_PAIRS,
    seed: Annotated[int, typer.Option(help="The same seed makes the same files.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="By default data/pairs of the lab.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that have other content.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write synthetic pairs as train, dev and test JSONL, and print their SHA-256."""
    folder = out or DATA_FOLDER / "pairs"
    files = {folder / name: content for name, content in make_splits(pairs, seed).items()}
    for file, content in files.items():
        if not force and file.exists() and file.read_bytes() != content:
            raise DataError(f"{file} has other content; --force replaces it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            file.write_bytes(content)
    except OSError as error:
        raise DataError(f"{folder} cannot be written to ({error.strerror}).") from error
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    if as_json:
        print_json({"files": [{"file": str(f), "sha256": s} for f, s in sums.items()]})
        return
    for file, sha256 in sums.items():
        typer.echo(f"{sha256}  {file}")


@app.command(
    epilog=examples(
        "labkit data check train.tsv",
        "labkit data check hub:owner/name/train.json --json",
        "labkit data check pairs.csv --skip-bad",
    )
)
def check(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH", help="A file or hub:ID; by default the lab's own pairs."
        ),
    ] = None,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
) -> None:
    """Count a file's rows, labels, lengths, duplicates and bad rows.

    Exits with 1 if a row is bad (unless --skip-bad is given) or no row has a label.
    """
    pairs = read_pairs(path, skip_bad=True)
    facts = _describe(pairs)
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    if pairs.bad_rows and not skip_bad:
        raise typer.Exit(1)


def _describe(pairs: Pairs) -> dict:
    from labkit.tokenizer import encode, load_tokenizer

    tokenizer = load_tokenizer("qwen3-small")
    together = list(zip(pairs.first, pairs.second, strict=True))
    return pairs.facts() | {
        "labels": {str(label): pairs.labels.count(label) for label in (0, 1)},
        "characters": _spread([len(first + second) for first, second in together]),
        "tokens": _spread([len(ids) for ids in encode(tokenizer, pairs.first, pairs.second)]),
        "duplicates": len(pairs) - len(set(together)),
        "bad_rows": [vars(row) for row in pairs.bad_rows[:SHOWN_BAD_ROWS]],
    }


def _spread(lengths: list[int]) -> dict[str, float]:
    import numpy as np

    median, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    mean = sum(lengths) / len(lengths)
    return {"mean": mean, "median": median, "p90": p90, "p99": p99, "max": max(lengths)}


def _show(facts: dict) -> None:
    for name, text in {
        "file": facts["name"],
        "sha256": facts["sha256"],
        "pairs": f"{facts['pairs']:,}",
        "labels": ", ".join(
            f"{count:,} of label {label} ({count / facts['pairs']:.1%})"
            for label, count in facts["labels"].items()
        ),
        "characters": _spread_words(facts["characters"]),
        "tokens": _spread_words(facts["tokens"]) + " (built-in tokenizer)",
        "duplicates": f"{facts['duplicates']:,}",
        "bad rows": f"{facts['skipped_rows']:,}",
    }.items():
        typer.echo(f"{name:<12}{text}")
    for row in facts["bad_rows"]:
        typer.echo(f"  line {row['line']}: {row['reason']}")
    if facts["skipped_rows"] > len(facts["bad_rows"]):
        typer.echo(f"  and {facts['skipped_rows'] - len(facts['bad_rows']):,} more")


def _spread_words(spread: dict[str, float]) -> str:
    return "a pair: " + ", ".join(f"{name} {length:,.4g}" for name, length in spread.items())


app.command(
    epilog=examples(
        "labkit data model --out my_model",
        "labkit data model --steps 100 --seed 7 --out quick_model",
    )
)(model)


@app.command(
    epilog=examples(
        "labkit data timelines",
        "labkit data timelines --check",
        "labkit data timelines --model qwen3-tiny --gpu a100-40gb",
    )
)
def timelines(
    model: Annotated[
        list[str] | None, typer.Option(help="A built-in model; all of them by default.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="One of the cards that stand for all; all three by default."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare what is there with what is fitted now.")
    ] = False,
) -> None:
    """Fit the timelines that come with the lab, or check them: minutes for each model.

    For whoever changes what a step does, or a pinned library. Exit status 1 where one differs.
    """
    from labkit.predict.gpus import find_gpu
    from labkit.predict.recording import CARDS, MODELS, check_card, record_card

    work = check_card if check else record_card
    for one in model or MODELS:
        if one not in MODELS:
            raise DataError(f"model {one!r} is not built in; one of {', '.join(MODELS)}.")
    differing = 0
    for card in gpu or CARDS:
        if card not in CARDS:
            raise DataError(f"GPU {card!r} stands for no others; one of {', '.join(CARDS)}.")
        for one in model or MODELS:
            for line, is_right in work(one, find_gpu(card)):
                typer.echo(line)
                differing += not is_right
    raise typer.Exit(int(differing > 0))
