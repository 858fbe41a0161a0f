import pytest
import torch

from labkit import precision
from labkit.precision import choose_precision, product_seconds
from labkit.recipe import Recipe

CPU = torch.device("cpu")


def pretend(monkeypatch, *native):
    monkeypatch.setattr(precision, "has_native", lambda dtype, device: dtype in native)


def test_a_native_format_is_used_as_asked(monkeypatch):
    pretend(monkeypatch, torch.float32, torch.bfloat16)
    chosen = choose_precision(Recipe(weights="bfloat16", autocast="bfloat16"), CPU)
    assert (chosen.weights, chosen.autocast) == (torch.bfloat16, torch.bfloat16)
    assert chosen.reason == ""


def test_without_instructions_float32_is_used_and_the_reason_is_given(monkeypatch):
    pretend(monkeypatch, torch.float32)
    chosen = choose_precision(Recipe(autocast="bfloat16"), CPU)
    assert chosen.autocast is None
    assert chosen.reason == (
        "autocast: bfloat16 was asked for, float32 is used, because this CPU has no "
        "instructions for bfloat16 and would imitate them slowly"
    )


def test_a_card_without_bfloat16_uses_float16(monkeypatch):
    pretend(monkeypatch, torch.float32, torch.float16)
    chosen = choose_precision(Recipe(autocast="bfloat16"), torch.device("cuda"))
    assert chosen.autocast == torch.float16
    assert "float16 is used" in chosen.reason


def test_imitating_can_be_asked_for(monkeypatch):
    pretend(monkeypatch, torch.float32)
    chosen = choose_precision(Recipe(autocast="float16"), CPU, emulate=True)
    assert (chosen.autocast, chosen.reason) == (torch.float16, "")


def test_emulated_bfloat16_of_a_card_does_not_count(monkeypatch):
    asked = []

    def is_supported(including_emulation=True):
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert not precision.has_native(torch.bfloat16, torch.device("cuda"))
    assert asked == [False]


@pytest.mark.parametrize(("avx512_bf16", "amx"), [(True, False), (False, True), (False, False)])
def test_a_cpu_has_bfloat16_with_avx512_bf16_or_amx(monkeypatch, avx512_bf16, amx):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert precision.has_native(torch.bfloat16, CPU) == (avx512_bf16 or amx)


def test_the_cost_of_imitating_is_measured():
    seconds = product_seconds([torch.float32, torch.bfloat16], CPU)
    assert list(seconds) == ["float32", "bfloat16"]
    assert all(value > 0 for value in seconds.values())
