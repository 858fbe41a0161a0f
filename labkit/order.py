"""Which pairs a batch holds: in what order they come, and who makes batches ahead."""

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch

from labkit.recipe import Recipe

SHARED_MEMORY = Path("/dev/shm")  # where Linux keeps what processes hand each other


def orders(recipe: Recipe, lengths: torch.Tensor) -> Iterator[torch.Tensor]:
    """Which pairs each batch holds, without end: every pair once an epoch.

    Each epoch shuffles all pairs anew. Where padding is grouped, the pairs of a window of
    ``group_window`` batches are sorted by length before they are cut into batches, and these
    are shuffled again: what is in a batch together stays random, but for its length.

    Args:
        lengths: (pairs,) tokens of each pair; only their number counts unless padding is
            grouped.
    """
    for epoch in count():
        draw = torch.Generator().manual_seed(recipe.seed + epoch)
        order = torch.randperm(len(lengths), generator=draw)
        if recipe.padding != "grouped":
            yield from order.split(recipe.batch_size)
            continue
        for window in order.split(recipe.group_window * recipe.batch_size):
            by_length = window[lengths[window].argsort(stable=True)]
            chosen = by_length.split(recipe.batch_size)
            yield from (chosen[i] for i in torch.randperm(len(chosen), generator=draw))


def leave_group(worker: int) -> None:
    """Make a worker a session of its own, so that signals to the trainer's group pass it by.

    A batch system tells the whole group to end, and the trainer still has a step and a
    checkpoint to do. It ends its workers itself.
    """
    if hasattr(os, "setsid"):
        os.setsid()


def loader_options(recipe: Recipe, device_type: str) -> tuple[dict, list[str]]:
    """The recipe's loader settings as arguments of a DataLoader, and what was dropped and why.

    A DataLoader raises at some settings that do not apply, and warns at others.
    """
    workers, dropped = recipe.num_workers, []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if workers > cores:
        dropped.append(f"num_workers: {workers} were asked for, {cores} are used, one a core")
        workers = cores
    needed_bytes = 4 * 8 * recipe.batch_size * recipe.max_length * workers
    needed_bytes *= recipe.prefetch_factor
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free < needed_bytes:
        dropped.append(
            f"num_workers: dropped, because {SHARED_MEMORY}, through which batches would come, "
            "has too little room (in a container, --shm-size sets it)"
        )
        workers = 0
    options = {"num_workers": workers}
    if workers:
        options["prefetch_factor"] = recipe.prefetch_factor
    elif recipe.prefetch_factor != Recipe().prefetch_factor:
        dropped.append("prefetch_factor: dropped, because no worker makes batches ahead")
    if recipe.pin_memory and device_type != "cuda":
        dropped.append("pin_memory: dropped, because there is no CUDA card to read it")
    options["pin_memory"] = recipe.pin_memory and device_type == "cuda"
    return options, dropped
