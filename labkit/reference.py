"""Reference runs: the records of named machines, which a reader's own run is compared with."""

import re
from pathlib import Path

from labkit.machine import PROJECT
from labkit.recipe import differences
from labkit.records import Record, RecordError, read_json, to_json, write_text
from labkit.report import Report, format_bytes

REFERENCE = PROJECT / "data" / "reference"
VALIDATIONS = "*-validate.json"  # other files of the folder: no runs, see validation.py
SPEED_BAND = 1.25  # a ratio may differ by this factor before it is called different


def save_reference(records: dict[str, Record], folder: Path = REFERENCE) -> Path:
    """Keep a run as the reference of its machine, without the timelines.

    Raises:
        RecordError: The run is no result: tiny, incomplete, or nothing was measured.
    """
    if not records or any(record.profile == "tiny" for record in records.values()):
        raise RecordError(
            "A tiny or empty run is no reference. Run: labkit run --profile small"
        )
    unfinished = [slug for slug, record in records.items() if not record.machine]
    if unfinished:
        raise RecordError(f"{', '.join(unfinished)} was not measured. Run: labkit run --resume")
    documents = [record.to_dict() for record in records.values()]
    for document in documents:
        comparison = document["comparison"]
        for pair in (comparison, *comparison["predicted"].values()):
            for report in filter(None, (pair["before"], pair["after"])):
                if report["memory"]:
                    report["memory"] |= {"timeline": [], "owner_timeline": {}}
    machine = documents[0]["comparison"]["after"]["machine"]["name"]
    path = folder / f"{file_name(machine, documents[0]['profile'])}.json"
    lines = ",\n".join(to_json(document) for document in documents)
    write_text(path, f"[\n{lines}\n]\n")
    return path


def file_name(*parts: str) -> str:
    """A file's name, made of what it holds."""
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(parts).lower()).strip("-")


def load_references(folder: Path = REFERENCE) -> list[dict[str, Record]]:
    """The reference runs, each as records by slug.

    Raises:
        RecordError: A file in the folder is no list of records.
    """
    references = []
    for path in sorted(set(folder.glob("*.json")) - set(folder.glob(VALIDATIONS))):
        try:
            records = [Record.from_dict(values) for values in read_json(path)]
            if not records:
                raise ValueError("empty")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RecordError(
                f"{path} is no list of records. Restore it with: git checkout {path.name}"
            ) from error
        references.append({record.slug: record for record in records})
    return references


def nearest_reference(
    records: dict[str, Record], references: list[dict[str, Record]]
) -> dict[str, Record] | None:
    """The reference run of the same profile whose machine is most like this one."""
    if not records:
        return None
    mine = next(iter(records.values()))
    same_profile = [r for r in references if next(iter(r.values())).profile == mine.profile]

    def likeness(reference: dict[str, Record]) -> int:
        theirs = next(iter(reference.values())).machine
        return sum(mine.machine.get(name) == value for name, value in theirs.items())

    return max(same_profile, key=likeness, default=None)


def compare_with_reference(
    records: dict[str, Record], reference: dict[str, Record]
) -> list[str]:
    """A sentence for each step: peak bytes and speed ratio against a reference run.

    Bytes should be equal; where they are not, the differences that can explain it are named.
    A speed ratio may differ by ``SPEED_BAND``: it depends on the machine.
    """
    return [
        f"{slug}: {_compare_peaks(records[slug], reference[slug])}; "
        f"{_compare_speeds(records[slug], reference[slug])}."
        for slug in records
        if slug in reference
    ]


def _compare_peaks(record: Record, reference: Record) -> str:
    mine, theirs = record.comparison.after, reference.comparison.after
    if mine.memory is None or theirs.memory is None:
        return "peak not compared, one of the two was not measured"
    difference = mine.memory.peak_allocated_bytes - theirs.memory.peak_allocated_bytes
    if difference == 0:
        return "peak equal to the reference, to the byte"
    causes = _causes(mine, theirs) or ["nothing that would explain it was found"]
    side = "above" if difference > 0 else "below"
    return f"peak {format_bytes(abs(difference))} {side} the reference ({'; '.join(causes)})"


def _compare_speeds(record: Record, reference: Record) -> str:
    if record.comparison.before is None:
        return "no speed ratio, it is the first step"
    mine, theirs = record.comparison.speed_ratio, reference.comparison.speed_ratio
    if mine is None or theirs is None:
        return "speed not compared, one of the two was not measured"
    low, high = theirs / SPEED_BAND, theirs * SPEED_BAND
    place = "inside" if low <= mine <= high else "outside"
    return f"speed ratio {mine:.2f}, {place} the band {low:.2f} to {high:.2f}"


def _causes(mine: Report, theirs: Report) -> list[str]:
    """The differences between two reports that can make their bytes differ."""
    causes = [
        f"{name} {here!r} here, {there!r} there"
        for name, (there, here) in differences(theirs.recipe, mine.recipe).items()
    ]
    if mine.data.get("sha256") != theirs.data.get("sha256"):
        causes.append("other data")
    for name in ("device_name", "cpu_capability", "threads"):
        here, there = mine.machine.get(name), theirs.machine.get(name)
        if here != there:
            causes.append(f"{name.replace('_', ' ')} {here} here, {there} there")
    here, there = mine.machine.get("versions", {}), theirs.machine.get("versions", {})
    causes += [
        f"{package} {here.get(package)} here, {there.get(package)} there"
        for package in ("torch", "transformers", "peft")
        if here.get(package) != there.get(package)
    ]
    return causes
