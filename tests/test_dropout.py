"""Dropout from fewer random numbers: the same chances, and gradients that fit the mask."""

import pytest
import torch
from torch import nn

from labkit import dropout
from labkit.dropout import FastDropout, keep_mask
from labkit.recipe import Recipe
from labkit.tokens import batches


def test_the_share_of_zeros_and_the_scale_are_those_of_dropout():
    torch.manual_seed(0)
    x = torch.ones(1000, 1001)
    out = FastDropout(0.15)(x)
    zeros = (out == 0).float().mean().item()
    assert zeros == pytest.approx(0.15, abs=0.002)  # five times the error of a million draws
    assert out.max().item() == pytest.approx(1 / 0.85)
    assert out.mean().item() == pytest.approx(1, abs=0.003)


def test_neighbours_that_share_a_random_number_are_independent():
    torch.manual_seed(0)
    keep = keep_mask(torch.ones(2_000_000), 0.3).float().view(-1, 2)
    both = keep.prod(dim=1).mean().item()
    assert both == pytest.approx(0.7**2, abs=0.003)
    for half in keep.mean(dim=0).tolist():
        assert half == pytest.approx(0.7, abs=0.003)


@pytest.mark.parametrize("p", [0.0, 1 / 2**16, 0.999, 0.999999])
def test_extreme_probabilities_are_met(p):
    torch.manual_seed(0)
    zeros = (~keep_mask(torch.ones(3_000_001), p)).float().mean().item()
    assert zeros == pytest.approx(p, abs=1e-4)


def test_the_gradient_is_scaled_where_something_was_kept():
    torch.manual_seed(0)
    x = torch.randn(64, 33, requires_grad=True)
    out = FastDropout(0.5)(x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.where(out == 0, 0.0, 2.0))


def test_evaluation_leaves_everything_as_it_is():
    x = torch.randn(8, 8)
    assert torch.equal(FastDropout(0.5).eval()(x), x)
    assert torch.equal(FastDropout(0.0)(x), x)


def test_a_card_draws_as_torch_does(monkeypatch):
    monkeypatch.setattr(dropout, "draws_slowly", lambda x: False)
    x = torch.randn(16, 16)
    torch.manual_seed(3)
    here = FastDropout(0.4)(x)
    torch.manual_seed(3)
    assert torch.equal(here, nn.functional.dropout(x, 0.4))


@pytest.mark.parametrize("fields", [{}, {"checkpoint_every": 1}])
def test_a_step_with_it_repeats_itself_and_trains(fields, tiny_step, pairs, tokenizer):
    batch = next(batches(Recipe(model="qwen3-tiny", batch_size=8), pairs, tokenizer))
    losses = []
    for _ in range(2):
        step = tiny_step(lora_dropout=0.3, fast_dropout=True, **fields)
        modules = [m for m in step.model.modules() if isinstance(m, FastDropout)]
        assert len(modules) == 6  # three in each of two layers
        torch.manual_seed(1)
        losses.append([step(batch) for _ in range(4)])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.compiles
def test_compiled_forward_and_backward_use_the_same_mask():
    compiled = torch.compile(lambda x: FastDropout(0.5)(x) * 3)
    torch.manual_seed(0)
    x = torch.ones(64, 32, requires_grad=True)
    out = compiled(x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.where(out == 0, 0.0, 6.0))
    assert 0.4 < (out == 0).float().mean() < 0.6
    assert not torch.equal(compiled(x), out)
