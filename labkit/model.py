"""The model that is trained: a transformers classifier with LoRA matrices and a new head."""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from labkit.dropout import use_fast_dropout
from labkit.hub import hub_reachable
from labkit.model_source import ModelError, ModelSource
from labkit.packed_model import ATTENTION, check_can_pack
from labkit.precision import Precision
from labkit.recipe import Recipe

logger = logging.getLogger(__name__)


def build_model(
    recipe: Recipe, source: ModelSource, precision: Precision, *, pad_token_id: int
) -> nn.Module:
    """A LoRA classifier with two labels, on the current default device.

    Args:
        pad_token_id: The tokenizer's; without it a classifier refuses batches above one.

    Raises:
        ModelError: ``lora_targets`` names no layer, there is no head to train, the attention
            implementation is not installed, or the weights do not load.
    """
    torch.manual_seed(recipe.seed)
    config = copy.deepcopy(source.config)
    if source.weights_from is not None and config.num_labels != 2:
        raise ModelError(
            f"model {source.name}: its head has {config.num_labels} labels, and the lab trains "
            "2; save the model without its head, or with num_labels=2."
        )
    config.num_labels = 2
    text_config = config.get_text_config()  # the config itself unless it nests others
    text_config.pad_token_id = pad_token_id
    config.use_cache = False  # training reads no key-value cache; leaving it on keeps one alive
    if pad_token_id >= text_config.vocab_size:
        raise ModelError(
            f"model {source.name}: its vocabulary of {text_config.vocab_size} has no row for "
            f"the tokenizer's pad token {pad_token_id}; use the model's own tokenizer."
        )
    packed = recipe.padding == "none"
    attention = ATTENTION if packed else recipe.attention
    options = {"dtype": precision.weights, "attn_implementation": attention}
    try:
        if source.weights_from is None:
            base = AutoModelForSequenceClassification.from_config(config, **options)
        else:
            base = _load(source, config, options)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"model {source.name} cannot be built: {reason}") from error
    if packed:
        check_can_pack(base, source.name, last_token_only=recipe.last_token_only)
    base.train()  # from_pretrained returns evaluation mode: no dropout, no recomputing
    return _add_lora(base, recipe, source.name)


def _load(source: ModelSource, config: PretrainedConfig, options: dict) -> nn.Module:
    """The model with its weights; those that were not in its files are named, but for a head.

    A backbone without a head is what is wanted, so transformers' report of it would only alarm.
    """
    with quiet_transformers():
        base, loaded = AutoModelForSequenceClassification.from_pretrained(
            source.weights_from, config=config, use_safetensors=True, **options,
            local_files_only=Path(source.weights_from).is_dir() or not hub_reachable(),
            output_loading_info=True,
        )  # fmt: skip
    inside = f"{base.base_model_prefix}."
    if missing := sorted(name for name in loaded["missing_keys"] if name.startswith(inside)):
        logger.warning(
            "%s: weights that are not in its files begin at random: %d, the first %s.",
            source.name, len(missing), missing[0],
        )  # fmt: skip
    return base


def _add_lora(base: nn.Module, recipe: Recipe, name: str) -> nn.Module:
    linear = {
        path.rpartition(".")[2]
        for path, module in base.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    if missing := [target for target in recipe.lora_targets if target not in linear]:
        raise ModelError(
            f"lora_targets: {name} has no linear layer named {', '.join(missing)}; it has "
            f"{', '.join(sorted(linear))}."
        )
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(recipe.lora_targets),
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.24 for the old name of a flag on every wrap
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        model = get_peft_model(base, config)
    if recipe.fast_dropout:
        use_fast_dropout(model)
    for parameter in trained_parameters(model).values():
        parameter.data = parameter.data.float()  # 16-bit steps are too small to add up
    for module in model.modules():
        if type(module).__name__ == "ModulesToSaveWrapper":
            module.register_forward_pre_hook(_to_head_dtype)
    if not any(parameter_kind(path) == "head" for path, _ in model.named_parameters()):
        raise ModelError(
            f"model {name} has no classification head that PEFT would train and save."
        )
    return model


def _to_head_dtype(head: nn.Module, inputs: tuple) -> tuple:
    """Hand a float32 head float32 activations, whatever format the base computes in."""
    weight = next(head.modules_to_save.parameters())
    return (inputs[0].to(weight.dtype), *inputs[1:])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' bars about files, and its report of what a file did not hold."""
    had_bar = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()


def parameter_kind(name: str) -> str:
    """``lora``, ``head``, ``base`` or ``unused`` (the untrained copy of the head)."""
    if "lora_" in name:
        return "lora"
    if ".modules_to_save." in name:
        return "head"
    return "unused" if ".original_module." in name else "base"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The LoRA matrices and the head that get an update, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter_kind(name) in ("lora", "head") and parameter.requires_grad
    }


def keep_base_gradients(model: nn.Module) -> None:
    """Ask for a gradient of every base parameter, as code does that forgets to freeze them.

    PEFT freezes the base by itself, so the honest baseline has to undo that. The optimizer
    never sees these parameters: their gradients are computed and kept, and nothing else.
    """
    for name, parameter in model.named_parameters():
        if parameter_kind(name) == "base":
            parameter.requires_grad_(True)


def recompute_layers(model: nn.Module, every: int) -> None:
    """Keep only the input of every ``every``-th layer and compute the rest again in backward.

    Non-reentrant checkpointing needs no input that requires a gradient, so the hook that
    transformers installs for it on the embedding is taken off: it would compute a gradient
    nobody reads, and ``torch.compile(fullgraph=True)`` refuses it.
    """
    base = model.get_base_model()
    enable = getattr(base, "activation_checkpointing_enable", None)
    if enable is None:  # its name before transformers 5.23
        enable = base.gradient_checkpointing_enable
    enable({"use_reentrant": False}, every_n_layers=every)
    base.disable_input_require_grads()


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that checkpointing can recompute."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
