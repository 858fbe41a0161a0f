"""Where a model comes from: a built-in geometry, a folder, a config file, or the hub.

Built-in geometries have random weights: what a step costs does not depend on the values. One,
``qwen3-mini``, was trained with the lab (``labkit.pretrain``), so that quality can be measured.
"""

import copy
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig, Qwen3Config

from labkit.hub import hub_reachable
from labkit.machine import PROJECT
from labkit.recipe import EMBEDDING_MODELS, Recipe

# Hidden size, layers, query heads, MLP width, vocabulary. The last three are the published
# config.json of Qwen3-Embedding; their parameters add up to 595,776,512 / 4,021,774,336 /
# 7,567,295,488, the counts the hub shows.
SIZES = {
    "qwen3-tiny": (64, 2, 4, 128, 8192),
    "qwen3-mini": (192, 6, 6, 576, 8192),
    "qwen3-small": (384, 4, 6, 1152, 8192),
    EMBEDDING_MODELS[0]: (1024, 28, 16, 3072, 151669),
    EMBEDDING_MODELS[1]: (2560, 36, 32, 9728, 151665),
    EMBEDDING_MODELS[2]: (4096, 36, 32, 12288, 151665),
}
TRAINED_GEOMETRY = "qwen3-mini"
TRAINED_FOLDER = PROJECT / "data" / "model"
ARCHITECTURE_ONLY = "architecture only: random weights"


class ModelError(ValueError):
    """A model that cannot be had or not be trained as asked; the message says why."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: its config, and a place to load weights from, if any."""

    name: str
    config: PretrainedConfig
    weights_from: str | None  # folder or hub id

    @cached_property
    def config_json(self) -> str:
        """The config as text: what tells two models apart."""
        return self.config.to_json_string()

    def facts(self) -> dict:
        """What a report says of the model."""
        return {
            "name": self.name,
            "weights": self._weights(),
            "config_sha256": hashlib.sha256(self.config_json.encode()).hexdigest(),
            "weights_sha256": _weights_sha256(self.weights_from),
        }

    def _weights(self) -> str:
        """Where the weights come from, for people: no folder of the lab's own."""
        if self.weights_from == str(TRAINED_FOLDER):
            return "trained with the lab, on synthetic pairs"
        return self.weights_from or ARCHITECTURE_ONLY


def _weights_sha256(folder: str | None) -> str | None:
    """Hash of a local folder's weight files; a hub id is pinned by its config instead."""
    if folder is None or not Path(folder).is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def geometry(name: str) -> Qwen3Config:
    """The configuration of a built-in geometry, or of a published Qwen3-Embedding."""
    hidden, layers, heads, mlp, vocabulary = SIZES[name]
    published = name in EMBEDDING_MODELS
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8 if published else 2,
        head_dim=128 if published else hidden // heads,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
    )


def with_depth(config: PretrainedConfig, depth: int) -> PretrainedConfig:
    """The same configuration with another number of layers."""
    config = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = kinds[:depth]
    config.num_hidden_layers = depth
    return config


def with_layers(source: ModelSource, layers: int) -> ModelSource:
    """The first layers of a model, with random weights.

    Raises:
        ModelError: It has fewer.
    """
    there = getattr(source.config, "num_hidden_layers", 0)
    if not 1 <= layers <= there:
        raise ModelError(
            f"model {source.name}: layers must be from 1 to {there}, not {layers}."
        )
    name = f"{source.name} of {layers} layer{'s' if layers > 1 else ''}"
    return ModelSource(name, with_depth(source.config, layers), None)


def find_model(name: str) -> ModelSource:
    """Resolve ``Recipe.model``: a geometry, a local folder, a ``config.json`` or a hub id.

    Raises:
        ModelError: No such folder, no or a broken config, weights that are not safetensors,
            or a hub id that cannot be reached.
    """
    path = Path(name).expanduser()
    if name in SIZES and name not in EMBEDDING_MODELS:
        trained = TRAINED_FOLDER if name == TRAINED_GEOMETRY else None
        return ModelSource(name, geometry(name), trained and str(trained))
    if path.is_dir():
        config = _read_config(path / "config.json")
        if list(path.glob("*.safetensors")):
            return ModelSource(name, config, str(path))
        if other := [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]:
            raise ModelError(
                f"{other[0]}: weights in pickle files can run code when they are loaded; "
                "convert them to safetensors (save_pretrained writes them), or remove them to "
                "use the architecture only."
            )
        return ModelSource(name, config, None)
    if path.is_file():
        return ModelSource(name, _read_config(path), None)
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") != 1:
        known = ", ".join(SIZES)
        raise ModelError(
            f"model {name!r}: there is no such folder or file, and it is no hub id "
            f"(owner/name). Built in: {known}."
        )
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=not hub_reachable())
        return ModelSource(name, config, name)
    except (OSError, ValueError) as error:
        if name in EMBEDDING_MODELS:  # the geometry is known: memory and speed can be measured
            return ModelSource(name, geometry(name), None)
        cause = "the hub has no such model" if hub_reachable() else "the hub cannot be reached"
        raise ModelError(
            f"model {name!r}: {cause} and it is not in the local cache. Give a folder that "
            "holds config.json and the weights, or a built-in geometry such as qwen3-small."
        ) from error


def check_recipe_fits(
    source: ModelSource, recipe: Recipe, tokenizer_size: int, *, before: int = 0
) -> None:
    """Refuse a model that cannot read what the recipe would give it.

    Args:
        before: Tokens of the instruction, which stand before each pair.

    Raises:
        ModelError: It has no vocabulary, too few positions, or too small a vocabulary.
    """
    text_config = source.config.get_text_config()
    vocabulary = getattr(text_config, "vocab_size", None)
    if vocabulary is None:
        raise ModelError(f"model {source.name}: it has no vocabulary, so it reads no text.")
    positions = getattr(text_config, "max_position_embeddings", recipe.max_length)
    if recipe.max_length + before > positions:
        instruction = f" and the instruction's {before} tokens are" if before else " is"
        raise ModelError(
            f"model {source.name}: max_length {recipe.max_length}{instruction} more than its "
            f"{positions} positions; lower max_length."
        )
    if tokenizer_size > vocabulary:
        raise ModelError(
            f"model {source.name}: its vocabulary of {vocabulary} is smaller than that of "
            f"its tokenizer ({tokenizer_size}); they do not belong together."
        )


def _read_config(file: Path) -> PretrainedConfig:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return AutoConfig.for_model(**values)
    except FileNotFoundError:
        raise ModelError(f"{file.parent}: no config.json in this folder.") from None
    except Exception as error:  # what a broken config raises depends on what is broken
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{file}: not a transformers config ({reason}).") from error
