"""Bytes against counts made by hand.

qwen3-tiny: vocabulary 8192, width 64, 2 layers, 4 query and 2 key/value heads of 16, MLP 128.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from labkit import memory
from labkit.memory import measure_memory, replay
from labkit.report import OWNERS

LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64 + 2 * 16  # q o, k v, MLP, norms
BASE = 8192 * 64 + 2 * LAYER + 64  # embedding, layers, last norm
HEAD = 2 * 64
LORA = 2 * ((8 * 64 + 64 * 8) + 2 * (8 * 64 + 32 * 8))  # q, k and v of two layers, rank 8
ROPE = 2 * 8  # inverse frequencies and their original, for half of 16 dimensions
TENSORS = 2 * 3 * 2 + 1  # two matrices for three targets in two layers, and the head


def warm(step, batches):
    first, second = batches
    step(first)
    return measure_memory(step, second)


def test_state_is_as_counted_by_hand(tiny_step, tiny_batches):
    measured = warm(tiny_step(), tiny_batches(2))
    assert measured.state_bytes == {
        "weights": 4 * (BASE + LORA + 2 * HEAD + ROPE),  # PEFT keeps an untrained head, too
        "gradients": 4 * (LORA + HEAD),
        "optimizer_state": 4 * (2 * (LORA + HEAD) + TENSORS),  # two moments, a step counter
        "inputs": 0,
        "activations": 0,
        "temporaries": 0,
    }


def test_the_baseline_keeps_a_gradient_for_each_base_parameter(tiny_step, tiny_batches):
    measured = warm(tiny_step(train_base=True), tiny_batches(2))
    assert measured.state_bytes["gradients"] == 4 * (BASE + LORA + HEAD)
    assert measured.by_owner["gradients"] >= 4 * BASE


def test_16_bit_weights_weigh_half(tiny_step, tiny_batches):
    measured = warm(tiny_step(weights="bfloat16"), tiny_batches(2))
    trained = 4 * (LORA + HEAD)
    assert measured.state_bytes["weights"] == 2 * (BASE + HEAD) + trained + 4 * ROPE


def test_owners_add_up_to_the_peak_and_phases_contain_it(tiny_step, tiny_batches):
    measured = warm(tiny_step(), tiny_batches(2, padding="max"))
    assert list(measured.by_owner) == list(OWNERS)
    assert sum(measured.by_owner.values()) == measured.peak_allocated_bytes
    assert max(measured.by_phase.values()) == measured.peak_allocated_bytes
    assert max(alive for alive, _ in measured.timeline) == measured.peak_allocated_bytes
    assert measured.by_owner["inputs"] == 8 * (8 * 32 * 2 + 8)  # ids, mask and labels, int64
    assert measured.process_bytes > measured.peak_allocated_bytes


@pytest.mark.parametrize(
    "fields", [{}, {"train_base": True}, {"checkpoint_every": 1}, {"micro_batches": 3}]
)
def test_two_measurements_agree_to_the_byte(tiny_step, tiny_batches, fields):
    first, second = (warm(tiny_step(**fields), tiny_batches(2)) for _ in range(2))
    assert first.peak_allocated_bytes == second.peak_allocated_bytes
    assert first.by_phase == second.by_phase
    assert first.by_owner == second.by_owner


def test_the_sum_of_all_events_is_what_is_left(tiny_step, tiny_batches, monkeypatch):
    seen = []
    monkeypatch.setattr(memory, "replay", lambda *args: seen.append(args) or replay(*args))
    step, (first, second) = tiny_step(), tiny_batches(2)
    step(first)
    measured = measure_memory(step, second)
    events, state, _ = seen[0]
    before = sum(size for _, size in state.values())
    left = before + sum(size for _, _, size in events)
    inputs = measured.by_owner["inputs"]
    assert left == sum(measured.state_bytes.values()) + inputs


def test_the_peak_is_that_of_the_allocators_own_running_total(tiny_step, tiny_batches):
    step, (first, second) = tiny_step(), tiny_batches(2)
    step(first)
    measured = measure_memory(step, second)
    step.optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(second)
    totals, waiting = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
    _, total, size = min(totals)
    grown = max(total for _, total, _ in totals) - (total - size)
    start = measured.by_phase["before"] - 4  # the running loss is made before the first phase
    assert grown == measured.peak_allocated_bytes - start


def test_freezing_checkpointing_and_accumulating_each_lower_the_peak(tiny_step, tiny_batches):
    fields, peaks = {"train_base": True}, []
    changes = ({}, {"train_base": False}, {"checkpoint_every": 1}, {"micro_batches": 4})
    for change in changes:
        fields |= change
        step = tiny_step(max_length=64, padding="max", **fields)
        peaks.append(warm(step, tiny_batches(2, max_length=64, padding="max")))
    heights = [peak.peak_allocated_bytes for peak in peaks]
    assert heights == sorted(set(heights), reverse=True)


def test_replay_follows_a_step_that_was_worked_out_by_hand():
    state = {1: ("weights", 100), 2: ("gradients", 10)}
    events = [
        ("memory", 2, -10),  # the last step's gradient goes
        ("mark", "forward", 0),
        ("memory", 3, 50),
        ("memory", 4, 30),  # 180
        ("mark", "backward", 0),
        ("memory", 5, 20),  # a gradient that stays
        ("memory", 6, 7),  # gone within backward: 207, the peak
        ("memory", 6, -7),
        ("memory", 4, -30),
        ("memory", 3, -50),
        ("memory", 3, 5),  # the address of a block that is gone, used again
    ]
    measured = replay(events, state, gradients={5, 3})
    assert measured.peak_allocated_bytes == 207
    assert measured.by_phase == {"before": 110, "forward": 180, "backward": 207}
    assert measured.by_owner == {
        "weights": 100,
        "gradients": 20,
        "optimizer_state": 0,
        "inputs": 0,
        "activations": 80,  # block 3 at the peak is not the gradient that has its address later
        "temporaries": 7,
    }


def test_a_long_timeline_is_thinned_and_keeps_its_peak():
    events = [("memory", address, 1 + (address == 5000)) for address in range(10_000)]
    events += [("memory", address, -1) for address in range(10_000)]
    timeline = replay(events, {}, set()).timeline
    assert len(timeline) < 1000
    assert max(timeline) == (10_001, "before")


def test_a_backend_that_reports_nothing_is_an_error(tiny_step, tiny_batches, monkeypatch):
    step, (first, second) = tiny_step(), tiny_batches(2)
    step(first)
    monkeypatch.setattr(memory, "_state", lambda *args: {})
    monkeypatch.setattr(memory, "_cpu_events", lambda profiler: [])
    with pytest.raises(RuntimeError, match="cpu reported a peak of 0 bytes"):
        measure_memory(step, second)


def test_peak_counters_are_read_phase_by_phase(tiny_step, tiny_batches):
    step, (first, second) = tiny_step(), tiny_batches(2)
    step(first)
    peaks = iter([7_000_000, 8_000_000, 9_000_000, 6_000_000])
    counters = memory._Counters(step, second, lambda: next(peaks), lambda: None)
    step(second, mark=counters)
    measured = counters.memory("counters")
    assert measured.by_phase == {
        "before": 7_000_000,
        "forward": 8_000_000,
        "backward": 9_000_000,
        "optimizer": 6_000_000,
    }
    assert measured.peak_allocated_bytes == sum(measured.by_owner.values()) == 9_000_000
    assert measured.by_owner["weights"] == 4 * (BASE + LORA + 2 * HEAD + ROPE)


@pytest.mark.gpu
def test_cuda_reports_what_its_allocator_handed_out(tiny_step, tiny_batches):
    step = tiny_step()
    step.model.cuda()
    step.device = torch.device("cuda")
    batches = [batch.to("cuda") for batch in tiny_batches(2)]
    measured = warm(step, batches)
    assert measured.peak_reserved_bytes >= measured.peak_allocated_bytes
    assert measured.peak_allocated_bytes >= 4 * BASE
