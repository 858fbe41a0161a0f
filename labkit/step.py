"""One optimizer step, and everything a recipe changes about it.

This is the code that is measured. There is no other training code in the lab.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

from labkit.compiling import compile_model
from labkit.model import (
    build_model,
    keep_base_gradients,
    layers,
    recompute_layers,
    trained_parameters,
)
from labkit.model_source import ModelError, ModelSource
from labkit.packed_model import PackedClassifier
from labkit.precision import Precision
from labkit.recipe import Recipe
from labkit.trainable import check_trainable

MAX_GRADIENT_NORM = 1.0  # the default of transformers' TrainingArguments.max_grad_norm


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Compute with so many threads of a CPU while the block runs; 0 leaves their number."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


class TrainingStep:
    """A model, its optimizer, and the step that updates one with the other.

    Attributes:
        model: The LoRA model, never compiled: save from this handle.
        eager_forward: What takes a batch's arguments, never compiled.
        forward: The same, compiled if the recipe says so.
        optimizer: AdamW over the LoRA matrices and the head.
        skipped_steps: Updates that the GradScaler left out because of an infinite gradient.
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, precision: Precision, device: torch.device
    ) -> None:
        self.recipe, self.model, self.precision, self.device = recipe, model, precision, device
        self.trained = list(trained_parameters(model).values())
        fused = recipe.optimizer == "adamw_fused" or None  # None: torch chooses
        self.optimizer = torch.optim.AdamW(self.trained, lr=recipe.learning_rate, fused=fused)
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=torch.float16 in (precision.autocast, precision.weights)
        )
        self.eager_forward = model
        if recipe.padding == "none":
            self.eager_forward = PackedClassifier(model, last_token_only=recipe.last_token_only)
        self.forward = compile_model(self.eager_forward, recipe, device)
        self.skipped_steps = 0

    def __call__(self, batch, mark: Callable[[str], None] = lambda phase: None) -> float:
        """Forward, backward and update on one batch.

        Args:
            batch: Token ids and labels, padded or packed as the recipe says, on the step's
                device.
            mark: Called with the name of each phase as it begins.

        Returns:
            The mean loss over the batch's pairs.
        """
        with using_threads(self.recipe.threads):
            self.optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), device=self.device)
            for part in batch.split(self.recipe.micro_batches):
                mark("forward")
                loss = self.loss(part, pairs=len(batch.labels))
                mark("backward")
                self.scaler.scale(loss).backward()
                total += loss.detach()
                del loss  # or the graph of this part is alive while the next one is built
            mark("optimizer")
            self.update()
            return total.item()

    def loss(self, part, *, pairs: int, forward: Callable | None = None) -> torch.Tensor:
        """The part's share of the mean loss over ``pairs`` pairs, the whole window.

        Dividing a sum by what the window really holds stays right when parts are uneven;
        a mean of means does not.
        """
        logits = self.logits(part, forward=forward)
        summed = functional.cross_entropy(logits.float(), part.labels, reduction="sum")
        return summed / pairs

    def logits(self, part, *, forward: Callable | None = None) -> torch.Tensor:
        """(B, 2) logits of a batch; with dropout unless the model is in evaluation mode."""
        autocast = contextlib.nullcontext()
        if self.precision.autocast is not None:
            autocast = torch.autocast(self.device.type, dtype=self.precision.autocast)
        with autocast:
            output = (forward or self.forward)(**part.arguments)
        return output.logits

    def update(self) -> None:
        """Unscale, clip, step: in this order, or the norm that is clipped is a scaled one."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.trained, MAX_GRADIENT_NORM)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped_steps += self.scaler.get_scale() < before


def build_step(
    recipe: Recipe,
    source: ModelSource,
    precision: Precision,
    device: torch.device,
    *,
    pad_token_id: int,
    build_on: torch.device | None = None,
) -> TrainingStep:
    """The training step that ``recipe`` describes, ready to be called.

    Args:
        build_on: Where the model is made and left, if not on ``device``; ``meta`` makes one
            that has shapes and no memory.

    Raises:
        ModelError: The model cannot be had, or checkpointing is not possible with it.
        TrainingError: Something is trained that should not be, or the other way round.
        CompilerMissing: ``recipe.compile`` is set and there is no compiler.
    """
    home = build_on or device
    with home:
        model = build_model(recipe, source, precision, pad_token_id=pad_token_id)
    model.to(home)
    if recipe.train_base:
        keep_base_gradients(model)
    if recipe.checkpoint_every:
        if recipe.checkpoint_every > max(len(layers(model)), 1):
            raise ModelError(
                f"checkpoint_every ({recipe.checkpoint_every}) is larger than the "
                f"{len(layers(model))} layers of {source.name}."
            )
        recompute_layers(model, recipe.checkpoint_every)
    check_trainable(model, recipe)
    return TrainingStep(recipe, model, precision, device)


def count_layer_forwards(step: TrainingStep, part) -> float | None:
    """How often each layer's forward runs for one forward and backward: 2 means recomputed.

    Counted, eagerly and on a few pairs, by a hook on each layer's first child (a hook on the
    layer itself lies outside the checkpoint). Gradients are put back as they were.
    """
    calls = 0

    def count(*_) -> None:
        nonlocal calls
        calls += 1

    blocks = layers(step.model)
    hooks = [next(block.children()).register_forward_pre_hook(count) for block in blocks]
    kept = [(parameter, parameter.grad) for parameter in step.model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        step.loss(part, pairs=len(part.labels), forward=step.eager_forward).backward()
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, grad in kept:
            parameter.grad = grad
    return calls / len(blocks) if blocks else None
