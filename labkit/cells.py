"""What the cells of a notebook show: sources, lists of sentences, figures that are kept."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

from IPython.display import Code, Image, Markdown, display

from labkit import captions, explorer_words, forecast_words, lora_words
from labkit.records import write_text

DOTS_PER_INCH = 110


def show_source(*objects: Callable) -> None:
    """Show the source of functions or classes as it is on disk."""
    for thing in objects:
        display(Code(inspect.getsource(thing), language="python"))


def show_bullets(lines: list[str]) -> None:
    """Show sentences as a list."""
    display(Markdown("\n".join(f"- {line}" for line in lines)))


def show_figure(plot: Callable, measured, folder: Path, slug: str) -> None:
    """Draw, save with its alternative text, and display a figure."""
    kind = plot.__name__.removeprefix("plot_")
    modules = (captions, forecast_words, explorer_words, lora_words)
    describe = next(words for module in modules if (words := vars(module).get(f"alt_{kind}")))
    alt = describe(measured)
    axes = plot(measured)
    figure = (axes[0] if isinstance(axes, tuple) else axes).figure
    path = folder / "figures" / f"{slug}-{kind}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    texts = path.with_name("alt.json")
    known = json.loads(texts.read_text(encoding="utf-8")) if texts.exists() else {}
    write_text(texts, json.dumps(known | {path.name: alt}, ensure_ascii=False, indent=1))
    display(Image(path.read_bytes()), metadata={"image/png": {"alt": alt}})
