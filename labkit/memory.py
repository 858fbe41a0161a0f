"""Bytes of one training step, taken from the allocator that hands them out.

On a CPU every allocation and free of PyTorch's allocator is recorded, so the figure is the
same on every run; the resident set is shown beside it, never instead. On CUDA the allocator's
own peak counters are read phase by phase. MPS keeps no peak, so it is sampled where phases
meet, and the report says so.
"""

from collections import Counter

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.report import OWNERS, PHASES, Memory, thin
from labkit.step import TrainingStep

MARK = "labkit.phase."


def measure_memory(step: TrainingStep, batch) -> Memory:
    """Run one warm step on ``batch`` and return what it held.

    Args:
        step: Has already made one update, so that the optimizer's state exists: the peak is
            that of any later step.
        batch: On the step's device.

    Raises:
        RuntimeError: The backend reported no bytes. A zero nobody measured is never returned.
    """
    observe = {"cpu": _observe_cpu, "cuda": _observe_cuda}.get(step.device.type, _observe_mps)
    memory = observe(step, batch)
    if memory.peak_allocated_bytes <= 0:
        raise RuntimeError(f"{step.device} reported a peak of 0 bytes: nothing was measured.")
    memory.state_bytes = _totals(_state(step))
    return memory


def _state(step: TrainingStep, batch=None) -> dict[int, tuple[str, int]]:
    """What lives between steps: address of each storage → its owner and bytes.

    By storage, so that tied weights and views count once.
    """
    owned = [
        ("weights", [*step.model.parameters(), *step.model.buffers()]),
        ("gradients", [p.grad for p in step.model.parameters() if p.grad is not None]),
        (
            "optimizer_state",
            [v for state in step.optimizer.state.values() for v in state.values()],
        ),
        ("inputs", batch.tensors if batch else []),
    ]
    return {
        storage.data_ptr(): (owner, storage.nbytes())
        for owner, tensors in owned
        for storage in (t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor))
        if storage.nbytes()
    }


def _totals(state: dict[int, tuple[str, int]]) -> dict[str, int]:
    """Bytes by owner; owners that hold nothing have 0, which was counted."""
    totals = Counter(dict.fromkeys(OWNERS, 0))
    for owner, size in state.values():
        totals[owner] += size
    return dict(totals)


def _observe_cpu(step: TrainingStep, batch) -> Memory:
    # The recorder knows no block older than itself: what the step would free first, the last
    # step's gradients, has to go before, or its free is missing from the sum.
    step.optimizer.zero_grad(set_to_none=True)
    state = _state(step, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(batch, mark=_mark)
    gradients = {
        address for address, (owner, _) in _state(step).items() if owner == "gradients"
    }
    memory = replay(_cpu_events(profiler), state, gradients)
    memory.process_bytes = psutil.Process().memory_info().rss
    return memory


def _mark(phase: str) -> None:
    """Leave a moment named after the phase in the recording."""
    with record_function(MARK + phase):
        pass


def _cpu_events(profiler: profile) -> list[tuple]:
    """The recorded step as events for ``replay``, in the order they happened."""
    found, waiting = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name.startswith(MARK):
            found.append((event.start_time_ns, "mark", event.name.removeprefix(MARK), 0))
        elif event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            found.append((event.start_time_ns, "memory", fields.ptr, fields.alloc_size))
    return [event[1:] for event in sorted(found, key=lambda event: event[0])]


def replay(
    events: list[tuple[str, str | int, int]],
    state: dict[int, tuple[str, int]],
    gradients: set[int],
) -> Memory:
    """Add up the allocations and frees of one step, in order.

    Args:
        events: ``("mark", phase, 0)`` or ``("memory", address, signed bytes)``.
        state: Address → (owner, bytes) of what was alive before the first event.
        gradients: Addresses of the gradients that are alive after the last event.
    """
    alive = peak = sum(size for _, size in state.values())
    by_phase, phase = {"before": alive}, "before"
    timeline, peak_index = [(alive, phase)], -1
    for index, (kind, what, size) in enumerate(events):
        if kind == "mark":
            phase = what
        alive += size
        by_phase[phase] = max(by_phase.get(phase, 0), alive)
        timeline.append((alive, phase))
        if alive > peak:
            peak, peak_index = alive, index
    return Memory(
        peak_allocated_bytes=peak,
        by_phase={name: by_phase[name] for name in PHASES if name in by_phase},
        by_owner=_owners(events, peak_index, state, gradients),
        timeline=thin(timeline),
        method="every allocation of PyTorch's CPU allocator",
    )


def _owners(events: list[tuple], peak_index: int, state: dict, gradients: set[int]) -> dict:
    """Bytes by owner just after the event at ``peak_index``."""
    blocks, stretch, phase = dict(state), 0, "before"
    made: dict[int, tuple[int, str]] = {}  # address → stretch of one phase, and that phase
    for kind, what, size in events[: peak_index + 1]:
        if kind == "mark":
            stretch, phase = stretch + 1, what
        elif size > 0:
            blocks[what], made[what] = ("temporaries", size), (stretch, phase)
        else:
            blocks.pop(what, None)
            made.pop(what, None)
    freed: dict[int, int] = {}  # address → stretch
    for kind, what, size in events[peak_index + 1 :]:
        if kind == "mark":
            stretch += 1
        elif size < 0:
            freed.setdefault(what, stretch)
    for address in made.keys() & blocks.keys():
        size = blocks[address][1]
        if address in gradients and address not in freed:
            blocks[address] = ("gradients", size)
        elif made[address][1] == "forward" and freed.get(address) != made[address][0]:
            blocks[address] = ("activations", size)
    return _totals(blocks)


class _Counters:
    """Peaks of an accelerator, read where one phase ends and the next begins.

    At each mark the state alive is noted too, so that the peak's owners are those of the
    phase it fell in; everything else at the peak is ``activations``: counters tell no blocks
    apart.
    """

    def __init__(self, step: TrainingStep, batch, read_peak, reset) -> None:
        self.step, self.batch, self.read_peak, self.reset = step, batch, read_peak, reset
        self.by_phase, self.owners = {}, {}
        self.phase, self.state = "before", _state(step, batch)

    def __call__(self, phase: str) -> None:
        peak = self.read_peak()
        if peak > self.by_phase.get(self.phase, 0):
            self.by_phase[self.phase] = peak
            self.owners[self.phase] = self.state
        self.reset()
        self.phase, self.state = phase, _state(self.step, self.batch)

    def memory(self, method: str) -> Memory:
        self("end")
        phase = max(self.by_phase, key=self.by_phase.get)
        by_owner = _totals(self.owners[phase])
        by_owner["activations"] = self.by_phase[phase] - sum(by_owner.values())
        return Memory(
            peak_allocated_bytes=self.by_phase[phase],
            by_phase={name: self.by_phase[name] for name in PHASES if name in self.by_phase},
            by_owner={owner: by_owner[owner] for owner in OWNERS if owner != "temporaries"},
            method=method,
        )


def _observe_cuda(step: TrainingStep, batch) -> Memory:
    cuda = torch.cuda
    reserved = []

    def reset() -> None:
        reserved.append(cuda.max_memory_reserved(step.device))
        cuda.reset_peak_memory_stats(step.device)

    cuda.synchronize(step.device)
    cuda.reset_peak_memory_stats(step.device)
    counters = _Counters(step, batch, lambda: cuda.max_memory_allocated(step.device), reset)
    step(batch, mark=counters)
    memory = counters.memory("peak counters of the CUDA caching allocator")
    memory.peak_reserved_bytes = max(reserved)
    free, total = cuda.mem_get_info(step.device)
    memory.process_bytes = total - free  # with what other processes hold on this card
    return memory


def _observe_mps(step: TrainingStep, batch) -> Memory:
    counters = _Counters(step, batch, torch.mps.current_allocated_memory, torch.mps.synchronize)
    step(batch, mark=counters)
    memory = counters.memory(
        "sampled where phases meet: MPS keeps no peak, the true one is higher"
    )
    memory.process_bytes = torch.mps.driver_allocated_memory()
    return memory
