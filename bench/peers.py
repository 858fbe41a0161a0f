"""Real tokens a second and peak bytes of labkit, two trainers, and three articles' recipes.

All train the same: one model geometry from the same random weights, the same LoRA matrices and
head, the same pairs, batch size and learning rate, on this processor. They run in one process,
some steps at a time, in turn; the order changes from round to round, so that a machine that
slows down slows all. Counted are real tokens, never padding, and seconds from reading the pairs
to the update. What is done once before training (making a cache, compiling) is not counted.
The first run compiles most of its time; a later one finds much of that in torch's cache.

The contenders:

- ``labkit_baseline``: where the course begins. ``labkit_tuned``: the recipe of ``--recipe``, or
  a fast one; ``labkit_tuned_eager``: the same, not compiled.
- ``trainer_…``: transformers' Trainer at its defaults, and with settings that may be faster.
- ``crossencoder_…``: sentence-transformers' CrossEncoderTrainer, likewise.
- ``article_…``: see ``peers_articles.py``. Where a recipe cannot run, the output says how it
  was repaired.

Left out, because they need a card or another task: Liger kernels, FlashAttention and the
unpadded inputs that need it, and collators that lay texts end to end for language models.
"""

import argparse
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from statistics import median

import labkit  # noqa: F401 - before torch, whose threads read what it sets

# isort: split
from peers_articles import RECIPES, Article
from peers_measure import (
    CPU,
    PEAK_BATCHES,
    Contender,
    Skipped,
    Task,
    many_graphs,
    matrix_rates,
    need_compiler,
    useful_flops_per_token,
)
from peers_table import HEADINGS, markdown, notes, rows
from peers_trainer import HeldCrossEncoder, HeldTrainer, cross_encoders, trainers
from rich.console import Console
from rich.table import Table

from labkit.data import Pairs, read_pairs
from labkit.machine import machine_facts
from labkit.memory import measure_memory
from labkit.precision import choose_precision
from labkit.recipe import Recipe, ladder
from labkit.step import build_step
from labkit.tokens import batches

REFERENCE = "labkit_tuned"
REFERENCES = (REFERENCE, "labkit_tuned_eager")  # the second where there is no compiler
TUNED = Recipe(
    padding="none",
    weights="bfloat16",
    last_token_only=True,
    fast_dropout=True,
    cached=True,
    optimizer="adamw_fused",
    compile="default",
)
WIDTH = 160  # of the table where there is no terminal
EXTRAS = ("accelerate", "sentence-transformers", "datasets")
CHECKED_STEPS = 2  # the second shows that the first one updated the same way
TOLERANCE = 1e-4  # of a loss; summing in another order changes less
SANE_LOSS = 1.0  # above ln 2 of a coin, with room for the noise of one batch

EXAMPLES = """examples:
  python bench/peers.py --out peers.json         # all of them, some minutes
  python bench/peers.py --only labkit_tuned,trainer_grouped --rounds 4
  python bench/peers.py --data pairs.tsv --batch-size 16 --recipe recipe.json
  python bench/peers.py --check                  # do they train the same?
  python bench/peers.py --markdown peers.json    # the table of a record
"""


class Labkit(Contender):
    """A recipe of labkit, by the very step that it measures."""

    def __init__(self, name: str, task: Task, settings: str, recipe: Recipe) -> None:
        super().__init__(name, task, settings)
        self.recipe = task.with_shared(recipe)
        self.compiles = recipe.compile != "none"

    def build(self) -> None:
        """The step and its stream of batches."""
        task = self.task
        precision = choose_precision(self.recipe, CPU, emulate=task.emulate)
        if precision.reason:
            self.repairs.append(f"{precision.reason}.")
        if self.compiles:
            need_compiler()
        self.step = build_step(
            self.recipe, task.source, precision, CPU, pad_token_id=task.tokenizer.pad_token_id
        )
        self.batches = self._stream()

    def _stream(self):
        return batches(
            self.recipe, self.task.pairs, self.task.tokenizer, cache_folder=self.task.folder
        )

    def _advance(self) -> None:
        batch = next(self.batches)
        loss = self.step(batch)
        self.seen.append(((batch.real_tokens, batch.computed_tokens), loss))

    def peak(self) -> int:
        """As the base class says."""
        planned = islice(self._stream(), PEAK_BATCHES)
        largest = max(planned, key=lambda batch: batch.computed_tokens)
        self.step(largest)
        return measure_memory(self.step, largest).peak_allocated_bytes

    def close(self) -> None:
        """Drop the step."""
        del self.step, self.batches


def contenders(task: Task, tuned: Recipe) -> list[Contender]:
    """All of them, in the order of the table."""
    eager = replace(tuned, compile="none")
    words = describe(tuned)
    baseline = ladder(task.recipe)["00_baseline"]
    return [
        Labkit("labkit_baseline", task, "where the course begins: float32", baseline),
        Labkit(REFERENCE, task, words, tuned),
        Labkit("labkit_tuned_eager", task, "the same, not compiled", eager),
        *trainers(task),
        *cross_encoders(task),
        *(Article(name, task) for name in RECIPES),
    ]


def describe(recipe: Recipe) -> str:
    """What in a recipe is not the default, leaving out what is the same for all."""
    left_out = ("model", "batch_size", "max_length", "lora_targets", "learning_rate", "seed")
    changed = {
        name: value
        for name, value in recipe.to_dict().items()
        if value != Recipe().to_dict()[name] and name not in left_out
    }
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in changed.items())


def exact_contenders(task: Task) -> list[Contender]:
    """One of each kind, in float32 and not compiled: without dropout, their losses agree."""
    packed = replace(TUNED, weights="float32", compile="none")
    return [
        Labkit("labkit", task, "padded to the longest", task.recipe),
        Labkit("labkit_packed", task, describe(packed), packed),
        HeldTrainer("trainer", task, "defaults"),
        HeldTrainer("trainer_grouped", task, "", train_sampling_strategy="group_by_length"),
        HeldCrossEncoder("crossencoder", task, "defaults"),
        HeldCrossEncoder("crossencoder_grouped", task, "", grouped=True),
        *(Article(name, task, exact=True) for name in RECIPES),
    ]


def check(task: Task, progress: Callable[[str], None]) -> dict[str, list[float] | str]:
    """The first losses of each kind on one and the same batch, or why there are none.

    The data are as many pairs as a batch holds, none of which is cut.
    """
    lengths = [len(row) for row in task.rows(8192)]
    fit = [i for i, length in enumerate(lengths) if length <= task.recipe.max_length]
    chosen = fit[: task.recipe.batch_size]
    columns = ("first", "second", "labels")
    few = {name: [getattr(task.pairs, name)[i] for i in chosen] for name in columns}
    task = replace(
        task,
        pairs=replace(task.pairs, **few),
        recipe=replace(task.recipe, lora_dropout=0.0, batch_size=len(chosen)),
    )
    found = {}
    for contender in exact_contenders(task):
        progress(f"{contender.name}: losses of {CHECKED_STEPS} steps")
        try:
            contender.build()
        except Skipped as reason:
            found[contender.name] = str(reason)
            continue
        found[contender.name] = contender.run(CHECKED_STEPS).losses
        contender.close()
    return found


def disagreeing(losses: dict[str, list[float] | str]) -> list[str]:
    """Who has other losses than the first."""
    first = next(iter(losses.values()))
    return [
        name
        for name, values in losses.items()
        if not isinstance(values, str)
        and any(abs(one - other) > TOLERANCE for one, other in zip(values, first, strict=True))
    ]


def measure_all(
    task: Task,
    found: list[Contender],
    *,
    rounds: int,
    steps: int,
    progress: Callable[[str], None],
) -> dict:
    """Measure the contenders in turn, and the machine's limit before and after."""
    progress("rate of matrix products, operations of a token")
    limits = [matrix_rates(task)]
    flops = useful_flops_per_token(task)
    with many_graphs():
        entries = run_rounds(found, rounds, steps, progress)
    limits.append(matrix_rates(task))
    for entry in entries.values():
        summarise(entry)
    rates = {
        name: max((one[name] for one in limits), key=lambda rate: rate["flops_per_second"])
        for name in limits[0]
    }
    return {
        "machine": machine_facts("cpu"),
        "versions": {name: installed(name) for name in EXTRAS},
        "task": task.recipe.to_dict() | {"data": task.pairs.facts()},
        "rounds": rounds,
        "steps": steps,
        "reference": next(
            (n for n in REFERENCES if entries.get(n, {}).get("slices")), REFERENCE
        ),
        "matrix_rates": rates,
        "useful_flops_per_token": flops,
        "contenders": list(entries.values()),
    }


def run_rounds(
    found: list[Contender], rounds: int, steps: int, progress: Callable[[str], None]
) -> dict[str, dict]:
    """What was measured of each contender: prepared one by one, then in turn."""
    entries = {contender.name: prepare(contender, progress) for contender in found}
    running = [c for c in found if entries[c.name]["status"] == "ok"]
    for index in range(rounds):
        progress(f"round {index + 1} of {rounds}")
        for contender in running if index % 2 == 0 else reversed(running):
            entry = entries[contender.name]
            attempt(
                entry, lambda c=contender, e=entry: e["slices"].append(asdict(c.run(steps)))
            )
        running = [c for c in running if entries[c.name]["status"] == "ok"]
    for contender in running:
        contender.close()
    return entries


def prepare(contender: Contender, progress: Callable[[str], None]) -> dict:
    """Build a contender, warm it up and take its peak; what is known of it so far."""
    entry = {
        "name": contender.name,
        "family": contender.family,
        "settings": contender.settings,
        "repairs": contender.repairs,
        "status": "ok",
        "reason": "",
        "peak_bytes": None,
        "warm_up": None,
        "slices": [],
    }

    def work() -> None:
        progress(f"{contender.name}: building")
        contender.build()
        progress(f"{contender.name}: warming up{', compiling' * contender.compiles}")
        entry["warm_up"] = asdict(contender.warm_up())
        progress(f"{contender.name}: recording allocations of a step")
        entry["peak_bytes"] = contender.peak()

    attempt(entry, work)
    return entry


def attempt(entry: dict, work: Callable[[], None]) -> None:
    """Do a part of the work; a contender that cannot go on says why, and the others do."""
    if entry["status"] != "ok":
        return
    try:
        work()
    except Skipped as reason:
        entry["status"], entry["reason"] = "skipped", str(reason)
    except Exception as error:  # any library's own; it must not end the others
        first = (str(error).strip() or "no message").splitlines()[0]
        entry["status"], entry["reason"] = "error", f"{type(error).__name__}: {first}"


def summarise(entry: dict) -> None:
    """Put the losses of all steps in order, and whether they are those of training."""
    parts = [entry["warm_up"] or {"losses": []}, *entry["slices"]]
    losses = entry["losses"] = [loss for part in parts for loss in part["losses"]]
    late = losses[len(losses) // 2 :]
    entry["losses_sane"] = bool(
        losses and all(map(math.isfinite, losses)) and median(late) < SANE_LOSS
    )


def installed(package: str) -> str | None:
    """The version of a package, None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def show(record: dict) -> None:
    """The record as a table on stdout."""
    width = None if sys.stdout.isatty() else WIDTH
    console, table = Console(width=width), Table(padding=(0, 1, 0, 0), box=None)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=heading != "Settings")
    for row in rows(record):
        table.add_row(*row)
    console.print(table)
    for note in notes(record):
        console.print(note, markup=False, soft_wrap=True, highlight=False)


def quiet() -> None:
    """Keep what libraries say to those who call them out of the output."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("sentence_transformers", "accelerate", "torch._dynamo", "torch._inductor"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", metavar="FILE", help="pairs; the synthetic ones if left out")
    add("--model", default="qwen3-small", help="default: %(default)s")
    add("--batch-size", type=int, default=32, metavar="N", help="default: %(default)s")
    add("--recipe", type=Path, metavar="FILE", help="labkit_tuned's recipe, as JSON")
    add(
        "--rounds", type=int, default=6, metavar="N", help="turns of each; default: %(default)s"
    )
    add("--steps", type=int, default=3, metavar="N", help="steps a turn; default: %(default)s")
    add("--only", metavar="NAMES", help="contenders to run, with commas; labkit_tuned runs too")
    add("--out", "--json", type=Path, metavar="FILE", help="where the record is written")
    add("--check", action="store_true", help="compare first losses, and measure nothing")
    add("--markdown", type=Path, metavar="RECORD", help="print the table of a record")
    options = parser.parse_args(arguments)
    for name in ("batch_size", "rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1.")
    if options.out and not options.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.parent}.")
    return options


def chosen_contenders(found: list[Contender], only: str | None) -> list[Contender]:
    """Those that were named, and the one that all are compared with.

    Raises:
        ValueError: A name is of none.
    """
    if only is None:
        return found
    wanted, known = set(only.split(",")), {contender.name for contender in found}
    if unknown := sorted(wanted - known):
        raise ValueError(
            f"--only: there is no {', '.join(unknown)}; there are {', '.join(sorted(known))}."
        )
    return [contender for contender in found if contender.name in wanted | {REFERENCE}]


def main(arguments: list[str] | None = None) -> int:
    """Measure, check, or show a record."""
    options = read_options(arguments)
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text(encoding="utf-8"))))
        return 0
    quiet()
    try:
        pairs: Pairs = read_pairs(options.data)
        shared = Recipe(model=options.model, batch_size=options.batch_size)
        tuned = TUNED
        if options.recipe:
            values = json.loads(options.recipe.read_text(encoding="utf-8"))
            tuned = Recipe.from_dict(values)
        with tempfile.TemporaryDirectory() as folder:
            task = Task(shared, pairs, Path(folder))
            if options.check:
                return print_check(check(task, progress))
            found = chosen_contenders(contenders(task, tuned), options.only)
            record = measure_all(
                task, found, rounds=options.rounds, steps=options.steps, progress=progress
            )
    except (OSError, ValueError) as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 2
    if options.out:
        text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
        options.out.write_text(text, encoding="utf-8")
    show(record)
    return 0


def progress(text: str) -> None:
    """What is being done, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_check(losses: dict[str, list[float] | str]) -> int:
    """The losses, and whether all agree; the exit code says so, too."""
    wrong = disagreeing(losses)
    for name, values in losses.items():
        words = values if isinstance(values, str) else ", ".join(f"{v:.6f}" for v in values)
        print(f"{name}: {words}{'  differs' * (name in wrong)}")
    print(f"All within {TOLERANCE:g}." if not wrong else f"Not the same: {', '.join(wrong)}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
