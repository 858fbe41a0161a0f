import csv
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count

import pytest
from typer.testing import CliRunner

from labkit import measure, training
from labkit.cli import app
from labkit.data import DATA_FOLDER, read_pairs
from labkit.recipe import PROFILES, Recipe
from labkit.step import TrainingStep
from labkit.subsets import sample, shared_pairs

TINY = ("--profile", "tiny", "--lora-dropout", 0, "--learning-rate", 0.003, "--device", "cpu")
SHORT = (*TINY, "--max-steps", 4, "--evaluate-every", 2)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def table(tmp_path):
    """A user's CSV of 60 pairs."""
    pairs, path = sample(read_pairs(), 60, 0), tmp_path / "mine.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence1", "sentence2", "label"])
        writer.writerows(zip(pairs.first, pairs.second, pairs.labels, strict=True))
    return path


def test_help_has_examples_and_every_option():
    text = invoke("train", "--help").output
    assert "$ labkit train --model qwen3-mini" in text
    for option in ("--validation", "--patience", "--light", "--resume", "--recipe", "--seed"):
        assert option in text


def test_a_training_shows_scores_beside_the_majority_s(table, tmp_path):
    folder = tmp_path / "run"
    result = invoke("train", *SHORT, "--data", table, "--out", folder, "--test", table)
    assert result.exit_code == 0, result.output
    for words in (
        "On 6 pairs of mine.csv, held-out part:", "On 60 pairs of mine.csv:", "macro-F1",
        'always "different"', '"same"', "Best after", "of 4 steps (4 steps done)",
        "random weights", f"Adapter: {folder / 'adapter'}",
    ):  # fmt: skip
        assert words in result.stdout
    assert "step 2: validation macro-F1" in result.stderr
    assert "step 1: loss" in result.stderr
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    document = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert document["recipe"]["learning_rate"] == 0.003
    assert document["scores"]["pairs"] == 6
    assert document["data"]["pairs"] == 54


def test_json_is_one_document(table, tmp_path):
    arguments = ("train", *SHORT, "--data", table, "--out", tmp_path / "run", "--json")
    result = invoke(*arguments, "--validation", 0.5)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["validation"]["pairs"] == 30
    assert document["steps"] == 4
    assert document["test"] is None
    assert set(document["scores"]["classes"]) == {"different", "same"}


def test_the_synthetic_pairs_are_validated_on_their_own_split(tmp_path, monkeypatch):
    asked = {}

    def stop(recipe, pairs, held, folder, **options):
        asked.update(options, recipe=recipe, pairs=pairs, held=held, folder=folder)
        raise SystemExit(3)

    monkeypatch.setattr(training, "train", stop)
    invoke("train", "--light", 100, "--out", tmp_path / "run", "--patience", 5)
    assert asked["recipe"] == PROFILES["small"].recipe
    assert asked["held"] == read_pairs(DATA_FOLDER / "pairs" / "dev.jsonl")
    assert len(asked["pairs"]) == 3200
    assert shared_pairs(asked["pairs"], asked["held"]) == 0
    assert (asked["schedule"].light, asked["schedule"].patience) == (100, 5)
    assert asked["folder"] == tmp_path / "run"


def test_a_folder_with_weights_of_one_s_own_is_trained(table, tmp_path):
    invoke("train", *SHORT, "--data", table, "--out", tmp_path / "first")
    model = tmp_path / "first" / "adapter" / "base_model"
    out = tmp_path / "second"
    result = invoke("train", *SHORT, "--data", table, "--out", out, "--model", model)
    assert result.exit_code == 0, result.output
    assert "random weights" not in result.stdout
    config = json.loads((out / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(model)
    assert not (out / "adapter" / "base_model").exists()


def test_an_earlier_training_is_kept_beside(table, tmp_path):
    arguments = ("train", *SHORT, "--data", table, "--out", tmp_path / "run")
    invoke(*arguments)
    assert "The earlier run is kept in" in invoke(*arguments).stderr
    assert len(list(tmp_path.glob("run-until-*/training.json"))) == 1


def test_ctrl_c_ends_the_step_and_writes_a_checkpoint(table, tmp_path, monkeypatch):
    real = TrainingStep.__call__

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(TrainingStep, "__call__", interrupted)
    result = invoke("train", *SHORT, "--data", table, "--out", tmp_path / "run")
    assert result.exit_code == 130
    words = "Stopped after step 1. Go on with the same options and --resume."
    assert result.stderr.splitlines()[-1] == words
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_a_terminated_training_goes_on_with_resume(table, tmp_path):
    steps = (
        "train",
        *TINY,
        "--max-steps",
        30,
        "--patience",
        99,
        "--epochs",
        99,
        "--data",
        table,
    )
    cut = ("--out", tmp_path / "cut", "--evaluate-every", 10)
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit", *map(str, (*steps, *cut))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("step 1:"):
            process.terminate()
            break
    text = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == 143
    assert "Go on with the same options and --resume." in text
    assert "Traceback" not in text
    assert "going on after step" in invoke(*steps, *cut, "--resume").stderr
    invoke(*steps, "--out", tmp_path / "whole", "--evaluate-every", 10)
    files = [
        tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("cut", "whole")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--name", "a", "--out", "b"], "leave one out"),
        (["--name", "a/b", "--max-steps", 1], "--name must be letters"),
        (["--data", "nothing.tsv"], "there is no such file"),
        (["--validation", "nothing.tsv"], "there is no such file"),
        (["--validation", "1.5"], "between 0 and 1"),
        (["--test", "nothing.tsv"], "there is no such file"),
        (["--profile", "huge"], "profile must be one of"),
        (["--model", "nowhere/at/all"], "there is no such folder"),
        (["--device", "abacus"], "abacus"),
        (["--resume"], "There is no checkpoint"),
        (["--lora-targets", "nothing"], "has no linear layer named nothing"),
    ],
)
def test_an_expected_error_is_one_sentence(tmp_path, arguments, sentence):
    own = [] if "--name" in arguments else ["--out", tmp_path / "run"]
    result = invoke("train", *TINY, *own, *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert sentence in result.stderr
    assert result.stderr.splitlines()[-1].startswith("labkit: ")
    assert "Traceback" not in result.stderr


def test_resuming_with_another_recipe_is_refused(table, tmp_path):
    arguments = ("train", *SHORT, "--data", table, "--out", tmp_path / "run")
    invoke(*arguments)
    result = invoke(*arguments, "--resume", "--lora-rank", 4)
    assert result.exit_code == 1
    assert "lora_rank is 4, there 8" in result.stderr.splitlines()[-1]


def test_a_loss_that_is_not_a_number_is_one_sentence(table, tmp_path, monkeypatch):
    real, calls = TrainingStep.__call__, count(1)
    monkeypatch.setattr(
        TrainingStep, "__call__", lambda *a: math.nan if next(calls) == 3 else real(*a)
    )
    result = invoke("train", *SHORT, "--data", table, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("labkit: the loss of step 3 is nan")


def test_memory_that_runs_out_is_one_sentence(table, tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(TrainingStep, "__call__", full)
    result = invoke("train", *SHORT, "--data", table, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "labkit: memory ran out: lower --batch-size" in result.stderr


def test_pairs_that_are_trained_and_validated_on_are_counted(table, tmp_path):
    result = invoke(
        "train", *SHORT, "--data", table, "--validation", table, "--out", tmp_path / "run"
    )
    assert "60 of the 60 validation pairs are training pairs, too." in result.stderr


def test_tensorboard_that_is_not_installed_is_one_sentence(table, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = invoke(
        "train", *SHORT, "--data", table, "--out", tmp_path / "run", "--tensorboard"
    )
    assert result.exit_code == 1
    assert "TensorBoard is not installed: pip install tensorboard" in result.stderr


def test_tensorboard_gets_losses_and_scores(table, tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            assert folder == tmp_path / "run" / "tensorboard"

        def add_scalar(self, tag, value, step):
            written.append((tag, step))

        def close(self):
            written.append("closed")

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    invoke("train", *SHORT, "--data", table, "--out", tmp_path / "run", "--tensorboard")
    assert written[:3] == [
        ("loss/training", 1),
        ("loss/training", 2),
        ("validation/macro_f1", 2),
    ]
    assert ("loss/validation", 4) in written
    assert written[-1] == "closed"


@pytest.fixture
def measured(monkeypatch):
    """The recipes that ``labkit measure`` is asked for."""
    asked = []

    def answer(recipe, pairs, **options):
        asked.append(recipe)
        raise SystemExit(0)

    monkeypatch.setattr(measure, "measure", answer)
    return asked


def test_a_recipe_file_is_the_default_under_the_given_options(measured, tmp_path):
    recipe = Recipe(model="qwen3-tiny", batch_size=16, lora_targets=("q_proj",), seed=3)
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe.to_dict()), encoding="utf-8")
    invoke("measure", "--recipe", file)
    invoke("measure", "--recipe", file, "--batch-size", 4)
    file.write_text('{"lora_rank": 2}', encoding="utf-8")
    invoke("measure", "--profile", "tiny", "--recipe", file)
    assert measured == [
        recipe,
        replace(recipe, batch_size=4),
        replace(PROFILES["tiny"].recipe, lora_rank=2),
    ]


@pytest.mark.parametrize("command", ["measure", "predict", "train"])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[]", "is no recipe"),
        ('{"lora_targets": "q_proj"}', "lora_targets is a list"),
        ('{"batch": 3}', "unknown recipe field batch"),
        ('{"batch_size": 0}', "batch_size must be a whole number"),
        ('{"learning_rate": "high"}', "of the wrong kind"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence(tmp_path, command, content, sentence):
    file = tmp_path / "recipe.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    result = invoke(command, "--recipe", file)
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
