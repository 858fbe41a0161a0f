"""What each switch of a fast step is worth here, one against another in one session.

Every line is one recipe measured against another by ``labkit.measure.compare``: bytes of each
alone, times of steps that alternate. Minutes; nothing else should run meanwhile.

Usage, from the project's folder:
    python bench/switches.py --out data/bench/MACHINE-switches.json
    python bench/switches.py --markdown data/bench/MACHINE-switches.json
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from labkit.captions import format_seconds
from labkit.data import read_pairs
from labkit.machine import machine_facts
from labkit.measure import compare
from labkit.recipe import Recipe, describe_change
from labkit.records import write_text
from labkit.report import Comparison, format_bytes

FAST = Recipe(padding="none", weights="bfloat16", cached=True, optimizer="adamw_fused")
AUTOCAST = {"weights": "float32", "autocast": "bfloat16"}
INSTRUCTION = "Instruct: 判断两个问题是否询问同一件事\nQuery: "


def switches() -> list[tuple[Recipe, Recipe]]:
    """Pairs of recipes that differ in what is looked at."""
    told = replace(FAST, instruction=INSTRUCTION)
    pairs = [
        (replace(FAST, padding="max"), replace(FAST, padding="longest")),
        (replace(FAST, padding="longest"), replace(FAST, padding="grouped")),
        (replace(FAST, padding="grouped"), FAST),
        (FAST, replace(FAST, last_token_only=True)),
        (told, replace(told, shared_prefix=True)),
        (replace(FAST, optimizer="adamw"), FAST),
        (replace(FAST, cached=False), FAST),
        (replace(FAST, cached=False), replace(FAST, cached=False, num_workers=1)),
        (FAST, replace(FAST, fast_dropout=True)),
    ]
    if (os.cpu_count() or 1) > 1:
        pairs.append((replace(FAST, threads=1), FAST))
    for batch_size in (4, 32, 128):
        base = replace(FAST, batch_size=batch_size)
        pairs.append((replace(base, **AUTOCAST), base))
        pairs.append((replace(base, weights="float32"), replace(base, **AUTOCAST)))
    return pairs


def measure(steps: int) -> dict:
    """The record: machine, and every comparison."""
    data, kept = read_pairs(), []
    for number, (before, after) in enumerate(pairs := switches(), 1):
        sys.stderr.write(f"{number} of {len(pairs)}: {describe_change(before, after)}\n")
        comparison = compare(before, after, data, timed_steps=steps)
        for report in (comparison.before, comparison.after):
            if report.memory:
                report.memory.timeline = []
            report.machine = {}  # one for all, beside them
        kept.append(comparison.to_dict())
    return {"machine": machine_facts(), "comparisons": kept}


def markdown(record: dict) -> str:
    """The record as a table, with where it was measured."""
    machine = record["machine"]
    lines = [
        f"Measured on {machine['name']}, torch {machine['versions']['torch']}; model "
        f"{FAST.model}, {FAST.batch_size} pairs a step where no other number is named.",
        "",
        "| From | To | Pairs a step | Speed (quartiles) | Time a step, after | Peak memory |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for values in record["comparisons"]:
        found = Comparison.from_dict(values)
        lines.append("| " + " | ".join(_cells(found)) + " |")
    return "\n".join(lines) + "\n"


def _cells(found: Comparison) -> list[str]:
    before, after = found.before, found.after
    changed = [
        name
        for name, value in before.recipe.to_dict().items()
        if value != after.recipe.to_dict()[name]
    ]
    sides = [
        ", ".join(f"{name} `{getattr(report.recipe, name)}`" for name in changed)
        for report in (before, after)
    ]
    if not (before.ok and after.ok):
        return [*sides, str(after.recipe.batch_size), "not measured", "", ""]
    low, high = found.speed_ratio_spread
    unclear = "" if found.speed_change_is_clear else ", unclear"
    return [
        *sides,
        str(after.recipe.batch_size),
        f"{found.speed_ratio:.2f}× ({low:.2f}–{high:.2f}){unclear}",
        format_seconds(after.median_step_seconds),
        f"{format_bytes(before.memory.peak_allocated_bytes)} → "
        f"{format_bytes(after.memory.peak_allocated_bytes)}",
    ]


def main() -> None:
    """Measure, or show a record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each recipe")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--markdown", type=Path, metavar="RECORD", help="show a kept record")
    options = parser.parse_args()
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text(encoding="utf-8"))), end="")
        return
    record = measure(options.steps)
    if options.out:
        write_text(options.out, json.dumps(record, ensure_ascii=False))
    print(markdown(record), end="")


if __name__ == "__main__":
    main()
