"""What a long run says while it runs: a live line in a terminal, plain lines elsewhere."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from labkit.machine import free_memory_bytes

HEARTBEAT_SECONDS = 30  # a plain log says at least this often that it is alive


class Watch:
    """Where a running notebook is, and the least memory that was left meanwhile."""

    def __init__(self, slug: str, cells: int) -> None:
        self.slug, self.cells, self.cell = slug, cells, 0
        self.start = time.monotonic()
        self.least_free_bytes = free_memory_bytes()

    def enter(self, cell: int) -> None:
        """The code cell of that number begins."""
        self.cell = cell

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def __str__(self) -> str:
        return f"{self.slug}: cell {self.cell} of {self.cells}, {self.seconds:.0f} s"


class Narrator:
    """Tells people what is running, on stderr so that stdout stays a document."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def watch(self, slug: str, cells: int) -> Iterator[Watch]:
        """Show that a notebook is running until the block ends."""
        watch, done = Watch(slug, cells), threading.Event()
        show = self._show_live if self.console.is_terminal else self._show_plain
        thread = threading.Thread(target=show, args=(watch, done), daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            done.set()
            thread.join()

    def _show_live(self, watch: Watch, done: threading.Event) -> None:
        with self.console.status(str(watch)) as status:
            while not done.wait(0.5):
                _observe(watch)
                status.update(str(watch))

    def _show_plain(self, watch: Watch, done: threading.Event) -> None:
        self.say(f"{watch.slug}: running")
        said = watch.start
        while not done.wait(0.5):
            _observe(watch)
            if time.monotonic() - said >= HEARTBEAT_SECONDS:
                said = time.monotonic()
                self.say(str(watch))


def _observe(watch: Watch) -> None:
    watch.least_free_bytes = min(watch.least_free_bytes, free_memory_bytes())
