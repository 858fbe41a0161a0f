"""The cards a prediction can be made for: what they hold, and how fast they are at best.

Every figure was published. How it is known is part of the entry, because not all are known
equally well: rates and bandwidth come from the vendor, capacity from what PyTorch printed, and
what a process holds outside the allocator from the arithmetic of out-of-memory messages.
"""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches

MIB = 2**20
GIB = 2**30
TERA = 10**12


class GpuError(ValueError):
    """A card that is not in the catalogue, or a name that fits several."""


@dataclass(frozen=True)
class Gpu:
    """One card.

    ``memory_bytes`` is what PyTorch sees as total capacity, ``context_bytes`` what a process
    holds of it outside PyTorch's allocator (the CUDA context and the kernels it has loaded).
    Rates are the vendor's peaks without sparsity, as PyTorch computes by default: float32
    without TF32, float16 and bfloat16 summed up in float32 (GeForce cards do that at half
    their rate). ``tf32_flops_per_second`` is ``None`` where the card has no such format.
    """

    name: str
    title: str
    capability: tuple[int, int]  # for AMD, too, what torch.cuda.get_device_capability gives
    vendor: str  # "nvidia" or "amd"
    memory_bytes: int
    context_bytes: int
    native_dtypes: tuple[str, ...]  # computed in without emulation
    bandwidth_bytes_per_second: float
    matrix_flops_per_second: dict[str, float] = field(hash=False)  # by dtype, native ones only
    tf32_flops_per_second: float | None
    source: str  # of rates and bandwidth
    memory_source: str
    context_source: str

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes of one cuBLAS workspace; PyTorch keeps one for each thread that multiplies.

        Source:
            ``parseChosenWorkspaceSize`` in PyTorch's CublasHandlePool.cpp: 8 MiB and 128 KiB;
            32 MiB on Hopper and, since pytorch #175344 (February 2026), on Blackwell; 128 MiB
            on MI300.
        """
        if self.vendor == "amd":
            return 128 * MIB
        return 32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024

    def flops_per_second(self, dtype: str) -> float:
        """Peak rate of matrix products in ``dtype``.

        A format that the card lacks is converted and computed in float32, so it is at best as
        fast as that.
        """
        rates = self.matrix_flops_per_second
        return rates.get(dtype, rates["float32"])


# Capacity in GiB, held outside the allocator in MiB, bandwidth in GB/s, rates in TFLOPS.
# fmt: off
FIGURES = (
    # name, title, capability, capacity, outside, bandwidth, float32, TF32, 16 bits
    ("rtx-2080-ti", "NVIDIA RTX 2080 Ti 11GB", (7, 5), 10.74, 197, 616, 13.4, None, 53.8),
    ("t4", "NVIDIA T4 16GB", (7, 5), 14.75, 142, 320, 8.1, None, 65),
    ("v100-16gb", "NVIDIA V100 16GB (SXM2)", (7, 0), 15.77, 399, 900, 15.7, None, 125),
    ("a10", "NVIDIA A10 24GB", (8, 6), 21.99, 317, 600, 31.2, 62.5, 125),
    ("l4", "NVIDIA L4 24GB", (8, 9), 22.03, 251, 300, 30.3, 60, 121),
    ("rtx-4090", "NVIDIA RTX 4090 24GB", (8, 9), 23.64, 522, 1008, 82.6, 82.6, 165.2),
    ("rtx-3090", "NVIDIA RTX 3090 24GB", (8, 6), 23.68, 315, 936, 35.6, 35.6, 71),
    ("rtx-5090", "NVIDIA RTX 5090 32GB", (12, 0), 31.36, 307, 1792, 104.8, 104.8, 209.5),
    ("v100-32gb", "NVIDIA V100 32GB (SXM2)", (7, 0), 31.73, 399, 900, 15.7, None, 125),
    ("a100-40gb", "NVIDIA A100 40GB (SXM)", (8, 0), 39.5, 501, 1555, 19.5, 156, 312),
    ("l40s", "NVIDIA L40S 48GB", (8, 9), 44.52, 517, 864, 91.6, 183, 362.05),
    ("rtx-6000-ada", "NVIDIA RTX 6000 Ada 48GB", (8, 9), 47.48, 517, 960, 91.1, 182.1, 364.2),
    ("rtx-a6000", "NVIDIA RTX A6000 48GB", (8, 6), 47.53, 317, 768, 38.7, 77.4, 154.8),
    ("h100-pcie", "NVIDIA H100 80GB (PCIe)", (9, 0), 79.11, 601, 2000, 51.2, 378, 756),
    ("a100-80gb", "NVIDIA A100 80GB (SXM)", (8, 0), 79.15, 501, 2039, 19.5, 156, 312),
    ("h100", "NVIDIA H100 80GB (SXM)", (9, 0), 79.19, 670, 3350, 66.9, 494.7, 989.4),
    ("h200", "NVIDIA H200 141GB (SXM)", (9, 0), 139.72, 670, 4800, 66.9, 494.7, 989.4),
    ("b200", "NVIDIA B200 180GB (SXM)", (10, 0), 178.35, 712, 7700, 75, 1100, 2250),
    ("mi300x", "AMD Instinct MI300X 192GB", (9, 4), 191.98, 460, 5300, 163.4, 653.7, 1307.4),
)
# fmt: on

# How each figure is known: rates and bandwidth, capacity, bytes outside the allocator.
# A message is PyTorch's "CUDA out of memory". It says what the process uses, what is allocated,
# and what is reserved besides; the rest is outside, known to 10 MiB or so. The largest rest is
# taken, that of a process with most of its kernels loaded, but none where other CUDA libraries
# were loaded, too.
AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper V2"
ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
A100 = "NVIDIA A100 datasheet"
HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
SOURCES = {
    "rtx-2080-ti": (
        "NVIDIA Turing GPU Architecture whitepaper, reference clocks",
        "one message (lllyasviel/FramePack #369)",
        "one message (lllyasviel/FramePack #369)",
    ),
    "t4": ("NVIDIA T4 datasheet", "median of 5 messages", "largest of 5 messages"),
    "v100-16gb": (
        "NVIDIA V100 datasheet",
        "messages that name this capacity",
        "taken from v100-32gb, the same chip",
    ),
    "a10": (
        "NVIDIA A10 datasheet",
        "one message (zai-org/CogVLM #236)",
        "taken from rtx-a6000, the same chip",
    ),
    "l4": (
        "NVIDIA L4 datasheet, half of its figures with sparsity",
        "messages that name the card",
        "two messages that agree",
    ),
    "rtx-4090": (ADA, "median of 5 messages", "largest of 5 messages"),
    "rtx-3090": (AMPERE, "median of 2 messages", "one message"),
    "rtx-5090": (
        "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A",
        "messages that name the card: 31.34 to 31.37 GiB",
        "one message (murong-xu/CADS #4)",
    ),
    "v100-32gb": ("NVIDIA V100 datasheet", "median of 4 messages", "largest of 4 messages"),
    "a100-40gb": (
        A100,
        "median of 3 messages",
        "one message (TianheWu/CoSeR #10)",
    ),
    "l40s": (
        "NVIDIA L40S datasheet",
        "2 messages, and 45,589 MiB printed by get_device_properties",
        "largest of 3 messages on L40 and L40S",
    ),
    "rtx-6000-ada": (
        "NVIDIA RTX 6000 Ada datasheet; 16 bits are a quarter of its FP8 figure with sparsity",
        "48,622 MiB printed by get_device_properties",
        "taken from l40s, the same chip; a context without kernels holds 426 MiB",
    ),
    "rtx-a6000": (AMPERE + ", appendix C", "median of 4 messages", "largest of 4 messages"),
    "h100-pcie": (
        HOPPER + " and H100 datasheet",
        "81,008 MiB printed by get_device_properties",
        "largest of 2 messages that name the card",
    ),
    "a100-80gb": (
        A100,
        "messages that name the card: 79.15 to 79.25 GiB",
        "taken from a100-40gb, the same chip",
    ),
    "h100": (
        HOPPER + " and H100 datasheet",
        "81,089 MiB printed by get_device_properties",
        "taken from h200, the same chip",
    ),
    "h200": ("NVIDIA H200 datasheet", "one message", "one message"),
    "b200": (
        "NVIDIA Blackwell datasheet, HGX B200, half of its figures with sparsity",
        "messages that name the card",
        "one message (stas00/ml-engineering)",
    ),
    "mi300x": (
        "AMD Instinct MI300X datasheet",
        "196,592 MiB printed by get_device_properties (ROCm/ROCm #4203)",
        "one message, if nothing else ran (ROCm blog on GPTQModel): capacity less allocated",
    ),
}


def _gpu(
    name: str,
    title: str,
    capability: tuple[int, int],
    capacity_gib: float,
    context_mib: int,
    gb_per_second: int,
    float32: float,
    tf32: float | None,
    half: float,
) -> Gpu:
    """An entry from a line of ``FIGURES``."""
    rates = {"float32": float32 * TERA, "float16": half * TERA}
    if capability >= (8, 0):  # bfloat16 came with Ampere
        rates["bfloat16"] = half * TERA
    source, memory_source, context_source = SOURCES[name]
    return Gpu(
        name=name,
        title=title,
        capability=capability,
        vendor=title.split()[0].lower(),
        memory_bytes=round(capacity_gib * GIB),
        context_bytes=context_mib * MIB,
        native_dtypes=tuple(rates),
        bandwidth_bytes_per_second=gb_per_second * 1e9,
        matrix_flops_per_second=rates,
        tf32_flops_per_second=tf32 and tf32 * TERA,
        source=source,
        memory_source=memory_source,
        context_source=context_source,
    )


GPUS = {figures[0]: _gpu(*figures) for figures in FIGURES}  # smallest memory first

# Words of a card's full name that tell no two entries apart.
FILLERS = {"nvidia", "amd", "geforce", "tesla", "instinct", "generation", "hbm3", "gpu"}


def _words(name: str) -> list[str]:
    """The telling words of a name; ``SXM4`` is ``sxm``."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+gb\b", r"\1gb", name.lower()))
    return [re.sub(r"^sxm\d$", "sxm", word) for word in words if word not in FILLERS]


def _fits(words: list[str], gpu: Gpu) -> bool:
    """Whether the words, spaced or not, are part of the card's name."""
    known, parts = _words(f"{gpu.name} {gpu.title}"), gpu.name.split("-")
    joined = [
        "".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)
    ]
    return set(words) <= set(known) or "".join(words) in joined


def find_gpu(name: str) -> Gpu:
    """The card of that name: a key of ``GPUS``, or what PyTorch calls the card.

    Case, spaces and dashes do not matter: ``A100 80GB``, ``rtx4090`` and
    ``NVIDIA A100-SXM4-80GB`` are understood.

    Raises:
        GpuError: The name fits no card or several; the message lists which.
    """
    words = _words(name)
    for key, gpu in GPUS.items():
        if "".join(words) == key.replace("-", ""):
            return gpu
    fitting = [key for key, gpu in GPUS.items() if words and _fits(words, gpu)]
    # "H100 80GB" fits both H100s, and is the whole name of one
    fitting = [key for key in fitting if set(_words(key)) <= set(words)] or fitting
    if len(fitting) == 1:
        return GPUS[fitting[0]]
    if fitting:
        raise GpuError(f"GPU {name!r} fits several: {', '.join(fitting)}. Say which.")
    near = get_close_matches("-".join(words), GPUS, cutoff=0.5)
    known = f"near names: {', '.join(near)}" if near else f"known: {', '.join(GPUS)}"
    raise GpuError(f"GPU {name!r} is not in the catalogue; {known}.")
