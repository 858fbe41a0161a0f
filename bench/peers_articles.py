"""The recipes of three articles on fine-tuning Qwen3-Embedding, written anew from their facts.

- ``article_four_steps``: 《Qwen3-Embedding-0.6B真实反馈：训练显存占用与优化建议》.
  Texts cut and padded to 64 tokens, base frozen, checkpointing, autocast with a gradient
  scaler, accumulation over four parts.
- ``article_padded_160``: 《Qwen3-Embedding-0.6B提速秘籍：训练效率翻倍技巧公开》.
  Every row padded to 160 tokens in a tensor made before training, checkpointing, torch.compile
  where there is a card, no workers.
- ``article_checkpointing``: 《Qwen3-Embedding-4B如何省显存？梯度检查点技术实战》.
  Checkpointing and autocast, rows padded to the longest of their batch, cut at 8,192 tokens.

All three are on CSDN. None is copied: what is here are their settings, in a loop of our own.
Each repair is a sentence in the output.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from peers_measure import (
    PEAK_BATCHES,
    Contender,
    PeakRecorder,
    Task,
    need_bfloat16,
    need_compiler,
)
from torch.utils.data import DataLoader, TensorDataset

from labkit.model import recompute_layers

ON_A_CPU = "It moves everything to CUDA; here it stays on the CPU, and memory is not pinned."
AUTOCAST = (
    "Its autocast is CUDA's, in float16; here it is the CPU's, in bfloat16, which needs no "
    "gradient scaler, so the scaler is disabled."
)
RENAMED = (
    "gradient_checkpointing_enable is deprecated; activation_checkpointing_enable is called."
)


@dataclass(frozen=True)
class ArticleRecipe:
    """What an article trains with."""

    settings: str
    max_length: int
    pad_to_length: bool
    tensors: bool = False  # made before training; otherwise rows are tokenised as they are read
    autocast: bool = False
    parts: int = 1
    compiled: bool = False
    repairs: tuple[str, ...] = ()


PADDED_160 = ArticleRecipe(
    "float32, every row padded to 160 in cached tensors, checkpointing",
    max_length=160,
    pad_to_length=True,
    tensors=True,
    repairs=(
        ON_A_CPU,
        RENAMED,
        "prefetch_factor without workers raises ValueError; it is left out.",
        "It compiles only where there is CUDA, so here it does not.",
        "It names no number format, which gave float32 when it was written; here dtype says "
        "float32, because transformers 5 would take the checkpoint's.",
    ),
)

RECIPES = {
    "article_four_steps": ArticleRecipe(
        "bfloat16 autocast, rows tokenised as read and padded to 64, checkpointing, 4 parts",
        max_length=64,
        pad_to_length=True,
        autocast=True,
        parts=4,
        repairs=(
            ON_A_CPU,
            AUTOCAST,
            RENAMED,
            "requires_grad_(False) on the base model freezes LoRA as well, and the loop after "
            "it the head: nothing could be trained. PEFT has frozen the base already, so both "
            "are left out.",
            "It does not show how rows are read: each is tokenised and padded when it is read, "
            "which article_padded_160 calls usual.",
            "encode_plus, the usual call for that, is gone from transformers 5; the tokenizer "
            "itself is called.",
        ),
    ),
    "article_padded_160": PADDED_160,
    "article_padded_160_compiled": ArticleRecipe(
        "the same, compiled: max-autotune, one graph, no dynamic shapes",
        max_length=160,
        pad_to_length=True,
        tensors=True,
        compiled=True,
        repairs=(
            *PADDED_160.repairs[:3],
            "It compiles only where there is CUDA; here that is dropped, and it compiles.",
            "One graph with checkpointing fails on a warning about use_cache and on the hook "
            "that makes the embedding's output require a gradient; use_cache is false and the "
            "hook is taken off.",
        ),
    ),
    "article_checkpointing": ArticleRecipe(
        "bfloat16 autocast, padded to the longest of a batch, checkpointing",
        max_length=8192,
        pad_to_length=False,
        autocast=True,
        repairs=(
            ON_A_CPU,
            AUTOCAST,
            RENAMED,
            "from_pretrained(gradient_checkpointing=True) raises TypeError; the method is "
            "called.",
            "Its loss is the mean of the last hidden state, which trains nothing of use; here "
            "it is the cross entropy of a head, as for all.",
            "DeepSpeed has nothing to share out in one process, and FlashAttention 2 needs "
            "CUDA; sdpa is used and DeepSpeed left out.",
            "Its DeepSpeed file computes two rows at a time and says nothing of accumulation; "
            "here the batch is computed whole, which is faster.",
        ),
    ),
}


class PairRows(torch.utils.data.Dataset):
    """Pairs that are tokenised, one by one, when they are read."""

    def __init__(self, task: Task, recipe: ArticleRecipe) -> None:
        self.task, self.recipe = task, recipe

    def __len__(self) -> int:
        return len(self.task.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        pairs, recipe = self.task.pairs, self.recipe
        encoded = self.task.tokenizer(
            pairs.first[index],
            pairs.second[index],
            truncation="longest_first",
            max_length=recipe.max_length,
            padding="max_length",
            return_tensors="pt",
        )
        ids, mask = encoded["input_ids"].squeeze(0), encoded["attention_mask"].squeeze(0)
        return ids, mask, pairs.labels[index]


class Article(Contender):
    """An article's recipe in a plain loop.

    Args:
        exact: In float32 and not compiled, to compare losses.
    """

    def __init__(self, name: str, task: Task, *, exact: bool = False) -> None:
        self.recipe, self.exact = RECIPES[name], exact
        super().__init__(name, task, self.recipe.settings, self.recipe.repairs)
        self.compiles = self.recipe.compiled and not exact

    @property
    def family(self) -> str:
        """The article, compiled or not."""
        return self.name.removesuffix("_compiled")

    def build(self) -> None:
        """Model, AdamW and a loader that shuffles."""
        recipe, task = self.recipe, self.task
        self.autocast = contextlib.nullcontext()
        if recipe.autocast and not self.exact:
            need_bfloat16(task)
            self.autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        if self.compiles:
            need_compiler()
        self.model = task.model()
        if recipe.compiled:
            recompute_layers(self.model, 1)  # without the hook that one graph cannot hold
        else:
            self.model.get_base_model().activation_checkpointing_enable()
        self.forward = self.model
        if self.compiles:
            self.forward = torch.compile(
                self.model, mode="max-autotune", fullgraph=True, dynamic=False
            )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=task.recipe.learning_rate)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.loader = self._loader()
        self.batches = self._stream()

    def _loader(self) -> DataLoader:
        recipe, task = self.recipe, self.task
        options = {"batch_size": -(-task.recipe.batch_size // recipe.parts), "shuffle": True}
        if not recipe.pad_to_length:
            return DataLoader(range(len(task.pairs)), collate_fn=self._longest, **options)
        dataset = PairRows(task, recipe)
        if recipe.tensors:
            ids, masks, labels = zip(*(dataset[i] for i in range(len(dataset))), strict=True)
            dataset = TensorDataset(torch.stack(ids), torch.stack(masks), torch.tensor(labels))
        return DataLoader(dataset, **options)

    def _longest(self, chosen: list[int]) -> list[torch.Tensor]:
        pairs = self.task.pairs
        encoded = self.task.tokenizer(
            [pairs.first[i] for i in chosen],
            [pairs.second[i] for i in chosen],
            truncation="longest_first",
            max_length=self.recipe.max_length,
            padding=True,
            return_tensors="pt",
        )
        labels = torch.tensor([pairs.labels[i] for i in chosen])
        return [encoded["input_ids"], encoded["attention_mask"], labels]

    def _stream(self) -> Iterator[list]:
        """The parts of each step, without end."""
        while True:
            epoch = iter(self.loader)
            while parts := list(islice(epoch, self.recipe.parts)):
                yield parts

    def _advance(self) -> None:
        self._step(next(self.batches))

    def _step(self, parts: list) -> None:
        total = 0.0
        for ids, mask, labels in parts:
            with self.autocast:
                output = self.forward(input_ids=ids, attention_mask=mask, labels=labels)
                loss = output.loss / len(parts)
            self.scaler.scale(loss).backward()
            total += loss.item()
            del loss, output
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.seen.append(([mask for _, mask, _ in parts], total))

    def peak(self) -> int:
        """As the base class says; the parts that are waiting belong to the batch."""
        steps = islice(self._stream(), PEAK_BATCHES)
        largest = max(steps, key=lambda parts: sum(part[0].numel() for part in parts))
        self._step(largest)
        recorder = PeakRecorder(
            self.model, self.optimizer, [t for part in largest for t in part]
        )
        self._step(largest)
        return recorder.stop()

    def close(self) -> None:
        """Drop the model."""
        del self.model, self.forward, self.optimizer, self.loader, self.batches
