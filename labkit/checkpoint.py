"""Everything a training needs to go on bit for bit, in one file that is replaced as a whole.

Tensors and text only, in the safetensors format: loading a checkpoint never runs code. What is
trained and what the optimizer knows are kept, not the base, which is built again.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit.model import trained_parameters
from labkit.step import TrainingStep

FORMAT = "labkit checkpoint 1"
Tensors = dict[str, torch.Tensor]


class CheckpointError(ValueError):
    """A checkpoint that cannot be gone on from; the message says why."""


@dataclass
class Progress:
    """How far a training is.

    Attributes:
        step: Updates done.
        evaluated_step: Updates done when it was last evaluated, 0 for never.
        best_step: Updates done when validation was best, 0 for never.
        best_macro_f1: Of that evaluation.
        best_loss: Of that evaluation, which decides between two with the same macro-F1.
        stale: Evaluations since then.
        skipped_steps: Updates that the GradScaler left out.
        history_lines: Lines of the history that belong to this state.
    """

    step: int = 0
    evaluated_step: int = 0
    best_step: int = 0
    best_macro_f1: float = -1.0
    best_loss: float = 0.0
    stale: int = 0
    skipped_steps: int = 0
    history_lines: int = 0


def trained_tensors(step: TrainingStep) -> Tensors:
    """Copies of the LoRA matrices and the head, on the CPU, by parameter name."""
    return {
        name: parameter.detach().cpu().clone()
        for name, parameter in trained_parameters(step.model).items()
    }


def load_trained(step: TrainingStep, tensors: Tensors) -> None:
    """Put such copies back."""
    with torch.no_grad():
        for name, parameter in trained_parameters(step.model).items():
            parameter.copy_(tensors[name])


def save_checkpoint(
    file: Path, step: TrainingStep, progress: Progress, best: Tensors, identity: dict[str, str]
) -> None:
    """Write the file; the one before it stays until this one is complete and on the disk.

    Args:
        best: The trained tensors that validated best so far; empty before an evaluation.
        identity: What has to be the same for going on, by the name a reader would use.
    """
    tensors = {f"trained/{name}": tensor for name, tensor in trained_tensors(step).items()}
    tensors |= {f"best/{name}": tensor for name, tensor in best.items()}
    for index, values in step.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": each.cpu() for name, each in values.items()}
    state = {
        "progress": asdict(progress),
        "scaler": step.scaler.state_dict(),
        "identity": identity,
    }
    text = json.dumps(state)
    draft = file.with_name(f".{file.name}.tmp")
    metadata = {"format": FORMAT, "state": text, "sha256": _checksum(tensors, text)}
    try:
        save_file({name: each.contiguous() for name, each in tensors.items()}, draft, metadata)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(file)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(f"the checkpoint {file} cannot be written ({error}).") from error


def load_checkpoint(
    file: Path, step: TrainingStep, identity: dict[str, str]
) -> tuple[Progress, Tensors]:
    """Put the step into the state of the checkpoint.

    Returns:
        How far the training was, and its best tensors.

    Raises:
        CheckpointError: There is none, it is damaged, or it is of something else.
    """
    metadata, tensors = _read(file)
    state = json.loads(metadata["state"])
    _check_identity(file, state["identity"], identity)
    groups: dict[str, Tensors] = {"trained": {}, "best": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        groups[group][rest] = tensor
    load_trained(step, groups["trained"])
    moments: dict[int, Tensors] = {}
    for name, tensor in groups["optimizer"].items():
        index, _, key = name.partition("/")
        moments.setdefault(int(index), {})[key] = tensor
    own = step.optimizer.state_dict()
    step.optimizer.load_state_dict(own | {"state": moments})
    step.scaler.load_state_dict(state["scaler"])
    progress = Progress(**state["progress"])
    step.skipped_steps = progress.skipped_steps
    return progress, groups["best"]


def _read(file: Path) -> tuple[dict[str, str], Tensors]:
    """Metadata and tensors of a file whose checksum is right."""
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no checkpoint {file}; train from the beginning, without --resume."
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is damaged ({str(error).partition(':')[0]}); train from the beginning, "
            "without --resume."
        ) from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a {FORMAT}.")
    if metadata["sha256"] != _checksum(tensors, metadata["state"]):
        raise CheckpointError(
            f"{file} is damaged (its checksum differs); train from the beginning, without "
            "--resume."
        )
    return metadata, tensors


def _checksum(tensors: Tensors, text: str) -> str:
    """Of the state's text, and of each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_identity(file: Path, there: dict[str, str], here: dict[str, str]) -> None:
    """Refuse a checkpoint that was made of something else, and say what differs."""
    names = sorted(there.keys() | here.keys())
    differing = [name for name in names if there.get(name) != here.get(name)]
    if differing:
        words = (f"{name} is {here.get(name)}, there {there.get(name)}" for name in differing)
        raise CheckpointError(
            f"{file} is of another training: {'; '.join(words)}. Give the same options, or "
            "train from the beginning, without --resume."
        )
