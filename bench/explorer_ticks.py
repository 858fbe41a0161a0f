"""What one tick of an explorer's slider costs: in the kernel, and until the picture changed.

Chromium moves the sliders of notebook 09 in JupyterLab by keys, 200 times over mixed settings
of the 0.6B model. The picture has changed with the frame that shows the new one.
Usage, from the project's folder: python bench/explorer_ticks.py
"""

import json
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from browsing import Explorer, chromium, notebook_in_lab

TICKS = 10  # of each slider in each setting
SETTINGS = (
    {},
    {"Card": "T4 16GB"},
    {"Precision": "float32 + autocast"},
    {"Precision": "16-bit weights", "Card": "H100 80GB (SXM)"},
    {"Checkpointing": "every layer"},
    {"Checkpointing": "every 2nd layer", "Card": "A100 40GB (SXM)"},
    {"Accumulation": "4"},
    {"Accumulation": "16", "Card": "RTX 3090 24GB"},
    {"Precision": "16-bit weights + autocast"},
    {"Card": "RTX 4090 24GB", "Accumulation": "1", "Checkpointing": "off"},
)
TIMED = """
import json, time
from pathlib import Path
from labkit.explorer import Explorer

follow, seconds = Explorer._follow, []

def timed(self, change):
    start = time.perf_counter()
    follow(self, change)
    seconds.append(time.perf_counter() - start)
    Path("ticks.json").write_text(json.dumps(seconds))

Explorer._follow = timed
"""
WATCH = """() => {
    const root = document.querySelector(".labkit-explorer");
    addEventListener("keydown", () => {
        const pressed = performance.now();
        window.tick = new Promise((resolve) => {
            window.changed = () => resolve(performance.now() - pressed);
        });
    }, true);
    new MutationObserver((changes) => {
        window.lastChange = performance.now();
        if (changes.some((change) => change.target.matches(".widget-html-content")))
            requestAnimationFrame(() => window.changed?.());
    }).observe(root, {childList: true, subtree: true});
}"""


RESTS = """() => performance.now() - window.lastChange > 1000 &&
    !document.querySelector(".labkit-words").innerText.startsWith("Working out")"""


def main() -> None:
    """Move the sliders and print what it took."""
    drawn, kernel = [], []
    with TemporaryDirectory() as folder, chromium() as browser:
        ticks = Path(folder) / "ticks.json"
        with notebook_in_lab(browser, Path(folder), before=TIMED) as lab:
            explorer = Explorer(lab)
            lab.evaluate(WATCH)
            for setting in SETTINGS:
                for label, option in setting.items():
                    explorer.root.get_by_label(label).select_option(option)
                for slider in ("Batch size", "Length"):
                    handle = explorer.handle(slider)
                    handle.press("Home")
                    lab.wait_for_timeout(500)
                    lab.wait_for_function(RESTS)
                    drawn += [one_tick(lab, handle) for _ in range(TICKS)]
                    kernel += json.loads(ticks.read_text())[-TICKS:]
    show("in the kernel", [1000 * seconds for seconds in kernel])
    show("until the picture changed", drawn)


def one_tick(lab, handle) -> float:
    """Milliseconds from a key to the new picture."""
    handle.press("ArrowRight")
    return lab.evaluate("window.tick")  # waits without asking again and again, which takes time


def show(what: str, milliseconds: list[float]) -> None:
    """Print median, 95th percentile and maximum."""
    ordered = sorted(milliseconds)
    high = ordered[round(0.95 * (len(ordered) - 1))]
    print(
        f"{what}: {len(ordered)} ticks, median {median(ordered):.0f} ms, 95 % within "
        f"{high:.0f} ms, at most {ordered[-1]:.0f} ms"
    )


if __name__ == "__main__":
    main()
