"""The machinery of bench/peers.py, on the smallest model; its figures are no results."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY

from labkit.memory import measure_memory
from labkit.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import peers
import peers_measure
import peers_trainer
from peers_articles import Article
from peers_table import HEADINGS, markdown, ratio, rows, total_rate

for package in ("accelerate", "sentence_transformers", "datasets"):
    pytest.importorskip(package, reason="the peers are measured with it: requirements-dev.txt")

# what the two libraries and peft say to each other
pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = ("labkit_baseline", "labkit_tuned_eager", "trainer_default", "trainer_grouped",
         "crossencoder_default", "crossencoder_grouped", "article_four_steps",
         "article_padded_160", "article_checkpointing")  # fmt: skip


@pytest.fixture(scope="module")
def task(pairs, tmp_path_factory):
    few = {name: getattr(pairs, name)[:24] for name in ("first", "second", "labels")}
    return peers.Task(
        Recipe(**TINY), replace(pairs, **few), tmp_path_factory.mktemp("peers"), emulate=True
    )


@pytest.fixture(scope="module")
def record(task):
    tuned = replace(peers.TUNED, compile="none")
    found = [c for c in peers.contenders(task, tuned) if c.name in (*QUICK, peers.REFERENCE)]
    return peers.measure_all(task, found, rounds=1, steps=1, progress=lambda text: None)


def test_each_contender_ran(record):
    found = {entry["name"]: entry for entry in record["contenders"]}
    assert set(found) == {*QUICK, peers.REFERENCE}
    for name, entry in found.items():
        assert (entry["status"], entry["reason"]) == ("ok", ""), name
        assert entry["losses_sane"], name
        assert len(entry["slices"]) == 1
        part = entry["slices"][0]
        assert 0 < part["real_tokens"] <= part["computed_tokens"]
        assert part["seconds"] > 0
        assert entry["peak_bytes"] > 0
    assert json.loads(json.dumps(record)) == record


def test_padding_is_not_counted(record):
    found = {entry["name"]: entry["slices"][0] for entry in record["contenders"]}
    assert found["article_padded_160"]["computed_tokens"] == 8 * 160
    assert found["article_four_steps"]["computed_tokens"] == 8 * 64
    assert found["labkit_baseline"]["computed_tokens"] == 8 * TINY["max_length"]
    tuned = found[peers.REFERENCE]
    assert tuned["real_tokens"] == tuned["computed_tokens"]


def test_one_step_has_the_same_loss_for_all(task):
    losses = peers.check(task, lambda text: None)
    assert not [values for values in losses.values() if isinstance(values, str)]
    assert peers.disagreeing(losses) == []
    first, second = losses["labkit"]
    assert abs(first - second) > 10 * peers.TOLERANCE  # the update can be seen in the losses


def test_another_loss_is_noticed():
    losses = {"labkit": [0.7, 0.6], "other": [0.7, 0.61], "missing": "it is not installed."}
    assert peers.disagreeing(losses) == ["other"]


def test_the_peak_is_that_of_labkit(task, tiny_step, tiny_batches):
    """The recorder for any model and optimizer sees what the one for labkit's step sees."""
    step, (batch,) = tiny_step(), tiny_batches(1)
    step(batch)
    expected = measure_memory(step, batch).peak_allocated_bytes
    step.optimizer.zero_grad(set_to_none=True)
    recorder = peers_measure.PeakRecorder(step.model, step.optimizer, batch.tensors)
    step(batch)
    assert recorder.stop() == expected


def test_the_trainer_holds_what_labkit_holds(record):
    """The same model, padded to the longest: peaks differ by what the loops keep."""
    found = {entry["name"]: entry["peak_bytes"] for entry in record["contenders"]}
    assert found["trainer_default"] == pytest.approx(found["crossencoder_default"], rel=0.05)
    assert found["trainer_default"] < found["labkit_baseline"]


def test_operations_of_a_token_are_those_of_the_formula(task):
    """Counted, and by hand from the sizes of the layers."""
    model = task.model()
    config, rank = model.config, task.recipe.lora_rank
    lengths = [len(row) for row in task.rows()[: task.recipe.batch_size]]
    tokens, heads = sum(lengths), config.num_attention_heads * config.head_dim
    narrow = config.num_key_value_heads * config.head_dim
    hidden, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    adapted = [(hidden, heads), (hidden, narrow), (hidden, narrow)]
    plain = [(heads, hidden), (hidden, mlp), (hidden, mlp), (mlp, hidden)]
    base = sum(2 * m * n for m, n in adapted + plain)
    lora = sum(2 * rank * (m + n) for m, n in adapted)
    expected = layers * (2 * base + 3 * lora) * tokens
    # nothing that is trained lies before the first layer: its inputs need no gradient
    expected -= sum(2 * m * n + 2 * rank * m for m, n in adapted) * tokens
    expected += layers * 12 * heads * sum(length**2 for length in lengths)
    counted = peers_measure.useful_flops_per_token(task) * tokens
    assert counted == pytest.approx(expected, rel=0.01)  # the head, and the angles of positions


def test_ratios_are_of_the_same_round():
    def entry(*seconds):
        parts = [{"real_tokens": 100, "seconds": value} for value in seconds]
        return {"slices": parts}

    assert ratio(entry(1, 4, 2), entry(1, 2, 4)) == (1, 0.75, 1.5)
    assert ratio(entry(1), entry(2)) == (2, 2, 2)
    assert ratio(entry(), entry(2)) is None
    assert total_rate(entry(1, 3)) == 50


def test_the_table_has_a_row_for_each(record):
    table = rows(record)
    assert [len(row) for row in table] == [len(HEADINGS)] * len(record["contenders"])
    text = markdown(record)
    assert "| labkit_tuned" in text
    assert "requires_grad_(False)" in text  # a repair
    assert "same for all" in text


def test_a_contender_that_fails_does_not_end_the_others(task, monkeypatch):
    def missing(self, arguments):
        raise peers_measure.Skipped("datasets is not installed.")

    def broken(self):
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setattr(peers_trainer.HeldCrossEncoder, "_make", missing)
    monkeypatch.setattr(Article, "build", broken)
    wanted = (peers.REFERENCE, "crossencoder_default", "article_four_steps")
    tuned = replace(peers.TUNED, compile="none")
    found = [c for c in peers.contenders(task, tuned) if c.name in wanted]
    record = peers.measure_all(task, found, rounds=1, steps=1, progress=lambda text: None)
    assert [(entry["status"], entry["reason"]) for entry in record["contenders"]] == [
        ("ok", ""),
        ("skipped", "datasets is not installed."),
        ("error", "RuntimeError: no such thing"),
    ]
    assert "skipped: datasets is not installed." in markdown(record)


def test_an_error_in_a_trainer_comes_out_of_its_thread():
    def work():
        turns.wait()
        raise ValueError("a bad batch")

    turns = peers_trainer.Turns(work)
    turns.turn()
    with pytest.raises(ValueError, match="a bad batch"):
        turns.turn()
    assert not turns.thread.is_alive() or turns.thread.join(5) is None


def test_a_trainer_that_is_stopped_ends():
    turns = peers_trainer.Turns(lambda: [turns.wait() for _ in range(3)])
    turns.turn()
    turns.close()
    assert not turns.thread.is_alive()
    assert turns.error is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nobody"], "there is no nobody; there are"),
        (["--data", "missing.tsv"], "there is no such file"),
        (["--recipe", "missing.json"], "missing.json"),
    ],
)
def test_a_wrong_option_is_one_sentence(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(peers, "quiet", lambda: None)  # other tests read what it silences
    assert peers.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_record_is_shown_again(record, tmp_path, capsys):
    file = tmp_path / "peers.json"
    file.write_text(json.dumps(record))
    assert peers.main(["--markdown", str(file)]) == 0
    assert capsys.readouterr().out.startswith("| Contender |")


def test_only_names_are_chosen(task):
    found = peers.contenders(task, peers.TUNED)
    chosen = peers.chosen_contenders(found, "trainer_default")
    assert [contender.name for contender in chosen] == [peers.REFERENCE, "trainer_default"]
    assert len({contender.name for contender in found}) == len(found)
    assert torch.get_default_dtype() == torch.float32
