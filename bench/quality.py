"""Does an optimisation change what is learned? Each recipe trained over seeds, with intervals.

Every recipe trains the same model on the same pairs for the same number of updates, once for
each seed; the scores are those of the last step, on pairs that were not trained on. A second
part asks how well a light validation, on a sample, stands for the full one.

Usage, from the project's folder:
    python bench/quality.py --out data/bench/MACHINE-quality.json
    python bench/quality.py --data train.tsv --validation dev.tsv --steps 1000 --seeds 3
    python bench/quality.py --markdown data/bench/MACHINE-quality.json
"""

import argparse
import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from labkit.captions import format_seconds
from labkit.data import Pairs
from labkit.machine import default_device, machine_facts
from labkit.model_source import find_model
from labkit.precision import choose_precision
from labkit.quality import evaluate, interval
from labkit.recipe import Recipe, ladder
from labkit.records import write_text
from labkit.step import TrainingStep, build_step
from labkit.subsets import pairs_for_training, sample
from labkit.tokens import batches, load_tokenizer

LIGHT = (50, 100, 200)  # pairs of a light validation
RATE = 1e-3  # learning rate: that of the course is too low to learn in few steps


def recipes(base: Recipe) -> dict[str, Recipe]:
    """What is fastest, then the ladder."""
    steps = ladder(base)
    fast = replace(
        base, padding="none", weights="bfloat16", last_token_only=True, fast_dropout=True,
        cached=True, optimizer="adamw_fused",
    )  # fmt: skip
    return {
        "fast": fast,
        "fast, float32": replace(fast, weights="float32"),
        "fast, grouped": replace(fast, padding="grouped", last_token_only=False),
    } | steps


def trained(recipe: Recipe, pairs: Pairs, steps: int) -> tuple[TrainingStep, object]:
    """The step after so many updates, and its tokenizer."""
    torch.compiler.reset()  # or the graphs of the last training count against this one
    device, tokenizer = torch.device(default_device()), load_tokenizer(recipe.model)
    step = build_step(
        recipe, find_model(recipe.model), choose_precision(recipe, device), device,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    for number, batch in enumerate(islice(batches(recipe, pairs, tokenizer), steps)):
        torch.manual_seed(recipe.seed + number)
        step(batch.to(device))
    return step, tokenizer


def measure(options: argparse.Namespace) -> dict:
    """The record: every score of every recipe and seed."""
    pairs, held_out = pairs_for_training(options.data, options.validation)
    base = Recipe(model=options.model, learning_rate=RATE)
    kept, light = {}, []
    record = {
        "machine": machine_facts(),
        "model": find_model(options.model).facts(),
        "data": [pairs.facts(), held_out.facts()],
        "steps": options.steps,
        "scores": kept,
        "light": light,
    }
    for name, recipe in recipes(base).items():
        if options.only and name not in options.only:
            continue
        kept[name] = []
        for seed in range(options.seeds):
            sys.stderr.write(f"{name}, seed {seed}\n")
            step, tokenizer = trained(replace(recipe, seed=seed), pairs, options.steps)
            scores = evaluate(step, held_out, tokenizer)
            kept[name].append(scores.to_dict())
            if name == "fast":
                light += _light(step, tokenizer, held_out, scores)
        if options.out:  # an interruption leaves what is done
            write_text(options.out, json.dumps(record, ensure_ascii=False))
    return record


def _light(step: TrainingStep, tokenizer, held_out: Pairs, full) -> list[dict]:
    """Samples beside all pairs: how far the score is off, and what it costs."""
    found = []
    for count in LIGHT:
        for seed in range(5):
            if count < len(held_out):
                scores = evaluate(step, sample(held_out, count, seed), tokenizer)
                off = scores.macro_f1 - full.macro_f1
                seconds = {"seconds": scores.seconds, "full_seconds": full.seconds}
                found.append({"pairs": count, "macro_f1_off": off} | seconds)
    return found


def markdown(record: dict) -> str:
    """The record as two tables, with where it was measured."""
    data, held_out = record["data"]
    first = next(iter(record["scores"].values()))
    lines = [
        f"Measured on {record['machine']['name']}: {record['model']['name']} "
        f"({record['model']['weights']}), {record['steps']} updates on {data['pairs']:,} pairs "
        f"({data['name']}), scored on {held_out['pairs']:,} others, {len(first)} seeds. "
        f"Always answering the majority's label has a macro-F1 of "
        f"{first[0]['majority_macro_f1']:.3f}.",
        "",
        "| Recipe | macro-F1, mean (95 % interval) | Accuracy | Average precision |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, scores in record["scores"].items():
        cells = [_interval([each[key] for each in scores]) for key in ("macro_f1", "accuracy")]
        precision = _interval([each["average_precision"] for each in scores])
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {precision} |")
    if record["light"]:
        lines += ["", "| Validated on | macro-F1 off by at most | Time, of the full one's |"]
        lines += ["| ---: | ---: | ---: |"]
        for count in sorted({row["pairs"] for row in record["light"]}):
            rows = [row for row in record["light"] if row["pairs"] == count]
            worst = max(abs(row["macro_f1_off"]) for row in rows)
            seconds = [sum(row[key] for row in rows) for key in ("seconds", "full_seconds")]
            lines.append(
                f"| {count} pairs ({len(rows)} samples) | {worst:.3f} | "
                f"{seconds[0] / seconds[1]:.0%} of {format_seconds(seconds[1] / len(rows))} |"
            )
    return "\n".join(lines) + "\n"


def _interval(values: list[float]) -> str:
    mean, low, high = interval(values)
    return f"{mean:.3f} ({low:.3f}–{high:.3f})"


def main() -> None:
    """Train and score, or show a record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-mini", help="one with weights")
    parser.add_argument("--data", help="pairs to train on; the synthetic ones by default")
    parser.add_argument("--validation", help="pairs to score on, or a share to hold out")
    parser.add_argument("--steps", type=int, default=40, help="updates of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each recipe")
    parser.add_argument("--only", nargs="+", help="these recipes, such as fast 00_baseline")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--markdown", type=Path, metavar="RECORD", help="show a kept record")
    options = parser.parse_args()
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text(encoding="utf-8"))), end="")
        return
    print(markdown(measure(options)), end="")


if __name__ == "__main__":
    main()
