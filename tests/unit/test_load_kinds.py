"""What became of a tensor's values: each explanation on a real job that it holds for, and on none of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from samerun.errors import Problem
from samerun.verify.judge import is_missing_evidence
from samerun.verify.load.check import check_loaded
from support import toy
from support.loads import capture, make_job, save

Damage = Callable[[dict[str, torch.Tensor], toy.Job], None]


def slot(job: toy.Job, parameter: torch.Tensor, name: str) -> torch.Tensor:
    return job.optimizer.state[parameter][name]


def flip_one(p: dict[str, torch.Tensor], job: toy.Job) -> None:
    p["mlp.up.weight"].view(torch.int32)[4, 3] ^= 1 << 13


def exchange(p: dict[str, torch.Tensor], job: toy.Job) -> None:
    kept = p["mlp.gate.weight"].clone()
    p["mlp.gate.weight"].copy_(p["mlp.up.weight"])
    p["mlp.up.weight"].copy_(kept)


def shorten_moments(p: dict[str, torch.Tensor], job: toy.Job) -> None:
    values = slot(job, p["mlp.up.weight"], "exp_avg_sq")
    values.copy_(values.to(torch.float8_e5m2))


CASES: dict[str, tuple[Damage, str, str, str]] = {
    # damage, key, words in the message, kind
    "one bit": (flip_one, "param:mlp.up.weight", "bit 13 of element [4, 3]", "files"),
    "rows rolled": (
        lambda p, _: p["mlp.up.weight"].copy_(p["mlp.up.weight"].roll(1, 0)),
        "param:mlp.up.weight", "in other places", "fused and strided layouts",
    ),
    "exchanged": (exchange, "param:mlp.up.weight", "those of param:mlp.gate.weight", "fused and strided layouts"),
    "through bfloat16": (
        lambda p, _: p["mlp.up.weight"].copy_(p["mlp.up.weight"].bfloat16()),
        "param:mlp.up.weight", "rounded to bfloat16 and back", "dtype and masters",
    ),
    "moments through eight bits": (
        shorten_moments, "optim.exp_avg_sq:mlp.up.weight", "rounded to float8_e5m2 and back", "dtype and masters",
    ),
    "kept its start": (
        lambda p, _: p["mlp.up.weight"].normal_(), "param:mlp.up.weight", "not those of the checkpoint", "names",
    ),
    "frozen": (
        lambda p, _: p["position"].mul_(1.01), "param:position", "not those of the checkpoint",
        "tied, frozen, never stepped",
    ),
    "not a number": (
        lambda p, _: p["mlp.up.weight"][0, 0].fill_(float("nan")),
        "param:mlp.up.weight", "not those of the checkpoint", "dtype and masters",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def job() -> toy.Job:
    return make_job()


def findings(job: toy.Job, damage: Damage | None) -> dict[str, Problem]:
    checkpoint, other = save(job), copy.deepcopy(job)
    with torch.no_grad():
        if damage is not None:
            damage(dict(other.model.named_parameters()), other)
    problems = check_loaded(checkpoint, capture(other), declare={})
    return {item.where["tensor"]: item for item in problems if item.code in ("SR-LOAD-PARAM", "SR-LOAD-OPT")}


@pytest.mark.parametrize("name", CASES)
def test_what_became_of_the_values_is_told(job: toy.Job, name: str) -> None:
    damage, key, words, kind = CASES[name]
    found = findings(job, damage)[key]
    assert words in found.message
    assert found.kind == kind
    others = {case[2] for case in CASES.values()} - {words, "not those of the checkpoint"}
    assert not any(other in found.message for other in others)


def test_a_true_load_has_nothing_to_explain(job: toy.Job) -> None:
    assert findings(job, None) == {}


def test_one_more_bit_is_not_taken_for_one(job: toy.Job) -> None:
    def flip_two(p: dict[str, torch.Tensor], other: toy.Job) -> None:
        flip_one(p, other)
        p["mlp.up.weight"].view(torch.int32)[0, 0] ^= 1

    assert "element" not in findings(job, flip_two)["param:mlp.up.weight"].message


def averaged(job: toy.Job, factor: float) -> dict[str, torch.Tensor]:
    return {name: factor * p.detach() for name, p in job.model.named_parameters() if p.requires_grad}


def test_an_average_is_compared_like_everything_else(job: toy.Job) -> None:
    def facts(average: dict[str, torch.Tensor]) -> dict[str, Any]:
        from samerun.train.capture import capture_state

        body = capture_state(
            job.model, job.optimizer, scheduler=job.scheduler, objects=job.objects, layout=job.layout, average=average
        )
        return body.to_json() | {"update": job.progress["update"]}

    average = averaged(job, 0.9)
    arrays = toy.full_state(job) | {f"ema:{name}": toy.as_numpy(value) for name, value in average.items()}
    checkpoint = save(job, arrays=arrays)
    assert [p.code for p in check_loaded(checkpoint, facts(average), declare={}) if p.severity == "error"] == []
    copied = check_loaded(checkpoint, facts(averaged(job, 1.0)), declare={})
    assert {(p.code, p.kind) for p in copied} >= {("SR-LOAD-PARAM", "averages of the model")}
    lost = check_loaded(checkpoint, facts(dict(list(average.items())[1:])), declare={})
    assert {p.code for p in lost if p.severity == "error"} == {"SR-LOAD-MISSING"}
    untold = [p for p in check_loaded(checkpoint, facts({}), declare={}) if p.severity == "error"]
    assert [p.code for p in untold] == ["SR-LOAD-UNSEEN"]
    assert is_missing_evidence(untold[0].code)  # the job may have restored it: that abstains
