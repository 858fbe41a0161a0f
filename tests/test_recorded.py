"""The timelines that come with the lab are what is fitted now, and used only where right."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.model_source import find_model, geometry
from labkit.predict import recorded
from labkit.predict.attention import choose_backend, stand_in
from labkit.predict.gpus import GPUS, find_gpu
from labkit.predict.recipe_timeline import recorded_key
from labkit.predict.recorded import built_in_model, file_of, find_recorded, save_recorded
from labkit.predict.recording import CARDS, MODELS, differs, recorded_steps

# Small models on every card, large ones on one: together every precision, checkpointing and
# number of parts. ``labkit data timelines --check`` compares all.
CHOSEN = [
    ("qwen3-tiny", "t4", 0), ("qwen3-tiny", "a100-40gb", 4), ("qwen3-tiny", "h100", 8),
    ("qwen3-small", "t4", 10), ("qwen3-small", "a100-40gb", 12), ("qwen3-small", "h100", 17),
    ("Qwen/Qwen3-Embedding-0.6B", "a100-40gb", 22), ("Qwen/Qwen3-Embedding-4B", "t4", 3),
    ("Qwen/Qwen3-Embedding-8B", "h100", 13),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu", "place"), CHOSEN)
def test_a_recorded_timeline_is_what_is_fitted_now(model, gpu, place):
    steps = list(recorded_steps(model, find_gpu(gpu)))
    assert differs(steps[place]) == ""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", CARDS)
def test_every_recipe_of_the_space_is_recorded(model, gpu):
    for step in recorded_steps(model, find_gpu(gpu)):
        key = recorded_key(step, 0, aligned=True)
        found = find_recorded(step.source.config, gpu, key)
        assert found is not None, key
        assert found.one_row


def test_archives_are_small_and_none_is_forgotten():
    files = {file_of(model, gpu) for model in MODELS for gpu in CARDS}
    assert files == set(recorded.FOLDER.glob("*.zip"))
    assert all(file.stat().st_size <= 500_000 for file in files)


def test_a_config_from_the_hub_is_known_by_its_shapes():
    config = geometry("Qwen/Qwen3-Embedding-0.6B")
    published = type(config)(**config.to_dict() | {"bos_token_id": 151643, "dtype": "bfloat16"})
    assert built_in_model(published) == "Qwen/Qwen3-Embedding-0.6B"
    assert built_in_model(type(config)(**config.to_dict() | {"vocab_size": 151670})) is None
    assert built_in_model(type(config)(**config.to_dict() | {"attention_bias": True})) is None


def test_other_versions_use_nothing_recorded(monkeypatch):
    step = next(recorded_steps("qwen3-tiny", find_gpu("t4")))
    key = recorded_key(step, 0, aligned=True)
    assert find_recorded(step.source.config, "t4", key)
    monkeypatch.setattr(recorded, "versions", lambda: {"torch": "2.14.0"})
    assert find_recorded(step.source.config, "t4", key) is None


def test_what_is_saved_is_what_is_read(tmp_path, monkeypatch):
    step = next(recorded_steps("qwen3-tiny", find_gpu("t4")))
    key = recorded_key(step, 0, aligned=True)
    found = find_recorded(step.source.config, "t4", key)
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    file = file_of("qwen3-tiny", "t4")
    save_recorded(file, [(key, found)])
    first = file.read_bytes()
    again = find_recorded(step.source.config, "t4", key)
    one, other = (r.pattern.timeline(2).at(8, 64) for r in (found, again))
    np.testing.assert_array_equal(one.sizes, other.sizes)
    assert one.blocks == other.blocks
    save_recorded(file, [(key, again)])
    assert file.read_bytes() == first
    assert find_recorded(step.source.config, "t4", {**key, "left_over": 1}) is None
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:5000], None])
def test_a_damaged_archive_is_as_good_as_none(tmp_path, monkeypatch, caplog, damage):
    step = next(recorded_steps("qwen3-tiny", find_gpu("t4")))
    key = recorded_key(step, 0, aligned=True)
    whole = file_of("qwen3-tiny", "t4").read_bytes()
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    middle = whole[:100] + bytes(2000) + whole[2100:]  # the archive opens, a member does not
    file_of("qwen3-tiny", "t4").write_bytes(damage(whole) if damage else middle)
    assert find_recorded(step.source.config, "t4", key) is None
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("head_dim", [64, 128, 224])
def test_a_card_and_its_stand_in_choose_the_same_kernels(gpu, head_dim):
    import torch

    card, other = GPUS[gpu], stand_in(GPUS[gpu], head_dim)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        query = torch.zeros(1, 2, 8, head_dim, dtype=dtype, device="meta", requires_grad=True)
        for mask in (None, torch.zeros(1, 1, 8, 8, dtype=torch.bool, device="meta")):
            for dropout in (0.0, 0.1):
                asked = (query, query, query, mask, dropout)
                assert choose_backend(card, *asked) == choose_backend(other, *asked)


def invoke(*arguments):
    return CliRunner().invoke(app, ["data", "timelines", *arguments])


def test_the_command_writes_and_checks_an_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    first = list(recorded_steps("qwen3-tiny", find_gpu("t4")))[:1]
    monkeypatch.setattr("labkit.predict.recording.recorded_steps", lambda *_: iter(first))
    asked = ("--model", "qwen3-tiny", "--gpu", "t4")
    missing = invoke(*asked, "--check")
    assert missing.exit_code == 1
    assert "not recorded for these versions: qwen3-tiny on t4" in missing.stdout
    assert invoke(*asked).exit_code == 0
    right = invoke(*asked, "--check")
    assert (right.exit_code, right.stdout[:9]) == (0, "the same:")
    key = recorded_key(first[0], 0, aligned=True)
    found = find_recorded(find_model("qwen3-tiny").config, "t4", key)
    save_recorded(file_of("qwen3-tiny", "t4"), [(key, replace(found, trained={"lora": 1}))])
    wrong = invoke(*asked, "--check")
    assert wrong.exit_code == 1
    assert "trained differ: qwen3-tiny" in wrong.stdout
    assert json.dumps(key)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "bert"), "model 'bert' is not built in"),
        (("--gpu", "rtx-4090"), "'rtx-4090' stands for no others; one of t4, a100-40gb, h100"),
    ],
)
def test_timelines_that_nobody_records(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert words in result.stderr
