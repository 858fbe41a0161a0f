"""What one operation of a step costs: arithmetic, and bytes read and written."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

aten = torch.ops.aten

# fmt: off
# The rule is that an operation reads its inputs and writes its outputs. Exceptions, by name:
# nothing is moved, because new memory is left as it is or old memory is described anew,
MOVES_NOTHING = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "_unsafe_view", "_efficientzerotensor",
}
# only the shape of the inputs counts,
SHAPE_ONLY = {
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full",
}
# what is written in place is not read before,
OVERWRITES = {
    "copy_", "zero_", "fill_", "uniform_", "normal_", "bernoulli_", "random_",
    "_foreach_copy_", "_foreach_zero_",
}
# or of the first tensor only those elements are touched that the indices name: at most as many
# bytes as the largest other tensor has.
INDEXED = {
    "embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward",
    "index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_",
}
# fmt: on


@dataclass(frozen=True)
class _Rule:
    """What an operation moves, and how its arithmetic is counted.

    An argument is known by its position, or by its name where it has none.
    """

    moves: bool
    unread: frozenset[str | int]
    writes: tuple[str | int, ...]  # arguments written in place
    returns_new: bool
    indexed: bool
    formula: Callable[..., int] | None
    takes_shapes: bool  # the formula is given shapes instead of tensors


def _with_all_heads(formula: Callable, query_at: int) -> Callable:
    """A formula of attention that is told of as many heads of keys and values as of queries.

    torch 2.13 counts heads that are shared by itself, 2.11 refuses them.
    """
    on_shapes = formula.__wrapped__

    def with_all_heads(*args, **kwargs) -> int:
        before, query, after = args[:query_at], args[query_at], args[query_at + 3 :]
        keys_and_values = [
            (*query[:2], *shape[2:]) for shape in args[query_at + 1 : query_at + 3]
        ]
        return on_shapes(*before, query, *keys_and_values, *after, **kwargs)

    return shape_wrapper(with_all_heads)


# What a CPU computes attention with costs the same arithmetic.
FORMULAS = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: _with_all_heads(
        flop_registry[aten._scaled_dot_product_flash_attention], 0
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _with_all_heads(
        flop_registry[aten._scaled_dot_product_flash_attention_backward], 1
    ),
}


@cache
def _rule(func: torch._ops.OpOverload) -> _Rule:
    """The rule of an operation, from its schema; once per operation, not per call."""
    name = func._overloadpacket.__name__
    arguments = func._schema.arguments
    places = [a.name if a.kwarg_only else i for i, a in enumerate(arguments)]
    written = {  # in place, or into ``out``
        place: a
        for place, a in zip(places, arguments, strict=True)
        # the fused optimizers say that they write gradients; only a GradScaler makes them
        if a.alias_info is not None and a.alias_info.is_write and a.name != "grads"
    }
    unread = {place for place, a in written.items() if a.is_out or name in OVERWRITES}
    if name in SHAPE_ONLY:
        unread = set(places)
    formula = FORMULAS.get(func._overloadpacket)
    raw = getattr(formula, "__wrapped__", None)  # without the slow search for tensors
    return _Rule(
        moves=not (
            func.is_view or name in MOVES_NOTHING or torch.Tag.inplace_view in func.tags
        ),
        unread=frozenset(unread),
        writes=tuple(written),
        returns_new=not any(returned.alias_info for returned in func._schema.returns),
        indexed=name in INDEXED,
        formula=raw or formula,
        takes_shapes=raw is not None,
    )


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """The tensors of an argument or of outputs: one, a list, or none."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return ()


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements: an expanded tensor repeats the same ones."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.nbytes
    elements = tensor.itemsize
    for size, stride in zip(tensor.shape, strides, strict=True):
        elements *= size if stride else min(size, 1)
    return elements


def _shapes(value: Any) -> Any:
    """The shape of a tensor; of a list of tensors, their shapes; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, list | tuple):
        return [_shapes(item) for item in value]
    return value


def count_op(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict | None, outputs: Any
) -> tuple[int, int, str]:
    """What one operation costs, as a ``TorchDispatchMode`` sees it.

    Products are counted as ``FlopCounterMode`` does, other arithmetic not at all: it is never
    what an element-wise operation waits for. Bytes are those of every distinct input, once,
    and of every output. A view moves nothing; an operation in place reads and writes.

    Args:
        func: The operation.
        args: What it was called with; fake tensors suffice.
        kwargs: The same, by name.
        outputs: What it returned.

    Returns:
        ``flops``, ``moved_bytes``, and the dtype: of the first input of a product, of the
        first output of anything else, ``""`` where there is none.
    """
    rule = _rule(func)
    kwargs = kwargs or {}
    returned = _tensors(outputs)
    flops = 0
    typed: Iterable[torch.Tensor] = returned
    if rule.formula is not None:
        typed = _tensors(args)
        if rule.takes_shapes:
            shapes = [_shapes(arg) for arg in args]
            flops = rule.formula(*shapes, out_shape=_shapes(outputs), **kwargs)
        else:
            flops = rule.formula(*args, **kwargs, out_val=outputs)
    dtype = next((_dtype_name(tensor.dtype) for tensor in typed), "")
    if not rule.moves or not (rule.writes or returned):
        return int(flops), 0, dtype
    return int(flops), _moved_bytes(rule, args, kwargs, returned), dtype


def _moved_bytes(
    rule: _Rule, args: tuple, kwargs: dict, returned: Iterable[torch.Tensor]
) -> int:
    read: dict[int, int] = {}  # bytes by identity: an argument given twice is read once
    for place, value in (*enumerate(args), *kwargs.items()):
        if place in rule.unread:
            continue
        for tensor in _tensors(value):
            read[id(tensor)] = _tensor_bytes(tensor)
    written = [
        (id(tensor), _tensor_bytes(tensor))
        for place in rule.writes
        for tensor in _tensors(_argument(place, args, kwargs))
    ]
    if rule.returns_new:
        written += [(id(tensor), tensor.nbytes) for tensor in returned]
    if rule.indexed:
        first = id(next(iter(_tensors(args))))
        moved = [*read.items(), *written]
        most = max((size for owner, size in moved if owner != first), default=0)
        return sum(min(size, most) if owner == first else size for owner, size in moved)
    return sum(read.values()) + sum(size for _, size in written)


def _argument(place: str | int, args: tuple, kwargs: dict) -> Any:
    """An argument that its schema lists at ``place``; left out, it is ``None``."""
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None
