"""The small model that comes with the lab, trained from nothing on what comes with the lab.

A step costs the same whatever the weights are; a score does not. With ``qwen3-mini`` the lab
can measure scores without the network. Its training sees pairs of the grammar of
``labkit.synthetic``, made with other seeds than the shipped ones, and no other Chinese:

- Both texts of a pair are one sequence, as in fine-tuning: ``first END second END``.
- Next token: every token of the first text is predicted, and, where the second asks the same,
  every token of the second. That is what teaches a model to look back while it reads.
- Match: a linear head on the last END says whether the two ask the same. The head is thrown
  away when the model is saved; fine-tuning begins with a new one.
- Cipher: in a share of the pairs every token is replaced by another one, drawn from the whole
  vocabulary, the same for both texts. The grammar uses few of the vocabulary's tokens; this
  teaches the model to compare the others, too. It is not Chinese, and has no meaning.

So the model has seen the grammar, its labels included: a score on synthetic pairs says how
well a recipe recovers what is in the weights, not how well the model would learn the task.
No shipped pair is among those it was trained on, and nothing of any other corpus is.
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3Model

from labkit.data import DATA_FOLDER, DataError
from labkit.machine import installed_version
from labkit.model import quiet_transformers
from labkit.model_source import TRAINED_GEOMETRY, geometry
from labkit.pretrain_data import training_batches
from labkit.tokenizer import load_tokenizer
from labkit.tokens import Batch

STEPS = 2400
SEED = 1
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.05
MAX_GRADIENT_NORM = 1.0
RANDOM_CANDIDATES = 512  # tokens that the right one is told from, beside those of the batch


CARD = """\
---
license: apache-2.0
language: zh
---

# {name}

A small Qwen3 backbone of {parameters:,} parameters without a head, so that quality can be
measured without a network. It is no embedding model to use: it has seen one small invented
grammar, and nothing else.

{objective}

Made by `labkit data model --steps {steps} --seed {seed}`, with torch {torch} and transformers
{transformers}, from a grammar of SHA-256 `{grammar}`. The same command on the same
kind of machine gives the same bytes; elsewhere sums are rounded otherwise, and the weights
differ. The tokenizer is the one in `data/tokenizer`.

- `model.safetensors`, in bfloat16: sha256 `{sha256}`
- Licence: Apache-2.0, as all of the lab
"""


@dataclass
class Pretrained:
    """A trained backbone, and how its loss went."""

    model: Qwen3Model
    seed: int
    losses: list[float] = field(default_factory=list)  # of each step: next token plus match

    def save(self, folder: Path) -> Path:
        """Write config, weights in bfloat16 and a model card; returns the weights' file."""
        with quiet_transformers():
            self.model.to(torch.bfloat16).save_pretrained(folder)
        file = folder / "model.safetensors"
        card = CARD.format(
            name=TRAINED_GEOMETRY,
            parameters=self.model.num_parameters(),
            objective=inspect.cleandoc(__doc__).partition("\n\n")[2],
            steps=len(self.losses),
            seed=self.seed,
            grammar=_sha256(DATA_FOLDER / "pairs" / "grammar.toml"),
            torch=installed_version("torch"),
            transformers=installed_version("transformers"),
            sha256=_sha256(file),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        return file


def pretrain(
    steps: int = STEPS,
    seed: int = SEED,
    *,
    config: Qwen3Config | None = None,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> Pretrained:
    """Train a backbone from random weights; the same arguments give the same weights.

    Args:
        steps: Updates, at least 1; the learning rate falls to zero over them.
        seed: Of the weights, of the pairs and of their order.
        config: Another geometry than that of the shipped model.
        progress: Called after each update with its number and its loss.

    Raises:
        DataError: ``steps`` is below 1, or ``seed`` below 0.
    """
    check_arguments(steps, seed)
    tokenizer = load_tokenizer(TRAINED_GEOMETRY)
    config = config or geometry(TRAINED_GEOMETRY)
    config.pad_token_id = tokenizer.pad_token_id
    config._attn_implementation = "eager"  # the fastest one for short rows on a CPU
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, head = Qwen3Model(config), nn.Linear(config.hidden_size, 2)
        trained = Pretrained(model, seed)
        parameters = [*model.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
        for step, batch in zip(range(steps), training_batches(tokenizer, seed), strict=False):
            for group in optimizer.param_groups:
                warmed = min(1.0, (step + 1) / WARMUP_STEPS)
                group["lr"] = LEARNING_RATE * warmed * (1 - step / steps)
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(model, head, batch, end_id=tokenizer.eos_token_id)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            optimizer.step()
            trained.losses.append(loss.item())
            progress(step + 1, trained.losses[-1])
    return trained


def check_arguments(steps: int, seed: int) -> None:
    """Refuse, before anything is done, what ``pretrain`` cannot do.

    Raises:
        DataError: ``steps`` is below 1, or ``seed`` below 0.
    """
    for name, value, least in (("steps", steps, 1), ("seed", seed, 0)):
        if value < least:
            raise DataError(f"{name} must be at least {least}, not {value}.")


def _loss(model: Qwen3Model, head: nn.Module, batch: Batch, *, end_id: int) -> torch.Tensor:
    """Mean next-token loss plus mean match loss of a batch."""
    ids, mask = batch.input_ids, batch.attention_mask  # (B, T)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Padding stands to the right of every token that attends, so it needs no mask.
        hidden = model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, D)
        in_first = (ids == end_id).cumsum(1)[:, :-1] == 0
        told = (mask[:, 1:] > 0) & (in_first | (batch.labels[:, None] == 1))
        wanted = ids[:, 1:][told]
        others = torch.randint(model.config.vocab_size, (RANDOM_CANDIDATES,))
        candidates, places = torch.cat([wanted, others]).unique(return_inverse=True)
        logits = hidden[:, :-1][told] @ model.embed_tokens.weight[candidates].T
        matches = head(hidden[torch.arange(len(ids)), mask.sum(1) - 1])
    next_token = functional.cross_entropy(logits.float(), places[: len(wanted)])
    return next_token + functional.cross_entropy(matches.float(), batch.labels)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
