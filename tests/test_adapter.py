import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit import adapter_files
from labkit.adapter import WEIGHTS, AdapterError, load_adapter, save_adapter
from labkit.machine import PROJECT
from labkit.recipe import Recipe

LORA_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
HEAD = "base_model.model.score.weight"

LOADER = """
import json, sys
from pathlib import Path
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder, texts = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
batch = tokenizer(*texts, padding=True, truncation="longest_first", max_length=32,
                  return_tensors="pt")
base = AutoModelForSequenceClassification.from_pretrained(folder + "/base_model", num_labels=2)
answers = []
for model in (PeftModel.from_pretrained(base, folder),
              AutoPeftModelForSequenceClassification.from_pretrained(folder)):
    with torch.no_grad():
        logits = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    answers.append([[value.hex() for value in row] for row in logits.tolist()])
assert "labkit" not in sys.modules
print(json.dumps([answers, {**base.config.id2label}]))
"""


def trained(step, batches, steps=2):
    for batch in batches(steps):
        step(batch)
    return step


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of an adapter that was trained for two steps, and its step."""
    from conftest import CPU, TINY

    from labkit.data import read_pairs
    from labkit.model_source import find_model
    from labkit.precision import choose_precision
    from labkit.step import build_step
    from labkit.tokens import batches, load_tokenizer

    recipe = Recipe(**TINY)
    tokenizer = load_tokenizer(recipe.model)
    step = build_step(
        recipe, find_model(recipe.model), choose_precision(recipe, CPU), CPU,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    stream = batches(recipe, read_pairs(), tokenizer)
    for _ in range(2):
        step(next(stream))
    return save_adapter(step, tokenizer, tmp_path_factory.mktemp("run") / "adapter"), step


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the folder, to be damaged."""
    return shutil.copytree(saved[0], tmp_path / "adapter")


def logits_of(step, batch):
    step.model.eval()
    with torch.no_grad():
        return step.logits(batch)


def test_a_process_without_labkit_computes_the_same_logits(saved, pairs, tiny_batches):
    folder, step = saved
    texts = [pairs.first[:8], pairs.second[:8]]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(folder), json.dumps(texts)],
        capture_output=True, text=True, check=True, cwd=folder.parent,
    )  # fmt: skip
    answers, labels = json.loads(done.stdout)
    from labkit.tokenizer import encode, load_tokenizer
    from labkit.tokens import collate

    tokenizer = load_tokenizer("qwen3-tiny")
    rows = encode(tokenizer, *texts, 32)
    batch = collate(rows, [0] * 8, pad_id=tokenizer.pad_token_id, length=None)
    expected = [[value.hex() for value in row] for row in logits_of(step, batch).tolist()]
    assert answers == [expected, expected]
    assert labels == {"0": "different", "1": "same"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_the_example_of_the_documentation_loads_it(saved):
    folder, step = saved
    page = (PROJECT / "docs" / "training.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1]
    names = {}
    exec(code.replace("runs/train/small/adapter", str(folder)), names)
    ids = {name: names["batch"][name] for name in ("input_ids", "attention_mask")}
    step.model.eval()
    assert torch.equal(names["logits"], step.model(**ids).logits)


def test_the_folder_says_what_it_is(saved):
    folder, step = saved
    assert json.loads((folder / "labels.json").read_text())["id2label"]["1"] == "same"
    recipe = Recipe.from_dict(json.loads((folder / "recipe.json").read_text(encoding="utf-8")))
    assert recipe == step.recipe
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "base_model")
    assert config["task_type"] == "SEQ_CLS"
    page = (folder / "README.md").read_text(encoding="utf-8")
    compile(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], "README.md", "exec")
    assert "max_length=32" in page
    assert not list(folder.parent.glob(".adapter*"))


def test_an_adapter_goes_into_a_step_of_the_same_recipe(saved, tiny_step, tiny_batches):
    folder, step = saved
    (batch,) = tiny_batches(1)
    fresh = tiny_step()
    before = logits_of(fresh, batch)
    load_adapter(fresh, folder)
    assert torch.equal(logits_of(fresh, batch), logits_of(step, batch))
    assert not torch.equal(before, logits_of(fresh, batch))
    head = fresh.model.base_model.model.score.modules_to_save.default.weight
    assert torch.equal(head, load_file(folder / WEIGHTS)[HEAD])


def test_saving_again_replaces_the_folder(tiny_step, tiny_batches, tokenizer, tmp_path):
    step = trained(tiny_step(), tiny_batches)
    folder = save_adapter(step, tokenizer, tmp_path / "adapter")
    (folder / "old").touch()
    assert save_adapter(step, tokenizer, folder) == folder
    assert not (folder / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_compiled_step_saves_names_that_load(tiny_step, tiny_batches, tokenizer, tmp_path):
    step = trained(tiny_step(), tiny_batches)
    step.forward = torch.compile(step.model, backend="eager")
    folder = save_adapter(step, tokenizer, tmp_path / "adapter")
    assert all("_orig_mod" not in name for name in load_file(folder / WEIGHTS))


@pytest.mark.parametrize("padding", ["longest", "none"])
def test_the_base_is_that_of_the_model(tiny_step, tiny_batches, tokenizer, tmp_path, padding):
    step = tiny_step(padding=padding)
    for batch in tiny_batches(1, padding=padding):
        step(batch)
    folder = save_adapter(step, tokenizer, tmp_path / "adapter")
    base = load_file(folder / "base_model" / "model.safetensors")
    own = dict(step.model.get_base_model().named_parameters())
    assert torch.equal(base["model.embed_tokens.weight"], own["model.embed_tokens.weight"])
    name = "model.layers.1.self_attn.v_proj"
    assert torch.equal(base[f"{name}.weight"], own[f"{name}.base_layer.weight"])
    assert len(base) == sum("lora_" not in n and "modules_to_save" not in n for n in own)


def test_the_base_that_comes_with_the_lab_is_written_another_one_is_named(
    saved, tokenizer, tiny_step, tiny_batches, tmp_path, monkeypatch
):
    base = saved[0] / "base_model"
    step = trained(tiny_step(model=str(base)), tiny_batches)
    named = save_adapter(step, tokenizer, tmp_path / "named")
    assert not (named / "base_model").exists()
    assert f"from_pretrained({str(base)!r}" in (named / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(adapter_files, "TRAINED_FOLDER", base)
    written = save_adapter(step, tokenizer, tmp_path / "written")
    ours, theirs = (load_file(f / "model.safetensors") for f in (written / "base_model", base))
    del ours["score.weight"], theirs["score.weight"]  # a head of its own
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_adapter_that_never_learned_is_not_saved(tiny_step, tokenizer, tmp_path):
    with pytest.raises(AdapterError, match=r"lora_B.* is zero; it was not trained"):
        save_adapter(tiny_step(), tokenizer, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_one_dead_layer_is_not_saved(tiny_step, tiny_batches, tokenizer, tmp_path):
    step = trained(tiny_step(), tiny_batches)
    dict(step.model.named_parameters())[LORA_B.replace("B.", "B.default.")].data.zero_()
    with pytest.raises(AdapterError, match=re.escape(f"{LORA_B} is zero")):
        save_adapter(step, tokenizer, tmp_path / "adapter")


def test_a_file_that_lacks_what_the_model_has_is_not_kept(
    tiny_step, tiny_batches, tokenizer, tmp_path, monkeypatch
):
    step = trained(tiny_step(), tiny_batches)
    real = step.model.save_pretrained

    def lossy(folder, **options):
        real(folder, **options)
        tensors = load_file(folder / WEIGHTS)
        del tensors[LORA_B]
        save_file(tensors, folder / WEIGHTS)

    monkeypatch.setattr(step.model, "save_pretrained", lossy)
    with pytest.raises(AdapterError, match="does not hold the tensors of the model"):
        save_adapter(step, tokenizer, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[LORA_B].zero_(), "is zero"),
        (lambda t: t.pop(LORA_B), "lacks .*q_proj.lora_B"),
        (lambda t: t.pop(HEAD), "lacks .*score"),
        (lambda t: t[HEAD].fill_(float("nan")), "not finite"),
        (lambda t: t.update({LORA_B: torch.empty(0)}), "is empty"),
        (lambda t: t.update(more=torch.ones(1)), "another model.*more"),
        (lambda t: t.update({LORA_B: torch.ones(96, 8)}), "another base model or rank"),
        (dict.clear, r"lacks .* \(and 12 more\)"),
    ],
)
def test_a_changed_adapter_is_not_loaded(folder, tiny_step, change, message):
    rewrite(folder, change)
    with pytest.raises(AdapterError, match=message):
        load_adapter(tiny_step(), folder)


def test_an_adapter_of_another_rank_is_not_loaded(saved, tiny_step):
    with pytest.raises(AdapterError, match="another base model or rank"):
        load_adapter(tiny_step(lora_rank=4), saved[0])


@pytest.mark.parametrize("size", [0, 40, 3000])
def test_a_cut_off_file_is_not_loaded(folder, tiny_step, size):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(AdapterError, match="is damaged"):
        load_adapter(tiny_step(), folder)


def test_a_folder_without_an_adapter_says_so(tiny_step, tmp_path):
    with pytest.raises(AdapterError, match="There is no adapter"):
        load_adapter(tiny_step(), tmp_path)
