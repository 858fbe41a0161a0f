"""The CUDA card of this machine, as an entry of the catalogue or made from what it says."""

import math
import os

import torch

from labkit.predict.gpus import Gpu, GpuError, find_gpu

UNKNOWN = "unknown"
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def local_card() -> Gpu:
    """The catalogue's entry of the card here; of a card that it lacks, what is seen of it.

    Rates are then unknown, NaN, and so are seconds; ``is_known`` tells.
    """
    name = torch.cuda.get_device_name()
    try:
        return find_gpu(name)
    except GpuError:
        return _seen_card(name)


def is_known(gpu: Gpu) -> bool:
    """Whether the card's rates are known."""
    return gpu.source != UNKNOWN


def outside_bytes() -> int:
    """Bytes of the card that are in use and not PyTorch's allocator's.

    The context of this process, and whatever other processes hold.
    """
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def has_expandable_segments() -> bool:
    """Whether the allocator of this process is set to expandable segments."""
    return any(
        "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", "")
        for name in ALLOCATOR_SETTINGS
    )


def _seen_card(name: str) -> Gpu:
    properties = torch.cuda.get_device_properties()
    dtypes = ["float32", "float16"]
    if torch.cuda.is_bf16_supported(including_emulation=False):
        dtypes.append("bfloat16")
    return Gpu(
        name=name,
        title=name,
        capability=(properties.major, properties.minor),
        vendor="amd" if torch.version.hip else "nvidia",
        memory_bytes=properties.total_memory,
        context_bytes=outside_bytes(),
        native_dtypes=tuple(dtypes),
        bandwidth_bytes_per_second=math.nan,
        matrix_flops_per_second=dict.fromkeys(dtypes, math.nan),
        tf32_flops_per_second=None,
        source=UNKNOWN,
        memory_source="printed by get_device_properties",
        context_source="measured here: in use, less what is reserved",
    )
