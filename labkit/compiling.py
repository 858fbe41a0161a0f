"""torch.compile: wrapping a model, counting graphs, and a cache that says what is cold."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from labkit.recipe import Recipe


class CompilerMissing(RuntimeError):
    """torch.compile has nothing to compile with on this machine."""


def compile_model(model: nn.Module, recipe: Recipe, device: torch.device) -> Callable:
    """The model's forward, compiled if the recipe says so; compiling waits for the first call.

    The LoRA model is wrapped, not the base: compiled first, its parameters get other names
    and a saved adapter no longer loads (huggingface/peft #2957).
    """
    if recipe.compile == "none":
        return model
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise CompilerMissing(
                "torch.compile needs a C++ compiler and finds none (g++ on Linux, clang on "
                "macOS, cl on Windows)"
            ) from None
    # without padding hardly two batches have the same number of tokens
    dynamic = True if recipe.padding == "none" else None
    return torch.compile(model, mode=recipe.compile, dynamic=dynamic)


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@contextmanager
def compile_cache(folder: Path | None, *, cold: bool) -> Iterator[None]:
    """Keep what Inductor compiles below ``folder``, not where earlier work left its own.

    Seconds of a first step mean something only when it is known what was compiled before.

    Args:
        folder: A temporary one if None.
        cold: Begin with an empty cache.
    """
    own = Path(tempfile.mkdtemp()) if folder is None else folder / "inductor"
    if cold:
        shutil.rmtree(own, ignore_errors=True)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    try:
        yield
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
        if folder is None:
            shutil.rmtree(own, ignore_errors=True)
