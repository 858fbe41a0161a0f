import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import count

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from labkit import loop as loop_module
from labkit.adapter import WEIGHTS, load_adapter
from labkit.checkpoint import CheckpointError, Progress
from labkit.data import read_pairs
from labkit.interruption import Interruption
from labkit.machine import PROJECT
from labkit.quality import Scores, evaluate
from labkit.recipe import Recipe
from labkit.schedule import Schedule, ScheduleError
from labkit.subsets import sample
from labkit.trainable import TrainingError
from labkit.training import CHECKPOINT, Interrupted, train

RECIPE = Recipe(
    model="qwen3-tiny", batch_size=8, max_length=32, lora_dropout=0.3, learning_rate=3e-3
)
SCHEDULE = Schedule(epochs=2, evaluate_every=4, patience=99, light=20, checkpoint_steps=3)

SCRIPT = """
import labkit, json, sys
from labkit.data import read_pairs
from labkit.recipe import Recipe
from labkit.schedule import Schedule
from labkit.subsets import sample
from labkit.training import train
recipe, schedule, folder = json.loads(sys.argv[1])
pairs = read_pairs()
train(Recipe.from_dict(recipe), sample(pairs, 60, 0), sample(pairs, 40, 1), folder,
      device="cpu", schedule=Schedule(**schedule), watch=lambda line: print(line, flush=True))
"""


@pytest.fixture(scope="module")
def data():
    """60 pairs, eight steps an epoch, the last of four pairs; and 40 to validate on."""
    pairs = read_pairs()
    return sample(pairs, 60, 0), sample(pairs, 40, 1)


def run(data, folder=None, recipe=RECIPE, schedule=SCHEDULE, **options):
    return train(recipe, *data, folder, schedule=schedule, device="cpu", **options)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted training and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return run(data, folder), folder


def untimed(history):
    """The lines without their seconds."""
    kept = []
    for line in history:
        inner = line.get("scores", {})
        kept.append({n: v for n, v in line.items() if n not in ("seconds", "scores")})
        kept[-1]["scores"] = {n: v for n, v in inner.items() if n != "seconds"}
    return kept


def lines_of(folder):
    text = (folder / "history.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def assert_same(trained, folder, whole):
    other, other_folder = whole
    assert untimed(trained.history) == untimed(other.history) == untimed(lines_of(folder))
    for file in ("adapter/" + WEIGHTS, CHECKPOINT):
        ours, theirs = load_file(folder / file), load_file(other_folder / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (trained.steps, trained.best_step) == (other.steps, other.best_step)
    assert replace(trained.scores, seconds=0) == replace(other.scores, seconds=0)


def test_a_training_learns_and_keeps_its_best(whole, data):
    trained = whole[0]
    steps = [line for line in trained.history if "loss" in line]
    looks = [line for line in trained.history if "scores" in line]
    assert [line["step"] for line in steps] == list(range(1, 17))
    assert [line["step"] for line in looks] == [4, 8, 12, 16]
    assert trained.stopped == "2 epochs done"
    assert looks[0]["scores"]["pairs"] == 20
    assert trained.scores.pairs == 40
    best = max(looks, key=lambda line: (line["scores"]["macro_f1"], -line["scores"]["loss"]))
    assert trained.best_step == best["step"]
    assert trained.seconds > 0
    again = evaluate(trained.step, data[1], trained.tokenizer)
    assert replace(again, seconds=0) == replace(trained.scores, seconds=0)


def test_losses_fall_on_what_is_seen_often(data):
    few = (sample(data[0], 8, 0), data[1])
    trained = run(few, schedule=Schedule(epochs=30, evaluate_every=30))
    losses = [line["loss"] for line in trained.history if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]


def test_the_saved_adapter_is_the_best_one(whole, tiny_step, data):
    trained, folder = whole
    step = tiny_step()
    load_adapter(step, folder / "adapter")
    scores = evaluate(step, data[1], trained.tokenizer)
    assert replace(scores, seconds=0) == replace(trained.scores, seconds=0)


def test_without_a_folder_nothing_is_written_and_all_is_the_same(data, whole):
    trained = run(data)
    assert trained.adapter is None
    assert untimed(trained.history) == untimed(whole[0].history)


def test_evaluating_does_not_disturb_training(data, tmp_path):
    for name, every in (("often", 1), ("once", 9)):
        schedule = replace(SCHEDULE, evaluate_every=every, max_steps=9)
        run(data, tmp_path / name, schedule=schedule)
    often, once = (load_file(tmp_path / name / CHECKPOINT) for name in ("often", "once"))
    names = [name for name in often if not name.startswith("best/")]
    assert all(torch.equal(often[name], once[name]) for name in names)
    losses = [
        [line["loss"] for line in lines_of(tmp_path / name) if "loss" in line]
        for name in ("often", "once")
    ]
    assert losses[0] == losses[1]


def test_a_killed_training_goes_on_bit_for_bit(data, whole, tmp_path):
    arguments = json.dumps([RECIPE.to_dict(), vars(SCHEDULE), str(tmp_path)])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, arguments], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if "'step': 11" in line:  # two steps after a checkpoint
            break
    os.kill(process.pid, signal.SIGKILL)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(b'{"step": 1')  # the line it died in
    said = []
    trained = run(data, tmp_path, resume=True, progress=said.append)
    assert any(text in said for text in ("going on after step 9", "going on after step 12"))
    assert_same(trained, tmp_path, whole)


@pytest.mark.parametrize("asked", [0, 5, 11, 30])
def test_a_training_that_was_asked_to_stop_goes_on_bit_for_bit(data, whole, tmp_path, asked):
    """Asked after a step, or while evaluating."""
    questions = count()
    with pytest.raises(Interrupted, match="Stopped after step"):
        run(data, tmp_path, stop=lambda: next(questions) >= asked)
    assert_same(run(data, tmp_path, resume=True), tmp_path, whole)


def test_a_finished_training_resumed_does_no_step(data, whole, tmp_path):
    run(data, tmp_path)
    seen = []
    trained = run(data, tmp_path, resume=True, watch=seen.append)
    assert seen == []
    assert_same(trained, tmp_path, whole)


def test_a_longer_schedule_goes_on_where_a_shorter_ended(data, whole, tmp_path):
    run(data, tmp_path, schedule=replace(SCHEDULE, max_steps=8))
    assert_same(run(data, tmp_path, resume=True), tmp_path, whole)


def test_a_scaler_s_state_is_kept(data, tmp_path):
    recipe = replace(RECIPE, autocast="float16")
    options = {"recipe": recipe, "schedule": replace(SCHEDULE, max_steps=5), "emulate": True}
    whole = run(data, tmp_path / "whole", **options)
    questions = count()
    with pytest.raises(Interrupted):
        run(data, tmp_path / "cut", stop=lambda: next(questions) >= 2, **options)
    resumed = run(data, tmp_path / "cut", resume=True, **options)
    assert resumed.step.scaler.state_dict() == whole.step.scaler.state_dict() != {}
    assert_same(resumed, tmp_path / "cut", (whole, tmp_path / "whole"))


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """The folder of a training that was stopped after three steps."""
    folder = tmp_path_factory.mktemp("stopped")
    questions = count()
    with pytest.raises(Interrupted):
        run(data, folder, stop=lambda: next(questions) >= 3)
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"recipe": replace(RECIPE, learning_rate=1e-3)},
            "rate is 0.001, there 0.003",
        ),
        ({"recipe": replace(RECIPE, seed=1)}, "seed is 1, there 0"),
        ({"schedule": replace(SCHEDULE, evaluate_every=5)}, "evaluate_every is 5, there 4"),
        ({"schedule": replace(SCHEDULE, light=19)}, "the validation data's sha256 is"),
    ],
)
def test_another_training_is_not_gone_on_with(data, stopped, changes, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        run(data, stopped, resume=True, **changes)
    assert len(str(caught.value).splitlines()) == 1


def test_other_data_are_not_gone_on_with(data, stopped):
    with pytest.raises(CheckpointError, match="the training data's sha256 is"):
        run((sample(data[0], 59, 0), data[1]), stopped, resume=True)


def test_another_library_is_not_gone_on_with(data, stopped, monkeypatch):
    from labkit import training

    real = training.installed_versions()
    monkeypatch.setattr(training, "installed_versions", lambda: real | {"peft": "0.0.1"})
    with pytest.raises(CheckpointError, match=r"version of peft is 0\.0\.1, there"):
        run(data, stopped, resume=True)


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "other", "history"])
def test_a_damaged_checkpoint_is_refused(data, stopped, tmp_path, damage):
    folder = tmp_path / "run"
    folder.mkdir()
    content = (stopped / CHECKPOINT).read_bytes()
    lines = (stopped / "history.jsonl").read_bytes()
    if damage == "flipped":
        content = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    (folder / CHECKPOINT).write_bytes(content[:5000] if damage == "cut" else content)
    (folder / "history.jsonl").write_bytes(b"" if damage == "history" else lines)
    if damage == "missing":
        (folder / CHECKPOINT).unlink()
    if damage == "other":
        from safetensors.torch import save_file

        save_file({"x": torch.ones(1)}, folder / CHECKPOINT)
    messages = {
        "cut": "is damaged", "flipped": "its checksum differs", "missing": "no checkpoint",
        "other": "is not a labkit checkpoint", "history": "has 0 lines",
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=messages[damage]):
        run(data, folder, resume=True)


def test_a_checkpoint_holds_no_base_and_no_code(stopped):
    with safe_open(stopped / CHECKPOINT, framework="pt") as opened:
        names = list(opened.keys())
        state = json.loads(opened.metadata()["state"])
    assert {name.partition("/")[0] for name in names} == {"trained", "optimizer"}
    assert all("lora_" in n or "modules_to_save" in n for n in names if "trained/" in n)
    assert state["progress"]["step"] == 3
    assert sorted(path.name for path in stopped.iterdir()) == [CHECKPOINT, "history.jsonl"]


def test_the_old_checkpoint_stays_until_the_new_is_written(
    data, stopped, tmp_path, monkeypatch
):
    from labkit import checkpoint

    (tmp_path / CHECKPOINT).write_bytes((stopped / CHECKPOINT).read_bytes())
    (tmp_path / "history.jsonl").write_bytes((stopped / "history.jsonl").read_bytes())

    def fail(tensors, draft, metadata):
        draft.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written \(no space"):
        run(data, tmp_path, resume=True)
    assert (tmp_path / CHECKPOINT).read_bytes() == (stopped / CHECKPOINT).read_bytes()
    assert not list(tmp_path.glob(".*"))


def scored(monkeypatch, values):
    """Evaluations that answer these macro-F1 and losses, the last one forever."""
    answers = [Scores(20, 0.5, f1, 0.5, loss, {}, 0.5, 0.5, 0.0) for f1, loss in values]
    waiting = iter(answers)
    monkeypatch.setattr(loop_module, "evaluate", lambda *_, **__: next(waiting, answers[-1]))


@pytest.mark.parametrize(
    ("values", "patience", "best", "steps"),
    [
        ([(0.5, 1), (0.6, 1), (0.6, 1), (0.59, 0.5), (0.9, 1)], 2, 2, 4),
        ([(0.5, 1), (0.4, 1), (0.4, 1), (0.6, 1), (0.5, 1), (0.5, 1), (0.5, 1)], 3, 4, 7),
        ([(0.4, 1), (0.4, 0.9), (0.4, 0.8), (0.4, 0.8)], 1, 3, 4),  # the loss still falls
    ],
)
def test_training_stops_when_nothing_gets_better(
    data, monkeypatch, values, patience, best, steps
):
    scored(monkeypatch, values)
    trained = run(data, schedule=Schedule(evaluate_every=1, patience=patience))
    assert (trained.best_step, trained.steps) == (best, steps)
    evaluations = "evaluation" + "s" * (patience > 1)
    assert trained.stopped == f"no better validation in {patience} {evaluations}"


def test_the_best_weights_are_those_of_the_best_step(data, monkeypatch):
    scored(monkeypatch, [(0.5, 1), (0.6, 1), (0.3, 1)])
    late = run(data, schedule=Schedule(evaluate_every=2, max_steps=6))
    early = run(data, schedule=Schedule(evaluate_every=4, max_steps=4))
    assert late.best_step == early.best_step == 4
    pairs = zip(late.step.trained, early.step.trained, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_in_one_sentence(data, tmp_path, monkeypatch, value):
    from labkit.step import TrainingStep

    real, calls = TrainingStep.__call__, count(1)
    monkeypatch.setattr(
        TrainingStep, "__call__", lambda *a: value if next(calls) == 5 else real(*a)
    )
    with pytest.raises(TrainingError, match=f"the loss of step 5 is {value}; a learning_rate"):
        run(data, tmp_path)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 4]


def test_a_dead_adapter_is_seen_at_the_first_step(data, monkeypatch):
    from labkit.step import TrainingStep

    real = TrainingStep.__call__

    def without_gradients(self, batch):
        loss = real(self, batch)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.grad = None
        return loss

    monkeypatch.setattr(TrainingStep, "__call__", without_gradients)
    with pytest.raises(TrainingError, match="have no gradient after the first step"):
        run(data)


def test_the_example_of_the_documentation_runs():
    page = (PROJECT / "docs" / "training.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    names = {}
    exec(code.replace("Schedule(", "Schedule(max_steps=2, light=20, "), names)
    assert names["trained"].scores.pairs == len(names["validation_pairs"])


@pytest.mark.parametrize("name", ["epochs", "max_steps", "evaluate_every", "patience", "light"])
def test_a_schedule_counts_from_one(name):
    with pytest.raises(ScheduleError, match=f"{name} must be at least 1, not 0"):
        Schedule(**{name: 0})


def test_a_schedule_ends_with_an_evaluation():
    schedule = Schedule(epochs=3, max_steps=10, evaluate_every=4)
    assert [step for step in range(13) if schedule.is_evaluation(step, 6)] == [4, 8, 10, 12]
    assert schedule.end(Progress(step=9), 6) is None
    assert schedule.end(Progress(step=10), 6) == "10 steps done"
    assert Schedule(epochs=1).end(Progress(step=6), 6) == "1 epoch done"


def test_a_signal_asks_to_stop_and_a_second_one_stops():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interruption() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        assert stop.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with Interruption():
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_signals_are_left_alone_in_other_threads():
    done = []

    def work():
        with Interruption() as stop:
            done.append(stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [False]
