import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from labkit.predict.allocator import replay
from labkit.predict.gpus import GPUS
from labkit.predict.prediction import PredictError, predict_step
from labkit.predict.published import (
    LENGTHS,
    Published,
    PublishedRow,
    compare_published,
    fit_length,
    read_published,
)
from labkit.predict.published_steps import find_step
from labkit.predict.trace import trace_step

GROUNDTRUTH = Path(__file__).resolve().parents[2] / "shared" / "groundtruth" / "measured.csv"
TABLE = read_published()
MIB = 2**20


@pytest.mark.parametrize("row_id", TABLE)
def test_prediction_is_within_the_bound(row_id):
    (row,) = compare_published([row_id])
    assert row.within, f"{row.error:+.3%} of {row.published.bytes:,} bytes"


@pytest.mark.parametrize("row_id", [row_id for row_id in TABLE if "liger" in row_id])
def test_single_operations_are_exact(row_id):
    (row,) = compare_published([row_id])  # published as a float32
    assert np.float32(row.predicted_bytes / MIB) == np.float32(row.published.value)


def test_gpt2_in_float32_is_exact():
    (row,) = compare_published(["gpt2-fp32"])
    assert f"{row.predicted_bytes / 2**30:.4f}" == str(row.published.value)


def test_the_table_is_what_was_published():
    if not GROUNDTRUTH.is_file():
        pytest.skip("measured.csv is not in ../shared/groundtruth")
    with GROUNDTRUTH.open(encoding="utf-8", newline="") as file:
        expected = {values["id"]: values for values in csv.DictReader(file)}
    assert set(TABLE) == set(expected)
    for row_id, values in expected.items():
        row = TABLE[row_id]
        assert row.value == float(values["value"])
        for name in ("setting", "unit", "gpu", "torch", "source"):
            assert getattr(row, name) == values[name]
        assert values["statistic"] in (row.statistic, "same")


@pytest.mark.parametrize("row_id", TABLE)
def test_each_row_can_be_compared(row_id):
    row = TABLE[row_id]
    assert row.id == row_id
    assert row.card in GPUS
    assert row.counted in ("allocated", "reserved")
    assert 0 < row.bound <= 0.1
    assert callable(find_step(row_id, 512).build)


def test_an_unknown_row():
    with pytest.raises(PredictError, match=r"gpt3 is not among the published rows: liger-"):
        compare_published(["gpt3", "gpt2-fp32"])


def test_a_row_without_a_step():
    with pytest.raises(KeyError, match="gpt2-fp8"):
        find_step("gpt2-fp8", None)


def test_progress_and_what_is_returned():
    told = []
    (row,) = compare_published(["liger-rms_norm-H1024"], progress=told.append)
    assert told == ["liger-rms_norm-H1024"]
    document = json.loads(json.dumps(row.to_dict()))
    assert document["published_bytes"] == document["predicted_bytes"] == row.published.bytes
    assert document["within"]
    assert document["error"] == 0


def row_of(predicted_bytes, **fields):
    known = {**vars(TABLE["peft-full"]), "value": 1000, "unit": "bytes", **fields}
    return PublishedRow(Published(**known), predicted_bytes, "")


def test_error_and_bound():
    assert row_of(1030).error == pytest.approx(0.03)
    assert row_of(970, bound=0.0301).within
    assert not row_of(960).within
    assert not row_of(1040).within


@pytest.mark.parametrize("wanted", [512, 513, 640, 767, 768])
def test_the_length_is_found(wanted):
    tried = []

    def bytes_at(tokens):
        tried.append(tokens)
        return 1000 * tokens + 10**6 + tokens % 8

    found = fit_length(bytes_at, bytes_at(wanted))
    assert abs(bytes_at(found) / bytes_at(wanted) - 1) <= 0.005
    assert len(tried) < 8


def test_a_length_beyond_the_limits_is_the_limit():
    assert fit_length(lambda tokens: tokens, 10**6) == LENGTHS[1]


# ---- what the steps need of the trace


def linear_step():
    """Weights of 16 MiB."""
    model = nn.Linear(1024, 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.zeros(4096, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.empty_cache()

    return model, optimizer, step


def test_the_cache_is_emptied_where_the_step_does_it():
    def build():
        model, optimizer, step = linear_step()
        return model, optimizer, lambda mark: step()

    trace = trace_step(build, GPUS["t4"], steps=2)
    assert trace.emptied == [trace.step_starts[1], len(trace.events)]


def test_an_emptied_cache_is_asked_for_again():
    sizes, events = [30 * MIB, 40 * MIB], [0, ~0, 1]
    assert replay(events, sizes).peak_reserved_bytes == 70 * MIB
    assert replay(events, sizes, emptied=[2]).peak_reserved_bytes == 40 * MIB


def test_weights_are_cut_from_the_segment_of_the_warm_up():
    def reserved(warm_up_bytes):
        report = predict_step(linear_step, "t4", steps=1, warm_up_bytes=warm_up_bytes)
        return report.memory.peak_reserved_bytes

    assert reserved(16 * MIB) == reserved(0)
    assert reserved(1024 * MIB) == 1024 * MIB + 2 * MIB  # small blocks have their own segment


def test_weights_lie_in_the_order_in_which_a_model_is_moved():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("buffer", torch.zeros(3))
            self.own = nn.Parameter(torch.zeros(5))
            self.child = nn.Linear(7, 1)

    def build():
        model = Model()
        return model, torch.optim.SGD(model.parameters()), lambda mark: None

    trace = trace_step(build, GPUS["t4"], steps=1)
    assert trace.sizes.tolist() == [7 * 4, 4, 5 * 4, 3 * 4]
