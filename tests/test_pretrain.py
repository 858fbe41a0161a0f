import hashlib
import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from labkit import pretrain as pretrain_module
from labkit import pretrain_data
from labkit.cli_data import app
from labkit.data import DATA_FOLDER, DataError, read_pairs
from labkit.model_source import TRAINED_FOLDER, find_model, geometry
from labkit.precision import choose_precision
from labkit.pretrain import SEED, STEPS, pretrain
from labkit.pretrain_data import shipped_pairs, training_batches, training_pairs
from labkit.recipe import Recipe
from labkit.step import build_step
from labkit.synthetic import PairMaker
from labkit.tokenizer import encode
from labkit.tokens import batches, collate

CPU = torch.device("cpu")
MEGABYTE = 10**6


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    """A seed of the grammar gives few pairs, so that the first batch is there at once."""
    monkeypatch.setattr(pretrain_data, "CHUNK_PAIRS", 64)
    monkeypatch.setattr(pretrain_data, "BATCH_PAIRS", 16)


def quick(steps=3, seed=1):
    return pretrain(steps, seed, config=geometry("qwen3-tiny"))


def command(*arguments):
    return CliRunner().invoke(app, ["model", *map(str, arguments)])


def test_a_few_steps_lower_the_loss(monkeypatch):
    monkeypatch.setattr(pretrain_module, "WARMUP_STEPS", 1)
    monkeypatch.setattr(pretrain_module, "LEARNING_RATE", 1e-2)
    losses = quick(30).losses
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path):
    state = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(len(name) + seed)  # what was drawn before is of no account
        quick(seed=seed).save(tmp_path / name)
    torch.random.set_rng_state(state)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_pretraining_leaves_the_random_numbers_of_others_alone():
    before = torch.random.get_rng_state()
    quick(1)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("steps", "seed"), [(0, 1), (-1, 1), (1, -1)])
def test_impossible_arguments_are_named(steps, seed):
    with pytest.raises(DataError, match=r"must be at least [01], not (0|-1)\."):
        pretrain(steps, seed)


def test_no_shipped_pair_is_trained_on_in_either_order(monkeypatch):
    held = read_pairs(DATA_FOLDER / "pairs" / "test.jsonl")
    names = ("sentence1", "sentence2", "label")
    texts = list(zip(held.first, held.second, held.labels, strict=True))
    shipped = [dict(zip(names, row, strict=True)) for row in texts]
    turned = [
        row | {"sentence1": row["sentence2"], "sentence2": row["sentence1"]} for row in shipped
    ]
    new = {"sentence1": "a", "sentence2": "b", "label": "0"}
    monkeypatch.setattr(PairMaker, "rows", lambda self, number: [*shipped, new, *turned])
    assert next(training_pairs(SEED)) == [new]


def test_all_three_shipped_files_are_left_out():
    shipped = shipped_pairs()
    for name in ("train", "dev", "test"):
        pairs = read_pairs(DATA_FOLDER / "pairs" / f"{name}.jsonl")
        together = {frozenset(texts) for texts in zip(pairs.first, pairs.second, strict=True)}
        assert together <= shipped


def test_the_seed_of_the_shipped_pairs_is_never_used(monkeypatch):
    seeds = []
    monkeypatch.setattr(PairMaker, "__init__", lambda self, seed: seeds.append(seed))
    monkeypatch.setattr(PairMaker, "rows", lambda self, number: [])
    for seed in range(3):
        list(islice(training_pairs(seed), 5))
    assert 0 not in seeds
    assert len(set(seeds)) == 15  # two seeds of the training share none


def test_a_cipher_replaces_tokens_alike_in_both_texts(tokenizer, monkeypatch):
    monkeypatch.setattr(pretrain_data, "CIPHER_SHARE", 0.0)
    plain = next(training_batches(tokenizer, 1))
    monkeypatch.setattr(pretrain_data, "CIPHER_SHARE", 1.0)
    ids = encode(tokenizer, ["青禾付提额"], ["青禾付提额"])[0]
    row = torch.tensor(ids)
    changed = pretrain_data._encipher(row, tokenizer, torch.Generator().manual_seed(1))
    half = len(row) // 2
    assert torch.equal(changed[:half], changed[half:])
    special = row == tokenizer.eos_token_id
    assert torch.equal(changed == tokenizer.eos_token_id, special)
    assert (changed[~special] != row[~special]).any()
    assert (plain.input_ids == tokenizer.eos_token_id).sum(1).eq(2).all()


def test_batches_hold_pairs_of_like_lengths(tokenizer):
    batch = next(training_batches(tokenizer, 1))
    assert batch.input_ids.shape[0] == pretrain_data.BATCH_PAIRS
    assert set(batch.labels.tolist()) == {0, 1}


def test_the_shipped_model_is_small_and_described_by_its_card():
    files = list(TRAINED_FOLDER.iterdir())
    assert {file.name for file in files} == {"README.md", "config.json", "model.safetensors"}
    assert sum(file.stat().st_size for file in files) <= 10 * MEGABYTE
    card = (TRAINED_FOLDER / "README.md").read_text(encoding="utf-8")
    weights = (TRAINED_FOLDER / "model.safetensors").read_bytes()
    assert f"sha256 `{hashlib.sha256(weights).hexdigest()}`" in card
    assert f"labkit data model --steps {STEPS} --seed {SEED}`" in card
    grammar = (DATA_FOLDER / "pairs" / "grammar.toml").read_bytes()
    assert hashlib.sha256(grammar).hexdigest() in card, "the grammar changed: train again"


def test_the_shipped_model_is_a_backbone_of_the_built_in_geometry():
    weights = load_file(TRAINED_FOLDER / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not [name for name in weights if "score" in name or "head" in name]
    config = json.loads((TRAINED_FOLDER / "config.json").read_text())
    for name, value in geometry("qwen3-mini").to_diff_dict().items():
        assert config[name] == value or name in ("transformers_version", "pad_token_id"), name


def test_the_shipped_model_loads_without_a_word(capsys, caplog, tokenizer):
    recipe = Recipe(model="qwen3-mini")
    step = build_step(
        recipe,
        find_model("qwen3-mini"),
        choose_precision(recipe, CPU),
        CPU,
        pad_token_id=tokenizer.pad_token_id,
    )
    captured = capsys.readouterr()
    assert (captured.out, captured.err, caplog.text) == ("", "", "")
    weights = load_file(TRAINED_FOLDER / "model.safetensors")
    embedding = step.model.get_base_model().model.embed_tokens.weight
    assert torch.equal(embedding, weights["embed_tokens.weight"].float())


def accuracy_after(source, tokenizer, steps):
    """Balanced accuracy on held-out synthetic pairs after a few steps of LoRA."""
    recipe = Recipe(model="qwen3-mini", batch_size=16, learning_rate=3e-3)
    precision = choose_precision(recipe, CPU)
    step = build_step(recipe, source, precision, CPU, pad_token_id=tokenizer.pad_token_id)
    for batch in islice(batches(recipe, read_pairs(), tokenizer), steps):
        step(batch)
    held = read_pairs(DATA_FOLDER / "pairs" / "test.jsonl")
    rows = encode(tokenizer, held.first[:200], held.second[:200], recipe.max_length)
    step.model.eval()
    with torch.no_grad():
        batch = collate(rows, held.labels[:200], pad_id=tokenizer.pad_token_id, length=None)
        right = step.logits(batch).argmax(1) == batch.labels
    return sum(right[batch.labels == label].float().mean().item() for label in (0, 1)) / 2


def test_the_shipped_weights_tell_pairs_apart_and_random_ones_do_not(tokenizer):
    trained = find_model("qwen3-mini")
    random = replace(trained, weights_from=None)
    assert accuracy_after(trained, tokenizer, 12) > accuracy_after(random, tokenizer, 12) + 0.2


def test_the_command_trains_and_prints_the_hash(tmp_path):
    result = command("--steps", 2, "--out", tmp_path / "new" / "model", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    weights = Path(document["file"]).read_bytes()
    assert document["sha256"] == hashlib.sha256(weights).hexdigest()
    assert (document["steps"], document["seed"]) == (2, SEED)
    card = (tmp_path / "new" / "model" / "README.md").read_text(encoding="utf-8")
    assert re.search(r"labkit data model --steps 2 --seed 1`, with torch \d", card)
    assert document["sha256"] in card


def test_the_command_says_in_one_sentence_what_it_cannot_do(tmp_path):
    (tmp_path / "precious").write_text("")
    for arguments, said in (
        (("--out", tmp_path), f"{tmp_path} is not empty; --force writes into it."),
        (("--steps", 0, "--out", tmp_path / "new"), "steps must be at least 1, not 0."),
        (("--out", tmp_path / "precious" / "x"), "cannot be written to"),
    ):
        result = command(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert said in result.stderr
        assert result.stderr.startswith("labkit: ")
        assert result.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_help_ends_with_examples():
    assert "$ labkit data model --out" in command("--help").stdout.partition("Examples")[2]
