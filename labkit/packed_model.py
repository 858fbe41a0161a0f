"""A classifier for packed batches: attention pair by pair, everything else token by token."""

from types import MethodType

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from labkit.model_source import ModelError
from labkit.precision import HALF

ATTENTION = "labkit_packed"  # its name among transformers' attention implementations
NARROWED = ("llama", "mistral", "qwen2", "qwen3")  # whose layers do what narrow_last_layer does


class PackedClassifier(nn.Module):
    """Runs a LoRA classifier on a packed batch, whose pairs do not see each other.

    Attributes:
        model: The LoRA model; its parameters have the names that it gives them.
    """

    def __init__(self, model: nn.Module, *, last_token_only: bool) -> None:
        super().__init__()
        self.model, self.last_token_only = model, last_token_only
        base = model.get_base_model()
        self.backbone, self.head = getattr(base, base.base_model_prefix), base.score
        if last_token_only:
            narrow_last_layer(self.backbone.layers[-1])

    def forward(self, *, ends: torch.Tensor, **arguments) -> SequenceClassifierOutput:
        """The logits of each pair; the arguments are those of ``PackedBatch``."""
        narrow = {"ends": ends} if self.last_token_only else {}
        hidden = self.backbone(**arguments, **narrow).last_hidden_state[0]
        return SequenceClassifierOutput(
            logits=self.head(hidden if self.last_token_only else hidden.index_select(0, ends))
        )


def check_can_pack(base: nn.Module, name: str, *, last_token_only: bool) -> None:
    """Refuse a classifier whose pairs cannot be laid end to end.

    Raises:
        ModelError: It reads more than its last token, its attention is not causal over all
            earlier tokens or has dropout, or nobody has looked at what its layers do after
            attention.
    """
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if (
        not isinstance(base, GenericForSequenceClassification)
        or kinds != {"full_attention"}
        or (window is not None and getattr(config, "use_sliding_window", True))
        or not base._supports_attention_backend
        or getattr(config, "is_causal", True) is False  # transformers then looks both ways
        or getattr(config, "attention_dropout", 0)
    ):
        raise ModelError(
            f"model {name}: padding none needs causal attention over all earlier tokens, "
            "without dropout, and a head that reads the last one, as Qwen3's classifier has; "
            "use padding grouped."
        )
    if last_token_only and config.model_type not in NARROWED:
        raise ModelError(
            f"model {name}: last_token_only is known for {', '.join(NARROWED)}, not for "
            f"{config.model_type}; leave it out."
        )


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    slots: tuple[torch.Tensor, ...],
    places: torch.Tensor,
    starts: torch.Tensor,
    scaling: float,
    **_,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each pair of a packed batch, and to the prefix they share.

    Args:
        query: (1, H, N, D); ``key`` and ``value`` may have fewer heads.
        slots, places, starts: As in ``PackedBatch``.

    Returns:
        (1, N, H, D), and no weights.
    """
    kernel = kernel_for(value)
    dtype = torch.float32 if kernel == "padded_float32" else value.dtype
    rows = [x[0].transpose(0, 1).to(dtype) for x in (query, key, value)]  # (N, heads, D)
    attend = _in_one_kernel if kernel == "varlen" else _in_padded_rows
    with torch.autocast(value.device.type, enabled=False):  # it would choose another dtype
        out = attend(*rows, slots, places, starts, scaling)
    return out.to(value.dtype)[None], None


AttentionInterface.register(ATTENTION, packed_attention)


def kernel_for(value: torch.Tensor) -> str:
    """``varlen``, ``padded`` or ``padded_float32``: what computes attention of such values.

    FlashAttention's kernel for rows of different lengths exists for 16 bits on cards from
    Ampere on. On a CPU the backward of attention in 16 bits takes longer than in float32
    (``bench/cpu_attention.py`` measures it).
    """
    if value.device.type == "cpu":
        return "padded_float32"
    has_kernel = value.is_cuda and torch.cuda.get_device_capability(value.device) >= (8, 0)
    return "varlen" if has_kernel and value.dtype in HALF else "padded"


def _in_one_kernel(query, key, value, slots, places, starts, scaling) -> torch.Tensor:
    """FlashAttention's kernel for rows of different lengths; the prefix is a row of its own.

    A row of fewer queries than keys is causal from its last token on, so a pair's queries see
    the whole prefix.
    """
    of_queries = of_keys = starts
    pairs, longest = len(starts) - 1, max(group.shape[1] for group in slots)
    shared = len(query) - len(places)
    if shared:
        zero = starts.new_zeros(1)
        of_queries = torch.cat([zero, starts])
        counts = torch.cat([zero, starts.diff() + shared])  # keys of each pair
        of_keys = torch.cat([zero, counts.cumsum(0, dtype=torch.int32) + shared])
        token = torch.arange(len(places), device=places.device)
        pair = torch.repeat_interleave(starts.diff(), output_size=len(places))
        rows = token.new_empty(len(places) + shared * (pairs + 1))  # of the keys' rows, which
        prefix = torch.arange(shared, device=places.device)
        rows[(of_keys[:-1, None] + prefix).flatten()] = prefix.repeat(pairs + 1)
        rows[token + (pair + 2) * shared] = token + shared
        key, value = key[rows], value[rows]
    return varlen_attn(
        query, key, value, of_queries, of_keys, max(longest, shared), longest + shared,
        scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _in_padded_rows(query, key, value, slots, places, starts, scaling) -> torch.Tensor:
    """The pairs of each group side by side, padded for attention alone.

    Causal attention needs no mask for padding on the right: no token sees what comes after it.
    """
    shared, kv_heads = len(query) - len(places), key.shape[1]
    options = {"scale": scaling, "enable_gqa": query.shape[1] != kv_heads}
    heads = [query.shape[1], kv_heads, kv_heads]
    rows = torch.cat([query, key, value], dim=1)  # (N, all heads, D)
    prefix = rows[:shared].transpose(0, 1)[None].split(heads, dim=1)  # (1, heads, P, D) each
    folded = _Fold.apply(rows, torch.cat([group.flatten() for group in slots]), places)
    outs = []
    for rows, group in zip(folded.split([g.numel() for g in slots]), slots, strict=True):
        q, k, v = rows.unflatten(0, group.shape).transpose(1, 2).split(heads, dim=1)
        seen = None
        if shared:
            k, v = (
                torch.cat([once.expand(len(group), -1, -1, -1), own], dim=2)
                for once, own in zip(prefix[1:], (k, v), strict=True)
            )
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            seen = seen.tril(shared)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, **options
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    out = _Unfold.apply(torch.cat(outs), places)
    if shared:
        of_prefix = functional.scaled_dot_product_attention(*prefix, is_causal=True, **options)
        out = torch.cat([of_prefix[0].transpose(0, 1), out])
    return out


class _Fold(torch.autograd.Function):
    """Rows of a packed batch at each place of each pair.

    Every token has one place, and what is computed of the other places is not used. So the
    gradient is read where the token lies, which costs less than adding up all places.
    """

    @staticmethod
    def forward(ctx, rows, slots, places):
        ctx.save_for_backward(places)
        ctx.shared = len(rows) - len(places)
        return rows.index_select(0, slots)

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        grad = grad.index_select(0, places)
        if ctx.shared:  # the prefix is read otherwise
            grad = torch.cat([grad.new_zeros(ctx.shared, *grad.shape[1:]), grad])
        return grad, None, None


class _Unfold(torch.autograd.Function):
    """What lies at the places of the tokens; no other place gets a gradient."""

    @staticmethod
    def forward(ctx, folded, places):
        ctx.save_for_backward(places)
        ctx.count = len(folded)
        return folded.index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, places, grad), None


def narrow_last_layer(layer: nn.Module) -> None:
    """Make the last layer go on, after attention, with the tokens that the head reads.

    What it would compute of the others is read by nobody; their keys and values are.
    """

    def forward(self, hidden_states, *, ends, **arguments) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **arguments)
        hidden = (hidden_states + attended).index_select(1, ends)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    layer.forward = MethodType(forward, layer)
