"""Measures what training optimisations do to the memory and speed of a LoRA step.

``import labkit as lab`` is all a notebook needs; the parts are imported when first used.
"""

import os
import warnings
from importlib import import_module

# Read by torch and tokenizers when they are loaded. The profiler's start and stop lines and its
# warning about frees of older blocks (memory.py deals with those) would fill the notebooks.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that wait for each other spin by default. Where another process, or another guest of
# the same host, takes one of the cores, they spin for its whole time slice: steps then last a
# second at random. Those that sleep at once are slow, too: a step is hundreds of short loops.
# So they spin for some microseconds. bench/wait_policy.py shows the difference on any machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # what GNU's library reads, not LLVM's
# Progress bars are text under papermill and offline; that widgets are missing is no news.
warnings.filterwarnings("ignore", "IProgress not found")

_HOME = {
    "recipe": ("PROFILES", "Recipe", "ladder", "profile_named"),
    "report": ("Comparison", "Report", "format_bytes"),
    "data": ("read_pairs",),
    "measure": ("compare",),
    "subsets": ("pairs_for_training",),
    "quality": ("evaluate", "interval"),
    "training": ("Schedule", "train"),
    "predict.prediction": ("predict_step",),
    "records": ("load_record", "load_records"),
    "plots": ("plot_peaks", "plot_phases", "plot_step_times", "plot_timeline"),
    "padding_plots": ("plot_padding",),
    "overview": ("plot_ladder",),
    "forecast_plots": ("plot_forecast", "plot_forecast_ladder"),
    "explorer_plots": ("plot_explorer",),
    "lora_plots": ("plot_gradients", "plot_lora_costs", "plot_lora_quality"),
    "cells": ("show_source",),
    "notebook": ("open_ladder", "open_run"),
    "explorer": ("explore",),
    "exploration": ("open_explorer",),
    "lora_choice": ("open_lora_choice",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str):
    if name in _MODULE_OF:
        return getattr(import_module(f"labkit.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
