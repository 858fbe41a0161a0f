"""The folder that a run writes: named, writable, and one process's alone while it runs."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path


class RunnerError(ValueError):
    """A run that cannot start; the message says what to do."""


@contextmanager
def open_run_folder(
    runs: Path, name: str, *, keep: bool, say: Callable[[str], None]
) -> Iterator[Path]:
    """The folder ``<runs>/<name>``, locked until the block ends.

    Args:
        runs: Where runs are kept.
        name: Of this run, a plain folder name.
        keep: Write into an existing run; otherwise it is renamed first, never deleted.
        say: Told when an earlier run is renamed.

    Raises:
        RunnerError: The name is no folder name, nothing can be written there, or another
            process is writing there now.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise RunnerError(
            f"--name must be letters, digits, dots, dashes and underscores, not {name!r}."
        )
    folder, lock = runs / name, runs / f"{name}.lock"
    with _explained(runs):
        runs.mkdir(parents=True, exist_ok=True)
        _take(lock, folder)
    try:
        with _explained(folder):
            if not keep and folder.is_dir() and any(folder.iterdir()):
                kept = folder.rename(f"{folder}-until-{datetime.now():%Y%m%d-%H%M%S}")
                say(f"The earlier run is kept in {kept}")
            folder.mkdir(exist_ok=True)
            (folder / ".probe").touch()
            (folder / ".probe").unlink()
        yield folder
    finally:
        lock.unlink(missing_ok=True)


def newest_run(runs: Path) -> Path:
    """The run that was written to last.

    Raises:
        RunnerError: There is no run.
    """
    folders = [path for path in runs.glob("*") if any(path.glob("*.json"))]
    if not folders:
        raise RunnerError(f"There is no run in {runs}. Make one with: labkit run")
    return max(folders, key=lambda path: path.stat().st_mtime)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn the failure to write into a sentence."""
    try:
        yield
    except OSError as error:
        raise RunnerError(
            f"Cannot write to {folder} ({error.strerror}). Give yourself the right to write "
            "there, or move what is in the way."
        ) from error


def _take(lock: Path, folder: Path) -> None:
    """Make the lock file, which holds this process's id; take over one of a dead process."""
    import psutil

    try:
        file = lock.open("x", encoding="utf-8")
    except FileExistsError:
        if not _is_stale(lock):
            raise RunnerError(
                f"Another run is writing to {folder}. Wait for it or choose another --name. "
                f"If there is none, delete {lock}"
            ) from None
        lock.unlink(missing_ok=True)
        file = lock.open("x", encoding="utf-8")
    with file:
        json.dump([os.getpid(), psutil.Process().create_time()], file)


def _is_stale(lock: Path) -> bool:
    """Whether the process that made a lock file is gone."""
    import psutil

    try:
        pid, started = json.loads(lock.read_text(encoding="utf-8"))
        return psutil.Process(pid).create_time() != started
    except psutil.NoSuchProcess:
        return True
    except (OSError, ValueError, TypeError, psutil.Error):
        return False  # being written just now, or unreadable: leave it to the user
