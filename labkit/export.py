"""A planned recipe to go on with: its pairs, and a script that trains on them for each library.

The scripts are for labkit, transformers and sentence-transformers. Each stands alone.
"""

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from labkit.data import Pairs
from labkit.model import build_model, parameter_kind
from labkit.model_source import TRAINED_FOLDER, ModelSource, find_model
from labkit.precision import Precision
from labkit.recipe import EMBEDDING_MODELS, Recipe
from labkit.step import MAX_GRADIENT_NORM
from labkit.tokenizer import TOKENIZER_FILES, load_tokenizer

LIBRARIES = ("labkit", "transformers", "sentence_transformers")
WEIGHT_DECAY = 0.01  # torch's default for AdamW, which labkit's step takes; Trainer's is none


class ExportError(ValueError):
    """A recipe that cannot be exported; the message says why and what to do."""


def export_recipe(
    recipe: Recipe, pairs: Pairs, folder: Path, *, comment: str = ""
) -> list[Path]:
    """Write a recipe, its pairs, and a script for each library that trains on them.

    The scripts run as they are. A model without weights therefore gets random ones, in
    ``<folder>/model``, and the scripts say so.

    Args:
        folder: Made if missing.
        comment: Stands at the top of each script.

    Returns:
        The files, and the model's folder if there is one.

    Raises:
        ExportError: The folder is not empty, the recipe asks for what only labkit does, or the
            model's folder has no tokenizer.
        ModelError, TokenizerError: There is no such model, or it cannot be trained as asked.
    """
    _check(recipe, folder)
    source = find_model(recipe.model)
    address = _address(recipe, source)
    model = _build(recipe, source, "cpu" if address is None else "meta")
    contents = _contents(recipe, pairs, address, _head(model))
    contents["random"] = address is None and source.weights_from is None
    files = {
        "pairs.jsonl": _lines(pairs),
        "recipe.json": json.dumps(recipe.to_dict(), ensure_ascii=False, indent=2) + "\n",
    }
    for library in LIBRARIES:
        script = _render(f"export_{library}.py.j2", contents | {"library": library})
        files[f"train_{library}.py"] = _as_comment(comment) + script

    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    written = [folder / name for name in files]
    if address is None:
        written.append(folder / "model")
        load_tokenizer(recipe.model).save_pretrained(written[-1])
        model.unload().to(getattr(torch, recipe.weights)).save_pretrained(written[-1])
    return written


def _check(recipe: Recipe, folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder} is not empty; name a new folder or an empty one.")
    if recipe.train_base:
        raise ExportError(
            "train_base: gradients that are kept and never applied are labkit's alone; without "
            "them the same is trained: set train_base to false."
        )
    if recipe.instruction:
        raise ExportError(
            "instruction: labkit puts it before a pair as tokens of its own, and the other "
            "libraries do not; write it into the texts and leave instruction out."
        )
    if recipe.batch_size % recipe.micro_batches:
        raise ExportError(
            f"batch_size ({recipe.batch_size}) is no multiple of micro_batches "
            f"({recipe.micro_batches}), and only labkit makes parts of different sizes; "
            "change one of them."
        )


def _address(recipe: Recipe, source: ModelSource) -> str | None:
    """Where the scripts find the model: a folder, a hub id, or None if it has no weights."""
    if source.weights_from == str(TRAINED_FOLDER):
        return None  # the lab's own weights go with the scripts
    if source.weights_from is None:  # those of a published model may only be out of reach here
        return recipe.model if recipe.model in EMBEDDING_MODELS else None
    path = Path(source.weights_from)
    if not path.is_dir():
        return source.weights_from
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ExportError(f"{path} has no tokenizer files, which the scripts need; add them.")
    return str(path.resolve())


def _build(recipe: Recipe, source: ModelSource, device: str) -> nn.Module:
    """The model with the weights that labkit gives it, or, on ``meta``, with none."""
    pad = 0 if device == "meta" else load_tokenizer(recipe.model).pad_token_id
    with torch.random.fork_rng(devices=[]), torch.device(device):  # building seeds it
        return build_model(
            # as any library would build it; another attention may not be installed here
            replace(recipe, attention="eager", padding="longest", last_token_only=False),
            source if device == "cpu" else replace(source, weights_from=None),
            Precision(getattr(torch, recipe.weights), autocast=None),
            pad_token_id=pad,
        )


def _head(model: nn.Module) -> str:
    """The name that the model's class gives its head."""
    path = next(name for name, _ in model.named_parameters() if parameter_kind(name) == "head")
    return path.partition(".modules_to_save.")[0].removeprefix("base_model.model.")


def _contents(recipe: Recipe, pairs: Pairs, address: str | None, head: str) -> dict:
    """What the templates are filled with."""
    part = recipe.batch_size // recipe.micro_batches
    bf16 = recipe.autocast == "bfloat16"
    return {
        "recipe": recipe,
        "part": part,
        "uneven": recipe.micro_batches > 1 and len(pairs) % part > 0,
        "model": 'str(FOLDER / "model")' if address is None else _literal(address),
        "head": head,
        "bf16": bf16,
        # without it Trainer does not scale gradients, those of float16 weights neither
        "fp16": not bf16 and "float16" in (recipe.autocast, recipe.weights),
        "scaling_only": (recipe.weights, recipe.autocast) == ("float16", "none"),
        "max_gradient_norm": MAX_GRADIENT_NORM,
        "weight_decay": WEIGHT_DECAY,
    }


def _lines(pairs: Pairs) -> str:
    """The pairs as AFQMC is published."""
    rows = (
        {"sentence1": first, "sentence2": second, "label": str(label)}
        for first, second, label in zip(pairs.first, pairs.second, pairs.labels, strict=True)
    )
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _as_comment(text: str) -> str:
    """The text as comment lines that are not too long."""
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, 94) or [""]]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _literal(value: str | list[str]) -> str:
    """Python's notation of texts, in double quotes; JSON's is the same."""
    return json.dumps(value, ensure_ascii=False)


def _render(template: str, contents: dict) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["literal"] = _literal
    return environment.get_template(template).render(contents)
