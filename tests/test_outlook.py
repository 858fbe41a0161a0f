"""A step with batch and length left open is the prediction of each."""

from dataclasses import replace

import pytest

from labkit.model_source import ModelError
from labkit.predict import recipe_step
from labkit.predict.gpus import find_gpu
from labkit.predict.outlook import Outlook
from labkit.predict.prediction import predict
from labkit.recipe import Recipe
from labkit.shapes import BatchShape

TINY = Recipe(model="qwen3-tiny", checkpoint_every=1, optimizer="adamw_fused")


@pytest.mark.parametrize("gpu", [None, "t4", "h100"])
@pytest.mark.parametrize(("pairs", "tokens"), [(1, 8), (6, 48), (64, 512)])
def test_every_point_is_the_prediction_of_it(gpu, pairs, tokens):
    card = gpu and find_gpu(gpu)
    outlook = Outlook(TINY, card)
    brief = outlook.report(pairs, tokens)
    whole = predict(TINY, card, shape=BatchShape(pairs, tokens, padded=True))
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "by_owner", "method"):
        assert getattr(brief.memory, name) == getattr(whole.memory, name), name
    assert brief.fit == whole.fit
    assert brief.precision == whole.precision
    assert brief.trainable == whole.trainable
    assert (brief.recipe.batch_size, brief.recipe.max_length) == (pairs, tokens)
    if card:
        assert brief.modelled["seconds"] == pytest.approx(whole.modelled["seconds"], rel=0.05)


def test_a_curve_holds_the_peaks_of_its_points():
    outlook = Outlook(replace(TINY, micro_batches=4), None)
    points = [(4, 8), (8, 64), (32, 64), (32, 128)]
    peaks = [outlook.report(*point).memory.peak_allocated_bytes for point in points]
    assert outlook.peaks(points) == peaks == sorted(peaks)


def test_a_built_in_model_needs_no_trace(monkeypatch):
    monkeypatch.setattr(recipe_step, "trace_step", None)  # would fail if it were called
    model = "Qwen/Qwen3-Embedding-4B"
    for gpu in ("v100-32gb", "rtx-4090", "b200"):
        recipe = Recipe(model=model, optimizer="adamw_fused", micro_batches=16)
        report = Outlook(recipe, find_gpu(gpu)).report(128, 512)
        assert report.memory.by_owner["weights"] > 4 * 4_021_774_336


def test_more_tokens_than_the_model_has_positions():
    with pytest.raises(ModelError, match="max_length 32776 is more than its 32768 positions"):
        Outlook(TINY, None).report(1, 32776)
