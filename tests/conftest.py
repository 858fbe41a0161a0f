"""Small real models and batches, made once."""

import labkit  # noqa: F401, I001 - before torch, whose threads read what it sets

from itertools import islice

import pytest
import torch

from labkit.data import read_pairs
from labkit.model_source import find_model
from labkit.precision import choose_precision
from labkit.recipe import Recipe
from labkit.step import build_step
from labkit.tokens import batches, load_tokenizer

CPU = torch.device("cpu")
TINY = {"model": "qwen3-tiny", "batch_size": 8, "max_length": 32, "lora_dropout": 0.0}


@pytest.fixture(scope="session")
def pairs():
    return read_pairs()


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("qwen3-tiny")


@pytest.fixture
def tiny_step(tokenizer):
    """Builds the step of a tiny recipe; dropout is off unless a test turns it on."""

    def build(*, emulate=True, **fields):
        recipe = Recipe(**{**TINY, **fields})
        return build_step(
            recipe,
            find_model(recipe.model),
            choose_precision(recipe, CPU, emulate=emulate),
            CPU,
            pad_token_id=tokenizer.pad_token_id,
        )

    return build


@pytest.fixture
def tiny_batches(pairs, tokenizer):
    """The first batches of a tiny recipe."""

    def take(count, **fields):
        recipe = Recipe(**{**TINY, **fields})
        return list(islice(batches(recipe, pairs, tokenizer), count))

    return take
