import csv
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from labkit.predict.gpus import GIB, GPUS, MIB, GpuError, find_gpu

GROUNDTRUTH = Path(__file__).resolve().parents[2] / "shared" / "groundtruth"
MESSAGES = GROUNDTRUTH / "cuda_context_overhead.csv"
GB = 1e9
TERA = 1e12

# What the chips are made of: float32 units and their clock in GHz; matrix units (SMs, for AMD
# CUs), their 16-bit operations in a cycle (GeForce: half the rate, for sums in float32) and
# clock; bits of the memory bus and their rate in Gbit/s.
CHIPS = {
    "rtx-2080-ti": (4352, 1.545, 68, 512, 1.545, 352, 14),
    "t4": (2560, 1.59, 40, 1024, 1.59, 256, 10),
    "v100-16gb": (5120, 1.53, 80, 1024, 1.53, 4096, 1.752),
    "a10": (9216, 1.695, 72, 1024, 1.695, 384, 12.5),
    "l4": (7424, 2.04, 58, 1024, 2.04, 192, 12.5),
    "rtx-4090": (16384, 2.52, 128, 512, 2.52, 384, 21),
    "rtx-3090": (10496, 1.695, 82, 512, 1.695, 384, 19.5),
    "rtx-5090": (21760, 2.407, 170, 512, 2.407, 512, 28),
    "v100-32gb": (5120, 1.53, 80, 1024, 1.53, 4096, 1.752),
    "a100-40gb": (6912, 1.41, 108, 4 * 256 * 2, 1.41, 5120, 2.43),
    "l40s": (18176, 2.52, 142, 1024, 2.52, 384, 18),
    "rtx-6000-ada": (18176, 2.505, 142, 1024, 2.505, 384, 20),
    "rtx-a6000": (10752, 1.8, 84, 1024, 1.8, 384, 16),
    "h100-pcie": (14592, 1.755, 114, 4096, 1.62, 5120, 3.186),
    "a100-80gb": (6912, 1.41, 108, 4 * 256 * 2, 1.41, 5120, 3.186),
    "h100": (16896, 1.98, 132, 4096, 1.83, 5120, 5.24),
    "h200": (16896, 1.98, 132, 4096, 1.83, 6144, 6.25),
    "b200": (18944, 1.98, 148, 8192, 1.86, 8192, 7.5),
    "mi300x": (19456 * 2, 2.1, 304, 2048, 2.1, 8192, 5.2),
}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a100-40gb", "a100-40gb"),
        ("A100 80GB", "a100-80gb"),
        ("a100 80 gb", "a100-80gb"),
        ("A100_80GB", "a100-80gb"),
        ("rtx4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("2080ti", "rtx-2080-ti"),
        ("a10", "a10"),
        ("l4", "l4"),
        ("h100", "h100"),
        ("H100 80GB", "h100"),
        ("mi300x", "mi300x"),
        # as torch.cuda.get_device_name says them
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_card_is_found_however_it_is_written(name, found):
    assert find_gpu(name) is GPUS[found]


def test_every_card_is_found_by_its_key_and_by_its_title():
    for key, gpu in GPUS.items():
        assert gpu.name == key
        assert find_gpu(key) is gpu
        assert find_gpu(gpu.title) is gpu


@pytest.mark.parametrize(
    ("name", "candidates"),
    [("a100", "a100-40gb, a100-80gb"), ("V100", "v100-16gb, v100-32gb")],
)
def test_a_name_of_several_cards_lists_them(name, candidates):
    with pytest.raises(GpuError, match=f"^GPU '{name}' fits several: {candidates}"):
        find_gpu(name)


def test_a_misspelt_card_is_answered_with_near_names():
    with pytest.raises(GpuError, match=r"^GPU 'rtx 4091' is not .* near names: rtx-4090, "):
        find_gpu("rtx 4091")


@pytest.mark.parametrize("name", ["A100-PCIE-40GB", "a10g"])
def test_a_kindred_card_is_not_taken_for_the_one_asked_for(name):
    with pytest.raises(GpuError, match=r"near names: .*a10"):
        find_gpu(name)


@pytest.mark.parametrize("name", ["", "abacus", "NVIDIA"])
def test_a_name_like_no_card_is_answered_with_all(name):
    with pytest.raises(GpuError, match=f"not in the catalogue; known: {', '.join(GPUS)}"):
        find_gpu(name)


def test_cards_stand_by_capacity():
    capacities = [gpu.memory_bytes for gpu in GPUS.values()]
    assert capacities == sorted(capacities)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_capacity_is_somewhat_less_than_what_is_sold(gpu):
    sold = next(int(word[:-2]) for word in gpu.title.split() if word.endswith("GB"))
    assert 0.91 * sold * GIB < gpu.memory_bytes < sold * GIB
    assert 100 * MIB < gpu.context_bytes < 0.03 * gpu.memory_bytes


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_figure_says_where_it_is_from(gpu):
    assert "whitepaper" in gpu.source or "datasheet" in gpu.source
    assert gpu.memory_source
    assert gpu.context_source
    other = gpu.context_source.removeprefix("taken from ").split(",")[0]
    if other in GPUS:
        assert gpu.context_bytes == GPUS[other].context_bytes


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_rates_follow_from_the_chip(gpu):
    units, clock, cores, per_cycle, core_clock, bits, gbits = CHIPS[gpu.name]
    rates = gpu.matrix_flops_per_second
    assert rates["float32"] == pytest.approx(units * 2 * clock * GB, rel=0.01)
    assert rates["float16"] == pytest.approx(cores * per_cycle * core_clock * GB, rel=0.015)
    assert gpu.bandwidth_bytes_per_second == pytest.approx(bits * gbits / 8 * GB, rel=0.02)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_formats_are_those_of_the_generation(gpu):
    before_ampere = gpu.name in ("t4", "v100-16gb", "v100-32gb", "rtx-2080-ti")
    assert gpu.native_dtypes == ("float32", "float16", "bfloat16")[: 2 if before_ampere else 3]
    assert tuple(gpu.matrix_flops_per_second) == gpu.native_dtypes
    assert (gpu.tf32_flops_per_second is None) == before_ampere
    if not before_ampere:
        assert gpu.flops_per_second("bfloat16") == gpu.flops_per_second("float16")
        assert gpu.tf32_flops_per_second == pytest.approx(
            gpu.flops_per_second("float16") / 2, rel=0.03
        )


def test_a_format_the_card_lacks_is_as_fast_as_float32():
    assert find_gpu("t4").flops_per_second("bfloat16") == 8.1 * TERA
    assert find_gpu("t4").flops_per_second("float16") == 65 * TERA
    assert find_gpu("a100-40gb").flops_per_second("float64") == 19.5 * TERA


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("v100-32gb", 8_519_680),
        ("a100-40gb", 8_519_680),
        ("rtx-4090", 8_519_680),
        ("h100", 33_554_432),
        ("b200", 33_554_432),
        ("rtx-5090", 33_554_432),
        ("mi300x", 134_217_728),
    ],
)
def test_the_workspace_of_cublas(name, size):
    assert find_gpu(name).cublas_workspace_bytes == size


def test_a_card_can_be_a_key_and_be_changed():
    gpu = find_gpu("l4")
    assert {gpu: 1}[gpu] == 1
    assert replace(gpu, memory_bytes=1).memory_bytes == 1


@pytest.mark.real_data
def test_capacity_and_context_are_those_of_the_messages():
    """The largest rest outside the allocator, of processes without other CUDA libraries."""
    if not MESSAGES.is_file():
        pytest.skip("the out-of-memory messages are not in ../shared/groundtruth")
    cards = {
        "T4": "t4",
        "V100-32GB": "v100-32gb",
        "RTX 4090": "rtx-4090",
        "RTX 3090": "rtx-3090",
        "A100-40GB": "a100-40gb",
        "L40S/A40-class (44.52)": "l40s",
        "RTX A6000 class (47.53)": "rtx-a6000",
        "H200": "h200",
        "RTX 5090": "rtx-5090",
        "RTX 2080 Ti": "rtx-2080-ti",
    }
    with MESSAGES.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu_guess_from_capacity"] in cards]
    for guess, key in cards.items():
        of_card = [row for row in rows if row["gpu_guess_from_capacity"] == guess]
        plain = [row for row in of_card if not row["note"] and "libs" not in row["source"]]
        capacity = median(float(row["total_capacity_GiB"]) for row in of_card)
        assert GPUS[key].memory_bytes == pytest.approx(capacity * GIB, rel=0.004)
        outside = max(int(row["non_pytorch_MiB"]) for row in plain)
        assert GPUS[key].context_bytes == outside * MIB


@pytest.mark.parametrize("name", ["h20", "l40", "rtx-409", "a10g", "100", "v10"])
def test_a_part_of_a_number_is_no_card(name):
    """An H20 is no H200: a name that goes on with a digit or a letter is another card."""
    with pytest.raises(GpuError, match=name):
        find_gpu(name)
