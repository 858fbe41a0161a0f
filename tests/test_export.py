import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CPU, TINY
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from labkit import model_source
from labkit.data import read_pairs
from labkit.export import LIBRARIES, ExportError, export_recipe
from labkit.model import layers
from labkit.model_source import find_model, geometry
from labkit.precision import choose_precision
from labkit.recipe import EMBEDDING_MODELS, Recipe
from labkit.step import MAX_GRADIENT_NORM, build_step

ROOT = Path(__file__).parent.parent
STEPS = 3  # one epoch of the twelve pairs: in the first one all shuffle alike
PIN = re.compile(r"[\w-]+==[\w.]+")

for package in ("accelerate", "sentence_transformers", "datasets"):
    pytest.importorskip(package, reason="the exported scripts need it: requirements-dev.txt")

# peft 0.21 asks transformers 5.24 for the old name of a flag on every wrap
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def few(pairs):
    return replace(
        pairs, first=pairs.first[:12], second=pairs.second[:12], labels=pairs.labels[:12]
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory, tokenizer):
    """A model as Qwen3-Embedding is published, and more awkward: a language model without a
    head, in bfloat16, whose tokenizer pads left, has no pad token and knows a chat template."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(1)
    config = geometry("qwen3-tiny")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    awkward = AutoTokenizer.from_pretrained(folder, padding_side="left")
    awkward.pad_token = None
    awkward.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    awkward.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recipe(published):
    return Recipe(
        **TINY | {"model": str(published), "batch_size": 4},
        micro_batches=2,
        checkpoint_every=2,
        padding="max",
        optimizer="adamw_fused",
        learning_rate=1e-2,
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory, recipe, few):
    folder = tmp_path_factory.mktemp("exported")
    export_recipe(recipe, few, folder, comment="Predicted peak: 4 GiB.\n\nPlanned for a card.")
    return folder


def start(script, **options):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, str(script), "--max-steps", str(STEPS)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def output(exported, tmp_path_factory):
    """What each script prints, run from another folder, all three at the same time."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    runs = {
        library: start(exported / f"train_{library}.py", cwd=elsewhere) for library in LIBRARIES
    }
    printed = {}
    for library, run in runs.items():
        printed[library], errors = run.communicate()
        assert run.returncode == 0, errors
    assert list(elsewhere.iterdir()) == []
    return printed


def load_script(folder, library="transformers"):
    """The script as a module; its ``main`` does not run."""
    spec = importlib.util.spec_from_file_location("script", folder / f"train_{library}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def export(tmp_path, few, monkeypatch):
    """Exports a tiny recipe with other fields and loads one of its scripts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the scripts set it where it is missing

    def write(library="transformers", **fields):
        folder = tmp_path / "exported"
        export_recipe(Recipe(**TINY | fields), few, folder)
        return load_script(folder, library)

    return write


def test_all_scripts_compute_the_same_losses(output):
    """Those after the first depend on order, accumulation, clipping and updates as well."""
    labkit = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output["labkit"])]
    assert len(labkit) == STEPS
    for library in LIBRARIES[1:]:
        losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", output[library])]
        assert losses == pytest.approx(labkit, abs=1e-4), library


def test_the_adapters_load_and_answer_alike(output, exported, tokenizer):
    texts = tokenizer(["一", "借呗"], ["二", "花呗分期"], padding=True, return_tensors="pt")
    answers = []
    for library in LIBRARIES:
        folder = exported / f"adapter_{library}"
        weights = load_file(folder / "adapter_model.safetensors")
        assert all(matrix.any() for name, matrix in weights.items() if "lora_B" in name)
        model = AutoPeftModelForSequenceClassification.from_pretrained(
            folder, num_labels=2, dtype=torch.float32
        )
        model.config.pad_token_id = AutoTokenizer.from_pretrained(folder).pad_token_id
        assert torch.equal(
            model.get_base_model().score.weight, weights["base_model.model.score.weight"]
        )
        with torch.no_grad():
            answers.append(model.eval()(**texts).logits)
    assert torch.allclose(answers[1], answers[0], atol=1e-3)
    assert torch.allclose(answers[2], answers[0], atol=1e-3)


def test_cross_encoder_loads_its_folder(output, exported, few):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its own imports warn of
        from sentence_transformers import CrossEncoder
    folder = exported / "adapter_sentence_transformers"
    model = CrossEncoder(str(folder), num_labels=2, model_kwargs={"dtype": torch.float32})
    model.config.pad_token_id = model.tokenizer.pad_token_id
    scores = model.predict(list(zip(few.first, few.second, strict=True)))
    labels = torch.tensor(few.labels)
    assert torch.nn.functional.cross_entropy(torch.tensor(scores), labels) < 0.7


def test_pairs_and_recipe_read_back(exported, recipe, few):
    read = read_pairs(exported / "pairs.jsonl")
    assert (read.first, read.second, read.labels) == (few.first, few.second, few.labels)
    written = json.loads((exported / "recipe.json").read_text(encoding="utf-8"))
    assert Recipe.from_dict(written) == recipe


def test_a_local_folder_is_named_by_its_path(exported, published):
    assert not (exported / "model").exists()
    for library in LIBRARIES:
        text = (exported / f"train_{library}.py").read_text(encoding="utf-8")
        assert f'\nMODEL = "{published}"\n' in text
        assert "random" not in text


def test_the_comment_stands_at_the_top(exported):
    for library in LIBRARIES:
        text = (exported / f"train_{library}.py").read_text(encoding="utf-8")
        assert text.startswith('# Predicted peak: 4 GiB.\n#\n# Planned for a card.\n"""Train')


def test_only_one_script_imports_labkit(exported):
    found = [
        library
        for library in LIBRARIES
        if re.search(
            r"^(from|import) labkit", (exported / f"train_{library}.py").read_text(), re.M
        )
    ]
    assert found == ["labkit"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}),
        (
            {"micro_batches": 4},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
        ({"optimizer": "adamw"}, {"optim": "adamw_torch"}),
        ({"optimizer": "adamw_fused"}, {"optim": "adamw_torch_fused"}),
        ({"learning_rate": 3e-5, "seed": 7}, {"learning_rate": 3e-5, "seed": 7}),
        ({"autocast": "none"}, {"bf16": False, "fp16": False}),
        ({"autocast": "bfloat16"}, {"bf16": True, "fp16": False}),
        ({"autocast": "float16"}, {"bf16": False, "fp16": True}),
        ({"weights": "float16"}, {"bf16": False, "fp16": True}),
        ({"weights": "float16", "autocast": "bfloat16"}, {"bf16": True, "fp16": False}),
        ({"compile": "none"}, {"torch_compile": False}),
        (
            {"compile": "max-autotune-no-cudagraphs"},
            {"torch_compile_mode": "max-autotune-no-cudagraphs", "tf32": False},
        ),
    ],
    ids=str,
)
def test_the_arguments_are_those_of_the_recipe(export, tiny_step, fields, expected):
    options = Namespace(max_steps=None, output=Path("out"))
    arguments = export(**fields).training_arguments(options)
    assert {name: getattr(arguments, name) for name in expected} == expected
    optimizer = tiny_step().optimizer.defaults
    assert arguments.weight_decay == optimizer["weight_decay"]
    assert (arguments.adam_beta1, arguments.adam_beta2) == optimizer["betas"]
    assert arguments.adam_epsilon == optimizer["eps"]
    assert arguments.max_grad_norm == MAX_GRADIENT_NORM
    assert arguments.lr_scheduler_type == "constant"
    assert (arguments.num_train_epochs, arguments.max_steps) == (1, -1)


def test_both_trainers_get_the_same_arguments(exported):
    texts = [(exported / f"train_{library}.py").read_text() for library in LIBRARIES[1:]]
    blocks = [re.search(r"TrainingArguments\((.*?)\n    \)", text, re.S)[1] for text in texts]
    assert blocks[0] == blocks[1]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"weights": "float16"}, True),
        ({"weights": "float16", "autocast": "float16"}, False),
        ({"weights": "bfloat16"}, False),
    ],
    ids=str,
)
def test_float16_weights_alone_are_not_computed_under_autocast(export, fields, expected):
    script = Path(export(**fields).__file__)
    for library in LIBRARIES[1:]:
        text = script.with_name(f"train_{library}.py").read_text()
        assert ("AutocastKwargs(enabled=False)" in text) == expected


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_the_model_is_that_of_the_recipe(export, weights):
    script = export(
        weights=weights, attention="eager", checkpoint_every=2, lora_rank=4, lora_alpha=6,
        lora_dropout=0.25, lora_targets=("q_proj", "up_proj"), max_length=20,
    )  # fmt: skip
    model = script.build_model(AutoTokenizer.from_pretrained(script.MODEL))
    base = model.get_base_model()
    assert base.config._attn_implementation == "eager"
    assert base.config.pad_token_id == 0
    assert script.MAX_LENGTH == 20
    assert [layer.gradient_checkpointing for layer in layers(model)] == [True, False]
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert base.model.embed_tokens.weight.dtype == getattr(torch, weights)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 6, 0.25)
    assert config.target_modules == {"q_proj", "up_proj"}
    ids = torch.ones(2, 5, dtype=torch.int64)
    assert model(input_ids=ids).logits.dtype == torch.float32


def test_random_weights_are_those_that_labkit_makes(tmp_path, few, tokenizer):
    recipe = Recipe(**TINY, seed=5)
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    written = export_recipe(recipe, few, tmp_path / "new" / "folder")
    assert torch.equal(torch.rand(1), expected)  # the caller's random numbers are untouched
    assert sorted(written) == sorted((tmp_path / "new" / "folder").iterdir())
    assert "model" in {path.name for path in written}

    precision = choose_precision(recipe, CPU)
    source = find_model(recipe.model)
    step = build_step(recipe, source, precision, CPU, pad_token_id=tokenizer.pad_token_id)
    base = step.model.unload().state_dict()
    script = load_script(tmp_path / "new" / "folder")
    saved = AutoModelForSequenceClassification.from_pretrained(script.MODEL).state_dict()
    assert saved.keys() == base.keys()
    assert all(torch.equal(saved[name], base[name]) for name in base)
    assert "weights in model/ are random" in script.__doc__


def test_a_config_file_gets_random_weights_in_its_own_format(tmp_path, few):
    config = tmp_path / "config.json"
    geometry("qwen3-tiny").to_json_file(config)
    recipe = Recipe(**TINY | {"model": str(config), "weights": "bfloat16"})
    folder = tmp_path / "exported"
    export_recipe(recipe, few, folder)
    weights = load_file(folder / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_a_published_model_is_named_by_its_id(tmp_path, few, monkeypatch):
    monkeypatch.setattr(model_source, "hub_reachable", lambda: False)
    recipe = Recipe(model=EMBEDDING_MODELS[0], attention="flash_attention_2")
    written = export_recipe(recipe, few, tmp_path / "exported")
    assert {path.suffix for path in written} == {".jsonl", ".json", ".py"}
    for library in LIBRARIES:
        text = (tmp_path / "exported" / f"train_{library}.py").read_text()
        assert f'\nMODEL = "{recipe.model}"\n' in text
        assert "random" not in text
        assert library == "labkit" or '"flash_attention_2"' in text


def test_a_small_last_part_is_mentioned(tmp_path, few):
    for batch_size, expected in ((4, False), (10, True)):
        folder = tmp_path / str(batch_size)
        recipe = Recipe(**TINY | {"batch_size": batch_size}, micro_batches=2)
        export_recipe(recipe, few, folder)  # twelve pairs in parts of two or five
        text = (folder / "train_sentence_transformers.py").read_text()
        assert ("last part of an epoch has fewer pairs" in text) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"instruction": "Instruct: same?"}, "instruction: labkit puts it before a pair"),
        ({"train_base": True}, r"^train_base: .* set train_base to false\.$"),
        ({"micro_batches": 3}, r"^batch_size \(8\) is no multiple of micro_batches \(3\)"),
    ],
)
def test_what_only_labkit_does_is_refused(tmp_path, few, fields, message):
    with pytest.raises(ExportError, match=message):
        export_recipe(Recipe(**TINY, **fields), few, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_without_padding_the_other_libraries_learn_the_same_with_it(tmp_path, few):
    recipe = Recipe(**TINY, padding="none", last_token_only=True)
    export_recipe(recipe, few, tmp_path / "out")
    texts = {
        library: (tmp_path / "out" / f"train_{library}.py").read_text(encoding="utf-8")
        for library in LIBRARIES
    }
    assert {name for name, text in texts.items() if "padding is none" in text} == {
        "transformers", "sentence_transformers",
    }  # fmt: skip


def test_the_labs_trained_weights_go_with_the_scripts(tmp_path, few):
    export_recipe(Recipe(model="qwen3-mini"), few, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model" / "model.safetensors")
    shipped = load_file(model_source.TRAINED_FOLDER / "model.safetensors")
    for names in zip(sorted(shipped), sorted(set(written) - {"score.weight"}), strict=True):
        assert names[0].removeprefix("model.") == names[1].removeprefix("model.")
        assert torch.equal(written[names[1]].float(), shipped[names[0]].float())
    text = (tmp_path / "out" / "train_labkit.py").read_text(encoding="utf-8")
    assert "are random" not in text


def test_nothing_is_overwritten(tmp_path, few):
    note = tmp_path / "note.txt"
    note.touch()
    for place in (tmp_path, note):
        with pytest.raises(ExportError, match=rf"^{place} is not empty; name a new folder or"):
            export_recipe(Recipe(**TINY), few, place)


def test_a_model_without_a_tokenizer_is_refused(tmp_path, few, published):
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((published / "model.safetensors").read_bytes())
    with pytest.raises(ExportError, match="has no tokenizer files, which the scripts need"):
        export_recipe(Recipe(**TINY | {"model": str(tmp_path)}), few, tmp_path / "exported")


def test_the_scripts_are_in_the_style_of_the_repository(tmp_path, few):
    short, long = tmp_path / "short", tmp_path / "long"
    export_recipe(Recipe(**TINY), few, short)
    every_option = Recipe(
        **TINY | {"lora_dropout": 0.05}, weights="float16", micro_batches=8, checkpoint_every=2,
        compile="max-autotune-no-cudagraphs", padding="max", attention="flash_attention_2",
        lora_targets=(
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        ),
    )  # fmt: skip
    export_recipe(every_option, few, long, comment="a long comment " * 20)
    scripts = [*short.glob("*.py"), *long.glob("*.py")]
    assert len(scripts) == 2 * len(LIBRARIES)
    for command in ("check --ignore T20", "format --check"):  # T20: print
        ruff = [sys.executable, "-m", "ruff", *command.split(), "--config", "pyproject.toml"]
        done = subprocess.run([*ruff, *scripts], check=False, capture_output=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout.decode()


def test_the_scripts_name_the_versions_they_are_tested_with(exported):
    pins = [
        pin
        for name in ("requirements.txt", "requirements-dev.txt")
        for pin in PIN.findall((ROOT / name).read_text(encoding="utf-8"))
    ]
    named = PIN.findall((exported / "train_sentence_transformers.py").read_text())
    assert {pin.partition("==")[0] for pin in named} == {
        "torch", "transformers", "peft", "accelerate", "sentence-transformers", "datasets",
    }  # fmt: skip
    assert set(PIN.findall((exported / "train_transformers.py").read_text())) < set(named)
    assert set(named) <= set(pins)
