"""The steps whose bytes were published, written in plain PyTorch as they were run.

A loop is a generator that yields after each step: what its variables hold stays alive during
the next step, as it does in the script.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PhiConfig

from labkit.predict.published_gpt2 import gpt2
from labkit.predict.published_liger import cross_entropy, rms_norm

LORA = {"target_modules": ["q_proj", "v_proj"], "task_type": TaskType.CAUSAL_LM}


@dataclass(frozen=True)
class PublishedStep:
    """A step for ``predict_step``, and what has to be known of the comparison."""

    build: Callable
    warm_up_bytes: int = 0
    note: str = ""


def find_step(row_id: str, tokens: int | None) -> PublishedStep:
    """The step of a published row.

    Args:
        tokens: The length of peft's batches, which was not published.

    Raises:
        KeyError: There is no step for this row.
    """
    match row_id.split("-"):
        case ["liger", "cross_entropy", vocabulary]:
            return PublishedStep(cross_entropy(int(vocabulary[1:])))
        case ["liger", "rms_norm", width]:
            return PublishedStep(rms_norm(int(width[1:])))
        case ["gpt2", "fp32"]:
            return PublishedStep(gpt2(torch.float32))
        case ["gpt2", "bf16"]:
            return PublishedStep(gpt2(torch.bfloat16))
        case ["peft", *method]:
            rank = 32 if method == ["lora", "r32"] else None
            note = f"batches of {tokens} tokens, fitted on peft-lora-r32"
            return PublishedStep(_peft(rank, tokens), _weight_bytes(_llama), note)
        case ["litgpt", "phi15", "mb1"]:
            note = "transformers' Phi with a fused GELU, for litgpt's own model"
            return PublishedStep(_litgpt(), note=note)
    raise KeyError(row_id)


def _llama():
    """The geometry of Llama-3.2-3B."""
    config = LlamaConfig(
        hidden_size=3072, num_hidden_layers=28, intermediate_size=8192, vocab_size=128256,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _with_lora(model: nn.Module, config: LoraConfig, **options) -> nn.Module:
    """LoRA matrices, in float32 unless the options say otherwise."""
    with warnings.catch_warnings():
        # peft asks transformers under a name that transformers has since given up
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(model, config, **options)


def _weight_bytes(make: Callable) -> int:
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in make().parameters())


def _peft(rank: int | None, tokens: int):
    """Training on batches of 4, the longest of which comes first after the cache was emptied.

    Buckets of 20 batches are sorted by length, longest first, and the cache is emptied after
    every tenth batch.

    Args:
        rank: Of LoRA; None trains all weights.

    Source:
        huggingface/peft, method_comparison/MetaMathQA, run.py and utils.py.
    """

    def build():
        model = _llama()
        if rank:
            model = _with_lora(model, LoraConfig(r=rank, lora_alpha=64, **LORA))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

        def train():
            while True:
                ids, mask = torch.zeros(2, 4, tokens, dtype=torch.int64).unbind()
                labels = ids.clone()
                optimizer.zero_grad()
                outputs = model(
                    input_ids=ids, attention_mask=mask, labels=labels,
                    num_items_in_batch=mask.numel(),
                )  # fmt: skip
                loss = outputs.loss
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                torch.cuda.empty_cache()
                yield

        return model.train(), optimizer, partial(next, train())

    return build


def _litgpt():
    """LoRA on the longest sample, with the logits and the loss in chunks of 128 tokens.

    Source:
        Lightning-AI/litgpt, finetune/lora.py, lit_gpt/utils.py of October 2023.
    """

    def build():
        config = PhiConfig(
            hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, vocab_size=51200,
            intermediate_size=8192, partial_rotary_factor=0.5, hidden_act="gelu_pytorch_tanh",
            resid_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        phi = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, **LORA)
        model = _with_lora(phi, lora, autocast_adapter_dtype=False).train()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01)

        def train():
            while True:
                ids, targets = torch.zeros(2, 1, 1044, dtype=torch.int64).unbind()
                hidden = phi.model(input_ids=ids).last_hidden_state
                logits = [phi.lm_head(chunk) for chunk in hidden.split(128, dim=1)]
                del hidden  # a variable of the model's forward
                logits[-1] = logits[-1][:, :-1]
                loss = _chunked_loss(logits, targets[:, 1:])
                (loss / 128).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

        return model, optimizer, partial(next, train())

    return build


def _chunked_loss(logits: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    losses = [
        functional.cross_entropy(chunk.flatten(0, 1), target.flatten(), reduction="none")
        for chunk, target in zip(logits, targets.split(128, dim=1), strict=True)
    ]
    return torch.cat(losses).sum() / targets.numel()
