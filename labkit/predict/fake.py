"""Tensors without data, and libraries that take the same path with them as with data."""

import contextlib
import gc
import logging
import pkgutil
import weakref
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def make_fake(
    model: torch.nn.Module, mode: FakeTensorMode, see: Callable[[torch.Tensor], None]
) -> None:
    """Turn every tensor on ``meta`` into a fake one on ``cpu``.

    In place, so that whatever holds a parameter (optimizer, closures) still holds it. Tensors
    that are no parameters or buffers of the model, such as a mask in an attribute, are found
    among the objects alive, those that the collector was told to leave out excepted.

    Args:
        see: Shown each tensor, the model's own first, as ``module.to(device)`` would move them.
    """
    recurrent = [m for m in model.modules() if isinstance(m, torch.nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # a tensor that they refer to cannot be swapped
    gc.collect()
    own = dict.fromkeys(_in_order_of_moving(model))
    others = (
        thing for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.is_meta and thing not in own
    )  # fmt: skip
    for tensor in [*own, *others]:
        if not tensor.is_meta or isinstance(tensor, FakeTensor):
            continue
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            fake._is_param = True
        torch.utils.swap_tensors(tensor, fake)
        del fake
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
        see(tensor)
    for module in recurrent:
        module._flat_weight_refs = [weakref.ref(weight) for weight in module._flat_weights]


def _in_order_of_moving(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers in the order in which ``module.to(device)`` moves them."""
    for child in module.children():
        yield from _in_order_of_moving(child)
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


@contextlib.contextmanager
def as_with_data(*, padded: bool) -> Iterator[None]:
    """Let libraries take the path that they take when tensors have values.

    Args:
        padded: What the answer is when they ask whether a mask holds padding.
    """
    with contextlib.ExitStack() as stack:
        for name, value in (
            # transformers takes other branches where it meets a fake tensor
            ("transformers.utils.import_utils.is_fake_tensor", lambda tensor: False),
            ("transformers.masking_utils.fast_all", lambda mask: not padded),
            # copying the storage of a fake tensor ends the process
            ("torch.Tensor.__deepcopy__", _copy),
            # numbers are printed with a format
            ("torch.Tensor.__format__", _format),
            # the scaler skips an update if it read an infinity
            ("torch.amp.GradScaler._maybe_opt_step", _always_step),
        ):
            if _exists(name):  # versions differ
                stack.enter_context(mock.patch(name, value))
        # what a fake tensor cannot do is told by our error, not by a page of its own
        noise = logging.getLogger("torch._subclasses.fake_tensor")
        stack.enter_context(mock.patch.object(noise, "disabled", True))
        yield


def _copy(tensor: torch.Tensor, memo: dict) -> torch.Tensor:
    if id(tensor) not in memo:
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            made._is_param = True
        if tensor.grad is not None:
            made.grad = _copy(tensor.grad, memo)
        memo[id(tensor)] = made
    return memo[id(tensor)]


def _format(tensor: torch.Tensor, spec: str) -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, "")


def _exists(name: str) -> bool:
    """Whether the installed version of a library has that name."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _always_step(scaler, optimizer, state, *args, **kwargs):
    return optimizer.step(*args, **kwargs)


@contextlib.contextmanager
def cpu_behaviour() -> Iterator[None]:
    """Count the state of the random numbers that checkpointing keeps for each layer.

    On a card the host keeps it; on a CPU it is memory like any other.
    """
    state_bytes = torch.get_rng_state().numel()

    def get_state() -> torch.Tensor:
        return torch.empty(state_bytes, dtype=torch.uint8)

    def drop_state(state: torch.Tensor) -> None:
        """Keep no state alive; a Mock would, among the arguments it was called with."""

    with (
        mock.patch("torch.get_rng_state", get_state),
        mock.patch("torch.set_rng_state", drop_state),
    ):
        yield
