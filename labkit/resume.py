"""What a run that was broken off need not do again."""

from pathlib import Path

from labkit.execution import NotebookError, same_source
from labkit.machine import machine_facts
from labkit.recipe import Profile, ladder
from labkit.records import FINAL_STATUSES, RecordError, input_key, load_record


def step_keys(profile: Profile, data_sha256: str) -> dict[str, str]:
    """The key that each record of a ladder step has when it is of the present inputs."""
    machine, keys, before = machine_facts(), {}, None
    for slug, recipe in ladder(profile.recipe).items():
        keys[slug] = input_key(
            before, recipe, profile=profile, data_sha256=data_sha256, machine=machine
        )
        before = recipe
    return keys


def is_finished(notebook: Path, folder: Path, key: str | None, gpu: str) -> bool:
    """Whether a run folder holds the whole result of a notebook for the inputs of ``key``.

    Args:
        gpu: The card, as the catalogue calls it. No figure that was measured depends on it,
            but what was predicted for another card has to be predicted again.
    """
    if key is None:
        return False
    try:
        record = load_record(folder / f"{notebook.stem}.json")
        whole = same_source(notebook, folder / notebook.name)
    except (RecordError, NotebookError):
        return False
    card = record.comparison.predicted.get("card")
    same_card = card is None or card.after.machine["gpu"] == gpu
    return whole and same_card and record.key == key and record.status in FINAL_STATUSES
