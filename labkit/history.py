"""What happened in a training, a JSON line each: a step's loss, or an evaluation's scores."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from labkit.checkpoint import CheckpointError

FILE = "history.jsonl"


class History:
    """The lines of a training, in memory and, where there is a folder, in its file.

    Args:
        watch: Given each line as it is added.
    """

    def __init__(self, folder: Path | None, watch: Callable[[dict], None]) -> None:
        self.lines: list[dict] = []
        self.watch = watch
        self.file = None if folder is None else folder / FILE

    def begin(self) -> None:
        """Start with no lines."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(b"")

    def go_on(self, count: int) -> None:
        """Start with the first lines of the file; what came after them is forgotten.

        Raises:
            CheckpointError: The file has fewer, or they cannot be read.
        """
        try:
            lines = self.file.read_bytes().splitlines(keepends=True)[:count]
            self.lines = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file} cannot be read ({error}).") from error
        if len(lines) < count:
            raise CheckpointError(
                f"{self.file} has {len(lines)} lines, and the checkpoint was written after "
                f"{count}; train from the beginning, without --resume."
            )
        draft = self.file.with_name(f".{FILE}.tmp")
        draft.write_bytes(b"".join(lines))
        draft.replace(self.file)

    def add(self, line: dict) -> None:
        """Keep a line, in the file at once."""
        self.lines.append(line)
        if self.file is not None:
            with self.file.open("ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
        self.watch(line)

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        if self.file is not None:
            with self.file.open("ab") as file:
                os.fsync(file.fileno())
