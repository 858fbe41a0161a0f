"""A step without data makes the blocks that the step with data makes."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
)

from labkit.memory import measure_memory
from labkit.predict.gpus import find_gpu
from labkit.predict.peaks import cpu_memory
from labkit.predict.prediction import predict_step
from labkit.predict.trace import TraceError, trace_step

BATCH, LENGTH = 4, 24


class Two(nn.Module):
    """Two layers without bias and a relu between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)
        self.second = nn.Linear(16, 4, bias=False)

    def forward(self, x):
        return self.second(functional.relu(self.first(x)))


def two_layers(**options):
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step(mark):
        mark("forward")
        loss = model(torch.zeros(5, 8)).sum()
        mark("backward")
        loss.backward()
        mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def made(trace, phase, step=-1):
    """Sizes and operations of the blocks made in a phase of a step."""
    start = trace.step_starts[step]
    return [
        (int(trace.sizes[event]), trace.blocks[event].op)
        for event, number in zip(trace.events[start:], trace.phases[start:], strict=True)
        if event >= 0 and ("before", "forward", "backward", "optimizer")[number] == phase
    ]


def test_two_layers_by_hand():
    trace = trace_step(two_layers)
    rows, hidden, out = 5, 16, 4
    sizes = [size for size, _ in made(trace, "forward")]
    # input, hidden layer, its relu, output, sum
    assert sizes == [4 * n for n in (rows * 8, rows * hidden, rows * hidden, rows * out, 1)]
    weights = [block for block in trace.blocks if block.owner == "weights"]
    assert [block.module for block in weights] == ["first", "second"]
    gradients = {
        (int(size), block.module)
        for size, block in zip(trace.sizes, trace.blocks, strict=True)
        if block.owner == "gradients"
    }
    assert gradients == {(4 * 8 * 16, "first"), (4 * 16 * 4, "second")}
    state = [
        int(size)
        for size, block in zip(trace.sizes, trace.blocks, strict=True)
        if block.owner == "optimizer_state"
    ]
    assert sorted(state) == [4, 4, *[4 * 64] * 2, *[4 * 128] * 2]


def test_state_is_made_in_the_first_step_only():
    trace = trace_step(two_layers, steps=3)
    first, *later = (made(trace, "optimizer", step) for step in range(3))
    start, second = trace.step_starts[:2]
    assert (
        sum(trace.blocks[e].owner == "optimizer_state" for e in trace.events[start:second]) > 0
    )
    assert all(
        trace.blocks[e].owner != "optimizer_state" for e in trace.events[second:] if e >= 0
    )
    assert len(first) > len(later[0])


def test_work_has_a_place_in_forward_and_in_backward():
    trace = trace_step(two_layers)
    places = {
        (trace.modules[index], ("before", "forward", "backward", "optimizer")[phase])
        for index, phase in enumerate(trace.phases)
    }
    for phase in ("forward", "backward"):
        assert {("first", phase), ("second", phase)} <= places


def test_on_a_card_the_optimizer_works_on_all_parameters_at_once():
    trace = trace_step(two_layers, find_gpu("t4"))
    roots = [size for size, op in made(trace, "optimizer") if op == "aten._foreach_sqrt"]
    assert roots == [4 * 128, 4 * 64]  # a copy of the second moments of all parameters
    counts = [
        int(size)
        for size, block in zip(trace.sizes, trace.blocks, strict=True)
        if block.owner == "optimizer_state"
    ]
    assert counts.count(0) == 2  # the step counts stay in the host's memory


def test_a_fused_optimizer_keeps_its_counts_on_the_card_and_copies_nothing():
    trace = trace_step(lambda: two_layers(fused=True), find_gpu("t4"))
    assert not made(trace, "optimizer")
    assert [int(s) for s, b in zip(trace.sizes, trace.blocks, strict=True)].count(0) == 0


def test_the_matrix_library_takes_its_workspace_once_for_each_thread():
    gpu = find_gpu("a100-40gb")
    trace = trace_step(two_layers, gpu)
    taken = [b for b in trace.blocks if b.op == "cublas workspace"]
    assert len(taken) == 2
    assert [int(s) for s in trace.sizes].count(gpu.cublas_workspace_bytes) == 2


def test_dropout_keeps_bytes_on_a_card_and_floats_on_a_cpu():
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters())

        def step(mark):
            mark("forward")
            loss = model(torch.zeros(32, 8)).sum()
            mark("backward")
            loss.backward()

        return model, optimizer, step

    def sizes(gpu):
        return [size for size, _ in made(trace_step(build, gpu), "forward")]

    assert 32 * 8 in sizes(find_gpu("t4"))
    assert 32 * 8 not in sizes(None)


def test_autocast_on_a_card_normalises_in_float32():
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        optimizer = torch.optim.SGD(model.parameters())

        def step(mark):
            mark("forward")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs.append(model(torch.zeros(3, 8)).dtype)

        return model, optimizer, step

    outputs = []
    trace_step(build, find_gpu("t4"), steps=1)
    assert outputs == [torch.float32]


def test_a_tensor_in_an_attribute_or_a_closure_is_found():
    def build():
        model = nn.Linear(4, 4)
        model.mask = torch.ones(4, 4)
        scale = torch.ones(1000)
        optimizer = torch.optim.SGD(model.parameters())

        def step(mark):
            (model(torch.zeros(2, 4)) @ model.mask).sum().backward()
            return scale * 2

        return model, optimizer, step

    memory = cpu_memory(trace_step(build))
    assert memory.by_owner["weights"] == 4 * (20 + 16 + 1000)


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_step_keeps_stays_alive(keeps):
    def build():
        model = nn.Linear(10, 10, bias=False)
        optimizer = torch.optim.SGD(model.parameters())
        kept = []

        def step():
            out = model(torch.zeros(100, 10))
            kept[:] = [out] if keeps else []
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    rows = 4 * 100 * 10  # the batch, this step's output, and that of the step before
    memory = predict_step(build).memory
    scalars = 0 if keeps else 8  # sum and its gradient, made when the old output is gone
    assert memory.by_phase["forward"] == 4 * 100 + (3 if keeps else 2) * rows + scalars


# ---- against what PyTorch's CPU allocator hands out


def measured(build):
    """The step with data, measured as the lab measures its own."""
    torch.manual_seed(0)
    model, optimizer, step = build()

    class Step:
        device = torch.device("cpu")

        def __call__(self, batch, mark=lambda phase: None):
            mark("forward")
            return step()

    runner = Step()
    runner.model, runner.optimizer = model, optimizer
    runner(None)
    gc.collect()
    nothing = torch.zeros(0)
    batch = SimpleNamespace(tensors=[nothing])
    return measure_memory(runner, batch)


def full_training(config, kind, *, autocast=False, accumulate=1, evaluate=False):
    def build():
        model = kind.from_config(config)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            optimizer.zero_grad(set_to_none=True)
            for _ in range(accumulate):
                ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
                labels = ids if kind is AutoModelForCausalLM else ids[:, 0].clone()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = model(input_ids=ids, labels=labels).loss
                (loss / accumulate).backward()
                del loss
            optimizer.step()
            if evaluate:
                with torch.no_grad():
                    model(input_ids=ids)

        return model, optimizer, step

    return build


GPT2 = GPT2Config(
    n_layer=2, n_embd=64, n_head=4, vocab_size=500, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
LLAMA = LlamaConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, vocab_size=500,
)  # fmt: skip
BERT = BertConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    vocab_size=500,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kind", "options"),
    [
        (GPT2, AutoModelForCausalLM, {}),
        (GPT2, AutoModelForCausalLM, {"autocast": True}),
        (LLAMA, AutoModelForCausalLM, {"accumulate": 2}),
        (LLAMA, AutoModelForCausalLM, {"evaluate": True}),
        (BERT, AutoModelForSequenceClassification, {}),
    ],
    ids=["gpt2", "gpt2 autocast", "llama in parts", "llama with evaluation", "bert"],
)
def test_full_training_of_other_models_peaks_where_it_is_predicted(config, kind, options):
    build = full_training(config, kind, **options)
    predicted = predict_step(build).memory.peak_allocated_bytes
    assert predicted == pytest.approx(measured(build).peak_allocated_bytes, rel=1e-3)


# ---- what cannot be traced


def failing(operation):
    def build():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())

        def step():
            operation(model(torch.zeros(2, 4)))

        return model, optimizer, step

    return build


def test_a_result_that_depends_on_values_is_named():
    with pytest.raises(
        TraceError, match=r"aten\.nonzero.*in the step itself.*depends on values"
    ):
        predict_step(failing(lambda out: out.nonzero()))


def test_the_module_in_which_it_happens_is_named():
    class Picky(nn.Module):
        def forward(self, x):
            return x[x > 0]

    def build():
        model = nn.Sequential(nn.Linear(4, 4), Picky())
        optimizer = torch.optim.SGD(model.parameters())
        return model, optimizer, lambda: model(torch.zeros(2, 4))

    with pytest.raises(TraceError, match=r"without data: .* in 1 fails there .*Leave it out"):
        predict_step(build)


def test_an_operation_that_refuses_is_named_with_its_reason(capfd):
    with pytest.raises(TraceError, match=r"aten\.mm.*fails there"):
        predict_step(failing(lambda out: out @ torch.zeros(3, 3)))
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_of_the_steps_own_is_not_ours():
    def wrong(out):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        predict_step(failing(wrong))


def test_numbers_that_code_reads_let_a_sound_step_go_on():
    def build():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.NAdam(model.parameters())  # divides by 1 minus what it reads

        def step():
            loss = model(torch.zeros(2, 4)).sum()
            if loss.isnan().any() or loss.isinf().any():
                raise ArithmeticError("not finite")
            assert (torch.ones(3) == 1).all()
            loss.backward()
            optimizer.step()
            return loss.item()

        return model, optimizer, step

    assert predict_step(build).memory.peak_allocated_bytes > 0


def test_tracing_leaves_libraries_as_they_were():
    before = functional.dropout, functional.scaled_dot_product_attention, torch.get_rng_state
    trace_step(two_layers, find_gpu("t4"))
    with pytest.raises(TraceError):
        predict_step(failing(lambda out: out.nonzero()))
    after = functional.dropout, functional.scaled_dot_product_attention, torch.get_rng_state
    assert after == before
    assert gc.isenabled()
    assert nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.bfloat16), (None, torch.float16)]
)
def test_a_step_written_for_a_card_is_traced_as_written(recwarn, dtype, expected):
    """Autocast and the scaler are asked for on ``cuda``; a CPU would switch both off."""
    seen = []

    def build():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        seen.append(scaler.is_enabled())

        def step():
            with torch.autocast("cuda", dtype=dtype):
                out = model(torch.zeros(2, 4))
            seen.append(out.dtype)
            scaler.scale(out.float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        return model, optimizer, step

    report = predict_step(build, "a100-40gb")
    assert seen == [True, expected, expected]
    assert not recwarn.list
    assert report.memory.by_owner["optimizer_state"] > 0
    assert not report.notes


def test_a_card_that_imitates_a_format_says_so():
    def build():
        model = nn.Linear(4, 4).bfloat16()
        optimizer = torch.optim.SGD(model.parameters())
        return model, optimizer, lambda: model(torch.zeros(2, 4).bfloat16()).sum().backward()

    (note,) = predict_step(build, "t4").notes
    assert note.startswith("the step multiplies in bfloat16, for which NVIDIA T4")


# ---- steps of many kinds


def rows():
    return torch.zeros(BATCH, 8)


def test_an_optimizer_that_works_in_backward():
    """Its hooks stay with the parameters: their state is made, their gradients go at once."""

    def build():
        model = nn.Linear(8, 8, bias=False)
        own = {p: torch.optim.AdamW([p]) for p in model.parameters()}

        def update(parameter):
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        idle = torch.optim.SGD(model.parameters())
        return model, idle, lambda: model(rows()).sum().backward()

    # weights, the batch, two moments and a count: no gradient is left from the step before
    assert predict_step(build).memory.by_phase["before"] == 4 * (64 + BATCH * 8 + 2 * 64 + 1)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    def build():
        model = kind(8, 16, batch_first=True)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            optimizer.zero_grad()
            model(torch.zeros(BATCH, 5, 8))[0].sum().backward()
            optimizer.step()

        return model, optimizer, step

    assert predict_step(build, "a100-40gb").memory.by_owner["weights"] > 4 * 16 * 8


def test_a_loss_can_be_printed():
    def build():
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters())

        def step():
            loss = model(rows()).sum()
            printed.append(f"{loss:.3f}")
            loss.backward()

        return model, optimizer, step

    printed = []
    predict_step(build)
    assert printed == ["0.500", "0.500"]


def test_a_sparse_gradient_is_named():
    def build():
        model = nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SGD(model.parameters())
        ids = lambda: torch.zeros(3, dtype=torch.int64)  # noqa: E731
        return model, optimizer, lambda: model(ids()).sum().backward()

    with pytest.raises(TraceError, match="sparse result"):
        predict_step(build)


def test_numbers_read_in_build_are_told():
    def build():
        torch.zeros(3).sum().item()

    with pytest.raises(TraceError, match="inside the step, not in build"):
        predict_step(build)


def test_gradients_are_switched_on_where_the_caller_has_them_off():
    with torch.no_grad():
        trace = trace_step(two_layers)
    assert any(block.owner == "gradients" for block in trace.blocks)


def test_copies_that_a_step_keeps_are_counted():
    def build():
        model = nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        kept = []

        def step():
            model(rows()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept[:] = [copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())]
            assert isinstance(kept[0].weight, nn.Parameter)

        return model, optimizer, step

    state = 2 * 64 + 1
    for _ in range(3):
        before = predict_step(build).memory.by_phase["before"]
        assert before == 4 * (2 * 64 + 2 * state + BATCH * 8)
        gc.collect()
