"""The load proof: silent on a true load, and one provoking case for each of its codes.

The job side is a real captured state of a real (one-process) job; the checkpoint side holds what torch itself says the
job's full state is. Each test changes one thing on one side.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from samerun.core.generators import cuda_state, generator_digest
from samerun.core.state import ParamGroup
from samerun.errors import Problem, Severity
from samerun.verify.load.check import check_loaded
from support import toy
from support.loads import capture, make_job, save
from support.memory import MemoryCheckpoint

EXACT: dict[str, Any] = {}


@pytest.fixture(scope="module")
def job() -> toy.Job:
    return make_job()


@pytest.fixture
def found(job: toy.Job) -> dict[str, Any]:
    return capture(job)


def check(checkpoint: MemoryCheckpoint, found: dict[str, Any], declare: Any = EXACT, **rest: Any) -> list[Problem]:
    return check_loaded(checkpoint, found, declare=declare, **rest)


def codes(problems: list[Problem], severity: Severity | None = Severity.ERROR) -> set[str]:
    return {problem.code for problem in problems if severity is None or problem.severity is severity}


def only(problems: list[Problem], code: str) -> Problem:
    """Returns the one finding with `code`; every other error would be a false alarm."""
    assert codes(problems) == {code}, [str(problem) for problem in problems]
    matching = [problem for problem in problems if problem.code == code]
    assert len(matching) == 1, [str(problem) for problem in matching]
    return matching[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_true_load_is_silent(dtype: torch.dtype) -> None:
    job = make_job(dtype=dtype)
    assert check(save(job), capture(job), optimizer="AdamW") == []


def test_a_job_that_loaded_nothing_is_told_everything(job: toy.Job) -> None:
    problems = check(save(job), capture(make_job(0, seed=9)))
    assert {"SR-LOAD-PARAM", "SR-LOAD-OPT-RESET", "SR-LOAD-SCHED", "SR-LOAD-OBJECT", "SR-LOAD-LR"} <= codes(problems)
    assert all(problem.expected is not None for problem in problems if problem.severity is Severity.ERROR)


def test_names_missing_and_unexpected(job: toy.Job, found: dict[str, Any]) -> None:
    fact = found["tensors"].pop("buffer:average")
    missing = only(check(save(job), found), "SR-LOAD-MISSING")
    assert missing.where["tensor"] == "buffer:average"
    found["tensors"] |= {"buffer:average": fact, "param:adapter.weight": {**fact, "trainable": True}}
    unexpected = only(check(save(job), found), "SR-LOAD-UNEXPECTED")
    assert unexpected.where["tensor"] == "param:adapter.weight"


def test_a_prefix_before_every_name_is_recognised(job: toy.Job, found: dict[str, Any]) -> None:
    found["tensors"] = {
        key.replace(":", ":model.", 1): {**fact, "aliases": ["model.head.weight"] if "tok" in key else []}
        for key, fact in found["tensors"].items()
    }
    problems = check(save(job), found)
    assert {"SR-LOAD-MISSING", "SR-LOAD-UNEXPECTED"} <= codes(problems)
    assert any("'model.'" in problem.hint for problem in problems)


def test_an_optimizer_state_of_zeros_that_was_not_saved_is_a_warning(job: toy.Job, found: dict[str, Any]) -> None:
    fact = {"shape": [5], "dtype": "float32", "digest": "0" * 16, "replicas": 1, "nonfinite": 0, "nonzero": 0}
    found["tensors"] |= {"optim.exp_avg:unused": fact}
    found["counters"]["optim.step:unused"] = {"value": 1.0, "dtype": "float32", "replicas": 1}
    problems = check(save(job), found)
    assert codes(problems) == set()
    assert codes(problems, Severity.WARNING) == {"SR-LOAD-UNEXPECTED", "SR-LOAD-STEP"}


def test_shape(job: toy.Job, found: dict[str, Any]) -> None:
    checkpoint = save(job, arrays=lambda arrays: arrays | {"param:router": arrays["param:router"][:2]})
    assert only(check(checkpoint, found), "SR-LOAD-SHAPE").expected == [2, 18]


def test_elements_that_no_rank_holds(job: toy.Job, found: dict[str, Any]) -> None:
    found["tensors"]["param:router"]["missing_elements"] = 18
    assert only(check(save(job), found), "SR-LOAD-SHAPE").found == 18


def test_one_wrong_bit_in_a_parameter_a_buffer_and_a_moment(job: toy.Job, found: dict[str, Any]) -> None:
    for key, code in (
        ("param:mlp.gate.bias", "SR-LOAD-PARAM"),
        ("buffer:seen", "SR-LOAD-PARAM"),
        ("optim.exp_avg_sq:norm.bias", "SR-LOAD-OPT"),
    ):
        arrays = toy.full_state(job)
        changed = arrays[key].copy()
        changed.reshape(-1).view(np.uint8)[0] ^= 1
        problem = only(check(save(job, arrays=arrays | {key: changed}), found), code)
        assert problem.where["tensor"] == key
        assert problem.expected != problem.found


def test_moments_of_another_parameter_are_recognised(job: toy.Job) -> None:
    other = copy.deepcopy(job)
    first, second = (dict(other.model.named_parameters())[f"mlp.{name}.weight"] for name in ("gate", "up"))
    state = other.optimizer.state
    state[first]["exp_avg"], state[second]["exp_avg"] = state[second]["exp_avg"], state[first]["exp_avg"]
    problems = check(save(job), capture(other))
    assert codes(problems) == {"SR-LOAD-OPT"}
    assert "optim.exp_avg:mlp.up.weight" in problems[0].message


def test_a_cast_is_explained_declared_or_bounded(job: toy.Job) -> None:
    cast = copy.deepcopy(job)
    router = dict(cast.model.named_parameters())["router"]
    router.data = router.data.to(torch.bfloat16)
    found, checkpoint = capture(cast), save(job)
    assert "exactly their cast" in only(check(checkpoint, found), "SR-LOAD-DTYPE").message
    for declared in ("expected-to-change", {"bounded": 2**-8}):
        problems = check(checkpoint, found, {"dtype": declared})
        assert codes(problems) == set()
        assert codes(problems, Severity.NOTE) == {"SR-LOAD-DTYPE"}
    assert codes(check(checkpoint, found, {"dtype": {"bounded": 1e-6}})) == {"SR-LOAD-DTYPE"}
    router.data[0, 0] += 1
    problems = check(checkpoint, capture(cast), {"dtype": "expected-to-change"})
    assert only(problems, "SR-LOAD-PARAM")


def test_a_master_that_the_job_holds_as_its_parameter(job: toy.Job, found: dict[str, Any]) -> None:
    def with_master(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        full = arrays["param:router"]
        return arrays | {"param:router": full.astype(ml_dtypes.bfloat16), "master:router": full}

    assert codes(check(save(job, arrays=with_master), found)) == set()
    broken = lambda arrays: {k: v + (k == "master:router") for k, v in with_master(arrays).items()}  # noqa: E731
    assert {"SR-LOAD-DTYPE", "SR-LOAD-PARAM", "SR-LOAD-MISSING"} == codes(check(save(job, arrays=broken), found))


def test_an_optimizer_that_starts_from_nothing(job: toy.Job) -> None:
    empty, zero, part = copy.deepcopy(job), copy.deepcopy(job), copy.deepcopy(job)
    empty.optimizer.state.clear()
    reset = only(check(save(job), capture(empty)), "SR-LOAD-OPT-RESET")
    assert "absent" in reset.message
    for state in zero.optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    assert "all zero" in only(check(save(job), capture(zero)), "SR-LOAD-OPT-RESET").message
    del part.optimizer.state[dict(part.model.named_parameters())["router"]]
    assert only(check(save(job), capture(part)), "SR-LOAD-OPT-RESET").where["tensor"] == "param:router"


def test_moments_that_were_saved_as_zeros_are_no_reset() -> None:
    job = make_job()
    state = job.optimizer.state[dict(job.model.named_parameters())["router"]]
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()
    assert check(save(job), capture(job)) == []


def test_learning_rates_and_groups_are_compared_by_name(job: toy.Job) -> None:
    changed = copy.deepcopy(job)
    changed.optimizer.param_groups.reverse()
    for group in changed.optimizer.param_groups:
        group["params"].reverse()
    problems = check(save(job, scheduler=None), {**capture(changed), "scheduler": None})
    assert problems == [], "order alone is no difference"
    changed.optimizer.param_groups[0]["lr"] *= 2
    rate = only(check(save(job, scheduler=None), capture(changed)), "SR-LOAD-LR")
    assert rate.found == 2 * rate.expected
    changed.optimizer.param_groups[0]["lr"] /= 2
    changed.optimizer.param_groups[1]["weight_decay"] = 0.0
    decay = only(check(save(job, scheduler=None), capture(changed)), "SR-LOAD-GROUP")
    assert (decay.expected, decay.found) == (0.1, 0.0)


def test_a_rate_within_its_declared_bound_is_a_note(job: toy.Job) -> None:
    changed = copy.deepcopy(job)
    for group in changed.optimizer.param_groups:
        group["lr"] *= 1.01
    found = capture(changed)
    assert codes(check(save(job), found, {"schedule": {"bounded": 0.02}})) == set()
    assert codes(check(save(job), found, {"schedule": {"bounded": 0.001}})) == {"SR-LOAD-LR"}
    assert codes(check(save(job), found, {"schedule": "expected-to-change"})) == set()


def test_a_parameter_in_no_group_and_one_that_is_new_in_one(job: toy.Job, found: dict[str, Any]) -> None:
    found["groups"][0]["params"].remove("router")
    lost = only(check(save(job), found), "SR-LOAD-GROUP")
    assert "router" in lost.message
    found["groups"][0]["params"] += ["router", "position"]
    assert "position" in only(check(save(job), found), "SR-LOAD-GROUP").message


def test_an_optimizer_of_other_tensors() -> None:
    job = make_job(0)
    job.optimizer = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in job.model.parameters()])
    problems = check(save(make_job(0)), capture(job) | {"scheduler": None})
    assert any(p.code == "SR-LOAD-GROUP" and "not the model's" in p.message for p in problems)


def test_how_the_step_is_carried_out_is_a_note(job: toy.Job) -> None:
    changed = copy.deepcopy(job)
    for group in changed.optimizer.param_groups:
        group["foreach"] = True
    problems = check(save(job), capture(changed))
    assert codes(problems) == set()
    assert codes(problems, Severity.NOTE) == {"SR-LOAD-GROUP"}


def test_optimizer_class_and_switches(job: toy.Job, found: dict[str, Any]) -> None:
    assert check(save(job), found, optimizer="adamw") == []
    assert only(check(save(job), found, optimizer="SGD"), "SR-LOAD-CLASS").found == "AdamW"
    two = found | {"optimizers": [{"class": "Muon", "decay": None}, *found["optimizers"]]}
    assert check(save(job), two, optimizer="Muon") == []  # one of several is named
    assert check(save(job), two, optimizer="AdamW") == []
    assert only(check(save(job), two, optimizer="SGD"), "SR-LOAD-CLASS").found == "Muon, AdamW"
    changed = copy.deepcopy(job)
    for group in changed.optimizer.param_groups:
        group["amsgrad"], group["decoupled_weight_decay"] = True, False
    problems = check(save(job), capture(changed))
    assert codes(problems) == {"SR-LOAD-CLASS"}
    assert {problem.where["key"] for problem in problems} >= {"amsgrad", "decoupled_weight_decay"}


def test_step_counters_by_value(job: toy.Job, found: dict[str, Any]) -> None:
    def in_groups(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: array for key, array in arrays.items() if not key.startswith("optim.step")}

    def with_step(groups: list[ParamGroup]) -> list[ParamGroup]:
        return [ParamGroup(group.params, {**group.hyperparameters, "step": 3}) for group in groups]

    integers = lambda arrays: {  # noqa: E731
        key: array.astype(np.int64) if key.startswith("optim.step") else array for key, array in arrays.items()
    }
    assert check(save(job, arrays=integers), found) == []
    assert check(save(job, arrays=in_groups, groups=with_step), found) == []
    for body in found["counters"].values():
        body["value"] = 4.0
    step = only(check(save(job), found), "SR-LOAD-STEP")
    assert (step.expected, step.found) == (3.0, 4.0)


def test_the_update_that_the_job_continues_after(job: toy.Job, found: dict[str, Any]) -> None:
    assert only(check(save(job), found | {"update": 4}), "SR-LOAD-STEP").expected == 3


def test_scheduler(job: toy.Job, found: dict[str, Any]) -> None:
    ahead = copy.deepcopy(job)
    ahead.scheduler.step()
    problems = check(save(job), capture(ahead))
    assert {"SR-LOAD-SCHED", "SR-LOAD-LR"} == codes(problems)
    position = next(problem for problem in problems if problem.where.get("key") == "scheduler.last_epoch")
    assert (position.expected, position.found) == (3, 4)
    assert only(check(save(job), found | {"scheduler": None}), "SR-LOAD-SCHED")
    assert check(save(job, scheduler=None), found | {"scheduler": None}) == []


def test_a_schedule_that_was_not_saved_and_begins_anew(job: toy.Job, found: dict[str, Any]) -> None:
    """The optimizer brings the rate back, and the first step of the new schedule loses it."""
    assert check(save(job, scheduler=None), found) == []  # one that was made at its position
    anew = found | {
        "scheduler": {**found["scheduler"], "last_epoch": 0, "_last_lr": [1e-9 for _ in found["learning_rates"]]}
    }
    assert only(check(save(job, scheduler=None), anew), "SR-LOAD-SCHED").expected == found["learning_rates"]
    assert only(check(save(job, scheduler=None), anew | {"scheduler": [anew["scheduler"]]}), "SR-LOAD-SCHED")


def test_objects(job: toy.Job, found: dict[str, Any]) -> None:
    wrong = copy.deepcopy(found)
    wrong["objects"]["progress"]["samples"] = 0
    problem = only(check(save(job), wrong), "SR-LOAD-OBJECT")
    assert (problem.where["key"], problem.found) == ("progress.samples", 0)
    flat = lambda objects: {f"progress.{name}": value for name, value in objects["progress"].items()}  # noqa: E731
    assert check(save(job, objects=flat), found) == []


def test_objects_inside_an_object_of_the_program(job: toy.Job, found: dict[str, Any]) -> None:
    inside = save(job, objects=lambda objects: {"app": objects})
    flat = save(job, objects=lambda objects: {f"app.{k}.{n}": v for k, o in objects.items() for n, v in o.items()})
    wrong = copy.deepcopy(found)
    wrong["objects"]["progress"]["samples"] = 0
    for saved in (inside, flat):
        assert check(saved, found) == []
        assert only(check(saved, wrong), "SR-LOAD-OBJECT").where["key"] == "progress.samples"
        untold = check(saved, found | {"objects": {}})
        assert codes(untold, Severity.NOTE) == {"SR-LOAD-OBJECT"}
    twice = save(job, objects=lambda objects: {"app": objects, "old": objects})
    assert codes(check(twice, found), Severity.WARNING) == {"SR-LOAD-OBJECT"}  # which of the two cannot be told


def test_objects_that_only_one_side_has(job: toy.Job, found: dict[str, Any]) -> None:
    unsaved = check(save(job), found | {"objects": {**found["objects"], "scaler": {"scale": 1.0}}})
    assert codes(unsaved) == set()
    assert codes(unsaved, Severity.WARNING) == {"SR-LOAD-OBJECT"}
    untold = check(save(job), found | {"objects": {}})
    assert codes(untold, Severity.NOTE) == {"SR-LOAD-OBJECT"}


def test_a_scaler_that_a_framework_saves_under_its_own_name(job: toy.Job, found: dict[str, Any]) -> None:
    saved = save(job, objects=lambda objects: {**objects, "optimizer": {"grad_scaler": {"scale": 8.0}}})
    assert codes(check(saved, found), Severity.NOTE) == {"SR-LOAD-OBJECT"}  # nobody told of it
    held = {**found["objects"], "scaler": {"scale": 8.0}}
    assert check(saved, found | {"objects": held}) == []
    fresh = {**held, "scaler": {"scale": 65536.0}}
    assert only(check(saved, found | {"objects": fresh}), "SR-LOAD-OBJECT").where["key"] == "scaler.scale"


def test_random_state_only_if_it_is_claimed(job: toy.Job, found: dict[str, Any]) -> None:
    state = torch.get_rng_state().numpy()
    same = save(job)
    same.state.rng["rng.0"] = {"cpu": state}  # type: ignore[index]
    assert check(same, found, {"rng": "exact"}) == []
    other = state.copy()
    other[0] ^= 1
    same.state.rng["rng.0"] = {"cpu": other}  # type: ignore[index]
    assert check(same, found) == []
    assert only(check(same, found, {"rng": "exact"}), "SR-LOAD-OBJECT").where["rank"] == 0


GENERATORS: dict[str, Any] = {
    "numpy": (np.random.RandomState(3).get_state(), np.random.RandomState(4).get_state()),
    "python": (random.Random(3).getstate(), random.Random(4).getstate()),
    "cuda": (cuda_state(3, 8), cuda_state(3, 12)),
    "megatron:model-parallel-rng": (cuda_state(2721), cuda_state(2722)),
}
"""A state of each generator, and another one."""


@pytest.mark.parametrize("name", GENERATORS)
def test_every_saved_generator_is_compared(name: str, job: toy.Job, found: dict[str, Any]) -> None:
    state, other = GENERATORS[name]
    saved = save(job)
    part = name.removeprefix("megatron:")
    saved.state.rng["rank0"] = {"rng_tracker_states": {part: state}} if part != name else {name: state}  # type: ignore[index]
    for held, wrong in ((state, False), (other, True)):
        job_holds = found | {"generators": {name: {"0": generator_digest(held)}}}
        problems = check(saved, job_holds, {"rng": "exact"})
        assert [(p.code, p.where) for p in problems] == [("SR-LOAD-OBJECT", {"key": "rng", "rank": 0})] * wrong
        assert check(saved, job_holds) == []  # not claimed
        record = {
            "policy": "keyed",
            "update": job_holds["update"],
            "kept": [],
            "seeded": [name],
            "stream": 0,
            "seed": 1,
        }
        assert check(saved, job_holds | {"rank_rng": {"0": record}}, {"rng": "exact"}) == []  # seeded on purpose
    unknown = found | {"generators": {"numpy:other": {"0": "00" * 8}}}
    assert check(saved, unknown, {"rng": "exact"}) == []  # nothing of that name was saved


def test_architecture_settings(job: toy.Job, found: dict[str, Any]) -> None:
    found["config"]["activation"] = "gelu"
    assert only(check(save(job), found), "SR-LOAD-CONFIG").expected == "silu"
    found["config"] |= {"activation": "silu", "heads": 4}
    assert codes(check(save(job), found), Severity.WARNING) == {"SR-LOAD-CONFIG"}


def test_values_that_are_not_finite(job: toy.Job) -> None:
    broken = copy.deepcopy(job)
    with torch.no_grad():
        dict(broken.model.named_parameters())["router"][0, 0] = float("nan")
    problems = check(save(job), capture(broken))
    assert codes(problems) == {"SR-LOAD-NONFINITE", "SR-LOAD-PARAM"}
    assert only(check(save(broken), capture(broken)), "SR-LOAD-NONFINITE").found == 1


def test_a_mask_of_infinities_is_a_note() -> None:
    job = make_job()
    job.model.average[0] = float("-inf")  # type: ignore[index]
    problems = check(save(job), capture(job))
    assert codes(problems) == set()
    assert codes(problems, Severity.NOTE) == {"SR-LOAD-NONFINITE"}


def test_replicas_that_differ(job: toy.Job, found: dict[str, Any]) -> None:
    fact = found["tensors"]["param:router"]
    fact |= {"replicas": 2, "odd": [{"rank": 2, "digest": "f" * 16}]}
    found |= {"world_size": 4, "layout": {"dp_replicate": 2, "dp_shard": 2}}
    problem = only(check(save(job), found), "SR-LOAD-REPLICA")
    assert problem.where == {"tensor": "param:router", "rank": 2}
    assert "dp_replicate 1" in problem.message
    fact["odd"][0]["digest"], fact["digest"] = fact["digest"], "f" * 16
    problems = check(save(job), found)
    assert codes(problems) == {"SR-LOAD-REPLICA", "SR-LOAD-PARAM"}, "the majority can be wrong"
    assert [p.where["rank"] for p in problems if p.code == "SR-LOAD-REPLICA"] == [0]
    found["counters"]["optim.step:router"]["odd"] = [{"rank": 3, "value": 2.0}]
    assert any(p.where.get("rank") == 3 for p in check(save(job), found))


def test_ranks_that_disagree(job: toy.Job, found: dict[str, Any]) -> None:
    found["disagreements"] = [{"what": "scheduler", "rank": 1, "expected": {"last_epoch": 3}, "found": {}}]
    assert only(check(save(job), found), "SR-LOAD-RANKS").where == {"rank": 1}


def test_a_tie_that_broke_and_a_tie_that_was_not_saved(job: toy.Job) -> None:
    untied = make_job(config=toy.Config(tied=False))
    untied.model.load_state_dict(job.model.state_dict())
    found = capture(untied)
    problems = check(save(job), found)
    told = [problem for problem in problems if problem.code == "SR-LOAD-TIE"]
    assert len(told) == 1
    assert "head.weight" in told[0].message

    both = save(untied, arrays=lambda arrays: arrays | {"param:head.weight": arrays["param:tok.weight"] + 1})
    assert "different values" in str(only_code(check(both, capture(job)), "SR-LOAD-TIE").message)
    equal = save(job, aliases={}, arrays=lambda arrays: arrays | {"param:head.weight": arrays["param:tok.weight"]})
    assert check(equal, capture(job)) == [], "saved under both names with equal values"
    other = save(job, aliases={"param:head.weight": ("tok.weight",)}, arrays=_owned_by_the_head)
    assert check(other, capture(job)) == [], "saved under the other name"


def only_code(problems: list[Problem], code: str) -> Problem:
    return next(problem for problem in problems if problem.code == code)


def _owned_by_the_head(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key.replace("tok.weight", "head.weight"): array for key, array in arrays.items()}


def test_a_tie_that_only_the_configuration_tells_of(job: toy.Job) -> None:
    untied = make_job(config=toy.Config(tied=False))
    checkpoint = save(untied)
    untied.config.tied = untied.model.config.tied = True  # type: ignore[union-attr, assignment]
    assert capture(untied)["broken_ties"] == [["tok.weight", "head.weight"]]
    assert only(check(checkpoint, {**capture(untied), "config": None}), "SR-LOAD-TIE").found == "2 tensors"
    assert capture(job)["broken_ties"] == []


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("parameters", lambda job: dict(job.model.named_parameters())["router"].data.add_(1)),
        ("buffers", lambda job: job.model.average.add_(1)),
        ("optimizer", lambda job: job.optimizer.state.clear()),
        ("schedule", lambda job: job.scheduler.step()),
        ("objects", lambda job: job.progress.update(samples=0)),
    ],
)
def test_what_is_expected_to_change_is_noted(job: toy.Job, part: str, damage: Callable[[toy.Job], Any]) -> None:
    changed = copy.deepcopy(job)
    with torch.no_grad():
        damage(changed)
    found = capture(changed)
    assert codes(check(save(job), found))
    problems = check(save(job), found, {part: "expected-to-change"})
    assert codes(problems) == set()
    assert problems


def test_a_second_job_reuses_the_digests(job: toy.Job, found: dict[str, Any]) -> None:
    checkpoint, digests = save(job), {}
    check(checkpoint, found, digests=digests)
    checkpoint.reads.clear()
    assert check(checkpoint, found, digests=digests) == []
    assert checkpoint.reads == []
