"""The tables of notebook 08: the layers there are, the choices as predicted and as found."""

from statistics import fmean

from torch import nn

from labkit.captions import verdict_words
from labkit.gradients import linear_layers
from labkit.lora_candidates import Choice, LoraStudy
from labkit.lora_words import measured_peak, speed
from labkit.report import Comparison, format_bytes

LAYERS = ("Linear layer", "Inputs", "Outputs", "Layers that have one")
PREDICTED = ("Choice", "LoRA parameters", "Predicted peak here", "On the card", "Does it fit")
FOUND = ("Choice", "LoRA parameters", "Predicted less measured", "Peak", "Speed", "Macro-F1")


def layers_table(model: nn.Module) -> str:
    """The linear layers of a model, with what the size of their LoRA matrices follows from."""
    found: dict[tuple[str, int, int], int] = {}
    for (_, kind), module in linear_layers(model).items():
        row = (kind, *in_out(module))
        found[row] = found.get(row, 0) + 1
    rows = [(kind, f"{n:,}", f"{m:,}", str(times)) for (kind, n, m), times in found.items()]
    return _table(LAYERS, rows)


def in_out(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, in PEFT's wrapper or not."""
    linear = getattr(module, "base_layer", module)
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    return tuple(linear.weight.shape)  # a Conv1D's weight lies the other way round


def predicted_table(study: LoraStudy) -> str:
    """The choices as they were predicted, here and on the card."""
    rows = [
        (
            choice.name,
            f"{choice.lora_parameters:,}",
            _peak(choice.comparison.predicted.get("here")),
            _peak(choice.comparison.predicted.get("card")),
            _verdict(choice.comparison.predicted.get("card")),
        )
        for choice in study.choices
    ]
    return _table(PREDICTED, rows)


def found_table(study: LoraStudy) -> str:
    """The choices as they were measured."""
    rows = [
        (
            choice.name,
            f"{choice.lora_parameters:,}",
            _error(choice),
            format_bytes(measured_peak(choice.report)),
            speed(choice.comparison),
            f"{fmean(choice.macro_f1):.3f}" if choice.macro_f1 else "not trained",
        )
        for choice in study.choices
    ]
    return _table(FOUND, rows)


def _peak(predicted: Comparison | None) -> str:
    memory = predicted and predicted.after.memory
    return format_bytes(memory.peak_allocated_bytes) if memory else "no prediction"


def _verdict(predicted: Comparison | None) -> str:
    return verdict_words(predicted.after) if predicted else "no prediction"


def _error(choice: Choice) -> str:
    here, measured = choice.comparison.predicted.get("here"), measured_peak(choice.report)
    if here is None or measured is None:
        return "not measured"
    error = here.after.memory.peak_allocated_bytes - measured
    return f"{'−' if error < 0 else '+'}{format_bytes(abs(error))}" if error else "exact"


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
