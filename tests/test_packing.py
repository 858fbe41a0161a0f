"""Batches without padding: laid out as by hand, and the same loss and gradients as padded."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig

from labkit import packed_model
from labkit.measure import measure
from labkit.model_source import ModelError, ModelSource
from labkit.packing import PackedBatch, pack
from labkit.precision import choose_precision
from labkit.predict.prediction import predict
from labkit.recipe import Recipe, RecipeError
from labkit.shapes import BatchShape, shape_of, worst_shape
from labkit.step import build_step
from labkit.tokens import batches, collate, in_order

CPU = torch.device("cpu")
INSTRUCTION = "Instruct: 两个问题是否相同\n"
RECIPE = Recipe(model="qwen3-tiny", batch_size=8, max_length=32, lora_dropout=0.0)


def gradients(step, batch):
    """The loss of a batch, and the gradient of everything that is trained, in one vector."""
    step.optimizer.zero_grad()
    total = 0.0
    for part in batch.split(step.recipe.micro_batches):
        loss = step.loss(part, pairs=len(batch.labels))
        loss.backward()
        total += loss.item()
    return total, torch.cat([parameter.grad.flatten() for parameter in step.trained])


def with_trained_lora(step):
    """LoRA matrices as they are after training: at the start lora_B is zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in step.trained:
        parameter.data.normal_(0, 0.05, generator=generator)
    return step


# ---- the layout


def test_the_row_is_laid_out_as_by_hand():
    batch = pack([[5, 6, 7], [8, 9]], [1, 0], pad_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert [group.tolist() for group in batch.slots] == [[[3, 4]], [[0, 1, 2]]]  # short first
    assert batch.places.tolist() == [2, 3, 4, 0, 1]
    assert batch.starts.tolist() == [0, 3, 5]
    assert batch.ends.tolist() == [2, 4]
    assert (batch.labels.tolist(), batch.real_tokens, batch.computed_tokens) == ([1, 0], 5, 5)


def test_groups_hold_pairs_of_similar_length_padded_to_the_longest_of_them():
    lengths = (2, 7, 3, 6, 1)  # in four groups: 1 and 2, 3, 6, 7
    batch = pack([range(n) for n in lengths], [0] * 5, pad_id=9)
    assert [tuple(group.shape) for group in batch.slots] == [(2, 2), (1, 3), (1, 6), (1, 7)]
    assert batch.slots[0].tolist() == [[18, 18], [0, 1]]  # a place too many: the last again
    laid = torch.cat([group.flatten() for group in batch.slots])
    assert laid[batch.places].tolist() == list(range(19))


def test_a_prefix_stands_once_before_all_pairs():
    batch = pack([[5, 6, 7], [8, 9]], [1, 0], pad_id=0, prefix=[1, 2])
    assert batch.input_ids.tolist() == [[1, 2, 5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3]]
    assert [group.tolist() for group in batch.slots] == [[[5, 6]], [[2, 3, 4]]]
    assert (batch.starts.tolist(), batch.ends.tolist()) == ([2, 5, 7], [4, 6])
    assert (batch.real_tokens, batch.computed_tokens) == (9, 7)  # 2 + 3, 2 + 2; and 7


def test_the_head_reads_the_last_token_that_is_not_padding_as_transformers_does():
    assert pack([[5, 0, 0], [0, 0], [7]], [0, 0, 0], pad_id=0).ends.tolist() == [0, 3, 5]
    shared = pack([[5, 0], [0, 0], [7]], [0, 0, 1], pad_id=0, prefix=[8, 9])
    assert shared.ends.tolist() == [2, 1, 6]  # nothing but padding: the prefix's last token
    assert [part.ends.tolist() for part in shared.split(3)] == [[2], [1], [2]]


@pytest.mark.parametrize("prefix", [(), (1, 2)])
def test_parts_are_what_their_pairs_would_be_packed_to(prefix):
    rows, labels = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [15]], [0, 1, 0, 1, 1]
    parts = pack(rows, labels, pad_id=0, prefix=prefix).split(2)
    for part, chosen in zip(parts, (slice(3), slice(3, 5)), strict=True):
        alone = pack(rows[chosen], labels[chosen], pad_id=0, prefix=prefix)
        for one, other in zip(part.tensors, alone.tensors, strict=True):
            assert torch.equal(one, other)
        assert part.real_tokens is None
    assert len(pack(rows, labels, pad_id=0).split(9)) == 5


# ---- the same numbers as padded


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        ({}, 1e-5),
        ({"last_token_only": True}, 1e-5),
        ({"last_token_only": True, "checkpoint_every": 1, "micro_batches": 3}, 1e-5),
        ({"weights": "bfloat16", "last_token_only": True}, 2**-5),
        ({"autocast": "bfloat16"}, 2**-5),
    ],
)
def test_fifty_batches_have_the_loss_and_gradients_of_padded_ones(
    fields, tolerance, tiny_step, pairs, tokenizer
):
    same = {name: fields[name] for name in fields.keys() & {"weights", "autocast"}}
    steps = {
        padding: with_trained_lora(tiny_step(padding=padding, **chosen))
        for padding, chosen in (("max", same), ("longest", same), ("none", fields))
    }
    count = 50 if not same else 10
    for of_each in islice(
        zip(*(batches(s.recipe, pairs, tokenizer) for s in steps.values()), strict=True), count
    ):
        (loss, gradient), *others = map(gradients, steps.values(), of_each)
        for other_loss, other in others:
            assert other_loss == pytest.approx(loss, rel=tolerance)
            assert (other - gradient).norm() <= tolerance * gradient.norm()


def test_a_prefix_computed_once_has_exact_gradients(tiny_step, pairs, tokenizer):
    steps = [
        with_trained_lora(tiny_step(instruction=INSTRUCTION, **fields))
        for fields in (
            {"padding": "max"},
            {"padding": "none"},
            {"padding": "none", "shared_prefix": True},
            {"padding": "none", "shared_prefix": True, "micro_batches": 3},
            {"padding": "none", "shared_prefix": True, "last_token_only": True},
        )
    ]
    streams = [batches(step.recipe, pairs, tokenizer) for step in steps]
    for of_each in islice(zip(*streams, strict=True), 5):
        (loss, gradient), *others = map(gradients, steps, of_each)
        assert len({batch.real_tokens for batch in of_each}) == 1
        for other_loss, other in others:
            assert other_loss == pytest.approx(loss, rel=1e-5)
            assert (other - gradient).norm() <= 1e-5 * gradient.norm()
    instruction = len(tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"])
    once, every = of_each[2].computed_tokens, of_each[1].computed_tokens
    assert every - once == instruction * (RECIPE.batch_size - 1)


def tiny_config(model_type, **fields):
    return AutoConfig.for_model(
        model_type, vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, **fields,
    )  # fmt: skip


def step_of(config, **fields):
    recipe = replace(RECIPE, **fields)
    source = ModelSource("a model", config, None)
    step = build_step(recipe, source, choose_precision(recipe, CPU), CPU, pad_token_id=0)
    return with_trained_lora(step)


@pytest.mark.parametrize("model_type", packed_model.NARROWED)
def test_each_architecture_that_is_narrowed_computes_the_same(model_type):
    rows, labels = [[5, 6, 7], [8, 9], [10, 11, 12, 13]], [0, 1, 1]
    config = tiny_config(model_type, **({"sliding_window": None} if "m" in model_type else {}))
    padded = step_of(config), collate(rows, labels, pad_id=0, length=None)
    packed = step_of(config, padding="none", last_token_only=True), pack(rows, labels, pad_id=0)
    (loss, gradient), (other_loss, other) = gradients(*padded), gradients(*packed)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert (other - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (tiny_config("mistral", sliding_window=8), {}, "padding none needs causal attention"),
        (AutoConfig.for_model("bert", vocab_size=8192, hidden_size=32, num_hidden_layers=2,
                              num_attention_heads=2, intermediate_size=64),
         {"lora_targets": ("query",)}, "padding none needs causal attention"),
        (tiny_config("qwen3", is_causal=False), {}, "padding none needs causal attention"),
        (tiny_config("qwen3", attention_dropout=0.5), {}, "without dropout"),
        (tiny_config("gemma"), {"last_token_only": True}, "not for gemma; leave it out"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_packed_are_refused(config, fields, words):
    with pytest.raises(ModelError, match=words):
        step_of(config, padding="none", **fields)


def test_fields_that_need_packed_batches_say_so():
    for name in ("last_token_only", "shared_prefix"):
        with pytest.raises(RecipeError, match=f"{name} needs the pairs laid end to end"):
            Recipe(**{name: True})
    with pytest.raises(RecipeError, match="there is none: set instruction"):
        Recipe(padding="none", shared_prefix=True)
    with pytest.raises(RecipeError, match="leave attention at sdpa"):
        Recipe(padding="none", attention="eager")


# ---- the kernel of cards, with its arithmetic done here


def attend_row_by_row(q, k, v, of_queries, of_keys, longest_query, longest_key, **options):
    """What ``varlen_attn`` does, by its documentation: causal from each row's last token on."""
    assert (options["window_size"], options["enable_gqa"]) == ((-1, 0), True)
    assert longest_query == int(of_queries.diff().max())
    assert longest_key == int(of_keys.diff().max())
    outs = []
    for row in range(len(of_queries) - 1):
        chosen = [
            x[bounds[row] : bounds[row + 1]].transpose(0, 1)[None]
            for x, bounds in ((q, of_queries), (k, of_keys), (v, of_keys))
        ]
        own, seen = chosen[0].shape[2], chosen[1].shape[2]
        mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
        out = functional.scaled_dot_product_attention(
            *chosen, attn_mask=mask, scale=options["scale"], enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("prefix", [(), (1, 2, 3)])
def test_the_kernel_of_cards_is_told_the_same_pairs(prefix, tiny_step, monkeypatch):
    shared = {"instruction": "x", "shared_prefix": True} if prefix else {}
    step = with_trained_lora(tiny_step(padding="none", **shared))
    batch = pack([[5, 6, 7, 8, 9], [8, 9], [4]], [1, 0, 1], pad_id=0, prefix=prefix)
    expected = gradients(step, batch)
    monkeypatch.setattr(packed_model, "kernel_for", lambda value: "varlen")
    monkeypatch.setattr(packed_model, "varlen_attn", attend_row_by_row)
    loss, gradient = gradients(step, batch)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert (gradient - expected[1]).norm() <= 1e-5 * gradient.norm()


# ---- bytes


@pytest.mark.parametrize(
    "fields",
    [{}, {"micro_batches": 3}, {"instruction": INSTRUCTION, "shared_prefix": True}],
)
def test_bytes_of_a_packed_step_are_predicted(fields, pairs):
    recipe = replace(RECIPE, padding="none", **fields)
    measured = measure(recipe, pairs, timed_steps=3)
    predicted = predict(recipe, shape=BatchShape(**measured.batch))
    # short by the boxed numbers that each LoRA layer scales by, 8 bytes each
    error = predicted.memory.peak_allocated_bytes - measured.memory.peak_allocated_bytes
    assert error == -8 * 6
    if recipe.micro_batches == 1:  # what splitting makes is an input in one, not in the other
        same = [report.memory.by_owner["inputs"] for report in (predicted, measured)]
        assert same[0] == same[1]


def test_a_card_is_predicted_for_the_pairs_own_lengths(pairs, tokenizer):
    recipe = replace(RECIPE, padding="none", weights="bfloat16")
    worst = worst_shape(recipe, pairs, tokenizer)
    assert worst.lengths == (32,) * 8
    few = replace(worst, lengths=(32,) + (4,) * 7)
    peaks = [
        predict(recipe, "a100-40gb", shape=shape).memory.peak_allocated_bytes
        for shape in (few, worst)
    ]
    assert peaks[0] < peaks[1]
    no_kernel = predict(recipe, "t4", shape=worst)  # padded rows for attention alone
    assert no_kernel.memory.peak_allocated_bytes != peaks[1]


def test_the_worst_batch_has_the_longest_pairs(pairs, tokenizer):
    recipe = replace(RECIPE, padding="none", max_length=64)
    lengths = sorted(
        (batch.real_tokens for batch in in_order(recipe, pairs, tokenizer, batch_size=1)),
        reverse=True,
    )
    assert worst_shape(recipe, pairs, tokenizer).lengths == tuple(lengths[:8])
    shared = replace(recipe, instruction=INSTRUCTION, shared_prefix=True)
    instruction = len(tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"])
    assert worst_shape(shared, pairs, tokenizer).shared == instruction
    every = worst_shape(replace(shared, shared_prefix=False), pairs, tokenizer)
    assert every.lengths == tuple(length + instruction for length in lengths[:8])


def test_the_shape_of_a_packed_batch_survives_a_record():
    shape = shape_of(pack([[5, 6, 7], [8, 9]], [1, 0], pad_id=0, prefix=[1]), "why")
    assert shape == BatchShape(2, 3, False, "why", (3, 2), 1)
    assert BatchShape(**(shape.to_dict() | {"lengths": [3, 2]})) == shape


@pytest.mark.compiles
def test_compiled_it_computes_the_same_at_every_length(tiny_step, pairs, tokenizer):
    fields = {"padding": "none", "last_token_only": True, "micro_batches": 2}
    eager, compiled = (tiny_step(compile=mode, **fields) for mode in ("none", "default"))
    stream = batches(eager.recipe, pairs, tokenizer)
    for batch in islice(stream, 4):
        (loss, gradient), (other_loss, other) = (gradients(s, batch) for s in (eager, compiled))
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert (other - gradient).norm() <= 1e-4 * gradient.norm()
    assert isinstance(batch, PackedBatch)
