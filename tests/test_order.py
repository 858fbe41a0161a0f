"""Which pairs share a batch, and who makes it."""

import os
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch

from labkit import order
from labkit.order import loader_options, orders
from labkit.recipe import Recipe
from labkit.tokens import batches

RECIPE = Recipe(model="qwen3-tiny", batch_size=8, max_length=32, group_window=4)
LENGTHS = torch.randint(4, 40, (203,), generator=torch.Generator().manual_seed(0))
A_PASS = 26  # batches of 8 of 203 pairs: 25 whole ones, and one of 3


@pytest.mark.parametrize("padding", ["longest", "grouped", "none"])
def test_every_pair_comes_once_an_epoch(padding):
    stream = orders(replace(RECIPE, padding=padding), LENGTHS)
    epochs = [list(islice(stream, A_PASS)) for _ in range(2)]
    for epoch in epochs:
        assert sorted(torch.cat(epoch).tolist()) == list(range(203))
        assert sorted(map(len, epoch)) == [3] + [8] * 25
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))


def test_grouped_batches_come_from_sorted_windows_in_random_order():
    random = list(islice(orders(RECIPE, LENGTHS), A_PASS))
    grouped = list(islice(orders(replace(RECIPE, padding="grouped"), LENGTHS), A_PASS))
    window = [set(torch.cat(epoch[:4]).tolist()) for epoch in (random, grouped)]
    assert window[0] == window[1]  # the same 32 pairs, put together otherwise
    longest = [LENGTHS[batch].max().item() for batch in grouped[:4]]
    spans = sorted((LENGTHS[b].min().item(), LENGTHS[b].max().item()) for b in grouped[:4])
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert any(
        [LENGTHS[b].max().item() for b in grouped[i : i + 4]] != sorted(longest)
        for i in range(0, 24, 4)
    )


def test_a_wider_window_leaves_less_padding():
    def computed(recipe):
        chosen = islice(orders(recipe, LENGTHS), A_PASS)
        return sum(len(batch) * LENGTHS[batch].max().item() for batch in chosen)

    grouped = [replace(RECIPE, padding="grouped", group_window=n) for n in (2, 4, 26)]
    sizes = [computed(recipe) for recipe in (RECIPE, *grouped)]
    assert sizes == sorted(sizes, reverse=True)
    assert int(LENGTHS.sum()) < sizes[-1] < 1.1 * int(LENGTHS.sum())


def test_settings_that_do_not_apply_are_dropped_with_a_word(monkeypatch):
    recipe = replace(RECIPE, prefetch_factor=4, pin_memory=True)
    options, dropped = loader_options(recipe, "cpu")
    assert options == {"num_workers": 0, "pin_memory": False}
    assert [line.partition(":")[0] for line in dropped] == ["prefetch_factor", "pin_memory"]
    assert loader_options(RECIPE, "cpu")[1] == []
    options, dropped = loader_options(replace(recipe, num_workers=10_000), "cuda")
    assert 1 <= options["num_workers"] < 10_000
    assert options["prefetch_factor"] == 4
    assert options["pin_memory"]
    assert len(dropped) == 1
    assert "10000 were asked for" in dropped[0]


def test_little_shared_memory_leaves_no_workers(monkeypatch, tmp_path):
    monkeypatch.setattr(order, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(order.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
    options, dropped = loader_options(replace(RECIPE, num_workers=1), "cpu")
    assert options["num_workers"] == 0
    assert "--shm-size" in dropped[0]


@pytest.mark.parametrize("padding", ["longest", "none"])
@pytest.mark.parametrize("cached", [False, True])
def test_worker_processes_make_the_same_batches(padding, cached, pairs, tokenizer, tmp_path):
    recipe = replace(RECIPE, padding=padding, cached=cached)
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    here, there = (
        list(islice(batches(r, pairs, tokenizer, cache_folder=tmp_path, skip=2), 4))
        for r in (recipe, replace(recipe, num_workers=1))
    )
    for one, other in zip(here, there, strict=True):
        assert one.real_tokens == other.real_tokens
        for a, b in zip(one.tensors, other.tensors, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), drawn)  # dropout draws what it would without


def test_a_worker_leaves_the_group_that_signals_are_sent_to(pairs, tokenizer):
    stream = batches(replace(RECIPE, num_workers=1), pairs, tokenizer)
    next(stream)
    (worker,) = stream._workers
    assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)
