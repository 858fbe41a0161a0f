"""Ctrl-C and SIGTERM as a wish to stop soon, so that what was computed can be kept first."""

import signal
import threading


class Interruption:
    """Remembers, while the block runs, that a signal asked to stop; a second one stops at once.

    Attributes:
        number: Of the signal, None as long as there was none.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.number is not None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # others receive no signals
            self._before = {each: signal.signal(each, self._note) for each in self.SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, _) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}
