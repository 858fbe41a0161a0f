"""Measurements that are kept: one JSON file a step, written whole or not at all."""

import json
import math
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path

from labkit.recipe import Profile, Recipe
from labkit.report import Comparison

FORMAT = "labkit record 1"
FINAL_STATUSES = ("ok", "out_of_memory")  # what was skipped may be possible the next time


class RecordError(ValueError):
    """A record that cannot be read or written; the message names the file and the cure."""


@dataclass
class Record:
    """What one step of the course measured, and what it was measured from.

    Attributes:
        slug: The step, its notebook and its file name: ``03_amp``.
        profile: Name of the profile.
        comparison: The step beside the step before it.
        key: Hash of everything that the figures depend on, see ``input_key``. Empty when
            nothing was measured.
        created: When, in ISO 8601 and UTC.
    """

    slug: str
    profile: str
    comparison: Comparison
    key: str = ""
    created: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds")
    )

    @property
    def status(self) -> str:
        """What became of the step, one of ``report.STATUSES``."""
        return self.comparison.after.status

    @property
    def machine(self) -> dict:
        """Facts of the machine that measured; empty when nothing was measured."""
        return self.comparison.after.machine

    def to_dict(self) -> dict:
        """The record as JSON values."""
        return {"format": FORMAT} | vars(self) | {"comparison": self.comparison.to_dict()}

    @classmethod
    def from_dict(cls, values: dict) -> "Record":
        """The record that ``to_dict`` wrote."""
        fields = {name: values[name] for name in ("slug", "profile", "key", "created")}
        return cls(comparison=Comparison.from_dict(values["comparison"]), **fields)


def input_key(
    before: Recipe | None,
    after: Recipe,
    *,
    profile: Profile,
    data_sha256: str,
    machine: dict,
) -> str:
    """A hash of everything that a step's figures depend on; equal keys need no second run.

    Args:
        before: Recipe of the step before, None for the first step.
        after: Recipe of the step.
        profile: Its repeat counts enter the key.
        data_sha256: Hash of the pairs.
        machine: ``machine_facts()`` of the measured device.
    """
    inputs = {
        "recipes": [before.to_dict() if before else None, after.to_dict()],
        "repeats": [profile.warmup_steps, profile.timed_steps],
        "data": data_sha256,
        "code": _code_sha256(),
        "machine": [machine[name] for name in ("name", "device", "python")],
        "versions": [machine["versions"][name] for name in ("torch", "transformers", "peft")],
    }
    return sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def save_record(folder: Path | str, record: Record) -> Path:
    """Write a record to ``<folder>/<slug>.json``, whole or not at all."""
    path = Path(folder) / f"{record.slug}.json"
    write_text(path, to_json(record.to_dict()))
    return path


def load_record(path: Path | str) -> Record:
    """Read one record.

    Raises:
        RecordError: The file is missing, damaged, or no record.
    """
    path = Path(path)
    values = read_json(path)
    try:
        if values["format"] != FORMAT:
            raise ValueError(values["format"])
        return Record.from_dict(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(
            f"{path} is not a {FORMAT}. Move it out of the folder, or measure the step again "
            f"with: labkit run --only {path.stem}"
        ) from error


def load_records(folder: Path | str) -> dict[str, Record]:
    """The records of a run by slug, in the order of the course.

    Raises:
        RecordError: There is no such folder, or a JSON file in it is no record.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordError(f"There is no run in {folder}. Make one with: labkit run")
    records = [load_record(path) for path in sorted(folder.glob("[0-9][0-9]_*.json"))]
    return {record.slug: record for record in records}


def read_json(path: Path) -> dict | list:
    """The JSON document in a file.

    Raises:
        RecordError: The file is missing or its text is cut off or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecordError(f"There is no record {path}. Make one with: labkit run") from error
    except ValueError as error:
        raise RecordError(
            f"{path} is damaged ({error}). Delete it and run: labkit run --resume"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def to_json(value: dict | list) -> str:
    """A JSON document that any reader takes: a float that is not finite becomes null."""
    return json.dumps(_standard(value), allow_nan=False, ensure_ascii=False)


def _standard(value):
    """The value with None for each float that JSON cannot write."""
    if isinstance(value, dict):
        return {name: _standard(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _code_sha256() -> str:
    """A hash of the code that figures come from: ``measure`` and every module it imports."""
    sources, waiting = {}, ["measure"]
    while waiting:
        module = waiting.pop()
        if module not in sources:
            sources[module] = (Path(__file__).parent / f"{module}.py").read_text(
                encoding="utf-8"
            )
            waiting += re.findall(
                r"^\s*from labkit\.(\w+) import", sources[module], re.MULTILINE
            )
    return sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
