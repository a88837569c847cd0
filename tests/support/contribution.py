"""A small language model and one fixed batch of samples with unequal numbers of valid tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

VOCAB, WIDTH, HIDDEN, LENGTH = 11, 5, 10, 7
IGNORE = -100
NUM_SAMPLES = 23


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Toy(torch.nn.Module):
    """Embedding, two blocks, a head; vocabulary, width and hidden size divide by neither 3 nor 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids.flatten())
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def make_model(dtype: torch.dtype) -> Toy:
    torch.manual_seed(1)
    return Toy().to(torch.float64).to(dtype)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples with 0 to LENGTH valid tokens each."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (NUM_SAMPLES, LENGTH), generator=generator)
    targets = torch.randint(VOCAB, (NUM_SAMPLES, LENGTH), generator=generator)
    valid = torch.randint(LENGTH + 1, (NUM_SAMPLES, 1), generator=generator)
    return ids, targets.masked_fill(torch.arange(LENGTH) >= valid, IGNORE)


def count(targets: torch.Tensor, unit: str) -> int:
    return int((targets != IGNORE).sum()) if unit == "tokens" else len(targets)


def loss_sum(model: torch.nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids), targets.flatten(), ignore_index=IGNORE, reduction="sum")
