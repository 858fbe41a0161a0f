"""What a prediction says, and what must hold of all of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from labkit.data import Pairs
from labkit.model_source import ModelError, find_model
from labkit.precision import Precision
from labkit.predict.events import Block, Trace
from labkit.predict.gpus import GPUS, GpuError, find_gpu
from labkit.predict.peaks import cpu_memory, cuda_memory, judge_fit
from labkit.predict.prediction import PredictError, predict, predict_step
from labkit.predict.recipe_step import RecipeStep
from labkit.predict.recipe_trace import step_trace
from labkit.recipe import Recipe, ladder
from labkit.report import OWNERS, Report
from labkit.shapes import BatchShape, worst_shape

SMALL = Recipe(model="qwen3-small", batch_size=8, max_length=64)
TINY = replace(SMALL, model="qwen3-tiny")
SHAPE = BatchShape(8, 64, padded=True)


def a_prediction(recipe=TINY, gpu="a100-40gb", shape=SHAPE, **options):
    return predict(recipe, gpu, shape=shape, **options)


def peak(recipe=SMALL, gpu="a100-40gb", shape=SHAPE):
    return a_prediction(recipe, gpu, shape).memory.peak_allocated_bytes


# ---- what must hold of every prediction


@pytest.mark.parametrize("gpu", [None, "t4", "h100"])
@pytest.mark.parametrize("change", [{}, {"checkpoint_every": 1}, {"autocast": "float16"}])
def test_owners_add_up_and_nothing_is_allocated_that_is_not_reserved(gpu, change):
    memory = a_prediction(replace(TINY, **change), gpu).memory
    assert list(memory.by_owner) == list(OWNERS)
    assert sum(memory.by_owner.values()) == memory.peak_allocated_bytes
    for owner, modules in memory.by_module.items():
        assert sum(modules.values()) == memory.by_owner[owner]
    assert max(memory.by_phase.values()) == memory.peak_allocated_bytes
    assert max(alive for alive, _ in memory.timeline) == memory.peak_allocated_bytes
    if gpu is None:
        assert memory.peak_reserved_bytes is None
    else:
        assert memory.peak_allocated_bytes <= memory.peak_reserved_bytes


@pytest.mark.parametrize(("gpu", "padded"), [(None, True), ("a100-40gb", False)])
def test_more_of_anything_never_lowers_the_peak(gpu, padded):
    gpu = gpu and find_gpu(gpu)
    precision = Precision(torch.float32, None)
    step = RecipeStep(SMALL, find_model(SMALL.model), precision, gpu, padded, pad_token_id=0)

    def peak_at(pairs, tokens):
        shape = BatchShape(pairs, tokens, padded)
        trace, _ = step_trace(step, shape, more_to_come=True)
        return (cuda_memory if gpu else cpu_memory)(trace).peak_allocated_bytes

    peaks = [peak_at(pairs, 64) for pairs in (2, 3, 8, 9, 64, 500)]
    assert peaks == sorted(peaks)
    for start in (3, 8):  # lengths that are multiples of 8, and others
        peaks = [peak_at(8, tokens) for tokens in range(start, 700, 64)]
        assert peaks == sorted(peaks)


@pytest.mark.parametrize("gpu", [None, "a100-40gb"])
def test_more_layers_never_lower_the_peak(gpu, tmp_path):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=8192, pad_token_id=0,
    )  # fmt: skip
    peaks = []
    for layers in (1, 2, 5, 6):
        config.num_hidden_layers = layers
        file = tmp_path / f"{layers}" / "config.json"
        config.save_pretrained(file.parent)
        peaks.append(peak(replace(SMALL, model=str(file)), gpu))
    assert peaks == sorted(set(peaks))


def test_wider_numbers_never_lower_the_peak():
    weights = [
        peak(replace(TINY, weights=dtype), "a100-40gb") for dtype in ("bfloat16", "float32")
    ]
    assert weights == sorted(weights)


@pytest.mark.parametrize("gpu", [None, "a100-40gb", "h100"])
def test_checkpointing_never_raises_the_bytes_of_activations(gpu):
    plain, *checkpointed = (
        a_prediction(replace(TINY, checkpoint_every=every), gpu).memory for every in (0, 1, 2)
    )
    for memory in checkpointed:
        assert memory.by_owner["activations"] <= plain.by_owner["activations"]


def test_weights_gradients_and_state_are_as_counted_by_hand():
    hidden, mlp, heads, kv, dim, vocabulary, layers = 384, 1152, 6, 2, 64, 8192, 4
    layer = 2 * hidden * heads * dim + 2 * hidden * kv * dim + 3 * hidden * mlp
    layer += 2 * hidden + 2 * dim
    lora = 8 * layers * (3 * hidden + heads * dim + 2 * kv * dim)
    head, rope = 2 * hidden, dim // 2
    base = vocabulary * hidden + layers * layer + hidden
    report = a_prediction(SMALL, None)
    assert report.memory.state_bytes["weights"] == 4 * (base + lora + 2 * head) + 2 * 4 * rope
    assert report.memory.state_bytes["gradients"] == 4 * (lora + head)
    tensors = 6 * layers + 1
    assert report.memory.state_bytes["optimizer_state"] == 4 * (2 * (lora + head) + tensors)
    assert report.trainable == {"lora": lora, "head": head, "base": 0}


# Figures for the published geometry without padding, worked out once with another tracer.
@pytest.mark.parametrize(("pairs", "gib"), [(32, 8.0), (64, 13.7), (128, 25.2), (256, 48.2)])
def test_the_published_geometry_at_four_batch_sizes(pairs, gib):
    recipe = Recipe(model="Qwen/Qwen3-Embedding-0.6B")
    bytes_ = peak(recipe, None, BatchShape(pairs, 64, padded=False))
    assert round(bytes_ / 2**30, 1) == gib


# ---- what it says


def test_a_report_says_where_it_comes_from():
    report = a_prediction(replace(TINY, compile="default"))
    assert report.oracle == "predicted"
    assert report.machine["name"] == find_gpu("a100-40gb").title
    assert report.batch["pairs"] == 8
    assert not report.step_seconds
    assert report.modelled["seconds"] > 0
    assert any("without torch.compile" in note for note in report.notes)
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again.memory == report.memory
    assert again.fit == report.fit


def test_a_card_without_a_format_uses_another_and_says_so():
    report = a_prediction(replace(TINY, autocast="bfloat16"), "t4")
    assert report.precision["autocast"] == "float16"
    assert "because NVIDIA T4" in report.notes[0]
    assert "bfloat16 was asked for, float16 is used" in report.notes[0]


def test_a_step_too_large_for_a_card_says_where_it_ends():
    recipe = Recipe(model="Qwen/Qwen3-Embedding-0.6B")
    report = a_prediction(recipe, "t4", BatchShape(128, 64, padded=True))
    assert not report.fit.fits
    assert report.fit.margin_bytes < 0
    assert report.fit.fails_in.startswith("step 1, forward, model.layers.*")
    roomy = a_prediction(recipe, "h200", BatchShape(128, 64, padded=True))
    assert roomy.fit.fits
    assert not roomy.fit.fails_in


def test_weights_that_do_not_fit_end_before_the_first_step():
    recipe = Recipe(model="Qwen/Qwen3-Embedding-8B")
    report = a_prediction(recipe, "t4", BatchShape(2, 16, padded=True))
    assert report.fit.fails_in == "the weights"


def test_the_verdict_counts_what_lies_outside_of_the_allocator():
    fit = a_prediction().fit
    gpu = find_gpu("a100-40gb")
    assert fit.capacity_bytes == gpu.memory_bytes
    assert fit.context_bytes == gpu.context_bytes
    reserved = a_prediction().memory.peak_reserved_bytes
    assert fit.margin_bytes == gpu.memory_bytes - gpu.context_bytes - reserved


@pytest.mark.parametrize(("room", "fits"), [(41, True), (39, False), (71, True)])
def test_a_cache_that_is_given_back_can_make_room(room, fits):
    """30 MiB come and go before 40 MiB: both are reserved, unless the first are given back."""
    mib = 2**20
    blocks = [
        Block("aten.empty", "first", "temporaries"),
        Block("aten.empty", "second", "inputs"),
    ]
    trace = Trace(
        blocks=blocks,
        sizes=np.array([30 * mib, 40 * mib]),
        events=np.array([0, ~0, 1]),
        phases=np.array([1, 1, 2], np.int8),
        modules=["first", "first", "second"],
        step_starts=[0],
        costs=[],
        cost_modules=[],
    )
    memory = cuda_memory(trace)
    assert memory.peak_allocated_bytes == 40 * mib
    assert memory.peak_reserved_bytes == 70 * mib
    gpu = find_gpu("a100-40gb")
    gpu = replace(gpu, memory_bytes=gpu.context_bytes + room * mib)
    fit = judge_fit(trace, memory, gpu)
    assert fit.fits == fits
    assert fit.margin_bytes == (room - 70) * mib
    assert fit.gives_back_cache == (room == 41)
    assert fit.fails_in == ("" if fits else "step 1, backward, second")


@pytest.mark.parametrize("name", GPUS)
def test_every_card_can_be_predicted_for(name):
    recipe = Recipe(model="qwen3-tiny", batch_size=4, max_length=16, autocast="float16")
    memory = a_prediction(recipe, name, BatchShape(4, 16, padded=True)).memory
    assert memory.peak_reserved_bytes % 2**21 == 0


def test_expandable_segments_lose_nothing_to_fragments():
    plain, growing = (a_prediction(expandable_segments=value).memory for value in (False, True))
    # nothing is lost to fragments; what is mapped at a time is a multiple of 20 MiB
    assert growing.peak_reserved_bytes <= plain.peak_reserved_bytes + 20 * 2**20
    assert growing.peak_allocated_bytes <= plain.peak_allocated_bytes


def test_each_step_of_the_course_can_be_predicted():
    steps = ladder(replace(TINY, batch_size=8))
    peaks = {slug: peak(recipe) for slug, recipe in steps.items()}
    assert peaks["01_freeze_base"] < peaks["00_baseline"]
    assert peaks["02_checkpointing"] < peaks["01_freeze_base"]
    assert peaks["03_amp"] < peaks["02_checkpointing"]
    assert peaks["04_accumulation"] < peaks["03_amp"]
    assert peaks["06_cached_data"] == peaks["05_compile"] == peaks["04_accumulation"]


def test_predicting_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    a_prediction()
    assert torch.equal(torch.get_rng_state(), before)


# ---- the worst batch


def some_pairs(lengths):
    words = "天 " * 500
    return Pairs(
        first=[words[: 2 * n] for n in lengths],
        second=["地"] * len(lengths),
        labels=[0] * len(lengths),
        name="drawn.jsonl",
        sha256="0",
        bad_rows=[],
    )


def test_the_worst_batch_is_as_long_as_the_longest_pair(tokenizer):
    pairs = some_pairs([1, 2, 9, 3])
    recipe = Recipe(model="qwen3-tiny", batch_size=3, max_length=64)
    shape = worst_shape(recipe, pairs, tokenizer)
    longest = max(
        len(tokenizer(a, b)["input_ids"])
        for a, b in zip(pairs.first, pairs.second, strict=True)
    )
    assert (shape.pairs, shape.tokens, shape.padded) == (3, longest, True)
    assert f"the longest of 4 pairs of drawn.jsonl has {longest} tokens" in shape.why


def test_pairs_of_one_length_need_no_padding(tokenizer):
    recipe = Recipe(model="qwen3-tiny", batch_size=8, max_length=64)
    shape = worst_shape(recipe, some_pairs([5, 5, 5]), tokenizer)
    assert not shape.padded
    assert shape.pairs == 3  # there are no more


def test_padding_to_the_maximum_makes_all_batches_alike(tokenizer):
    recipe = Recipe(model="qwen3-tiny", batch_size=2, max_length=16, padding="max")
    shape = worst_shape(recipe, some_pairs([2, 400]), tokenizer)
    assert (shape.pairs, shape.tokens, shape.padded) == (2, 16, True)
    cut = worst_shape(replace(recipe, padding="longest"), some_pairs([400, 2]), tokenizer)
    assert cut.tokens == 16
    assert "(cut there)" in cut.why


def test_data_decides_the_prediction(pairs):
    report = predict(replace(SMALL, model="qwen3-tiny"), None, pairs=pairs)
    assert report.data == pairs.facts()
    assert report.batch["why"].startswith("the longest of 3,200 pairs of synthetic pairs has")


# ---- what cannot be predicted


def test_imitated_formats_are_for_this_machine_only():
    with pytest.raises(PredictError, match="leave out the card"):
        a_prediction(emulate=True)


def test_a_build_that_returns_something_else_is_told():
    with pytest.raises(PredictError, match="model, optimizer, step"):
        predict_step(dict)


def test_an_unknown_card_lists_near_ones():
    with pytest.raises(GpuError, match="a100"):
        a_prediction(gpu="a100-60gb")


def test_a_length_beyond_the_positions_is_refused():
    recipe = replace(SMALL, max_length=40_000)
    with pytest.raises(ModelError, match="40000 is more than its 32768 positions"):
        a_prediction(recipe)


def test_data_or_a_shape_is_needed():
    with pytest.raises(PredictError, match="needs pairs, or the shape"):
        predict(SMALL, "t4")


def test_attention_that_takes_padding_out_is_refused():
    with pytest.raises(PredictError, match="predict with sdpa"):
        a_prediction(replace(SMALL, attention="flash_attention_2"))


def test_a_step_of_ones_own_gets_the_same_report(two_layer_step):
    report = predict_step(two_layer_step, "t4", name="two layers")
    assert report.recipe is None
    assert report.model["name"] == "two layers"
    assert report.fit.fits
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again.memory == report.memory


@pytest.fixture
def two_layer_step():
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(torch.zeros(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build
