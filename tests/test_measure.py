import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from labkit.measure import MeasureError, compare, measure
from labkit.recipe import Recipe
from labkit.step import TrainingStep
from labkit.trial import is_out_of_memory

TINY = Recipe(model="qwen3-tiny", batch_size=8, max_length=32)
FEW = {"warmup_steps": 1, "timed_steps": 3, "device": "cpu"}


def test_a_report_says_where_its_figures_come_from(pairs):
    report = measure(TINY, pairs, **FEW)
    assert (report.status, report.oracle) == ("ok", "measured")
    assert report.recipe == TINY
    assert len(report.step_seconds) == len(report.data_seconds) == 3
    assert all(0 < d < s for d, s in zip(report.data_seconds, report.step_seconds, strict=True))
    assert len(report.losses) == 4
    assert report.layer_forwards == 1.0
    assert report.trainable == {"lora": 5120, "head": 128, "base": 0}
    assert report.data == pairs.facts()
    assert report.machine["versions"]["torch"] == torch.__version__
    assert report.precision["weights"] == "float32"


def test_two_runs_of_a_recipe_report_the_same_bytes(pairs):
    first, second = (measure(TINY, pairs, **FEW) for _ in range(2))
    assert first.memory.peak_allocated_bytes == second.memory.peak_allocated_bytes
    assert first.losses == second.losses


def test_real_tokens_are_counted_without_padding(pairs, tokenizer):
    report = measure(replace(TINY, padding="max"), pairs, **FEW)
    assert report.computed_tokens == [8 * 32] * 3
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = order[8:16]  # the first 8 warmed up
    ids = tokenizer(
        [pairs.first[i] for i in chosen],
        [pairs.second[i] for i in chosen],
        truncation=True,
        max_length=32,
    ).input_ids
    assert report.real_tokens[0] == sum(len(row) for row in ids)


def test_the_two_recipes_alternate_and_take_turns_at_going_first(pairs, monkeypatch):
    calls = []
    original = TrainingStep.__call__

    def spy(step, batch, **options):
        calls.append(step.recipe.checkpoint_every)
        return original(step, batch, **options)

    monkeypatch.setattr(TrainingStep, "__call__", spy)
    comparison = compare(TINY, replace(TINY, checkpoint_every=1), pairs, **FEW)
    assert calls[-6:] == [0, 1, 1, 0, 0, 1]
    assert len(comparison.speed_ratios) == 3
    assert comparison.before.losses == comparison.after.losses  # neighbours do not disturb
    assert comparison.after.layer_forwards == 2.0


def test_the_largest_batch_is_the_one_whose_bytes_are_taken(pairs, tiny_batches):
    report = measure(replace(TINY, padding="longest"), pairs, **FEW)
    widest = max(batch.input_ids.shape[1] for batch in tiny_batches(4))
    assert report.memory.by_owner["inputs"] == 8 * (2 * 8 * widest + 8)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_out_of_memory_is_an_outcome_and_the_other_recipe_goes_on(
    pairs, monkeypatch, error, reason
):
    original = TrainingStep.__call__

    def run_out(step, batch, **options):
        if step.recipe.checkpoint_every == 0:
            raise error
        return original(step, batch, **options)

    monkeypatch.setattr(TrainingStep, "__call__", run_out)
    comparison = compare(TINY, replace(TINY, checkpoint_every=1), pairs, **FEW)
    assert comparison.before.status == "out_of_memory"
    assert reason in comparison.before.reason
    assert comparison.before.memory is None
    assert comparison.after.ok
    assert comparison.after.memory.peak_allocated_bytes > 0
    assert comparison.speed_ratio is None


def test_running_out_while_two_are_timed_keeps_the_bytes_of_one(pairs, monkeypatch):
    original = TrainingStep.__call__
    calls = []

    def run_out(step, batch, **options):
        calls.append(step)
        if len(calls) == 6:  # each: one warm-up, one recorded; then the second timed step
            raise MemoryError
        return original(step, batch, **options)

    monkeypatch.setattr(TrainingStep, "__call__", run_out)
    one_shape = replace(TINY, padding="max")
    comparison = compare(one_shape, replace(one_shape, checkpoint_every=1), pairs, **FEW)
    assert comparison.after.status == "ok"
    assert comparison.after.step_seconds == comparison.after.data_seconds == []
    assert comparison.after.real_tokens == comparison.after.computed_tokens == []
    assert "not timed: out of memory beside the other recipe" in comparison.after.notes[-1]
    assert len(comparison.before.step_seconds) == 3


def test_other_errors_are_not_taken_for_out_of_memory(pairs, monkeypatch):
    def fail(step, batch, **options):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(TrainingStep, "__call__", fail)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        measure(TINY, pairs, **FEW)


def test_without_a_compiler_the_step_is_skipped_with_the_reason(pairs, monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none_found():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    comparison = compare(TINY, replace(TINY, compile="default"), pairs, **FEW)
    assert comparison.after.status == "skipped"
    assert "needs a C++ compiler" in comparison.after.reason
    assert comparison.before.ok


def test_a_format_without_hardware_is_not_used_and_the_reason_is_noted(pairs, monkeypatch):
    from labkit import precision

    monkeypatch.setattr(precision, "has_native", lambda dtype, device: dtype == torch.float32)
    report = measure(replace(TINY, autocast="bfloat16"), pairs, **FEW)
    assert report.precision["autocast"] == "none"
    assert "bfloat16 was asked for, float32 is used" in report.notes[0]
    assert list(report.product_seconds) == ["float32", "bfloat16"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": 0}, "warmup_steps must be at least 1"),
        ({"timed_steps": 2}, "timed_steps must be from 3 to 1000"),
        ({"device": "xpu"}, "device 'xpu': this machine has cpu"),
        ({"device": "toaster"}, "device 'toaster': this machine has cpu"),
    ],
)
def test_what_cannot_be_measured_is_refused(pairs, options, words):
    with pytest.raises(MeasureError, match=words):
        measure(TINY, pairs, **{**FEW, **options})


def test_progress_is_told(pairs):
    said = []
    compare(None, TINY, pairs, progress=said.append, **FEW)
    assert said[0] == "this step: building the model"
    assert said[-1] == "timed step 3 of 3"


def test_is_out_of_memory_knows_what_is_none():
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces RLIMIT_AS")
def test_a_process_that_may_not_grow_records_out_of_memory():
    code = """
import resource
import psutil
from labkit.data import read_pairs
from labkit.measure import measure
from labkit.recipe import Recipe
pairs = read_pairs()
recipe = Recipe(model="qwen3-tiny", batch_size=3200, max_length=64, padding="max")
limit = psutil.Process().memory_info().vms + 2**30  # the step alone needs more
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
report = measure(recipe, pairs, device="cpu", warmup_steps=1, timed_steps=3)
print(report.status, "|", report.reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert done.stdout.startswith("out_of_memory |"), done.stdout + done.stderr


def test_warm_up_sees_every_shape_that_is_timed(pairs, tmp_path, monkeypatch):
    # parts of 3, 3 and 2 pairs are two shapes; tracing counts the same with a quick backend
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    recipe = replace(TINY, padding="max", micro_batches=3, compile="default")
    report = measure(recipe, pairs, cache_folder=tmp_path, **FEW)
    assert report.compile["graphs"] == 2
    assert report.compile["recompilations_while_timed"] == 0


def test_seeing_shapes_changes_no_loss(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    eager = replace(TINY, lora_dropout=0.0)  # longest: nearly every batch has its own shape
    comparison = compare(
        eager, replace(eager, compile="default"), pairs, cache_folder=tmp_path, **FEW
    )
    assert comparison.after.losses == pytest.approx(comparison.before.losses, abs=1e-6)
    assert comparison.after.compile["recompilations_while_timed"] == 0


@pytest.mark.compiles
def test_a_compiled_step_trains_like_an_eager_one(pairs, tmp_path):
    eager = replace(TINY, lora_dropout=0.0, padding="max")
    compiled = replace(eager, compile="default")
    comparison = compare(eager, compiled, pairs, cache_folder=tmp_path, **FEW)
    report = comparison.after
    assert report.losses == pytest.approx(comparison.before.losses, abs=1e-5)
    assert report.compile["graphs"] == 1
    assert report.compile["first_step_seconds"] > 2 * report.median_step_seconds
    assert (tmp_path / "inductor").is_dir()
