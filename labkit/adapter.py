"""A trained adapter as a folder that plain transformers and peft load, and back.

PEFT saves an adapter that never learned, and loads one whose tensors are missing, with a
warning at most. Here both are errors, and what was written is read again and compared.
"""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from labkit.adapter_files import write_companions
from labkit.model import parameter_kind
from labkit.model_source import ModelSource, find_model
from labkit.step import TrainingStep

WEIGHTS = "adapter_model.safetensors"
Tensors = dict[str, torch.Tensor]


class AdapterError(RuntimeError):
    """An adapter that holds less than it should; the message says what."""


def save_adapter(
    step: TrainingStep, tokenizer, folder: Path, *, source: ModelSource | None = None
) -> Path:
    """Write adapter, head, tokenizer, labels, recipe and, where it is nowhere else, the base.

    The folder appears when it is complete; one of that name is replaced.

    Args:
        source: Where the step's base comes from; the recipe's model if left out.

    Returns:
        The folder.

    Raises:
        AdapterError: A ``lora_B`` is zero, a value is not finite, the head is missing, or the
            file does not hold what the model does.
    """
    source, folder = source or find_model(step.recipe.model), Path(folder)
    check_tensors(_of_model(step.model), "the model")
    draft, old = (folder.with_name(f".{folder.name}.{state}") for state in ("tmp", "old"))
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    step.model.save_pretrained(draft, save_embedding_layers=False)  # never compiled, never asks
    saved, held = _read(draft / WEIGHTS), _of_model(step.model)
    check_tensors(saved, str(draft / WEIGHTS))
    if saved.keys() != held.keys() or any(not saved[n].equal(held[n]) for n in held):
        raise AdapterError(f"{draft / WEIGHTS} does not hold the tensors of the model.")
    write_companions(step, tokenizer, source, draft, folder)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def load_adapter(step: TrainingStep, folder: Path) -> None:
    """Put a saved adapter and head into a step that was built from the same recipe.

    Raises:
        AdapterError: A tensor is missing, zero, not finite, of another shape (another base or
            rank), or one too many; or the file cannot be read.
    """
    file = Path(folder) / WEIGHTS
    saved = _read(file)
    wanted = {_saved_name(n): p for n, p in step.model.named_parameters() if _is_trained(n)}
    for words, names in (
        ("lacks", wanted.keys() - saved.keys()),
        ("is of another model: it has too many tensors:", saved.keys() - wanted.keys()),
    ):
        if names:
            raise AdapterError(f"{file} {words} {_some(names)}.")
    check_tensors(saved, str(file))
    if other := [name for name in wanted if saved[name].shape != wanted[name].shape]:
        raise AdapterError(
            f"{file} is of another base model or rank: {other[0]} is "
            f"{tuple(saved[other[0]].shape)}, the model's {tuple(wanted[other[0]].shape)}."
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(saved[name])


def check_tensors(tensors: Tensors, where: str) -> None:
    """Refuse an adapter that was never trained or broke while it was.

    Raises:
        AdapterError: Naming the first tensor that is wrong.
    """
    if not any("lora_B" in name for name in tensors):
        raise AdapterError(f"{where} holds no LoRA matrices.")
    if not any("lora_" not in name for name in tensors):
        raise AdapterError(f"{where} holds no head.")
    if empty := [name for name, tensor in tensors.items() if not tensor.numel()]:
        raise AdapterError(f"{where}: {_some(empty)} is empty.")
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise AdapterError(f"{where}: {_some(broken)} holds values that are not finite.")
    if dead := [n for n, tensor in tensors.items() if "lora_B" in n and not tensor.any()]:
        raise AdapterError(f"{where}: {_some(dead)} is zero; it was not trained.")


def _is_trained(name: str) -> bool:
    return parameter_kind(name) in ("lora", "head")


def _saved_name(name: str) -> str:
    """What PEFT calls a parameter in the file."""
    return name.replace(".modules_to_save", "").replace(".default", "")


def _of_model(model: nn.Module) -> Tensors:
    return {
        _saved_name(name): parameter.detach().cpu()
        for name, parameter in model.named_parameters()
        if _is_trained(name)
    }


def _read(file: Path) -> Tensors:
    try:
        return load_file(file)
    except FileNotFoundError:
        raise AdapterError(f"There is no adapter {file}.") from None
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} is damaged ({str(error).partition(':')[0]}).") from error


def _some(names) -> str:
    """The first of some names, and how many more there are."""
    first, *others = sorted(names)
    return f"{first} (and {len(others)} more)" if others else first
