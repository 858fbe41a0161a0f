"""How large the gradient of each linear layer is: of its own weight, and of its LoRA matrices.

PEFT freezes the base, so a run with LoRA never sees these gradients. Here the base is asked for
them (``train_base``), and they are looked at and thrown away.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import fmean

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from labkit.data import Pairs
from labkit.machine import default_device
from labkit.model import layers, parameter_kind
from labkit.model_source import find_model
from labkit.precision import choose_precision
from labkit.quality import Interval, interval
from labkit.recipe import Recipe
from labkit.step import TrainingStep, build_step
from labkit.tokens import batches, load_tokenizer

MEASURES = ("whole", "per_entry", "lora")


@dataclass(frozen=True)
class GradientNorm:
    """The gradients of one linear layer, averaged over nothing yet.

    Attributes:
        layer: Number of the block that it is in, from 0.
        kind: Its name inside the block: ``q_proj``.
        parameters: Entries of its weight.
        whole: The norm of the weight's gradient, one a batch.
        lora: That of the gradients of both its LoRA matrices together; empty if it has none.
    """

    layer: int
    kind: str
    parameters: int
    whole: tuple[float, ...]
    lora: tuple[float, ...]

    @property
    def per_entry(self) -> tuple[float, ...]:
        """The root mean square of the gradient's entries: size alone does not raise it."""
        return tuple(norm / sqrt(self.parameters) for norm in self.whole)

    def to_dict(self) -> dict:
        """The norms as JSON values."""
        return asdict(self)


def linear_layers(model: nn.Module) -> dict[tuple[int, str], nn.Module]:
    """The linear layers of the repeated blocks, by number of the block and name inside it.

    One that has LoRA matrices is PEFT's wrapper around it; the matrices are not listed.
    """
    found = {}
    for number, block in enumerate(layers(model)):
        for path, module in block.named_modules():
            if isinstance(module, nn.Linear | Conv1D) and parameter_kind(path) == "base":
                place = path.removesuffix(".base_layer")
                found[number, place.rpartition(".")[2]] = block.get_submodule(place)
    return found


def gradient_norms(step: TrainingStep, some_batches: Iterable) -> list[GradientNorm]:
    """The norms on each batch, one row a linear layer; the step's model does not change.

    Dropout is off: a norm then depends on weights and batch alone.

    Args:
        step: Of a recipe with ``train_base``.
        some_batches: What each norm is taken of, one after the other.
    """
    linear = linear_layers(step.model)
    whole, lora = ({place: [] for place in linear} for _ in range(2))
    was_training = step.model.training
    step.model.eval()
    for batch in some_batches:
        step.model.zero_grad(set_to_none=True)
        step.loss(
            batch.to(step.device), pairs=len(batch.labels), forward=step.eager_forward
        ).backward()
        for place, module in linear.items():
            matrices = [p for name, p in module.named_parameters() if "lora_" in name]
            whole[place].append(_norm([_weight(module)]))
            lora[place] += [_norm(matrices)] if matrices else []
    step.model.zero_grad(set_to_none=True)
    step.model.train(was_training)
    return [
        GradientNorm(*place, _weight(module).numel(), tuple(whole[place]), tuple(lora[place]))
        for place, module in linear.items()
    ]


def measure_gradients(
    recipe: Recipe,
    pairs: Pairs,
    *,
    steps: int,
    batch_count: int,
    cache_folder: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[GradientNorm]:
    """The norms on the batches that follow some steps of training.

    Before the first step every ``lora_B`` is zero, and so is the gradient of every ``lora_A``.

    Args:
        recipe: Its ``lora_targets`` get LoRA matrices; ``train_base`` is turned on.
        steps: Steps of training before.
        batch_count: Batches that norms are taken of.
    """
    recipe = replace(recipe, train_base=True)
    device, tokenizer = torch.device(default_device()), load_tokenizer(recipe.model)
    step = build_step(
        recipe, find_model(recipe.model), choose_precision(recipe, device), device,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    stream = batches(
        recipe, pairs, tokenizer, cache_folder=cache_folder, device_type=device.type
    )
    for number in range(1, steps + 1):
        progress(f"training step {number} of {steps}")
        step(next(stream).to(device))
    progress(f"gradients of {batch_count} batches")
    return gradient_norms(step, islice(stream, batch_count))


def by_kind(norms: Sequence[GradientNorm], measure: str = "whole") -> dict[str, float]:
    """The mean over layers and batches, by kind of layer."""
    kinds = dict.fromkeys(norm.kind for norm in norms)
    return {
        kind: fmean(fmean(getattr(n, measure)) for n in norms if n.kind == kind)
        for kind in kinds
    }


def ratio(
    norms: Sequence[GradientNorm],
    above: Sequence[str],
    below: Sequence[str],
    measure: str = "whole",
) -> Interval:
    """How many times larger the gradients of some kinds are than those of others.

    Of each batch, the mean over the layers of ``above`` divided by that over ``below``; then
    the mean over the batches, with its interval.
    """

    def means(kinds: Sequence[str]) -> list[float]:
        chosen = [getattr(norm, measure) for norm in norms if norm.kind in kinds]
        return [fmean(of_batch) for of_batch in zip(*chosen, strict=True)]

    return interval([a / b for a, b in zip(means(above), means(below), strict=True)])


def _weight(module: nn.Module) -> nn.Parameter:
    """The base's own weight, inside PEFT's wrapper or not."""
    return getattr(module, "base_layer", module).weight


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    """The norm of all gradients as one vector, in float32."""
    return sqrt(sum(p.grad.float().square().sum().item() for p in parameters))
