"""What an older version of a library lacks is done without."""

import pytest
import torch
from torch.utils.flop_counter import shape_wrapper
from transformers import PreTrainedModel

from labkit.predict import counting, fake
from labkit.predict.prediction import predict
from labkit.recipe import Recipe
from labkit.shapes import BatchShape

RECIPE = Recipe(model="qwen3-tiny", batch_size=4, max_length=16, checkpoint_every=1)
SHAPE = BatchShape(4, 16, padded=True)


def peak():
    return predict(RECIPE, shape=SHAPE).memory.peak_allocated_bytes


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "activation_checkpointing_enable"), reason="it has that name"
)
def test_checkpointing_is_found_under_its_older_name(monkeypatch):
    enable, calls = PreTrainedModel._activation_checkpointing_enable, []

    def older(self, gradient_checkpointing_kwargs=None, every_n_layers=1, offload=False):
        calls.append(every_n_layers)
        enable(self, gradient_checkpointing_kwargs, every_n_layers, offload)

    expected = peak()
    monkeypatch.delattr(PreTrainedModel, "activation_checkpointing_enable")
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", older)
    assert peak() == expected
    assert set(calls) == {1}


NAMES = (
    "transformers.utils.import_utils.is_fake_tensor",
    "transformers.masking_utils.fast_all",
    "torch.amp.GradScaler._maybe_opt_step",
)


@pytest.mark.parametrize("missing", NAMES)
def test_a_step_is_traced_without_a_name_that_is_patched(monkeypatch, missing):
    monkeypatch.setattr(fake, "_exists", lambda name: name != missing)
    assert peak() > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_versions_have_all_names(name):
    assert fake._exists(name)


@pytest.mark.parametrize("name", ["torch.amp.no_such", "no_such_library.name"])
def test_a_name_that_is_missing_is_seen(name):
    assert not fake._exists(name)


def test_attention_with_shared_heads_is_counted_where_torch_refuses_to():
    def older(grad, query, key, value, *args, out_shape=None):
        assert query[1] == key[1] == value[1]
        return sum(len(shape) for shape in (grad, query, key, value)) + key[2]

    formula = counting._with_all_heads(shape_wrapper(older), query_at=1)
    query, shared = torch.ones(2, 4, 8, 16), torch.ones(2, 2, 9, 16)
    assert formula(query, query, shared, shared, "more", out_val=None) == 16 + 9
