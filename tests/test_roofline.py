from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from labkit.predict.counting import count_op
from labkit.predict.gpus import GPUS, find_gpu
from labkit.predict.roofline import OpCosts, model_time

aten = torch.ops.aten
TERA = 1e12


class Counter(TorchDispatchMode):
    """Counts every operation below it."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.ops.append((func, *count_op(func, args, kwargs, outputs)))
        return outputs

    def bytes_of(self, name):
        return sum(op[2] for op in self.ops if op[0]._overloadpacket.__name__ == name)

    @property
    def flops(self):
        return sum(op[1] for op in self.ops)

    @property
    def moved_bytes(self):
        return sum(op[2] for op in self.ops)


def counted(call):
    """What ``call`` costs; its tensors are fake ones."""
    with Counter() as counter:
        call()
    return counter


@pytest.fixture(autouse=True)
def fake_tensors():
    with FakeTensorMode():
        yield


def costs(*ops):
    """``OpCosts`` of (flops, bytes, dtype, phase)."""
    flops, moved, dtypes, phases = zip(*ops, strict=True) if ops else ((), (), (), ())
    return OpCosts(
        np.array(flops, np.int64), np.array(moved, np.int64), list(dtypes), list(phases)
    )


# Counting


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)]
)
def test_a_linear_layer_by_hand(dtype, size):
    m, k, n = 6, 5, 7
    x, weight, bias = torch.empty(m, k), torch.empty(n, k), torch.empty(n)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    counter = counted(lambda: F.linear(x, weight, bias))
    moving = [op[1:] for op in counter.ops if op[2]]
    name = str(dtype).removeprefix("torch.")
    assert moving == [(2 * m * n * k, (m * k + n * k + n + m * n) * size, name)]


def test_a_product_without_bias_and_its_gradients():
    m, k, n = 6, 5, 7
    x, weight = torch.empty(m, k, requires_grad=True), torch.empty(n, k, requires_grad=True)
    counter = counted(lambda: F.linear(x, weight).sum().backward())
    assert counter.flops == 3 * 2 * m * n * k
    # both operands and the product, of which each is read or written in every one of the three
    # products; the gradient of a sum is one number expanded, so it is read as one
    assert counter.bytes_of("mm") == 4 * (m * k + n * k + m * n) + 4 * (1 + n * k + m * k) * 2


def test_a_network_is_counted_as_by_torch():
    mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.empty(4, 16)
    counter = Counter()
    with FlopCounterMode(display=False) as torchs, counter:
        mlp(x).square().mean().backward()
    # forward; gradients of two weights and of the second layer's input
    by_hand = 2 * 4 * (16 * 32 + 32 * 8) * 2 + 2 * 4 * 32 * 8
    assert counter.flops == torchs.get_total_flops() == by_hand


@pytest.mark.parametrize(
    "name", ["efficient_attention", "flash_attention", "flash_attention_for_cpu"]
)
def test_attention_forward(name):
    q = torch.empty(2, 3, 8, 16)
    call = getattr(aten, f"_scaled_dot_product_{name}").default
    more = (None, False) if name == "efficient_attention" else ()
    with torch.device("meta"):
        outputs = (torch.empty(2, 3, 8, 16), torch.empty(2, 3, 8))
    flops, moved, dtype = count_op(call, (q, q.clone(), q.clone(), *more), {}, outputs)
    assert flops == 2 * (2 * 3 * 8 * 8 * 16) * 2
    assert moved == 4 * (4 * q.numel() + 2 * 3 * 8)
    assert dtype == "float32"


def test_attention_backward_multiplies_five_times():
    q = torch.empty(2, 3, 8, 16, dtype=torch.bfloat16)
    call = aten._scaled_dot_product_efficient_attention_backward.default
    args = (q, q, q, q, None, q, torch.empty(2, 3, 32), None, None, 0.0, [True] * 3 + [False])
    flops, _, dtype = count_op(call, args, {}, (q, q, q, None))
    assert flops == 5 * 2 * (2 * 3 * 8 * 8 * 16)
    assert dtype == "bfloat16"


def test_attention_on_a_cpu_and_back():
    q = torch.empty(2, 3, 8, 16, requires_grad=True)
    counter = counted(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward())
    assert counter.flops == (2 + 5) * 2 * (2 * 3 * 8 * 8 * 16)


def test_attention_of_packed_sentences_counts_each_for_itself():
    q = torch.empty(16, 3, 8, dtype=torch.float16)  # tokens, heads, width
    ends = torch.empty(3, dtype=torch.int32)  # of two sentences, and a zero
    args = (q, q, q, ends, ends, 10, 10, 0.0, False, False)
    counted_op = count_op(aten._flash_attention_forward.default, args, {}, (q, None))
    # of fake tensors only the longest length is known, so that all count as long as that
    assert counted_op == (2 * 2 * (2 * 3 * 10 * 10 * 8), 2 * 2 * 16 * 3 * 8 + 3 * 4, "float16")


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.view(-1),
        lambda x: x[1:],
        lambda x: x.split(2),
        lambda x: x.unbind(),
        lambda x: x.expand(3, 4, 6),
        lambda x: x.detach(),
        lambda x: x.t_(),
        lambda x: aten._unsafe_view(x, [24]),
        torch.empty_like,
        lambda x: torch.empty(5),
        lambda x: x.new_empty(5),
        lambda x: aten.is_same_size(x, x),
    ],
)
def test_what_moves_nothing(view):
    x = torch.empty(4, 6)
    counter = counted(lambda: view(x))
    assert counter.ops
    assert counter.moved_bytes == counter.flops == 0


@pytest.mark.parametrize(
    ("call", "moved"),
    [
        (lambda x, y: x + y, 3 * 24),
        (lambda x, y: x * x, 2 * 24),  # one input, given twice
        (lambda x, y: x.add_(y), 3 * 24),
        (lambda x, y: x.mul_(2), 2 * 24),
        (lambda x, y: x.copy_(y), 2 * 24),
        (lambda x, y: x.zero_(), 24),
        (lambda x, y: x.normal_(), 24),
        (lambda x, y: torch.add(x, y, out=torch.empty(4, 6)), 3 * 24),
        (lambda x, y: torch.zeros(4, 6), 24),
        (lambda x, y: torch.zeros_like(x), 24),
        (lambda x, y: x.new_ones(3), 3),
        (lambda x, y: x.sum(), 24 + 1),
        (lambda x, y: x.clone(), 2 * 24),
        (lambda x, y: x.t().contiguous(), 2 * 24),
        (lambda x, y: x[:1].expand(4, 6) + y, 6 + 24 + 24),  # an expanded row is one row
        (lambda x, y: torch.cat([x, y]), 2 * 24 + 48),
        (lambda x, y: torch._foreach_add_([x, y], [y, x]), 2 * 24 + 2 * 24),
        (lambda x, y: torch._foreach_mul([x, y], 2.0), 4 * 24),
        (lambda x, y: torch._foreach_copy_([x], [y]), 2 * 24),
    ],
)
def test_bytes_read_and_written(call, moved):
    x, y = torch.empty(4, 6), torch.empty(4, 6)
    assert counted(lambda: call(x, y)).moved_bytes == 4 * moved


def test_the_dtype_of_a_conversion_is_that_of_its_output():
    x = torch.empty(4, 6)
    (op,) = counted(lambda: x.to(torch.bfloat16)).ops
    assert op[1:] == (0, 24 * 4 + 24 * 2, "bfloat16")


def test_the_dtype_of_a_product_is_that_of_its_inputs():
    x, product = torch.empty(4, 4, dtype=torch.bfloat16), torch.empty(4, 4)
    args = (x, x.clone(), torch.float32)
    flops, moved, dtype = count_op(aten.mm.dtype, args, {}, product)
    assert (flops, moved, dtype) == (2 * 4**3, 2 * 16 * 2 + 16 * 4, "bfloat16")


def test_a_lookup_reads_only_its_rows():
    table, rows = torch.empty(1000, 8), torch.empty(5, dtype=torch.long)
    row_bytes = 5 * 8 * 4
    looked_up = counted(lambda: F.embedding(rows, table)).moved_bytes
    assert looked_up == row_bytes + 5 * 8 + row_bytes
    assert counted(lambda: table[rows]).moved_bytes == looked_up
    assert counted(lambda: table.index_select(0, rows)).moved_bytes == looked_up


def test_writing_at_indices_touches_only_these():
    table, values = torch.empty(1000, 8), torch.empty(5, 8)
    rows = torch.empty(5, dtype=torch.long)
    counter = counted(lambda: table.index_put_((rows,), values, accumulate=True))
    assert counter.moved_bytes == 3 * 5 * 8 * 4 + 5 * 8


def test_the_fused_optimizer_reads_gradients_and_writes_the_rest():
    weight, grad, m, v = (torch.empty(10) for _ in range(4))
    step = torch.empty(())
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    args = ([weight], [grad], [m], [v], [], [step])
    kwargs = {**options, "amsgrad": False, "maximize": False}
    flops, moved, _ = count_op(aten._fused_adamw_.default, args, kwargs, None)
    assert (flops, moved) == (0, 4 * (4 * 10 + 1 + 3 * 10))


# Time


@pytest.fixture
def card():
    """100 GB/s; 1 TFLOPS in float32, 4 in float16."""
    rates = {"float32": 1 * TERA, "float16": 4 * TERA}
    gpu = find_gpu("t4")
    return type(gpu)(
        **{
            **vars(gpu),
            "bandwidth_bytes_per_second": 100e9,
            "matrix_flops_per_second": rates,
            "native_dtypes": tuple(rates),
        }
    )


def test_an_operation_takes_the_longer_of_its_two_times(card):
    modelled = model_time(
        costs(
            (2 * 10**12, 10**9, "float16", "forward"),  # 0.5 s of arithmetic, 0.01 s of bytes
            (10**9, 25 * 10**9, "float32", "forward"),  # 0.001 s and 0.25 s
            (0, 5 * 10**10, "int64", "backward"),  # 0.5 s of bytes
        ),
        card,
    )
    assert modelled.seconds == pytest.approx(1.25)
    assert modelled.seconds_by_phase == pytest.approx({"forward": 0.75, "backward": 0.5})
    assert modelled.compute_bound_share == pytest.approx(0.4)
    assert (modelled.flops, modelled.moved_bytes) == (2_001_000_000_000, 76_000_000_000)


def test_a_format_without_units_is_computed_in_float32(card):
    asked = model_time(costs((10**12, 1, "bfloat16", "forward")), card)
    assert asked.seconds == pytest.approx(1.0)


def test_no_operations_take_no_time(card):
    modelled = model_time(costs(), card)
    assert (modelled.seconds, modelled.seconds_by_phase) == (0.0, {})
    assert modelled.compute_bound_share == 0.0


def test_phases_keep_their_order_and_add_up(card):
    ops = [(0, 10**9, "", phase) for phase in ("forward", "backward", "forward", "optimizer")]
    modelled = model_time(costs(*ops), card)
    assert list(modelled.seconds_by_phase) == ["forward", "backward", "optimizer"]
    assert sum(modelled.seconds_by_phase.values()) == pytest.approx(modelled.seconds)


def random_costs(count=500):
    numbers = np.random.default_rng(0)
    flops = np.where(numbers.random(count) < 0.3, numbers.integers(0, 10**12, count), 0)
    return OpCosts(
        flops,
        numbers.integers(0, 10**9, count),
        numbers.choice(["float32", "float16", "bfloat16"], count).tolist(),
        ["forward"] * (count // 2) + ["backward"] * (count - count // 2),
    )


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_scaling_a_card(gpu):
    def scaled(bandwidth, rate):
        rates = {dtype: rate * flops for dtype, flops in gpu.matrix_flops_per_second.items()}
        return model_time(
            random_costs(),
            type(gpu)(
                **{
                    **vars(gpu),
                    "bandwidth_bytes_per_second": bandwidth * gpu.bandwidth_bytes_per_second,
                    "matrix_flops_per_second": rates,
                }
            ),
        )

    as_is = scaled(1, 1)
    assert scaled(2, 1).seconds < as_is.seconds
    assert scaled(1, 2).seconds < as_is.seconds
    assert scaled(2, 1).compute_bound_share > as_is.compute_bound_share
    assert scaled(2, 2).seconds == pytest.approx(as_is.seconds / 2)
    assert scaled(2, 2).compute_bound_share == pytest.approx(as_is.compute_bound_share)


def test_twice_the_work_takes_twice_as_long(card):
    once = random_costs()
    twice = OpCosts(once.flops * 2, once.moved_bytes * 2, once.dtypes, once.phases)
    assert model_time(twice, card).seconds == pytest.approx(2 * model_time(once, card).seconds)


def test_a_newer_card_is_modelled_faster():
    names = ("h200", "h100", "a100-80gb", "t4")
    seconds = [model_time(random_costs(), find_gpu(name)).seconds for name in names]
    assert seconds == sorted(seconds)


def test_operations_that_run_several_times_count_so_often():
    card, ops = find_gpu("t4"), random_costs()
    thrice = replace(ops, times=np.full(len(ops.flops), 3))
    once, more = model_time(ops, card), model_time(thrice, card)
    assert more.seconds == pytest.approx(3 * once.seconds)
    assert (more.flops, more.moved_bytes) == (3 * once.flops, 3 * once.moved_bytes)
    assert more.compute_bound_share == pytest.approx(once.compute_bound_share)


def test_a_step_of_small_tensors_waits_for_launches():
    ops = [(0, 1, "float32", phase) for phase in ("forward", "backward", "optimizer")]
    modelled = model_time(costs(*ops), find_gpu("h100"))
    assert modelled.launches == 2  # the optimizer's lists are a kernel for many
    assert modelled.least_seconds == modelled.launch_seconds == 2 * 5e-6
    large = model_time(costs((10**12, 1, "float32", "forward")), find_gpu("h100"))
    assert large.least_seconds == large.seconds > large.launch_seconds
