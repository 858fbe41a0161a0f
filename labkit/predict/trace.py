"""One training step run without data: every block of memory it would take, in order.

The model is built on the ``meta`` device, its tensors become fake tensors on ``cpu``, and the
very code of the step runs on them: shapes, dtypes and lifetimes are real, values are not. A
block is born when an operation returns a new storage and dies when the last tensor on that
storage does, which is when PyTorch would hand its bytes back.
"""

import gc
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from labkit.predict.cuda import cuda_behaviour, host_tensors, use_card_optimizer
from labkit.predict.events import Trace
from labkit.predict.fake import as_with_data, cpu_behaviour, make_fake
from labkit.predict.gpus import Gpu
from labkit.predict.tracer import Tracer


class TraceError(ValueError):
    """A step that cannot be run without data; the message says where it stopped and why."""


def trace_step(
    build: Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer, Callable]],
    gpu: Gpu | None = None,
    *,
    steps: int = 2,
    padded: bool = True,
    warm_up_bytes: int = 0,
) -> Trace:
    """Build a step without memory and run it without data.

    Args:
        build: Returns a model, its optimizer, and the step: a function that is handed ``mark``
            (which may name phases as they begin), makes its batch, and does forward, backward
            and update. Called with ``meta`` as the default device; the step runs on fake
            tensors whose device is ``cpu``.
        gpu: The card whose behaviour is put in; None for that of a CPU, with the last step's
            gradients gone before each step, as they are where bytes are measured.
        steps: How many; the optimizer's state exists from the second on.
        padded: Whether the batch holds padding: it decides the attention path.
        warm_up_bytes: Allocated and freed before the weights, which are then cut from them, as
            transformers does where it loads onto a device.

    Raises:
        TraceError: An operation's result depends on values, or it has no rule without them.
    """
    mode, behaviour = FakeTensorMode(), partial(cuda_behaviour, gpu) if gpu else cpu_behaviour
    gc.freeze()  # what is found among all objects is then only what the step is made of
    try:
        with behaviour(), torch.device("meta"), torch.enable_grad():
            model, optimizer, step = build()
        tracer = Tracer(model, gpu.cublas_workspace_bytes if gpu else 0)
        if warm_up_bytes:
            tracer.warm_up(warm_up_bytes)
        make_fake(model, mode, see=tracer.add_weight)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("meta", "swap", "gradient edge")):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        raise TraceError(
            f"the model cannot be built without data ({reason}). "
            "Make batches and read numbers inside the step, not in build."
        ) from error
    finally:
        gc.unfreeze()
    if gpu:
        use_card_optimizer(optimizer)
    collecting = gc.isenabled()
    gc.disable()  # or blocks in reference cycles would be freed at moments of its choosing
    try:
        with (
            as_with_data(padded=padded),
            behaviour(),
            mock.patch("torch.cuda.empty_cache", tracer.log.empty_cache),
            mode,
            torch.enable_grad(),
            tracer.watching(),
        ):
            for _ in range(steps):
                tracer.begin_step()
                if gpu is None:
                    optimizer.zero_grad(set_to_none=True)
                step(tracer.mark)
                tracer.end_step(optimizer)
        for tensor in host_tensors(optimizer) if gpu else ():
            tracer.log.sizes[tracer.number_of(tensor)] = 0
        return tracer.log.trace()
    except Exception as error:
        if tracer.failure is None or tracer.failure[0] is not error:
            raise  # the step's own
        raise TraceError(_words(*tracer.failure)) from error
    finally:
        tracer.closed = True
        if collecting:
            gc.enable()


def _words(error: Exception, operation: torch._ops.OpOverload, where: str) -> str:
    """What could not be done without data, and what to do about it."""
    reason = "its result depends on values"
    if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"the step cannot be run without data: {operation} in {where or 'the step itself'} "
        f"fails there ({reason}). Leave it out of the step, or use operations whose shapes are "
        "known beforehand."
    )
