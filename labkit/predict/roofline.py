"""Seconds of a step at best, from the operations it consists of.

The roofline model: an operation takes as long as its arithmetic at the card's peak rate or its
bytes at the card's bandwidth, whichever is longer, and operations run one after the other. No
factor for efficiency is applied, so a real step takes longer. Two things shift the other way: a
tensor that still lies in the card's cache is read faster than counted, and attention with a
causal mask is counted as the full square, as PyTorch's own counter does.

Launching is a second bound. The host launches kernels ahead of the card, at 5 to 20
microseconds each, so that a step of small tensors waits for the host, whatever the card. What
that costs depends on a host that is not known here; 5 microseconds is what it costs at least.

Source:
    Williams, Waterman, Patterson, "Roofline" (2009). Launching: NVIDIA, "Getting Started with
    CUDA Graphs"; Holistic Trace Analysis, "CUDA kernel launch statistics".
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from labkit.predict.gpus import Gpu

LAUNCH_SECONDS = 5e-6
LAUNCHED_SINGLY = ("forward", "backward")  # an optimizer works on lists, a kernel for many


@dataclass(frozen=True)
class OpCosts:
    """What the operations of one optimizer step cost, one entry per operation.

    ``dtypes`` is what a matrix product is computed in; it has no meaning where ``flops`` is 0.
    ``times`` says how often each operation runs.
    """

    flops: np.ndarray
    moved_bytes: np.ndarray
    dtypes: list[str]
    phases: list[str]
    times: np.ndarray | int = 1

    def take(self, indices: np.ndarray) -> "OpCosts":
        """The operations at the given places."""
        indices = list(indices)
        return OpCosts(
            self.flops[indices],
            self.moved_bytes[indices],
            [self.dtypes[index] for index in indices],
            [self.phases[index] for index in indices],
        )

    @cached_property
    def phase_numbers(self) -> tuple[list[str], np.ndarray]:
        """The names of the phases, and of each operation the number of its phase."""
        numbers = {phase: number for number, phase in enumerate(dict.fromkeys(self.phases))}
        return list(numbers), np.fromiter(map(numbers.__getitem__, self.phases), np.intp)


@dataclass(frozen=True)
class Modelled:
    """Seconds of one optimizer step on a card, at best.

    ``compute_bound_share`` is the part of ``seconds`` in operations whose arithmetic takes
    longer than their bytes; it is 0 where nothing takes any time. ``launches`` counts the
    operations of forward and backward, ``launch_seconds`` is what the host needs for them.
    """

    seconds: float
    seconds_by_phase: dict[str, float]
    compute_bound_share: float
    flops: int
    moved_bytes: int
    launches: int
    launch_seconds: float

    @property
    def least_seconds(self) -> float:
        """The larger of both bounds: what the card needs, and what the host does."""
        return max(self.seconds, self.launch_seconds)


def model_time(costs: OpCosts, gpu: Gpu) -> Modelled:
    """How long the operations take on ``gpu`` at best, one after the other."""
    seconds = costs.moved_bytes / gpu.bandwidth_bytes_per_second
    products = np.flatnonzero(costs.flops)
    dtypes = [costs.dtypes[product] for product in products.tolist()]
    rate = {dtype: gpu.flops_per_second(dtype) for dtype in set(dtypes)}
    rates = np.fromiter(map(rate.__getitem__, dtypes), np.float64)
    arithmetic = costs.flops[products] / rates
    bound = products[arithmetic > seconds[products]]
    seconds[products] = np.maximum(arithmetic, seconds[products])
    times = np.broadcast_to(costs.times, seconds.shape)
    seconds = seconds * times
    phases, numbers = costs.phase_numbers
    by_phase = np.bincount(numbers, seconds, len(phases))
    single = [number for number, phase in enumerate(phases) if phase in LAUNCHED_SINGLY]
    launches = int(times[np.isin(numbers, single)].sum())
    total = float(seconds.sum())
    return Modelled(
        seconds=total,
        seconds_by_phase=dict(zip(phases, by_phase.tolist(), strict=True)),
        compute_bound_share=float(seconds[bound].sum()) / total if total else 0.0,
        flops=int((costs.flops * times).sum()),
        moved_bytes=int((costs.moved_bytes * times).sum()),
        launches=launches,
        launch_seconds=launches * LAUNCH_SECONDS,
    )
