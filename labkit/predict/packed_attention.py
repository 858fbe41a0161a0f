"""Attention of rows of different lengths as a CUDA card runs it, and what its kernel allocates.

Source:
    PyTorch, torch/nn/attention/varlen.py (what is saved); FlashAttention 2, flash_api.cpp,
    ``mha_varlen_fwd`` and ``mha_varlen_bwd`` (what the kernels take).
"""

import math
from collections.abc import Callable

import torch

from labkit.precision import HALF
from labkit.predict.gpus import Gpu

BLOCK = 128  # rows by which each row of queries is lengthened in backward


def packed_kernel_on(gpu: Gpu) -> Callable:
    """A stand-in for ``packed_model.kernel_for``: what such a card takes."""
    has_kernel = gpu.capability >= (8, 0)
    return lambda value: "varlen" if has_kernel and value.dtype in HALF else "padded"


def packed_attention_on(gpu: Gpu) -> Callable:
    """A stand-in for ``varlen_attn`` that allocates as a card would."""

    def attention(query, key, value, of_queries, of_keys, longest_query, longest_key, **_):
        return _PackedAttention.apply(query, key, value, of_queries, of_keys)

    return attention


class _PackedAttention(torch.autograd.Function):
    """Saves its inputs, its output and a log-sum-exp for each row of scores."""

    @staticmethod
    def forward(ctx, query, key, value, of_queries, of_keys):
        out = torch.empty_like(query)
        statistics = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        state = torch.empty(2, dtype=torch.int64)
        ctx.save_for_backward(query, key, value, of_queries, of_keys, out, statistics, state)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, of_queries, *_ = ctx.saved_tensors
        grad = grad.contiguous()
        rows, heads, dim = query.shape
        rows += BLOCK * (len(of_queries) - 1)
        held = [
            query.new_empty(heads, rows, dtype=torch.float32),  # the softmax's own gradient
            query.new_empty(rows, heads, math.ceil(dim / 32) * 32, dtype=torch.float32),
        ]
        if key.shape[1] != heads:  # gradients of each query head, before they are added up
            held += [query.new_empty(len(key), heads, dim) for _ in range(2)]
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        del held
        return (*grads, None, None)
