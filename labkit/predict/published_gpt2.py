"""GPT-2 with 124M weights as a book writes it out, and the step it is trained with.

What is kept for backward depends on how attention, norm and GELU are spelled, so they are
spelled as in the published script, from parts and not with PyTorch's fused functions.

Source:
    rasbt/LLMs-from-scratch, ch05/10_llm-training-speed, 00_orig.py and the steps 1 to 5 of its
    README.
"""

import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional

LAYERS, HEADS, DIM = 12, 12, 768
VOCABULARY, BATCH, TOKENS = 50257, 8, 1024
DROPOUT = 0.1


def gpt2(dtype: torch.dtype):
    """The script as it begins, in float32, or after its fifth step, in bfloat16.

    The first four steps make the mask where it is used and take the fused AdamW; the fifth
    moves the model to the card and then converts it there.
    """

    def build():
        improved = dtype != torch.float32
        model = _Gpt2(mask_is_kept=not improved)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=5e-4, weight_decay=0.1, fused=improved or None
        )

        def loss_of_batch():
            ids, targets = (torch.zeros(BATCH, TOKENS, dtype=torch.int64) for _ in range(2))
            logits = model(ids)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def train():
            for tensor in model.parameters():  # what .to(dtype) does on the card
                tensor.data = tensor.data.to(dtype)
            while True:
                optimizer.zero_grad()
                loss = loss_of_batch()
                loss.backward()
                optimizer.step()
                yield

        return model, optimizer, partial(next, train())

    return build


class _Gpt2(nn.Module):
    def __init__(self, *, mask_is_kept: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TOKENS, DIM)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(_Block(mask_is_kept) for _ in range(LAYERS)))
        self.norm = _Norm()
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids):  # (B, T) → (B, T, vocabulary)
        tokens = self.tokens(ids)
        positions = self.positions(torch.arange(ids.shape[1]))
        hidden = tokens + positions
        hidden = self.dropout(hidden)
        hidden = self.blocks(hidden)
        return self.head(self.norm(hidden))


class _Block(nn.Module):
    def __init__(self, mask_is_kept: bool) -> None:
        super().__init__()
        self.attention = _Attention(mask_is_kept)
        self.feed_forward = nn.Sequential(
            nn.Linear(DIM, 4 * DIM), _Gelu(), nn.Linear(4 * DIM, DIM)
        )
        self.norm_1, self.norm_2 = _Norm(), _Norm()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden):  # (B, T, D)
        hidden = self.dropout(self.attention(self.norm_1(hidden))) + hidden
        return self.dropout(self.feed_forward(self.norm_2(hidden))) + hidden


class _Attention(nn.Module):
    def __init__(self, mask_is_kept: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(DROPOUT)
        future = torch.ones(TOKENS, TOKENS).triu(1) if mask_is_kept else None
        self.register_buffer("future", future)

    def forward(self, hidden):  # (B, T, D)
        batch, tokens, _ = hidden.shape
        keys, queries, values = self.key(hidden), self.query(hidden), self.value(hidden)
        keys, values, queries = (
            part.view(batch, tokens, HEADS, -1).transpose(1, 2)
            for part in (keys, values, queries)
        )
        scores = queries @ keys.transpose(2, 3)  # (B, H, T, T)
        if self.future is None:
            future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        else:
            future = self.future.bool()[:tokens, :tokens]
        scores.masked_fill_(future, -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch, tokens, DIM)
        return self.out(context)


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))

    def forward(self, hidden):
        mean = hidden.mean(dim=-1, keepdim=True)
        variance = hidden.var(dim=-1, keepdim=True, unbiased=False)
        normed = (hidden - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class _Gelu(nn.Module):
    def forward(self, hidden):
        root = math.sqrt(2 / math.pi)
        return 0.5 * hidden * (1 + torch.tanh(root * (hidden + 0.044715 * hidden.pow(3))))
