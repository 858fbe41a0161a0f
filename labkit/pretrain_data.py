"""What the lab's own small model is trained on: pairs of the grammar that are not shipped."""

from collections.abc import Iterator

import torch

from labkit.data import DATA_FOLDER, read_pairs
from labkit.synthetic import PairMaker
from labkit.tokenizer import encode
from labkit.tokens import Batch, collate

SPLITS = ("train", "dev", "test")
BATCH_PAIRS = 64
MAX_LENGTH = 64
CHUNK_PAIRS = 4096  # pairs of one seed of the grammar; batches of like lengths are made of them
CORPORA_PER_SEED = 100_000  # seeds of the grammar that one seed of the training may use
CIPHER_SHARE = 0.25  # of the batch's pairs


def training_batches(tokenizer, seed: int) -> Iterator[Batch]:
    """Batches without end, of pairs of like lengths, some of them in cipher."""
    generator = torch.Generator().manual_seed(seed)
    for pairs in training_pairs(seed):
        first, second = ([pair[name] for pair in pairs] for name in ("sentence1", "sentence2"))
        rows = [torch.tensor(row) for row in encode(tokenizer, first, second, MAX_LENGTH)]
        labels = torch.tensor([int(pair["label"]) for pair in pairs])
        by_length = torch.tensor(sorted(range(len(rows)), key=lambda i: len(rows[i])))
        chunks = by_length.split(BATCH_PAIRS)
        for place in torch.randperm(len(chunks), generator=generator).tolist():
            chosen = chunks[place]
            texts = [_encipher(rows[i], tokenizer, generator) for i in chosen.tolist()]
            yield collate(texts, labels[chosen], pad_id=tokenizer.pad_token_id, length=None)


def _encipher(row: torch.Tensor, tokenizer, generator: torch.Generator) -> torch.Tensor:
    """Every token but the special ones replaced by another, in a share of the rows."""
    if torch.rand((), generator=generator) >= CIPHER_SHARE:
        return row
    special = torch.tensor([tokenizer.pad_token_id, tokenizer.eos_token_id])
    ordinary = torch.arange(len(tokenizer))
    ordinary = ordinary[~torch.isin(ordinary, special)]
    key = torch.arange(len(tokenizer))
    key[ordinary] = ordinary[torch.randperm(len(ordinary), generator=generator)]
    return key[row]


def training_pairs(seed: int) -> Iterator[list[dict]]:
    """Chunks of new pairs without end, none of them a shipped one in either order."""
    shipped = shipped_pairs()
    for corpus in range(CORPORA_PER_SEED):
        # the shipped pairs are those of seed 0
        rows = PairMaker(1 + seed * CORPORA_PER_SEED + corpus).rows(CHUNK_PAIRS)
        yield [row for row in rows if _texts(row) not in shipped]


def shipped_pairs() -> set[frozenset[str]]:
    """The two texts of every pair of train, dev and test."""
    files = [read_pairs(DATA_FOLDER / "pairs" / f"{name}.jsonl") for name in SPLITS]
    return {
        frozenset(texts)
        for pairs in files
        for texts in zip(pairs.first, pairs.second, strict=True)
    }


def _texts(row: dict) -> frozenset[str]:
    return frozenset((row["sentence1"], row["sentence2"]))
