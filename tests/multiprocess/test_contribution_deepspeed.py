"""The gradient of one fixed global batch through DeepSpeed engines, against one process in fp64.

Mean and sum reduction, gradients divided before, partly before, and after; unequal ranks, empty passes, clipping.
Runs where DeepSpeed is installed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from samerun.core.batch import Dealing, deal
from samerun.errors import UsageError
from samerun.train.contribution import ContributionMean, accumulate
from support.contribution import count, loss_sum, make_data, make_model
from support.gloo import import_frameworks, run_ranks
from support.warm_ranks import ZERO

pytestmark = [
    pytest.mark.framework,
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What every rank would import."""
    import_frameworks(*ZERO)


RANKS = 3
RTOL = 2e-6  # fp32 sums of 100 tokens in another order: about sqrt(100) * 2**-24
CLIP = 0.05
"""Below the gradient's norm, so that clipping acts."""

REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"gradient_allreduce_op": "sum"},
    "prescale": {"prescale_gradients": True},
    "predivide": {"gradient_predivide_factor": 2.0},
    "predivide by ranks": {"gradient_predivide_factor": float(RANKS)},
}
STAGES: dict[int, list[str]] = {
    0: list(REDUCTIONS),
    1: list(REDUCTIONS),
    2: list(REDUCTIONS),
    3: ["mean", "prescale", "predivide"],  # ZeRO-3 has no sum
}
DEALINGS = [
    ("tokens", deal(16, RANKS, 2)),
    ("samples", deal(16, RANKS, 2)),
    ("tokens", Dealing(((0, 0, 9), (0, 0, 7)))),  # one rank has everything
    ("tokens", Dealing(((1, 4, 0), (0, 2, 3), (5, 0, 1)))),
]


def engine_of(stage: int, reduction: str) -> Any:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # builds for minutes otherwise
    scatters = reduction in ("mean", "sum")  # DeepSpeed refuses the others with reduce-scatter
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_scatter": scatters, "stage3_param_persistence_threshold": 0},
        **REDUCTIONS[reduction],
    }
    model = make_model(torch.float32)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    return engine


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=engine.zero_optimization_stage() == 3):
        return {name: parameter.detach().double().clone() for name, parameter in named.items()}


def oracle(weights: dict[str, torch.Tensor], unit: str, batch: int) -> tuple[dict[str, torch.Tensor], float]:
    """Returns gradient and mean loss of the whole batch at these weights, in one pass of one process, in fp64."""
    model = make_model(torch.float64)
    model.load_state_dict(weights)
    ids, targets = (part[:batch] for part in make_data())
    loss = loss_sum(model, ids, targets) / count(targets, unit)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, loss.item()


def step(engine: Any, mean: ContributionMean, unit: str, dealing: Dealing, rank: int) -> float:
    data = make_data()
    parts = [tuple(part[list(places)] for part in data) for places in dealing.replica_positions(rank)]
    mean.start(sum(count(targets, unit) for _, targets in parts), passes=dealing.passes)
    for ids, targets in accumulate(engine, parts):
        counts = len(ids) > 0
        batch = (ids, targets) if counts else (data[0][:1], data[1][:1])
        mean.backward(loss_sum(engine, *batch), counts=counts, engine=engine)
    engine.step()
    return mean.loss()


def on_engines(rank: int, world_size: int, stage: int) -> dict[str, float]:
    """Returns the worst relative error of an update by reduction: SGD at rate 1 moves by the clipped gradient."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29551", DS_ACCELERATOR="cpu")
    worst: dict[str, float] = {}
    for reduction in STAGES[stage]:
        engine = engine_of(stage, reduction)
        mean = ContributionMean.of_engine(engine, replicas=world_size)
        assert mean.reduction == ("sum" if reduction == "sum" else "mean")
        for unit, dealing in DEALINGS:
            start = parameters(engine)
            gradient, loss = oracle(start, unit, dealing.global_batch)
            norm = torch.stack([g.norm() for g in gradient.values()]).norm()
            assert norm > CLIP
            assert step(engine, mean, unit, dealing, rank) == pytest.approx(loss, rel=RTOL)
            if stage:  # without ZeRO the engine does not keep the norm
                assert float(engine.get_global_grad_norm()) == pytest.approx(float(norm), rel=RTOL)
            moved = parameters(engine)
            error = torch.stack([(start[n] - moved[n] - g * CLIP / norm).norm() for n, g in gradient.items()]).norm()
            worst[reduction] = max(worst.get(reduction, 0.0), float(error) / CLIP)
    return worst


@pytest.mark.parametrize("stage", STAGES)
def test_the_update_does_not_depend_on_the_dealing(stage: int) -> None:
    found = run_ranks(RANKS, on_engines, stage, timeout=400)
    assert set(found[0]) == set(STAGES[stage])
    assert max(max(each.values()) for each in found) < 1e-5, found  # a difference of fp32 weights has 1e-6 of rounding


def refuses(rank: int, world_size: int) -> list[str]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29551", DS_ACCELERATOR="cpu")
    with pytest.raises(UsageError) as caught:
        ContributionMean.of_engine(engine_of(3, "predivide by ranks"))
    return [problem.code for problem in caught.value.problems]


def test_a_factor_that_is_not_multiplied_back_is_refused() -> None:
    assert run_ranks(RANKS, refuses) == [["SR-MEAN-GROUP"]] * RANKS
