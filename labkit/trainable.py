"""What gets a gradient: counted before the first step and looked at after it.

A model with a trainable head runs without any error while its adapters learn nothing.
"""

from torch import nn

from labkit.model import parameter_kind
from labkit.recipe import Recipe


class TrainingError(RuntimeError):
    """A step that does not train what it should."""


def trainable_parameters(model: nn.Module) -> dict[str, int]:
    """Numbers of parameters that get a gradient, by ``lora``, ``head`` and ``base``."""
    counts = {"lora": 0, "head": 0, "base": 0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter_kind(name) in counts:
            counts[parameter_kind(name)] += parameter.numel()
    return counts


def check_trainable(model: nn.Module, recipe: Recipe) -> None:
    """Refuse a model in which LoRA or head is frozen, or the base is not as asked.

    Raises:
        TrainingError: With the counts.
    """
    counts = trainable_parameters(model)
    wrong = [kind for kind in ("lora", "head") if not counts[kind]]
    if bool(counts["base"]) != recipe.train_base:
        wrong.append("base")
    if wrong:
        raise TrainingError(
            f"{' and '.join(wrong)}: not trained as the recipe says; parameters with a "
            "gradient: " + ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
        )


def check_gradients(model: nn.Module) -> None:
    """After the first step: every ``lora_B`` and the head must have a non-zero gradient.

    ``lora_A``'s is zero then, because ``lora_B`` starts at zero.

    Raises:
        TrainingError: Naming how many have none, and the first.
    """
    watched = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if "lora_B" in name or parameter_kind(name) == "head"
    }
    dead = [name for name, grad in watched.items() if grad is None or not grad.any()]
    if dead:
        raise TrainingError(
            f"{len(dead)} of {len(watched)} trained tensors have no gradient after the first "
            f"step, the first is {dead[0]}."
        )
