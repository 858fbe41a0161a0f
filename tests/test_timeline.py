"""Any batch and length from a timeline is what a trace at that very point gives."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import MistralConfig

from labkit.model_source import find_model
from labkit.precision import choose_precision
from labkit.predict import recipe_step
from labkit.predict.gpus import find_gpu
from labkit.predict.peaks import cuda_memory, peak_bytes
from labkit.predict.polynomials import ROUNDINGS, Polynomials
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.recipe_timeline import has_timeline
from labkit.predict.recipe_trace import step_trace
from labkit.predict.roofline import model_time
from labkit.predict.stack import Unlike
from labkit.predict.timeline import LENGTHS, Pattern, points
from labkit.recipe import Recipe
from labkit.shapes import BatchShape

CPU = torch.device("cpu")
A100 = find_gpu("a100-40gb")


def step(gpu=None, *, padded=True, layers=4, **fields):
    recipe = Recipe(**{"model": "qwen3-small", "lora_dropout": 0.1, **fields})
    source = find_model(recipe.model)
    source.config.num_hidden_layers = layers
    source.config.layer_types = ["full_attention"] * layers
    precision = choose_precision(recipe, CPU, emulate=True)
    return RecipeStep(recipe, source, precision, gpu, padded, pad_token_id=0)


def assert_same(fast, slow):
    """Every block, size, event, place and owner."""
    assert fast.blocks == slow.blocks
    for name in ("sizes", "events", "phases"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name), err_msg=name)
    assert fast.modules == slow.modules
    assert fast.step_starts == slow.step_starts


def total(trace):
    return trace.costs[-1].flops.sum(), trace.costs[-1].moved_bytes.sum()


CASES = {
    "cpu": {},
    "cpu, no padding": {"padded": False},
    "cpu, eager attention, checkpointing": {"attention": "eager", "checkpoint_every": 1},
    "cpu, LoRA in the MLP only": {"lora_targets": ("gate_proj", "down_proj")},
    "card": {"gpu": A100},
    "card, no padding, base gradients": {"gpu": A100, "padded": False, "train_base": True},
    "card, every second layer": {"gpu": A100, "checkpoint_every": 2, "layers": 9},
    "card, 16-bit weights, scaled gradients": {"gpu": A100, "weights": "float16"},
    "card, all at once": {
        "gpu": A100, "autocast": "bfloat16", "checkpoint_every": 1, "micro_batches": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_timeline_is_the_trace_at_every_point(name, monkeypatch):
    one = step(**CASES[name])
    draw = random.Random(name)
    parts = one.recipe.micro_batches
    pairs = parts * draw.randint(2, 12) + draw.randrange(parts)
    tokens = 8 * draw.randint(1, 40) + draw.choice([0, 3])
    with monkeypatch.context() as patch:
        patch.setattr(RecipeStep, "trace", only_few_layers(RecipeStep.trace))
        fast, trained = step_trace(
            one, BatchShape(pairs, tokens, one.padded), more_to_come=True
        )
    slow = one.trace([(pairs, tokens)] * 2)
    assert_same(fast, slow)
    flops, moved_bytes = total(slow)
    assert total(fast)[0] == flops
    assert total(fast)[1] == pytest.approx(moved_bytes, rel=1e-2)
    if one.recipe.lora_targets == Recipe().lora_targets:
        assert trained["lora"] == one.recipe.lora_rank * len(slow_lora(one))


def only_few_layers(trace):
    """A trace that is refused for the whole model: a timeline has to do without it."""

    def of_few_layers(self, shapes, depth=None, see=lambda model: None):
        assert depth is not None, "fell back to a trace of the model itself"
        return trace(self, shapes, depth, see)

    return of_few_layers


def slow_lora(one):
    """A number for each row and column of each weight that has LoRA matrices."""
    config = one.source.config
    width, kv = config.num_attention_heads * config.head_dim, 2 * config.head_dim
    widths = 3 * config.hidden_size + width + 2 * kv
    return range(config.num_hidden_layers * widths)


def test_a_further_point_costs_no_trace(monkeypatch):
    one = step(A100)
    step_trace(one, BatchShape(8, 64, padded=True), more_to_come=True)
    monkeypatch.setattr(recipe_step, "trace_step", None)  # would fail if it were called
    trace, _ = step_trace(one, BatchShape(100, 512, padded=True), more_to_come=True)
    assert trace.sizes.sum() > 0


PARTS = {
    "cpu, 3 parts of a row": (None, 3, 1, {"checkpoint_every": 1}),
    "cpu, 4 parts": (None, 4, 2, {}),
    "T4, 3 parts, scaled gradients": ("t4", 3, 2, {"autocast": "float16"}),
    "A100, 6 parts of a row": ("a100-40gb", 6, 1, {"weights": "bfloat16"}),
    "RTX 5090, every second layer": ("rtx-5090", 4, 3, {"checkpoint_every": 2}),
    "MI300X, 5 parts": ("mi300x", 5, 4, {"optimizer": "adamw_fused"}),
    "B200, autocast": ("b200", 4, 16, {"autocast": "bfloat16", "layers": 2}),
}


@pytest.mark.parametrize("name", PARTS)
def test_two_parts_stand_for_more_and_one_card_for_others(name):
    gpu, parts, rows, fields = PARTS[name]
    card = gpu and find_gpu(gpu)
    one, shape = (
        step(card, micro_batches=parts, batch_size=parts * rows, **fields),
        (parts * rows, 72),
    )
    fast, _ = step_trace(one, BatchShape(*shape, padded=True), more_to_come=True)
    slow = one.trace([shape] * 2)
    assert peak_bytes(fast, card) == peak_bytes(slow, card)
    if card:
        assert cuda_memory(fast).peak_reserved_bytes == cuda_memory(slow).peak_reserved_bytes
        quick, true = model_time(fast.costs[-1], card), model_time(slow.costs[-1], card)
        assert (quick.flops, quick.launches) == (true.flops, true.launches)
        assert quick.seconds == pytest.approx(true.seconds, rel=1e-3)


def test_layers_that_a_config_tells_apart_have_no_timeline():
    one = step(layers=6)
    assert has_timeline(one)
    one.source.config.no_rope_layers = [1, 1, 1, 1, 1, 0]
    assert not has_timeline(one)
    one.source.config.no_rope_layers = [1] * 6
    assert has_timeline(one)


def test_uneven_parts_are_traced_as_they_are():
    one = step(A100, micro_batches=3)
    fast, _ = step_trace(one, BatchShape(10, 72, padded=True), more_to_come=True)
    assert_same(fast, one.trace([(10, 72)] * 2))


@pytest.mark.parametrize(
    ("pairs", "tokens", "fields"),
    [(1, 64, {}), (4, 1, {}), (3, 16, {"micro_batches": 2}), (4, 16, {"layers": 3})],
)
def test_small_batches_and_shallow_models_are_traced_themselves(pairs, tokens, fields):
    one = step(**fields)
    trace, _ = step_trace(one, BatchShape(pairs, tokens, padded=True), more_to_come=True)
    assert_same(trace, one.trace([(pairs, tokens)] * 2))


def test_one_prediction_of_few_layers_needs_no_timeline(monkeypatch):
    monkeypatch.setattr(Pattern, "fit", None)  # would fail if it were called
    trace, trained = step_trace(step(lora_rank=5), BatchShape(4, 40, padded=True))
    assert trace.sizes.sum() > 0
    assert trained["lora"] > 0


def test_layers_that_are_not_alike_are_all_traced():
    """A window makes another path of long rows: nothing is concluded from short ones."""
    one = step()
    one.source.config.layer_types = ["full_attention", "sliding_attention"] * 2
    one.source.config.sliding_window = 16
    trace, _ = step_trace(one, BatchShape(4, 40, padded=True), more_to_come=True)
    assert_same(trace, one.trace([(4, 40)] * 2))


def test_a_window_without_a_list_of_layer_types_is_seen(tmp_path):
    config = MistralConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=8192, num_hidden_layers=6, sliding_window=40, pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    one = replace(step(padded=False), source=source)
    shape = BatchShape(4, 80, padded=False)
    trace, _ = step_trace(one, shape, more_to_come=True)
    assert_same(trace, one.trace([(4, 80)] * 2))


def test_a_model_with_a_changed_layer_is_all_traced(monkeypatch):
    """Where the middle layers do not repeat, the fit notices and the model itself is traced."""
    build = recipe_step.build_step

    def odd(recipe, source, *args, **kwargs):
        made = build(recipe, source, *args, **kwargs)
        made.model.get_base_model().model.layers[1].mlp.act_fn = torch.nn.Tanh()
        return made

    monkeypatch.setattr(recipe_step, "build_step", odd)
    one = step(lora_rank=3)  # no other test's timeline
    trace, _ = step_trace(one, BatchShape(4, 40, padded=True), more_to_come=True)
    assert_same(trace, one.trace([(4, 40)] * 2))


# ---- the sums themselves


def rounded(length, multiple):
    return -(-length // multiple) * multiple


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("multiple", ROUNDINGS)
def test_a_size_that_rounds_the_length_up_is_recognised(aligned, multiple):
    at = points((2, 3, 5), aligned=aligned)

    def size(batch, length):
        return 12 * batch * length * rounded(length, multiple) + 7 * batch

    values = np.array([[size(*point)] for point in at])
    fitted = Polynomials.fit(at, values, parts=1)
    for batch, length in ((17, 1000), (64, 4096), (3, 777)):
        if aligned and length % 8:
            continue
        assert fitted.at(batch, length).tolist() == [size(batch, length)]


def test_huge_sizes_come_out_to_the_byte():
    at = points((6, 9, 15), aligned=True)
    values = np.array([[(batch // 3) * 151_669 * length * 4] for batch, length in at])
    fitted = Polynomials.fit(at, values, parts=3)
    assert fitted.at(3 * 4096, 32_768).tolist() == [4096 * 151_669 * 32_768 * 4]


def test_a_size_that_is_no_such_sum_is_refused():
    at = points((2, 3, 5), aligned=True)
    values = np.array([[batch**3] for batch, _ in at])
    with pytest.raises(Unlike, match="no such sum"):
        Polynomials.fit(at, values, parts=1)


def test_the_lengths_tell_the_roundings_apart():
    for lengths in LENGTHS.values():
        rows = {
            tuple(rounded(length, multiple) for length in lengths) for multiple in ROUNDINGS
        }
        assert len(rows) == len(ROUNDINGS) - (lengths[0] % 8 == 0)  # 8 changes no multiple of 8


def test_what_is_the_same_model_shares_a_timeline():
    assert step() == step()
    assert hash(step()) == hash(step())
    assert step() != step(layers=6)
    assert step() != replace(step(), padded=False)
    assert step() != step(A100)


def test_recipes_that_differ_in_nothing_that_takes_memory_share_one(monkeypatch):
    shape = BatchShape(8, 64, padded=True)
    step_trace(step(), shape, more_to_come=True)
    monkeypatch.setattr(recipe_step, "trace_step", None)
    fields = {"compile": "default", "cached": True, "seed": 5, "learning_rate": 1e-3}
    step_trace(
        step(padding="max", batch_size=64, max_length=512, **fields), shape, more_to_come=True
    )
