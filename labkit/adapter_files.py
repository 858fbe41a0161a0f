"""What lies beside an adapter: its base where that is nowhere else, tokenizer, labels, page."""

import copy
import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from labkit.data import LABELS
from labkit.model import parameter_kind, quiet_transformers
from labkit.model_source import TRAINED_FOLDER, ModelSource
from labkit.recipe import Recipe
from labkit.step import TrainingStep

CONFIG = "adapter_config.json"

README = """\
# A LoRA adapter and its head: do two texts ask the same?

Label 0 is *{0}*, label 1 is *{1}*. Trained with labkit; `recipe.json` says how.

```python
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

adapter = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(adapter)
base = AutoModelForSequenceClassification.from_pretrained({base}, num_labels=2)
base.config.pad_token_id = tokenizer.pad_token_id
model = PeftModel.from_pretrained(base, adapter).eval()

pairs = ["first text"], ["second text"]
batch = tokenizer(*pairs, padding=True, truncation="longest_first", max_length={length},
                  return_tensors="pt")
logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
```

{where}
"""


def write_companions(
    step: TrainingStep, tokenizer, source: ModelSource, draft: Path, folder: Path
) -> None:
    """Write all that belongs to an adapter besides its tensors.

    Args:
        source: Where the base comes from. A built-in one is written, another one is named.
        draft: Where to write; PEFT's config is there already.
        folder: What the draft will be called.
    """
    _save_tokenizer(tokenizer, draft)
    own_base = source.weights_from in (None, str(TRAINED_FOLDER))
    base = source.weights_from
    if own_base:
        base = str((folder / "base_model").resolve())
        with quiet_transformers():
            plain_base(step.model).save_pretrained(draft / "base_model")
        _save_tokenizer(tokenizer, draft / "base_model")
    _describe(step.recipe, draft, base, own_base)


def plain_base(model: nn.Module) -> nn.Module:
    """The frozen base of a LoRA model as transformers knows it, sharing its memory."""
    wrapped = model.get_base_model()
    config = copy.deepcopy(wrapped.config)
    config.id2label, config.label2id = LABELS, {text: label for label, text in LABELS.items()}
    with torch.device("meta"):
        base = AutoModelForSequenceClassification.from_config(
            config, dtype=wrapped.dtype, attn_implementation="sdpa"
        )
    tensors = {
        name.replace(".base_layer", "").replace(".original_module", ""): tensor
        for name, tensor in wrapped.state_dict().items()
        if parameter_kind(name) not in ("lora", "head")
    }
    base.load_state_dict(tensors, assign=True)
    return base


def _save_tokenizer(tokenizer, folder: Path) -> None:
    """The tokenizer as it was used: padding on the right, and no length left from a call."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "right"
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)


def _describe(recipe: Recipe, folder: Path, base: str, own_base: bool) -> None:
    """Name the base in PEFT's config, and write recipe, labels and a page on how to load."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    texts = {
        CONFIG: _json(config | {"base_model_name_or_path": base}),
        "recipe.json": _json(recipe.to_dict()),
        "labels.json": _json({"id2label": LABELS}),
    }
    where = "The base model is not part of this folder."
    if own_base:
        where = (
            "`base_model/` is the model it was trained on, which is nowhere else.\n"
            "`AutoPeftModelForSequenceClassification.from_pretrained` finds it as long as\n"
            "this folder stays where it was made."
        )
    if recipe.instruction:
        where += f"\n\nBefore each pair stand the tokens of this text: {recipe.instruction!r}"
    texts["README.md"] = README.format(
        *LABELS.values(),
        base='adapter + "/base_model"' if own_base else repr(base),
        length=recipe.max_length,
        where=where,
    )
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _json(values: dict) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
