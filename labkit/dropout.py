"""LoRA's dropout with fewer random numbers: two decisions from each, on a CPU.

A CPU draws random numbers one after the other, on one core, and torch's dropout takes one for
each activation. Sixteen bits are enough to decide: the probability is right to 1 / 2**17.
"""

import torch
from torch import nn
from torch.nn import functional

LEVELS = 2**16  # that sixteen bits tell apart


class FastDropout(nn.Module):
    """What ``nn.Dropout`` does, with other random numbers.

    Args:
        p: Probability of a zero, in [0, 1).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zero each element with probability p, and scale the others up."""
        if not (self.training and self.p and draws_slowly(x)):
            return functional.dropout(x, self.p, self.training)
        draw = _keep_opaque if torch.compiler.is_compiling() else keep_mask
        return x * draw(x, self.p) * (1 / (1 - self.p))


def draws_slowly(x: torch.Tensor) -> bool:
    """Whether random numbers are drawn one after the other there; a card draws all at once."""
    return x.device.type == "cpu"


def keep_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """A boolean for each element of ``x``: False with probability p, rounded to 1 / 2**16."""
    numbers = torch.randint(-(2**31), 2**31, ((x.numel() + 1) // 2,), dtype=torch.int32)
    halves = numbers.view(torch.int16)[: x.numel()].view(x.shape)
    return halves >= min(round(p * LEVELS), LEVELS - 1) - LEVELS // 2


# Compiled, each number would be computed by itself and cost what is saved.
@torch.library.custom_op(
    "labkit::keep_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _keep_opaque(x: torch.Tensor, p: float) -> torch.Tensor:
    return keep_mask(x, p)


@_keep_opaque.register_fake
def _(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def use_fast_dropout(model: nn.Module) -> None:
    """Put it in the place of every dropout of LoRA matrices."""
    for module in model.modules():
        for name, dropout in getattr(module, "lora_dropout", {}).items():
            if isinstance(dropout, nn.Dropout):
                module.lora_dropout[name] = FastDropout(dropout.p)
