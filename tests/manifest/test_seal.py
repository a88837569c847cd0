"""The seal: what was declared cannot be changed unseen."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.errors import StalePlan
from samerun.manifest.models import Manifest
from samerun.manifest.seal import Seal, SealRecord, check_record, check_seal, reseal, seal
from support.manifests import COMPLETE, leaves, manifest

PLAN = {"batch": {"global_batch": 32, "microbatches": [[2, 2, 2]]}, "first_update": 13}
BANDS = {"loss": {"limits": [1e-6, 2e-6]}}
CONTROLS = {"first": "sha256:aa", "repeat-2": "sha256:bb"}


def first() -> Seal:
    return seal(manifest(), PLAN, BANDS, CONTROLS, sealed_at="2026-01-01T00:00:00Z")


def stored(record: SealRecord) -> dict[str, Any]:
    return json.loads(json.dumps(record.to_json()))


def test_an_unchanged_run_keeps_its_seal() -> None:
    record = SealRecord((first(),))
    read = SealRecord.from_json(stored(record))
    assert check_record(read) == []
    assert check_seal(read.current, manifest(), PLAN, BANDS, CONTROLS) == []
    assert read.current.digest == first().digest == record.to_json()["sealed"]


def test_the_same_content_has_the_same_digest_whenever_it_is_sealed() -> None:
    assert seal(manifest(), PLAN, BANDS, CONTROLS, sealed_at="later").digest == first().digest


def test_a_changed_tolerance_is_refused_by_name_with_both_values() -> None:
    wider = manifest(tolerances__loss={"from": "control", "factor": 100, "floor": 1e-6})
    (problem,) = check_seal(first(), wider)
    assert problem.code == "SR-SEAL-CHANGED"
    assert problem.where["key"] == "manifest.tolerances.loss.factor"
    assert (problem.expected, problem.found) == (10.0, 100.0)


def test_every_part_is_compared() -> None:
    bands, plan, controls = copy.deepcopy(BANDS), copy.deepcopy(PLAN), dict(CONTROLS)
    bands["loss"]["limits"][1] = 1.0
    plan["first_update"] = 12
    del controls["repeat-2"]
    found = check_seal(first(), manifest(), plan, bands, controls)
    assert [problem.where["key"] for problem in found] == [
        "plan.first_update",
        "tolerances.loss.limits",
        "controls.repeat-2",
    ]


@settings(deadline=None)
@given(st.sampled_from([key for key, value in leaves(COMPLETE).items() if isinstance(value, int | float)]))
def test_no_number_of_the_manifest_can_change_unseen(dotted: str) -> None:
    data = copy.deepcopy(COMPLETE)
    *above, last = dotted.split(".")
    node = data
    for step in above:
        node = node[step]
    node[last] += 1
    if dotted == "samerun":
        return
    (problem,) = check_seal(first(), Manifest.from_data(data))
    assert problem.where["key"] == f"manifest.{dotted}"


def test_a_further_seal_needs_a_reason_and_keeps_the_first() -> None:
    record = SealRecord((first(),))
    wider = manifest(tolerances__loss={"from": "control", "factor": 100, "floor": 1e-6})
    with pytest.raises(StalePlan) as caught:
        reseal(record, wider, PLAN, BANDS, CONTROLS, reason="  ")
    assert [problem.code for problem in caught.value.problems] == ["SR-SEAL-REASON"]
    second = reseal(record, wider, PLAN, BANDS, CONTROLS, reason="the first control ran on a loaded machine")
    assert [item.number for item in second.seals] == [1, 2]
    assert second.seals[0] == record.current or second.seals[0].digest == record.current.digest
    assert second.current.previous == record.current.digest
    assert check_record(SealRecord.from_json(stored(second))) == []
    assert check_seal(second.current, wider) == []
    assert check_seal(second.current, manifest()) != []


def test_an_edited_record_is_noticed() -> None:
    second = reseal(SealRecord((first(),)), manifest(), PLAN, BANDS, CONTROLS, reason="again")
    body = stored(second)
    body["seals"][0]["tolerances"]["loss"]["limits"][0] = 1.0
    edited = SealRecord.from_json(body)
    assert [problem.code for problem in check_record(edited)] == ["SR-SEAL-BROKEN"]
    assert [problem.code for problem in check_seal(edited.seals[0], manifest())] == ["SR-SEAL-BROKEN"]
    with pytest.raises(StalePlan):
        reseal(edited, manifest(), PLAN, BANDS, CONTROLS, reason="over it")


def test_a_seal_cannot_be_taken_out_or_lose_its_reason() -> None:
    record = reseal(SealRecord((first(),)), manifest(), PLAN, BANDS, CONTROLS, reason="again")
    assert [problem.code for problem in check_record(SealRecord(record.seals[1:]))] == ["SR-SEAL-BROKEN"]
    mute = SealRecord((record.seals[0], replace(record.seals[1], reason=None)))
    assert {problem.code for problem in check_record(mute)} == {"SR-SEAL-BROKEN"}
    with pytest.raises(ValueError):
        SealRecord(())


def test_a_number_that_is_not_finite_cannot_be_sealed() -> None:
    with pytest.raises(ValueError):
        seal(manifest(), PLAN, {"loss": {"limits": [float("inf")]}}, CONTROLS)
