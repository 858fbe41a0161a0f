"""What a CUDA card does differently from the CPU that a step is traced on.

A CPU build of PyTorch makes no fake tensors on ``cuda``, so a step is traced on the CPU, with
these differences put in for the time of the trace. The functions themselves are replaced: a
mode that intercepts calls would not see the forward that checkpointing repeats in backward.

Source:
    PyTorch: aten/src/ATen/native/Dropout.cpp (one kernel, a mask of bytes), torch/optim
    (foreach by default where all parameters are on a card), aten/src/ATen/autocast_mode.h (what
    runs in float32 under autocast), cuda/CublasHandlePool.cpp (workspaces).
"""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.nn import functional

from labkit import dropout, packed_model
from labkit.predict.attention import cuda_attention
from labkit.predict.gpus import Gpu
from labkit.predict.packed_attention import packed_attention_on, packed_kernel_on

# Of the operations that autocast runs in float32 on a card and not on a CPU, those that the
# layers of language models use.
FLOAT32_UNDER_AUTOCAST = (
    "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "pow", "__pow__",
    "softplus", "layer_norm", "rms_norm", "group_norm", "cosine_similarity", "nll_loss",
    "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "cdist", "logsumexp",
    "binary_cross_entropy_with_logits", "prod", "softmax", "log_softmax", "cumprod", "cumsum",
    "cross_entropy",
)  # fmt: skip
NAMESPACES = (torch, torch.Tensor, functional)


@contextlib.contextmanager
def cuda_behaviour(gpu: Gpu) -> Iterator[None]:
    """Trace as if on ``gpu``."""
    with contextlib.ExitStack() as stack:

        def replace(owner, name: str, function: Callable) -> None:
            stack.enter_context(mock.patch.object(owner, name, function))

        replace(torch.autocast, "__init__", _for_cpu(torch.autocast.__init__, narrows=True))
        replace(torch.amp.GradScaler, "__init__", _for_cpu(torch.amp.GradScaler.__init__))
        replace(functional, "dropout", _dropout(functional.dropout))
        replace(functional, "scaled_dot_product_attention", cuda_attention(gpu))
        replace(dropout, "draws_slowly", lambda x: False)
        replace(packed_model, "kernel_for", packed_kernel_on(gpu))
        replace(packed_model, "varlen_attn", packed_attention_on(gpu))
        for name in FLOAT32_UNDER_AUTOCAST:
            for owner in NAMESPACES:
                if function := getattr(owner, name, None):
                    replace(owner, name, _in_float32(function))
        yield


def use_card_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Set what an optimizer chooses by itself where its parameters are on a card."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def host_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """State that stays in the host's memory: step counts, unless a kernel reads them."""
    on_card = {
        parameter
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    return [
        state["step"]
        for parameter, state in optimizer.state.items()
        if parameter not in on_card and isinstance(state.get("step"), torch.Tensor)
    ]


def _for_cpu(init: Callable, *, narrows: bool = False) -> Callable:
    """Autocast or a scaler that a step asks for on a card: on the device that is traced.

    Args:
        narrows: It is autocast, which on a card computes in float16 unless told otherwise.
    """

    def for_cpu(self, device_type="cuda", *args, **kwargs):
        device_type = kwargs.pop("device", device_type)
        if str(device_type).startswith("cuda"):
            if narrows and not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float16
            device_type = "cpu"
        init(self, device_type, *args, **kwargs)

    return for_cpu


def _dropout(on_cpu: Callable) -> Callable:
    def dropout(input, p=0.5, training=True, inplace=False):
        if training and 0 < p < 1 and not inplace:
            return torch.native_dropout(input, p, True)[0]
        return on_cpu(input, p, training, inplace)

    return dropout


def _in_float32(function: Callable) -> Callable:
    def in_float32(*args, **kwargs):
        if torch.is_autocast_enabled("cpu"):
            args = [_widened(arg) for arg in args]
            kwargs = {name: _widened(arg) for name, arg in kwargs.items()}
        return function(*args, **kwargs)

    return in_float32


def _widened(thing):
    if isinstance(thing, torch.Tensor) and thing.dtype in (torch.float16, torch.bfloat16):
        return thing.float()
    return thing
