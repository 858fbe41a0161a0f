"""Scaled dot-product attention as a CUDA card runs it: which kernel, and what it allocates.

The kernels themselves cannot run here. What is imitated is their memory: the tensors each one
returns, saves for backward and takes for a moment in backward.

Source:
    PyTorch, aten/src/ATen/native/transformers: cuda/sdp_utils.cpp (the choice), attention.cpp
    (masks), cuda/attention.cu, cuda/attention_backward.cu, cuda/mem_eff_attention/
    kernel_backward.h, cuda/flash_attn/flash_api.cpp; torch/_meta_registrations.py (shapes).
"""

import math

import torch
from torch.nn import functional

from labkit.precision import HALF
from labkit.predict.gpus import GPUS, Gpu

NARROW_HEAD = 192  # wider ones do not fit the shared memory of some cards


def stand_in(gpu: Gpu, head_dim: int) -> Gpu:
    """A card whose kernels allocate as those of ``gpu``: one for all that are alike.

    Workspaces of cuBLAS aside: they are blocks of a trace that every card has in its own size.
    """
    if gpu.capability < (8, 0):
        return GPUS["t4"]
    if has_cudnn_attention(gpu):
        return GPUS["h100"]
    if head_dim > NARROW_HEAD and _has_little_shared_memory(gpu):
        return GPUS["rtx-3090"]
    return GPUS["a100-40gb"]


def choose_backend(gpu: Gpu, query, key, value, mask, dropout: float) -> str:
    """``flash``, ``mem_efficient``, ``cudnn`` or ``math``, as torch 2.13 chooses.

    Args:
        query: (B, H, Sq, D), like ``key`` and ``value`` with their own lengths and heads.
        mask: None where ``is_causal`` says it all.
    """
    dim, value_dim = query.shape[-1], value.shape[-1]
    ampere, half = gpu.capability >= (8, 0), query.dtype in HALF
    if any(tensor.shape[2] == 0 or tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return "math"
    if half and has_cudnn_attention(gpu) and dim == value_dim <= 128 and dim % 8 == 0:
        return "cudnn"  # first in the order since the wheels bundle cuDNN 9.15.1
    if half and ampere and mask is None and dim == value_dim <= 256:
        trained = any(tensor.requires_grad for tensor in (query, key, value))
        too_wide = NARROW_HEAD < dim <= (256 if dropout else 224)
        if not (_has_little_shared_memory(gpu) and trained and too_wide):
            return "flash"
    supported = half or query.dtype == torch.float32
    if query.dtype == torch.bfloat16 and not ampere:
        supported = False
    alignment = 8 if half else (4 if ampere else 1)
    if supported and dim % alignment == 0 and value_dim % alignment == 0:
        return "mem_efficient"
    return "math"


def has_cudnn_attention(gpu: Gpu) -> bool:
    """Whether 16-bit attention is cuDNN's there, whose workspace nobody else knows."""
    return gpu.vendor == "nvidia" and gpu.capability[0] in (9, 10)


def _has_little_shared_memory(gpu: Gpu) -> bool:
    return gpu.capability in ((8, 6), (8, 9)) or gpu.capability[0] == 12


def cuda_attention(gpu: Gpu):
    """A stand-in for ``scaled_dot_product_attention`` that allocates as ``gpu`` would."""

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        if torch.is_autocast_enabled("cpu"):
            narrow = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(narrow) for tensor in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(narrow)
        backend = "math"
        if query.dim() == 4:
            backend = choose_backend(gpu, query, key, value, attn_mask, dropout_p)
        if backend == "math":
            output, _ = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
            return output
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, query, pad=backend == "mem_efficient")
        return _Attention.apply(gpu, backend, query, key, value, attn_mask)

    return attention


def _as_bias(mask, query, *, pad: bool):
    """A mask as the kernels take it: added, of the query's dtype, rows on 16-byte borders."""
    if mask.dtype == torch.bool:
        mask = torch.where(
            mask.logical_not(), torch.full((), -math.inf, dtype=query.dtype), 0.0
        )
    length = mask.shape[-1]
    if pad and length % 8:
        mask = functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask


def _empty(*shape: int, like: torch.Tensor | None = None) -> torch.Tensor:
    """Memory of a kernel; float32 unless it is to be like another tensor."""
    return torch.empty(shape, dtype=torch.float32 if like is None else like.dtype)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


class _Attention(torch.autograd.Function):
    """A fused kernel: saves its inputs, its output and a log-sum-exp for each row of scores."""

    @staticmethod
    def forward(ctx, gpu, backend, query, key, value, bias):
        batch, heads, length, _ = query.shape
        out = _empty(batch, length, heads, value.shape[-1], like=query).transpose(1, 2)
        rows = _round_up(length, 32) if backend == "mem_efficient" else length
        statistics = _empty(batch, heads, rows)
        random_state = torch.empty(2, dtype=torch.int64) if backend == "flash" else None
        ctx.save_for_backward(query, key, value, bias, out, statistics, random_state)
        ctx.gpu, ctx.backend = gpu, backend
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, out, *_ = ctx.saved_tensors
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        grads = [
            _empty(*tensor.transpose(1, 2).shape, like=tensor).transpose(1, 2)
            for tensor in (query, key, value)
        ]
        held = _temporaries(ctx.backend, ctx.gpu, grad, query, key, out)
        del held
        return None, None, *grads, None


def _temporaries(backend: str, gpu: Gpu, grad, query, key, out) -> list[torch.Tensor]:
    """What the backward of a kernel holds beside the three gradients."""
    batch, heads, length, dim = query.shape
    half = query.dtype in HALF
    if backend == "flash":
        rows = _round_up(length, 128)
        held = [
            _empty(batch, heads, rows),  # the softmax's own gradient
            _empty(batch, rows, heads, _round_up(dim, 64 if dim > 128 else 32)),  # dq summed up
        ]
        if key.shape[1] != heads:  # gradients of each query head, before they are added up
            held += [_empty(batch, key.shape[2], heads, dim, like=key) for _ in range(2)]
        return held
    if backend == "mem_efficient":
        if half:  # the kernel computes each row's product of gradient and output itself
            delta = _empty(batch, heads, length)
        else:
            products = grad.transpose(1, 2) * out.transpose(1, 2)
            delta = products.sum(-1).transpose(1, 2).contiguous()
            del products
        # gradients of the queries are added up in tiles of float32, each with two counters
        tile_rows = 128 if dim > 64 and (half or gpu.capability >= (8, 0)) else 64
        numbers = math.ceil(length / tile_rows) * math.ceil(dim / 64) * (4 + tile_rows * 64)
        if (
            half and dim > 128
        ):  # too large for registers: keys and values are added up there too
            numbers += 2 * 64 * _round_up(dim, tile_rows)
        return [delta, _empty(batch, heads, numbers)]
    return []  # cuDNN's workspace is known to cuDNN alone, and at run time only
