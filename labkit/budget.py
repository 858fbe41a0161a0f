"""How many bytes a recipe may take: what somebody asks for, or most of what is free."""

import re

import torch

from labkit.machine import free_memory_bytes
from labkit.report import format_bytes

SHARE = "90%"  # of what is free, unless somebody asks for something else
UNITS = {
    "": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


class BudgetError(ValueError):
    """A budget that nobody can keep to; the message says what it may be."""


def free_bytes(device: torch.device) -> int:
    """Bytes that a process could still get on a device.

    Raises:
        BudgetError: The device keeps no such count.
    """
    if device.type == "cpu":
        return free_memory_bytes()
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    raise BudgetError(
        f"bytes are predicted for a CPU and for CUDA cards, not for {device.type}: --device cpu"
    )


def budget_bytes(budget: str | int | None, free: int) -> int:
    """The budget in bytes.

    Args:
        budget: Bytes, a size (``4GiB``), or a share of what is free (``80%``); None for
            ``SHARE``.
        free: Bytes that are free.

    Raises:
        BudgetError: It is none of these, or more than is free.
    """
    text = SHARE if budget is None else str(budget)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]*)\s*", text, re.IGNORECASE)
    unit = found[2].upper() if found else None
    if unit != "%" and unit not in UNITS:
        raise BudgetError(_possible(text))
    amount = float(found[1]) * (free / 100 if unit == "%" else UNITS[unit])
    wanted = int(min(amount, 2**62))  # a float may be infinite
    if wanted < 1:
        raise BudgetError(_possible(text))
    if wanted > free:
        raise BudgetError(
            f"budget {text} is {format_bytes(wanted)}, and {format_bytes(free)} are free: ask "
            "for less, or end what holds the rest."
        )
    return wanted


def _possible(text: str) -> str:
    return (
        "budget must be a number of bytes, a size such as 4GiB or 512MiB, or a share of the "
        f"free memory such as 80%, not {text!r}."
    )
