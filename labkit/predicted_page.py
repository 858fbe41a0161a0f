"""A predicted step as a figure, or as one HTML page that needs nothing beside it."""

from base64 import b64encode
from io import BytesIO
from pathlib import Path

from labkit.canvas import OWNER_STYLES
from labkit.captions import alt_owner_timeline, model_name, provenance, verdict_words
from labkit.page import render
from labkit.predicted_plots import plot_owner_timeline, plot_prediction
from labkit.records import to_json, write_text
from labkit.report import Report, format_bytes
from labkit.summary import report_summary
from labkit.waterfall import waterfall


def write_prediction(report: Report, path: Path) -> None:
    """Write the figure to a ``.png``, or the page to any other file."""
    if path.suffix.lower() == ".png":
        plot_prediction(report).savefig(path, dpi=200)
    else:
        write_text(path, render("prediction.html.j2", prediction_contents(report)))


def prediction_contents(report: Report) -> dict:
    """What the template shows of a report."""
    summary = report_summary(report)
    picture = BytesIO()
    plot_owner_timeline(report).figure.savefig(picture, format="png", dpi=180)
    peak = report.memory.peak_allocated_bytes
    return {
        "title": f"{model_name(report)} on {report.machine['name']}",
        "verdict": verdict_words(report),
        "provenance": provenance(report),
        "picture": _data_uri("image/png", picture.getvalue()),
        "picture_alt": alt_owner_timeline(report),
        "peak": format_bytes(peak),
        "rows": [
            {
                "name": row.name,
                "is_owner": row.is_owner,
                "held": format_bytes(row.held_bytes),
                "share": row.share_words,
                "start_percent": 100 * row.start_bytes / peak,
                "percent": 100 * row.share,
                "color": OWNER_STYLES[row.owner]["facecolor"],
            }
            for row in waterfall(report.memory)
        ],
        "facts": {k: v for k, v in summary.items() if k not in ("Status", "Source")},
        "recipe": report.recipe.to_dict() if report.recipe else {},
        "document": _data_uri("application/json", to_json(report.to_dict()).encode()),
    }


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"
