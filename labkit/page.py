"""A run as one HTML page that opens from disk: table, figures, executed notebooks."""

import json
from pathlib import Path

from labkit.records import Record, RecordError, load_records, write_text
from labkit.reference import compare_with_reference, load_references, nearest_reference
from labkit.report import format_bytes
from labkit.summary import facts_text
from labkit.table import effect_words, headings, row_words, table_rows

LADDER_NOTEBOOK = "90_ladder"  # reads the records of the others
PLAN_NOTEBOOK = "09_plan_your_gpu"  # predicts, and leaves no record
LORA_NOTEBOOK = "08_lora_choice"  # no step either: it compares many recipes with one


def write_page(folder: Path) -> Path:
    """Write ``<folder>/index.html`` from the records, figures and notebooks in the folder.

    Raises:
        RecordError: A JSON file in the folder is no record.
    """
    page = folder / "index.html"
    write_text(page, render("page.html.j2", page_contents(folder)))
    return page


def render(template: str, contents: dict) -> str:
    """A template of the package, filled in; all texts are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(contents)


def page_contents(folder: Path) -> dict:
    """What the template shows of a run."""
    records = load_records(folder)
    rows = table_rows(records)
    largest = max((row["peak_allocated_bytes"] or 0 for row in rows), default=0)
    reference = nearest_reference(records, load_references())
    measured = [record for record in records.values() if record.machine]
    return {
        "title": folder.name,
        "facts": _facts(measured[0]) if measured else {},
        "tiny": any(record.profile == "tiny" for record in records.values()),
        "headline": _headline(rows),
        "headings": headings(rows),
        "rows": [
            row
            | {
                "words": row_words(row),
                "effect": effect_words(row),
                "share": (row["peak_allocated_bytes"] or 0) / (largest or 1),
                "figures": _figures(folder, row["slug"]),
                "notebook": _notebook(folder, row["slug"]),
            }
            for row in rows
        ],
        "ladder_figures": _figures(folder, LADDER_NOTEBOOK),
        "ladder_notebook": _notebook(folder, LADDER_NOTEBOOK),
        "lora_figures": _figures(folder, LORA_NOTEBOOK),
        "lora_notebook": _notebook(folder, LORA_NOTEBOOK),
        "plan_figures": _figures(folder, PLAN_NOTEBOOK),
        "plan_notebook": _notebook(folder, PLAN_NOTEBOOK),
        "reference": next(iter(reference.values())).machine["name"] if reference else None,
        "comparison": compare_with_reference(records, reference) if reference else [],
    }


def _headline(rows: list[dict]) -> str:
    """The whole ladder in one sentence, from the first step and the last that was measured."""
    peaks = [row for row in rows if row["peak_allocated_bytes"] is not None]
    if len(peaks) < 2:
        return ""
    first, last = peaks[0]["peak_allocated_bytes"], peaks[-1]["peak_allocated_bytes"]
    sentence = (
        f"From {peaks[0]['slug']} to {peaks[-1]['slug']}: peak memory {format_bytes(first)} → "
        f"{format_bytes(last)} ({last / first - 1:+.0%})"
    ).replace("-", "−")
    speed = peaks[-1]["cumulative_speed_product"]
    return (
        f"{sentence}, {speed:.2f} times as fast (the product of all ratios)"
        if speed
        else sentence
    )


def _facts(record: Record) -> dict[str, str]:
    """Where the figures come from, by name."""
    report, machine = record.comparison.after, record.machine
    versions = machine["versions"]
    return {
        "Machine": machine["name"],
        "Memory": format_bytes(machine["memory_bytes"]),
        "Device": f"{machine['device']}, {machine['cpu_capability']}",
        "System": f"{machine['os']}, Python {machine['python']}",
        "Versions": ", ".join(
            f"{name} {number}" for name, number in versions.items() if number
        ),
        "Commit": machine["commit"] or "not in a git checkout",
        "Profile": record.profile,
        "Model": facts_text(report.model),
        "Data": facts_text(report.data),
        "Measured": record.created,
    }


def _figures(folder: Path, slug: str) -> list[dict[str, str]]:
    """The figures that a notebook wrote, with the sentences that replace them."""
    sidecar = folder / "figures" / "alt.json"
    try:
        texts = json.loads(sidecar.read_text(encoding="utf-8")) if sidecar.exists() else {}
        texts = dict(texts)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{sidecar} is damaged. Delete it and run: labkit run") from error
    return [
        {"source": f"figures/{path.name}", "alt": texts.get(path.name, f"Figure of {slug}")}
        for path in sorted((folder / "figures").glob(f"{slug}*.png"))
    ]


def _notebook(folder: Path, slug: str) -> str | None:
    """The link to an executed notebook, None when it was not executed."""
    return f"{slug}.html" if (folder / f"{slug}.html").exists() else None
