"""A small language model and one fixed batch of samples with unequal numbers of valid tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from samerun.core.batch import Dealing, deal
from samerun.train.contribution import ContributionMean, accumulate

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


def reference(
    unit: str, batch: int, make: Callable[[torch.dtype], torch.nn.Module] = make_model
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradient and mean loss of the whole batch in one pass of one process, in fp64."""
    model = make(torch.float64)
    ids, targets = (part[:batch] for part in make_data())
    loss = loss_sum(model, ids, targets) / count(targets, unit)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, loss.item()


@dataclass(frozen=True)
class Case:
    unit: str
    dealing: Dealing
    dtype: torch.dtype = torch.float64
    sync: Any = None
    with_passes: bool = True


def random_dealing(replicas: int, batch: int, rng: random.Random) -> Dealing:
    passes = rng.randint(1, 4)
    cells = [[0] * replicas for _ in range(passes)]
    for _ in range(batch):
        cells[rng.randrange(passes)][rng.randrange(replicas)] += 1
    return Dealing(tuple(map(tuple, cells)))


def make_cases(replicas: int) -> list[Case]:
    rng = random.Random(replicas)
    fixed = [Case(unit, deal(16, replicas, micro)) for unit in ("tokens", "samples") for micro in (1, 3)]
    drawn = [
        Case(rng.choice(["tokens", "samples"]), random_dealing(replicas, 16, rng), sync=sync)
        for sync in (None, "last", "every", None)
    ]
    starved = Dealing(((0,) * (replicas - 1) + (9,), (0,) * (replicas - 1) + (7,)))  # one replica has everything
    return [
        *fixed,
        *drawn,
        Case("tokens", starved, with_passes=False),
        Case("tokens", deal(16, replicas, 2), dtype=torch.float32),
    ]


def run_update(
    model: torch.nn.Module, mean: ContributionMean, case: Case, replica: int, columns: slice = slice(None)
) -> float:
    """One update as a training loop would do it: an empty pass runs on a placeholder at zero weight.

    `columns` are the positions of every sample that this rank holds.
    """
    data = tuple(part[:, columns] for part in make_data())
    parts = case.dealing.replica_positions(replica)
    microbatches = [tuple(part[list(positions)] for part in data) for positions in parts]
    mine = sum(count(targets, case.unit) for _, targets in microbatches)
    mean.start(mine, passes=case.dealing.passes if case.with_passes else None)
    for ids, targets in accumulate(model, microbatches, sync=case.sync):
        counts = len(ids) > 0
        mean.backward(loss_sum(model, *((ids, targets) if counts else (data[0][:1], data[1][:1]))), counts=counts)
    return mean.loss()


def whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters()}


def check_cases(
    model_of: Callable[[torch.dtype], torch.nn.Module],
    mean: ContributionMean,
    replica: int,
    *,
    replicas: int | None = None,
    make: Callable[[torch.dtype], torch.nn.Module] = make_model,
    held: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, gradient: gradient,
    columns: slice = slice(None),
    units: tuple[str, ...] = ("tokens", "samples"),
    clips: bool = True,
) -> int:
    """Every case as one update of the same model, gradients set to zero in between as a loop does.

    `replicas` is the number of ranks that see different samples, `held` what of a whole gradient this rank has. Unless
    the parameters lie on several meshes (then torch cannot), gradients are clipped afterwards: the norm that clipping
    sees is that of the normalised gradient, and what is left of it is what is left of the whole batch's.
    """
    cases = [case for case in make_cases(replicas or mean.replicas) if case.unit in units]
    models = {dtype: model_of(dtype) for dtype in {case.dtype: None for case in cases}}
    for case in cases:
        expected, loss = reference(case.unit, case.dealing.global_batch, make)
        model = models[case.dtype]
        tolerance = 1e-12 if case.dtype is torch.float64 else 2e-6
        assert run_update(model, mean, case, replica, columns) == pytest.approx(loss, rel=tolerance)
        found = gradients(model)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient.double(), held(name, expected[name]), rtol=tolerance, atol=tolerance)
        if clips:
            check_clipped(model, expected, tolerance)
        model.zero_grad()
    return len(cases)


def check_clipped(model: torch.nn.Module, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    total = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), total.item() / 3)
    assert whole(norm).item() == pytest.approx(total.item(), rel=tolerance)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient.double(), expected[name] / 3, rtol=1e-6, atol=1e-6)
