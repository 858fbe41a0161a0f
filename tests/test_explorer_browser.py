"""The explorer in a real browser: JupyterLab's notebook, and the page of ``labkit explore``."""

import signal
import sys

import psutil
import pytest
from browsing import (
    NOTEBOOK,
    Explorer,
    browser_path,
    chromium,
    free_port,
    notebook_in_lab,
    server,
    wait_until,
)
from nbconvert import HTMLExporter

from labkit.explorer_answer import answer
from labkit.explorer_setting import LENGTHS, Setting
from labkit.explorer_words import segments, summary, verdict
from labkit.predict.gpus import find_gpu
from labkit.report import format_bytes

pytest.importorskip("playwright", reason="needs playwright, see requirements-dev.txt")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser_path() is None, reason="needs Chromium: no browser is there"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Playwright's own sockets
]
START = Setting(batch_size=8, max_length=512)


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def lab(browser, folder):
    with notebook_in_lab(browser, folder) as page:
        yield page


@pytest.fixture
def explorer(lab):
    return Explorer(lab)


def shows(explorer, setting):
    """Wait until words, bar and figures are those that the oracle gives here."""
    found = answer(setting)
    explorer.wait_for(summary(found))
    sign, words = verdict(found.report)
    assert explorer.words().startswith(f"{sign} {words}")
    parts = segments(found.report)
    assert explorer.legend() == [
        f"{name.replace('_', ' ')} {format_bytes(count)}" for name, count in parts
    ]
    total = sum(count for _, count in parts)
    widths = explorer.widths()
    shares = [width / sum(widths) for width in widths]
    assert shares == pytest.approx([count / total for _, count in parts], abs=1e-3)


def test_the_notebook_runs_and_shows_the_start(lab, explorer):
    shows(explorer, START)
    assert lab.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    lab.locator(".jp-RenderedImage img").wait_for()


def test_an_export_of_the_saved_notebook_shows_the_picture(lab, folder):
    lab.keyboard.press("Control+s")
    saved = folder / NOTEBOOK.name
    wait_until(lambda: "labkit-picture" in saved.read_text(encoding="utf-8"), seconds=20)
    html, _ = HTMLExporter().from_filename(str(saved))
    assert html.count('class="labkit-bar"') == 1
    assert html.count("<img") == 1
    assert "Verdict" in html


def test_the_batch_follows_mouse_and_keyboard(explorer):
    explorer.drag("Batch size", 0.3)
    batch = explorer.readout("Batch size")
    assert 100 < batch < 200
    shows(explorer, Setting(batch_size=batch, max_length=512))
    explorer.handle("Batch size").press("ArrowLeft")
    shows(explorer, Setting(batch_size=batch - 1, max_length=512))
    explorer.handle("Batch size").press("Home")
    shows(explorer, Setting(batch_size=1, max_length=512))


def test_the_length_follows_mouse_and_keyboard(explorer):
    explorer.drag("Length", 0.8)
    length = explorer.readout("Length")
    assert length in LENGTHS
    assert length > 1000
    shows(explorer, Setting(batch_size=1, max_length=length))
    explorer.handle("Length").press("ArrowRight")
    longer = LENGTHS[LENGTHS.index(length) + 1]
    shows(explorer, Setting(batch_size=1, max_length=longer))
    explorer.handle("Length").press("Home")
    shows(explorer, Setting(batch_size=1, max_length=16))


def test_every_choice_changes_the_answer_and_keeps_the_batch_whole(explorer):
    explorer.handle("Batch size").press("End")
    fields = {"batch_size": 512, "max_length": 16}
    for name, label, field, value in (
        ("Card", "T4 16GB", "gpu", find_gpu("t4")),
        ("Precision", "16-bit weights + autocast", "precision", "16-bit weights + autocast"),
        ("Checkpointing", "every layer", "checkpoint_every", 1),
        ("Accumulation", "64", "micro_batches", 64),
        ("Model", "qwen3-tiny", "model", "qwen3-tiny"),
    ):
        explorer.root.get_by_label(name).select_option(label)
        fields[field] = value
        shows(explorer, Setting(**fields))
    explorer.handle("Batch size").press("ArrowLeft")
    shows(explorer, Setting(**fields | {"batch_size": 448}))


def test_the_picture_follows_while_the_slider_is_held(lab, explorer):
    explorer.grab("Length")
    for share in (0.3, 0.6, 0.5):
        explorer.pull("Length", share)
        explorer.wait_for(f" of {explorer.readout('Length'):,} tokens")
    lab.mouse.up()


def test_positions_that_a_fast_drag_has_left_are_not_drawn_later(lab, explorer):
    """While a picture is worked out, the browser keeps the last position only."""
    explorer.handle("Batch size").press("End")
    lab.evaluate("""() => {
        const words = () => document.querySelector(".labkit-words").innerText;
        window.drawn = [];
        new MutationObserver(() => window.drawn.push(words())).observe(
            document.querySelector(".labkit-explorer"), {childList: true, subtree: true}
        );
    }""")
    explorer.drag("Length", 0.95, steps=60)
    released = lab.evaluate("window.drawn.length")
    explorer.wait_for(f"512 pairs of {explorer.readout('Length'):,} tokens")
    late = set(lab.evaluate("window.drawn")[released:])
    assert len(late) <= 3  # the one in work at the release, the last, and one between


def test_screen_readers_hear_the_words_once_the_slider_rests(explorer):
    explorer.handle("Length").press("Home")
    heard = explorer.root.get_by_role("status")
    heard.filter(has_text="512 pairs of 16 tokens").wait_for(state="attached")
    assert explorer.handle("Length").get_attribute("aria-valuetext") == "16"


def test_a_measurement_is_laid_over_its_prediction(explorer):
    explorer.root.get_by_label("Model").select_option("qwen3-tiny")
    explorer.root.get_by_label("Card").select_option("This machine's CPU")
    explorer.root.get_by_label("Precision").select_option("float32")
    explorer.root.get_by_label("Accumulation").select_option("1")
    explorer.wait_for("qwen3-tiny on this machine's CPU: 512 pairs of 16 tokens, float32")
    button = explorer.root.get_by_role("button", name="Measure")
    button.click()
    measured = explorer.root.locator(".labkit-measured")
    measured.wait_for(timeout=60_000)
    assert "predicted for it was" in measured.inner_text()
    assert button.is_enabled()


def test_what_is_too_large_for_this_machine_is_refused_in_a_sentence(explorer):
    explorer.root.get_by_label("Model").select_option("Qwen3-Embedding-8B")
    explorer.root.get_by_label("Precision").select_option("float32")
    explorer.handle("Batch size").press("End")
    explorer.handle("Length").press("End")
    explorer.root.get_by_role("button", name="Measure").click()
    explorer.root.get_by_text("Not measured:").wait_for(timeout=60_000)


def test_the_page_without_jupyter_answers_and_ends_with_ctrl_c(browser, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "labkit", "explore", "--model", "qwen3-tiny"]
    command += ["--gpu", "t4", "--port", str(port), "--no-browser"]
    start = Setting(model="qwen3-tiny", gpu=find_gpu("t4"))
    with server(command, port, tmp_path) as process:
        page = browser.new_page()
        page.goto(f"http://localhost:{port}")
        explorer = Explorer(page)
        shows(explorer, start)
        explorer.handle("Batch size").press("ArrowRight")
        shows(explorer, Setting(model="qwen3-tiny", gpu=find_gpu("t4"), batch_size=33))
        kernels = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert kernels
        psutil.wait_procs(kernels, timeout=10)
        assert not any(kernel.is_running() for kernel in kernels)
    assert "Traceback" not in (tmp_path / "server.log").read_text()
