"""A real browser at a real server, for the explorer's tests and its benchmark."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat

PROJECT = Path(__file__).resolve().parent.parent
NOTEBOOK = PROJECT / "notebooks" / "09_plan_your_gpu.ipynb"
KEEP_HERE = """
from pathlib import Path
from labkit import exploration

exploration.BY_HAND = Path("by-hand").resolve()  # not among what the user's notebooks left
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A cell out of sight is not drawn, and a question about news is in the way.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def browser_path():
    """Where a browser is that Playwright can drive, None if nowhere."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextmanager
def chromium():
    """A browser whose pages wait half a minute at most; a sandbox cannot be had by root."""
    from playwright.sync_api import sync_playwright

    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=sandbox)
        context = browser.new_context(viewport={"width": 1280, "height": 1000})
        context.set_default_timeout(30_000)
        yield context
        browser.close()


@contextmanager
def server(command, port, folder):
    """A server in a process of its own, stopped at the end with what it started."""
    environment = os.environ | {
        "PYTHONPATH": str(PROJECT),
        # what a user has set and opened is neither read nor changed
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
    }
    log = folder / "server.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: process.poll() is not None or _answers(port), seconds=60)
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def _answers(port):
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def notebook_in_lab(browser, folder, *, theme="JupyterLab Light", before=""):
    """A page with a copy of the explorer's notebook, open in JupyterLab and executed.

    Args:
        before: Code that is executed before the notebook's own.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(KEEP_HERE + before))
    nbformat.write(notebook, folder / NOTEBOOK.name)
    themes = {"apputils-extension/themes": {"theme": theme}}
    settings = folder / "config" / "lab" / "user-settings" / "@jupyterlab"
    for name, values in (SETTINGS | themes).items():
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    port, token = free_port(), os.urandom(8).hex()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    with server(command, port, folder):
        lab = browser.new_page()
        lab.goto(f"http://localhost:{port}/lab/tree/{NOTEBOOK.name}?token={token}")
        lab.get_by_text("| Idle").wait_for()
        lab.get_by_role("menuitem", name="Run", exact=True).click()
        lab.get_by_text("Run All Cells", exact=True).click()
        lab.locator(".labkit-picture .verdict").wait_for(timeout=60_000)
        lab.get_by_text("| Idle").wait_for(timeout=60_000)
        yield lab


class Explorer:
    """The explorer as a user sees it."""

    def __init__(self, page):
        self.page = page
        self.root = page.locator(".labkit-explorer")

    def handle(self, name):
        """The handle of a slider, found by the name that a screen reader reads."""
        return self.root.get_by_role("slider", name=name)

    def readout(self, name):
        """What a slider says, as a number."""
        text = self.root.locator(".widget-slider", has_text=name).locator(".widget-readout")
        return int(text.inner_text())

    def grab(self, name):
        """Put the mouse on a handle and hold it."""
        self.handle(name).scroll_into_view_if_needed()
        box = self.handle(name).bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.page.mouse.down()

    def pull(self, name, share, steps=12):
        """Pull a handle that is held to a share of its track."""
        track = self.root.locator(".widget-slider", has_text=name).locator(".noUi-base")
        box = track.bounding_box()
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + share * box["width"], y, steps=steps)

    def drag(self, name, share, steps=12):
        """Drag a handle by the mouse to a share of its track, and let it go."""
        self.grab(name)
        self.pull(name, share, steps)
        self.page.mouse.up()

    def words(self):
        return self.root.locator(".labkit-words").inner_text()

    def wait_for(self, words):
        """Wait until the words of the picture contain some others."""
        self.root.locator(".labkit-words", has_text=re.compile(re.escape(words))).wait_for()

    def widths(self):
        """The widths of the bar's parts in percent, from the left."""
        return [
            float(rect.get_attribute("width").rstrip("%"))
            for rect in self.root.locator(".labkit-bar rect").all()
        ]

    def legend(self):
        return self.root.locator(".labkit-picture li").all_inner_texts()
