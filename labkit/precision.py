"""Which number formats a run really uses, and why.

A processor without instructions for a 16-bit format still accepts it: every product is then
converted back and forth, many times slower than float32, and nothing warns (pytorch #124996).
So a format is used only where the hardware has it, and what was chosen is part of the report.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from labkit.recipe import Recipe

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Precision:
    """The formats a run uses.

    ``weights`` holds the frozen base, ``autocast`` is what matrix products are computed in
    (``None``: in the weights' own format); parameters that are trained are always float32.
    """

    weights: torch.dtype
    autocast: torch.dtype | None
    reason: str = ""  # why something else than asked is used

    def to_dict(self) -> dict[str, str]:
        """The formats by name, for the report."""
        return {
            "weights": _name(self.weights),
            "autocast": _name(self.autocast) if self.autocast else "none",
            "trained parameters": "float32",
            "reason": self.reason,
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device computes in ``dtype`` without emulating it.

    Source:
        ``torch.cuda.is_bf16_supported`` counts emulation unless told not to; on a CPU oneDNN
        needs AVX512-BF16 or AMX for bfloat16, AVX512-FP16 or AMX-FP16 for float16.
    """
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return True
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # Arm: the bf16 matrix instructions


def choose_precision(
    recipe: Recipe, device: torch.device, *, emulate: bool = False
) -> Precision:
    """The formats to run ``recipe`` in on ``device``.

    Args:
        emulate: Use what the recipe asks for even where the hardware only imitates it.
    """
    return native_precision(
        recipe,
        lambda dtype: emulate or has_native(dtype, device),
        where=f"this {device.type.upper()}",
        prefer_half=device.type == "cuda",
    )


def native_precision(
    recipe: Recipe, has: Callable[[torch.dtype], bool], *, where: str, prefer_half: bool
) -> Precision:
    """The formats to run ``recipe`` in where only some exist.

    Args:
        has: Whether a format is computed in without imitating it.
        where: The device in words, for the reason.
        prefer_half: Use float16, where it is had, in place of a format that is not.
    """
    asked = {
        "weights": getattr(torch, recipe.weights),
        "autocast": None if recipe.autocast == "none" else getattr(torch, recipe.autocast),
    }
    used, reasons = {}, []
    for role, dtype in asked.items():
        if dtype is None or has(dtype):
            used[role] = dtype
            continue
        half = prefer_half and has(torch.float16)
        used[role] = torch.float16 if half else torch.float32
        reasons.append(
            f"{role}: {_name(dtype)} was asked for, {_name(used[role])} is used, because "
            f"{where} has no instructions for {_name(dtype)} and would imitate them slowly"
        )
    if used["autocast"] == torch.float32:
        used["autocast"] = None
    return Precision(**used, reason="; ".join(reasons))


def product_seconds(dtypes: list[torch.dtype], device: torch.device) -> dict[str, float]:
    """Seconds of one 512 × 512 × 512 matrix product in each format, best of three.

    Shows what imitating a format costs on this very machine, in a few tenths of a second.
    """
    seconds = {}
    for dtype in dtypes:
        matrix = torch.ones(512, 512, dtype=dtype, device=device)
        runs = []
        for _ in range(4):  # the first run sets up threads and kernels
            start = time.perf_counter()
            (matrix @ matrix).sum().item()  # reading the sum waits for the device
            runs.append(time.perf_counter() - start)
        seconds[_name(dtype)] = min(runs[1:])
    return seconds
