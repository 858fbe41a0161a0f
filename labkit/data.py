"""Sentence pairs from a file: AFQMC's JSON lines, TSV or CSV, local or on the hub.

No row is ever dropped in silence: the first bad one stops the reading and is named, or, if
asked for, every bad one is kept in a list with its reason.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from labkit.hub import hub_reachable
from labkit.rows import READERS, find_flaw, read_lines

DATA_FOLDER = Path(__file__).resolve().parent.parent / "data"
TRAINING_FILE = DATA_FOLDER / "pairs" / "train.jsonl"
LABELS = {0: "different", 1: "same"}  # what two questions ask


class DataError(ValueError):
    """Data that cannot be used; the message names file and line and says how to go on."""


@dataclass(frozen=True)
class BadRow:
    """A row that was skipped: the physical line it starts on, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs with labels: 1 asks the same, 0 does not.

    ``sha256`` is that of the file's bytes; ``bad_rows`` is empty unless bad rows were skipped.
    """

    first: list[str]
    second: list[str]
    labels: list[int]
    name: str
    sha256: str
    bad_rows: list[BadRow]

    def __len__(self) -> int:
        return len(self.labels)

    def facts(self) -> dict:
        """What a report says of the data."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "pairs": len(self),
            "skipped_rows": len(self.bad_rows),
        }


def read_pairs(source: str | Path | None = None, *, skip_bad: bool = False) -> Pairs:
    """The pairs of a ``.jsonl``, ``.json`` (JSON lines), ``.tsv`` or ``.csv`` file.

    Args:
        source: A path, or ``hub:owner/name/path/in/repository.jsonl`` for a data set of the
            hub; the synthetic training pairs if left out.
        skip_bad: Leave bad rows out, each noted in ``bad_rows``, where otherwise the first
            one is an error.

    Raises:
        DataError: There is no such file, a row is bad, or no row is usable.
    """
    digest = hashlib.sha256()
    first, second, labels, bad_rows = [], [], [], []
    try:
        path, name = _locate(source)
        with path.open("rb") as file:
            for line, row in READERS[path.suffix.lower()](read_lines(file, digest)):
                flaw = find_flaw(row)
                if flaw is None:
                    first.append(row["sentence1"])
                    second.append(row["sentence2"])
                    labels.append(int(row["label"]))
                elif skip_bad:
                    bad_rows.append(BadRow(line, str(flaw)))
                else:
                    raise DataError(
                        f"{path}:{line}: {flaw}. Correct the row, or go on without bad rows: "
                        "--skip-bad (skip_bad=True)."
                    )
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror or error}.") from error
    if bad_rows and not labels:
        raise DataError(
            f"{path}: none of its {len(bad_rows):,} rows can be used; the first, on line "
            f"{bad_rows[0].line}: {bad_rows[0].reason}."
        )
    if not labels:
        raise DataError(f"{path} holds no pairs; training needs some.")
    return Pairs(first, second, labels, name, digest.hexdigest(), bad_rows)


def _locate(source: str | Path | None) -> tuple[Path, str]:
    """The file to read, and its name in reports (which hold no folders of this machine)."""
    address = str(TRAINING_FILE if source is None else source)
    path = Path(address).expanduser()
    if path.is_dir():
        raise DataError(f"{path} is a folder; name one of the files in it.")
    if path.suffix.lower() not in READERS:
        raise DataError(f"{address}: the name must end in one of {', '.join(READERS)}.")
    if address.startswith("hub:"):
        return _download(address), address
    if not path.is_file():
        advice = " `labkit data make` writes it." if source is None else ""
        raise DataError(f"{path}: there is no such file.{advice}")
    return path, "synthetic pairs" if source is None else path.name


def _download(address: str) -> Path:
    """The local copy of ``hub:owner/name/path/in/repository``."""
    from huggingface_hub import hf_hub_download

    owner, name, file = (*address.removeprefix("hub:").split("/", 2), "", "")[:3]
    if not (owner and name and file):
        raise DataError(f"{address}: write hub:owner/name/path/in/repository.jsonl.")
    repository, offline = f"{owner}/{name}", not hub_reachable()
    try:
        return Path(
            hf_hub_download(repository, file, repo_type="dataset", local_files_only=offline)
        )
    except (OSError, ValueError) as error:
        cause = (
            "the hub could not be reached, and the file is not in the local cache"
            if offline
            else "the hub has no such file, or does not show it to you"
        )
        raise DataError(f"{address}: {cause}; the path of a local copy works, too.") from error
