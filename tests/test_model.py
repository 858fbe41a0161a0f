import json

import pytest
import torch
from conftest import CPU
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear
from transformers import (
    AutoModelForSequenceClassification,
    CLIPConfig,
    GPT2Config,
    Qwen3Model,
)

from labkit import model_source
from labkit.measure import measure
from labkit.model import parameter_kind
from labkit.model_source import ARCHITECTURE_ONLY, ModelError, find_model, geometry
from labkit.precision import choose_precision
from labkit.recipe import Recipe
from labkit.step import build_step
from labkit.tokens import collate
from labkit.trainable import trainable_parameters


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(model_source, "hub_reachable", lambda: False)


def save_tiny(folder, dtype=torch.float32):
    torch.manual_seed(0)
    config = geometry("qwen3-tiny")
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def build(name, **fields):
    recipe = Recipe(model=str(name), batch_size=2, lora_dropout=0.0, **fields)
    precision = choose_precision(recipe, CPU, emulate=True)
    return build_step(recipe, find_model(recipe.model), precision, CPU, pad_token_id=0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # the counts that the hub shows for the published models
        ("Qwen/Qwen3-Embedding-0.6B", 595_776_512),
        ("Qwen/Qwen3-Embedding-4B", 4_021_774_336),
        ("Qwen/Qwen3-Embedding-8B", 7_567_295_488),
    ],
)
def test_published_geometries_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(geometry(name))
    assert sum(p.numel() for p in model.model.parameters()) == parameters


def test_built_in_geometries_say_that_their_weights_are_random():
    assert find_model("qwen3-tiny").facts()["weights"] == ARCHITECTURE_ONLY


def test_a_local_folder_is_really_loaded(tmp_path):
    folder = save_tiny(tmp_path)
    step = build(folder)
    saved = AutoModelForSequenceClassification.from_pretrained(folder)
    loaded = step.model.get_base_model().model.embed_tokens.weight
    assert torch.equal(loaded, saved.model.embed_tokens.weight)
    facts = find_model(str(folder)).facts()
    assert facts["weights"] == str(folder)
    assert len(facts["weights_sha256"]) == 64


def test_a_backbone_loads_without_a_word(tmp_path, capsys, caplog):
    Qwen3Model(geometry("qwen3-tiny")).save_pretrained(tmp_path)
    capsys.readouterr()  # of saving
    build(tmp_path)
    captured = capsys.readouterr()
    assert (captured.out, captured.err, caplog.text) == ("", "", "")


def test_weights_that_are_not_in_the_file_are_named(tmp_path, caplog):
    file = save_tiny(tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    build(tmp_path)
    assert "not in its files begin at random: 1, the first model.layers.1.mlp" in caplog.text


def test_the_dtype_of_the_recipe_wins_over_that_of_the_checkpoint(tmp_path):
    folder = save_tiny(tmp_path, torch.bfloat16)
    dtypes = {p.dtype for p in build(folder).model.parameters()}
    assert dtypes == {torch.float32}


def test_a_config_file_gives_the_architecture_only(tmp_path):
    save_tiny(tmp_path)
    source = find_model(str(tmp_path / "config.json"))
    assert source.weights_from is None
    assert source.config.hidden_size == 64


def test_a_folder_without_weights_gives_the_architecture_only(tmp_path):
    (save_tiny(tmp_path) / "model.safetensors").unlink()
    assert find_model(str(tmp_path)).facts()["weights"] == ARCHITECTURE_ONLY


def test_pickled_weights_are_refused(tmp_path):
    (save_tiny(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle files can run code"):
        find_model(str(tmp_path))


def test_weights_of_another_shape_are_refused(tmp_path):
    config = json.loads((save_tiny(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(ModelError, match="cannot be built"):
        build(tmp_path)


def test_weights_cut_in_half_are_refused(tmp_path):
    weights = save_tiny(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelError, match="cannot be built"):
        build(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "nowhere", "none.json"])
def test_a_folder_that_is_not_there_is_named(name):
    with pytest.raises(ModelError, match="there is no such folder or file"):
        find_model(name)


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json in this folder"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no such type"}', "{}"])
def test_a_broken_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json: not a transformers config"):
        find_model(str(tmp_path))


def test_a_hub_id_without_a_network_gives_one_sentence(offline):
    with pytest.raises(ModelError, match=r"^[^\n]*the hub cannot be reached[^\n]*$"):
        find_model("someone/some-model")


def test_published_models_without_a_network_are_architecture_only(offline):
    assert find_model("Qwen/Qwen3-Embedding-0.6B").weights_from is None


def test_wrong_lora_targets_are_refused_with_the_names_that_exist():
    with pytest.raises(ModelError, match=r"no linear layer named query; it has .*q_proj"):
        build("qwen3-tiny", lora_targets=("q_proj", "query"))


def test_an_attention_that_is_not_installed_is_one_sentence():
    with pytest.raises(ModelError, match=r"cannot be built: .*[Ff]lash"):
        build("qwen3-tiny", attention="flash_attention_2")


def test_a_pad_token_outside_the_vocabulary_is_refused():
    recipe = Recipe(model="qwen3-tiny")
    source, precision = find_model("qwen3-tiny"), choose_precision(recipe, CPU)
    with pytest.raises(ModelError, match="no row for the tokenizer's pad token 8192"):
        build_step(recipe, source, precision, CPU, pad_token_id=8192)


def test_recomputing_every_fifth_of_two_layers_is_refused():
    with pytest.raises(ModelError, match="larger than the 2 layers"):
        build("qwen3-tiny", checkpoint_every=5)


def test_both_padding_sides_pool_the_same_token():
    rows = [[5, 6, 7, 8, 9], [11, 12]]
    step = build("qwen3-tiny")
    step.model.eval()
    logits = []
    for side in ("right", "left"):
        batch = collate(rows, [0, 1], pad_id=0, length=8, side=side)
        with torch.no_grad():
            output = step.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        logits.append(output.logits)
    assert torch.allclose(*logits, atol=1e-6)
    alone = step.model(input_ids=torch.tensor([rows[1]])).logits  # no padding at all
    assert torch.allclose(logits[0][1], alone[0], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_trained_parameters_are_float32_over_a_16_bit_base(dtype):
    step = build("qwen3-tiny", weights=dtype)
    dtypes = {"base": set(), "lora": set(), "head": set(), "unused": set()}
    for name, parameter in step.model.named_parameters():
        dtypes[parameter_kind(name)].add(parameter.dtype)
    assert dtypes["base"] == {getattr(torch, dtype)}
    assert dtypes["lora"] == dtypes["head"] == {torch.float32}
    batch = collate([[5, 6], [7]], [0, 1], pad_id=0, length=None)
    assert step(batch) > 0  # the float32 head takes what a 16-bit base computes


def test_lora_adds_its_scaled_product_to_the_frozen_layer():
    step = build("qwen3-tiny", lora_rank=4, lora_alpha=12)
    layer = step.model.get_base_model().model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(b)
    x = torch.randn(3, 64)
    expected = linear(x, layer.base_layer.weight + 12 / 4 * b @ a)
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_peft_freezes_the_base_by_itself():
    assert trainable_parameters(build("qwen3-tiny").model)["base"] == 0


def test_a_head_with_three_labels_is_refused(tmp_path):
    config = geometry("qwen3-tiny")
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its head has 3 labels, and the lab trains 2"):
        build(tmp_path)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_gpt2_layers_can_carry_lora(tmp_path):
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    config.save_pretrained(tmp_path)
    step = build(tmp_path, lora_targets=("c_attn",))
    assert step(collate([[5, 6], [7]], [0, 1], pad_id=0, length=None)) > 0


def test_a_config_with_a_value_of_the_wrong_kind_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "x"}')
    with pytest.raises(ModelError, match=r"config\.json: not a transformers config"):
        find_model(str(tmp_path))


def test_a_model_that_cannot_classify_text_is_refused(tmp_path, pairs):
    CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be built"):
        measure(Recipe(model=str(tmp_path)), pairs, device="cpu")


def test_more_tokens_than_positions_are_refused(tmp_path, pairs):
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    with pytest.raises(ModelError, match="max_length 64 is more than its 16 positions"):
        measure(Recipe(model=str(tmp_path)), pairs, device="cpu")
