import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.predict.attention import choose_backend, cuda_attention
from labkit.predict.gpus import find_gpu
from labkit.predict.trace import trace_step

BATCH, HEADS, LENGTH, DIM = 2, 4, 40, 64


def heads(dtype=torch.float32, *, dim=DIM, length=LENGTH, count=HEADS, grad=True):
    shape = (BATCH, count, length, dim)
    return torch.zeros(shape, dtype=dtype, device="meta", requires_grad=grad)


def chosen(card, dtype, *, mask=False, dim=DIM, dropout=0.0, grad=True):
    query = heads(dtype, dim=dim, grad=grad)
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool) if mask else None
    return choose_backend(find_gpu(card), query, query, query, mask, dropout)


# What torch 2.13 chooses, from the table of its own conditions in sdp_utils.cpp.
@pytest.mark.parametrize(
    ("card", "dtype", "mask", "expected"),
    [
        ("a100-40gb", torch.bfloat16, False, "flash"),
        ("rtx-4090", torch.float16, False, "flash"),
        ("l40s", torch.bfloat16, True, "mem_efficient"),
        ("a100-80gb", torch.float32, False, "mem_efficient"),
        ("rtx-3090", torch.float32, True, "mem_efficient"),
        ("h100", torch.bfloat16, False, "cudnn"),
        ("h200", torch.float16, True, "cudnn"),
        ("h100", torch.float32, True, "mem_efficient"),
        ("v100-16gb", torch.float16, True, "mem_efficient"),
        ("t4", torch.float32, False, "mem_efficient"),
        ("t4", torch.bfloat16, False, "math"),
        ("v100-32gb", torch.bfloat16, True, "math"),
    ],
)
def test_the_kernel_is_the_one_that_torch_chooses(card, dtype, mask, expected):
    assert chosen(card, dtype, mask=mask) == expected


def test_the_dimension_of_a_head_decides_as_well():
    assert chosen("a100-40gb", torch.bfloat16, dim=256) == "flash"
    assert chosen("a100-40gb", torch.bfloat16, dim=264) == "mem_efficient"
    assert chosen("a100-40gb", torch.bfloat16, dim=260) == "math"  # no multiple of 8
    assert chosen("t4", torch.float32, dim=33) == "mem_efficient"
    assert chosen("a100-40gb", torch.float32, dim=33) == "math"  # no multiple of 4
    # cards with little shared memory cannot train heads of 193 to 224 numbers
    assert chosen("rtx-4090", torch.bfloat16, dim=200) == "mem_efficient"
    assert chosen("rtx-4090", torch.bfloat16, dim=200, grad=False) == "flash"
    assert chosen("rtx-4090", torch.bfloat16, dim=256) == "flash"
    assert chosen("rtx-4090", torch.bfloat16, dim=256, dropout=0.1) == "mem_efficient"


class Attention(torch.nn.Module):
    """One attention, its inputs made of one parameter each."""

    def __init__(self, dtype, length, dim, mask, kv_heads):
        super().__init__()
        for name, count in (("query", HEADS), ("key", kv_heads), ("value", kv_heads)):
            # (B, S, H, D), as projections make it
            shape = (BATCH, length, count, dim)
            setattr(self, name, torch.nn.Parameter(torch.empty(shape, dtype=dtype)))
        self.mask, self.length, self.grouped = mask, length, kv_heads != HEADS

    def forward(self):
        rows = (BATCH, 1, self.length, self.length)
        mask = torch.ones(rows, dtype=torch.bool) if self.mask else None
        return functional.scaled_dot_product_attention(
            self.query.transpose(1, 2),
            self.key.transpose(1, 2),
            self.value.transpose(1, 2),
            attn_mask=mask,
            is_causal=not self.mask,
            enable_gqa=self.grouped,
        )


def blocks_of(card, dtype, *, length=LENGTH, dim=DIM, mask=False, kv_heads=HEADS):
    """Sizes of the blocks made in forward and in backward, in order."""

    def build():
        model = Attention(dtype, length, dim, mask, kv_heads)
        optimizer = torch.optim.SGD(model.parameters())

        def step(mark):
            mark("forward")
            out = model()
            mark("backward")
            out.backward(torch.ones_like(out))

        return model, optimizer, step

    trace = trace_step(build, find_gpu(card), steps=1)
    made = [(int(e), int(p)) for e, p in zip(trace.events, trace.phases, strict=True) if e >= 0]
    named = {1: [], 2: []}
    for event, phase in made:
        if phase in named:
            named[phase].append(int(trace.sizes[event]))
    return named[1], named[2][1:]  # the first block of backward is the gradient handed in


QUERY = BATCH * HEADS * LENGTH * DIM  # numbers


def test_flash_keeps_its_output_a_number_for_each_row_and_its_random_state():
    forward, backward = blocks_of("a100-40gb", torch.bfloat16)
    assert forward == [2 * QUERY, 4 * BATCH * HEADS * LENGTH, 16]
    rows = 128  # 40 rounded up
    assert backward == [
        *[2 * QUERY] * 3,  # the gradients
        4 * BATCH * HEADS * rows,
        4 * BATCH * HEADS * rows * DIM,  # those of the queries, added up in float32
    ]


def test_flash_adds_up_the_gradients_of_shared_keys_and_values():
    _, backward = blocks_of("a100-40gb", torch.bfloat16, kv_heads=2)
    assert backward[:3] == [2 * QUERY, QUERY, QUERY]
    assert backward[5:] == [2 * QUERY, 2 * QUERY]  # one for each query head, before the sum


def test_memory_efficient_attention_makes_a_bias_of_a_mask():
    forward, _ = blocks_of("a100-40gb", torch.bfloat16, mask=True)
    square = BATCH * LENGTH * LENGTH
    numbers = [2, 2]  # minus infinity and 0
    kept = [2 * square, 2 * QUERY, 4 * BATCH * HEADS * 64]  # bias, output, padded statistics
    assert forward == [square, square, *numbers, *kept]


def test_rows_of_a_bias_begin_on_borders_of_16_bytes():
    forward, _ = blocks_of("a100-40gb", torch.bfloat16, mask=True, length=37)
    assert 2 * BATCH * 37 * 37 in forward
    assert 2 * BATCH * 37 * 40 in forward  # the copy whose rows are padded


def test_memory_efficient_backward_in_16_bits():
    _, backward = blocks_of("a100-40gb", torch.bfloat16, mask=True, dim=128)
    tiles = 1 * 2  # 40 rows in tiles of 128, 128 columns in tiles of 64
    workspace = 4 * BATCH * HEADS * tiles * (4 + 128 * 64)
    assert backward == [*[4 * QUERY] * 3, 4 * BATCH * HEADS * LENGTH, workspace]


def test_memory_efficient_backward_in_float32_works_out_each_rows_product_first():
    _, backward = blocks_of("a100-40gb", torch.float32)
    rows = 4 * BATCH * HEADS * LENGTH
    assert backward[:3] == [4 * QUERY] * 3
    assert backward[3:6] == [4 * QUERY, rows, rows]  # product, sum, the sum laid out in order
    assert backward[6] == 4 * BATCH * HEADS * (4 + 64 * 64)


def test_math_keeps_the_square_of_scores():
    forward, _ = blocks_of("v100-16gb", torch.bfloat16)
    assert forward.count(4 * BATCH * HEADS * LENGTH * LENGTH) >= 2  # scores, softmax in float32


@pytest.mark.parametrize("card", ["a100-40gb", "h100", "t4"])
@pytest.mark.parametrize("mask", [True, False])
def test_gradients_have_the_shapes_that_torch_gives(card, mask):
    attention = cuda_attention(find_gpu(card))
    query = torch.zeros(2, 4, 8, 16, requires_grad=True)
    key = torch.zeros(2, 4, 8, 16, requires_grad=True)
    value = torch.zeros(2, 4, 8, 24, requires_grad=True)
    rows = torch.ones(2, 1, 8, 8, dtype=torch.bool) if mask else None
    out = attention(query, key, value, attn_mask=rows)
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=rows)
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    out.sum().backward()
    assert [t.grad.shape for t in (query, key, value)] == [query.shape, key.shape, value.shape]


def test_under_autocast_inputs_are_narrowed():
    attention = cuda_attention(find_gpu("a100-40gb"))
    query = torch.zeros(1, 2, 8, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(query, query, query).dtype == torch.bfloat16


class Operations(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def test_a_bool_mask_is_turned_into_numbers_to_add():
    attention = cuda_attention(find_gpu("a100-40gb"))
    query = torch.zeros(1, 1, 2, 8)
    mask = torch.tensor([[True, False], [True, True]])
    with Operations() as operations:
        attention(query, query, query, attn_mask=mask)
    assert torch.ops.aten.where in operations.seen
