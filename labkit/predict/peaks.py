"""What a trace says of the bytes of one step: the peak, who holds it, whether it fits."""

import re
from collections import Counter

import numpy as np

from labkit.predict.allocator import ROUND_BYTES, Replay, replay
from labkit.predict.events import WORKSPACE, Trace
from labkit.predict.gpus import Gpu
from labkit.predict.plain_replay import plain_replay
from labkit.report import OWNERS, PHASES, Fit, Memory, thin


def cpu_memory(trace: Trace, *, brief: bool = False) -> Memory:
    """The last step's bytes as PyTorch's CPU allocator hands them out: as asked for.

    Args:
        brief: Only the peak and its owners.
    """
    memory = _peak(trace, trace.sizes, "every allocation of the step, traced without data")
    return memory if brief else _describe(memory, trace, trace.sizes)


def cuda_memory(
    trace: Trace, *, expandable_segments: bool = False, brief: bool = False
) -> Memory:
    """The last step's bytes as the CUDA caching allocator counts them.

    Args:
        expandable_segments: As in ``PYTORCH_CUDA_ALLOC_CONF``.
        brief: Only the peaks and the owners of what is allocated.
    """
    whole = _replay(trace, expandable_segments=expandable_segments)
    memory = _peak(
        trace,
        whole.block_bytes,
        "the step, traced without data and replayed through the CUDA caching allocator",
    )
    memory.peak_reserved_bytes = whole.peak_reserved_bytes
    return memory if brief else _describe(memory, trace, whole.block_bytes)


def judge_fit(
    trace: Trace, memory: Memory, gpu: Gpu, *, expandable_segments: bool = False
) -> Fit:
    """Whether the step runs on ``gpu``, alone on it.

    Args:
        memory: From ``cuda_memory``. Where what it reserves is more than the card has, the
            allocator first gives back what it caches, so the replay is made once more with the
            card's capacity.
    """
    capacity_bytes = gpu.memory_bytes - gpu.context_bytes
    fit = Fit(
        capacity_bytes=gpu.memory_bytes,
        context_bytes=gpu.context_bytes,
        margin_bytes=capacity_bytes - memory.peak_reserved_bytes,
        fits=memory.peak_reserved_bytes <= capacity_bytes,
    )
    if not fit.fits:
        tight = _replay(
            trace, capacity_bytes=capacity_bytes, expandable_segments=expandable_segments
        )
        fit.fits = fit.gives_back_cache = tight.out_of_memory_index is None
        fit.fails_in = "" if fit.fits else _place(trace, tight)
    return fit


def _replay(trace: Trace, **settings) -> Replay:
    """What the allocator does in a trace."""
    if not any(settings.values()) and not trace.emptied:
        return plain_replay(trace.events, trace.sizes)
    return replay(trace.events, trace.sizes, emptied=trace.emptied, **settings)


def _place(trace: Trace, stopped: Replay) -> str:
    """Where a replay ran out of memory, in words."""
    index = stopped.out_of_memory_index
    step = int(np.searchsorted(trace.step_starts, index, side="right"))
    where = module_group(trace.modules[index])
    phase = PHASES[trace.phases[index]]
    return f"step {step}, {phase}" + (f", {where}" if where else "") if step else "the weights"


def peak_bytes(trace: Trace, gpu: Gpu | None) -> int:
    """The peak of the last step alone, in a millisecond or two.

    On a card blocks are rounded as the allocator rounds them; a rest too small to be split off,
    which it adds to some, is left out: ``cuda_memory`` counts it.
    """
    multiple = ROUND_BYTES if gpu else 1
    rounded = -(-trace.sizes // multiple) * multiple
    return int(alive_bytes(trace, rounded)[trace.step_starts[-1] :].max())


def alive_bytes(trace: Trace, block_bytes: np.ndarray) -> np.ndarray:
    """Bytes alive after each event."""
    freed = trace.events < 0
    blocks = np.where(freed, ~trace.events, trace.events)
    return np.cumsum(np.where(freed, -1, 1) * block_bytes[blocks])


def owner_curves(trace: Trace, block_bytes: np.ndarray) -> dict[str, np.ndarray]:
    """Bytes alive after each event of the last step, by owner."""
    start = trace.step_starts[-1]
    freed = trace.events < 0
    blocks = np.where(freed, ~trace.events, trace.events)
    changes = np.where(freed, -1, 1) * block_bytes[blocks]
    owners = trace.owner_numbers[blocks]
    return {
        owner: np.cumsum(np.where(owners == number, changes, 0))[start:]
        for number, owner in enumerate(OWNERS)
    }


def module_group(path: str) -> str:
    """A module's path for people: without wrappers, layers of a stack taken together."""
    path = re.sub(r"^base_model\.model(\.|$)", "", path)
    path = re.sub(
        r"\.(base_layer|lora_[AB]\.\w+|lora_dropout\.\w+|modules_to_save\.\w+)$", "", path
    )
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _peak_index(trace: Trace, alive: np.ndarray) -> int:
    """The event of the last step after which most bytes are alive."""
    start = trace.step_starts[-1]
    return start + int(np.argmax(alive[start:]))


def _peak(trace: Trace, block_bytes: np.ndarray, method: str) -> Memory:
    """The peak and who holds it."""
    alive = alive_bytes(trace, block_bytes)
    peak_index = _peak_index(trace, alive)
    held = _alive_at(trace, peak_index)
    owners = trace.owner_numbers[held]
    return Memory(
        peak_allocated_bytes=int(alive[peak_index]),
        by_phase={},
        by_owner={
            owner: int(block_bytes[held[owners == number]].sum())
            for number, owner in enumerate(OWNERS)
        },
        method=method,
    )


def _describe(memory: Memory, trace: Trace, block_bytes: np.ndarray) -> Memory:
    """Add what else is known: phases, modules, what stays, and the whole timeline."""
    alive = alive_bytes(trace, block_bytes)
    start, peak_index = trace.step_starts[-1], _peak_index(trace, alive)
    phases = trace.phases[start:]
    memory.by_phase = {
        phase: int(alive[start:][phases == number].max())
        for number, phase in enumerate(PHASES)
        if (phases == number).any()
    }
    if (phases == 0).any():  # the last step's gradients are gone by the end of it
        memory.by_phase[PHASES[0]] = int(alive[start:][phases == 0][-1])
    modules = {}
    for block in _alive_at(trace, peak_index).tolist():
        known = trace.blocks[block]
        group = modules.setdefault(known.owner, Counter())
        place = WORKSPACE if known.op == WORKSPACE else module_group(known.module)
        group[place] += int(block_bytes[block])
    memory.by_module = {owner: dict(group.most_common()) for owner, group in modules.items()}
    memory.state_bytes = _state(trace, block_bytes)
    names = [PHASES[number] for number in phases.tolist()]
    shown = thin(list(zip(alive[start:].tolist(), names, range(len(names)), strict=True)))
    places = [place for *_, place in shown]
    memory.timeline = [(held, phase) for held, phase, _ in shown]
    curves = owner_curves(trace, block_bytes)
    memory.owner_timeline = {owner: curve[places].tolist() for owner, curve in curves.items()}
    return memory


def _alive_at(trace: Trace, index: int) -> np.ndarray:
    """The blocks alive just after an event."""
    alive = np.zeros(len(trace.blocks), bool)
    events = trace.events[: index + 1]
    alive[events[events >= 0]] = True
    alive[~events[events < 0]] = False
    return np.flatnonzero(alive)


def _state(trace: Trace, block_bytes: np.ndarray) -> dict[str, int]:
    """Bytes that outlive the last step, by owner."""
    totals = Counter(dict.fromkeys(OWNERS, 0))
    for block in _alive_at(trace, len(trace.events) - 1).tolist():
        owner = trace.blocks[block].owner
        if owner in ("weights", "gradients", "optimizer_state"):
            totals[owner] += int(block_bytes[block])
    return dict(totals)
