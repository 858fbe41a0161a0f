"""Single operations as Liger-Kernel's benchmark runs them, forward and backward, ten times.

The input's gradient is kept from run to run, so the peak is that of the second run and later.

Source:
    linkedin/Liger-Kernel, benchmark/scripts: benchmark_cross_entropy.py, benchmark_rms_norm.py,
    and _test_memory in utils.py.
"""

import torch
from torch import nn
from torch.nn import functional


def cross_entropy(vocabulary: int):
    """The loss of 8 x 2048 rows."""

    def build():
        logits = nn.Parameter(torch.empty(8 * 2048, vocabulary))
        targets = torch.zeros(8 * 2048, dtype=torch.int64)
        model = nn.ParameterList([logits])

        def step():
            functional.cross_entropy(logits, targets).backward()

        return model, torch.optim.SGD(model.parameters()), step

    return build


def rms_norm(width: int):
    """Llama's norm of 2048 rows, with all that the benchmark makes before."""

    def build():
        hidden = nn.Parameter(torch.empty(2048, width, dtype=torch.bfloat16))
        gradient = torch.empty_like(hidden)
        norm, other_norm = _RmsNorm(width), _RmsNorm(width)  # of which one is run
        model = nn.ModuleList([other_norm, norm, nn.ParameterList([hidden])])

        def step():
            norm(hidden).backward(gradient, retain_graph=True)

        return model, torch.optim.SGD(model.parameters()), step

    return build


class _RmsNorm(nn.Module):
    """Computes in float32, with a float32 weight whatever the input is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden):
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(dtype)
