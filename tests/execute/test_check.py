"""Every rule of a destination and a plan, broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from samerun.core.dtype import parse_dtype
from samerun.core.written import Checksum, DestinationPlan, FilePlan, Fill, Literal, TensorSlots
from samerun.execute.check import check_destination, check_plan, why_unsafe
from samerun.execute.plan import ConversionPlan, Copies
from samerun.execute.planner import plan_conversion
from support.pieces import PieceCheckpoint, Tensor, lay_out_boxes

F32 = parse_dtype("float32")


@pytest.fixture
def source(tmp_path: Path) -> PieceCheckpoint:
    return PieceCheckpoint(tmp_path / "source", tensors())


def tensors() -> list[Tensor]:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    halves = [((0, 0), (2, 6)), ((2, 0), (2, 6))]
    columns = [((0, 0), (4, 3)), ((0, 3), (4, 3))]
    return [
        Tensor("param:w", whole, F32, halves, columns, ["rows", "rows"], F32),
        Tensor("param:b", np.arange(5, dtype=np.float32), F32, [((0,), (5,))], [((0,), (5,))], ["rows"], F32),
    ]


def change_file(plan: DestinationPlan, **changes: object) -> DestinationPlan:
    return replace(plan, files=(replace(plan.files[0], **changes), *plan.files[1:]))  # type: ignore[arg-type]


def change_slots(plan: DestinationPlan, **changes: object) -> DestinationPlan:
    first = plan.tensors[0]
    fields = {name: getattr(first, name) for name in TensorSlots.__slots__}
    return replace(plan, tensors=(TensorSlots(**{**fields, **changes}), *plan.tensors[1:]))  # type: ignore[arg-type]


DAMAGE: dict[str, tuple[str, Callable[[DestinationPlan], DestinationPlan]]] = {
    "a hole": ("SR-COPY-BYTES", lambda plan: change_file(plan, fills=plan.files[0].fills[1:])),
    "an overlap": (
        "SR-COPY-BYTES",
        lambda plan: change_file(plan, fills=(*plan.files[0].fills, Fill(10, 4))),
    ),
    "too short": ("SR-COPY-BYTES", lambda plan: change_file(plan, size=plan.files[0].size - 1)),
    "too long": ("SR-COPY-BYTES", lambda plan: change_file(plan, size=plan.files[0].size + 1)),
    "before the start": ("SR-COPY-BYTES", lambda plan: change_file(plan, literals=(Literal(-1, bytes(9)),))),
    "a negative fill": (
        "SR-COPY-BYTES",
        lambda plan: change_file(plan, fills=(*plan.files[0].fills, Fill(8, -1))),
    ),
    "a file that is not planned": ("SR-COPY-BYTES", lambda plan: change_slots(plan, file=np.array([0, 7]))),
    "a box twice": (
        "SR-COPY-TENSOR",
        lambda plan: change_slots(plan, offsets=np.array([[0, 0], [0, 2]]), sizes=np.array([[4, 3], [4, 3]])),
    ),
    "a box outside": ("SR-COPY-TENSOR", lambda plan: change_slots(plan, offsets=np.array([[0, 0], [0, 4]]))),
    "a box too few": (
        "SR-COPY-TENSOR",
        lambda plan: change_slots(
            plan, offsets=np.zeros((1, 2), int), sizes=np.array([[4, 3]]), file=np.array([0]), at=np.array([9])
        ),
    ),
    "other dimensions": (
        "SR-COPY-TENSOR",
        lambda plan: change_slots(plan, offsets=np.zeros((2, 1), int), sizes=np.full((2, 1), 12)),
    ),
    "an unknown tensor": ("SR-COPY-TENSOR", lambda plan: change_slots(plan, key="param:other")),
    "a tensor twice": ("SR-COPY-TENSOR", lambda plan: replace(plan, tensors=(*plan.tensors, plan.tensors[0]))),
    "a forgotten tensor": ("SR-COPY-FORGOTTEN", lambda plan: replace(plan, tensors=plan.tensors[:1])),
    "a checksum in the values": (
        "SR-COPY-CHECKSUM",
        lambda plan: change_file(plan, checksums=(Checksum(20, 30, (12,)),)),
    ),
    "a checksum over itself": (
        "SR-COPY-CHECKSUM",
        lambda plan: change_file(plan, checksums=(Checksum(2, 30, (4,)),)),
    ),
    "a checksum beyond the end": (
        "SR-COPY-CHECKSUM",
        lambda plan: change_file(plan, checksums=(Checksum(20, 1 << 20, (4,)),)),
    ),
    "two checksums in one place": (
        "SR-COPY-CHECKSUM",
        lambda plan: change_file(plan, checksums=(Checksum(20, 30, (4,)), Checksum(10, 20, (2,)))),
    ),
    "a checksum over other bytes": (
        "SR-COPY-CHECKSUM",
        lambda plan: change_file(plan, literals=(Literal(0, b"12345678"),)),
    ),
    "two files for one": ("SR-COPY-PATH", lambda plan: replace(plan, single_file=True)),
    "no file": ("SR-COPY-PATH", lambda plan: replace(plan, files=())),
    "one path twice": ("SR-COPY-PATH", lambda plan: change_file(plan, path=plan.files[1].path)),
    "a file as directory": ("SR-COPY-PATH", lambda plan: change_file(plan, path="sub1")),
    "up and out": ("SR-COPY-PATH", lambda plan: change_file(plan, path="../outside")),
    "absolute": ("SR-COPY-PATH", lambda plan: change_file(plan, path="/etc/passwd")),
    "the proof": ("SR-COPY-PATH", lambda plan: change_file(plan, path="samerun-proof.json")),
}


def test_a_right_plan_is_silent(source: PieceCheckpoint) -> None:
    destination = lay_out_boxes(tensors(), 2)
    assert check_destination(destination, source.state) == []
    assert check_plan(plan_conversion(destination, source, ""), source.state) == []


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name: str, source: PieceCheckpoint) -> None:
    code, damage = DAMAGE[name]
    found = check_destination(damage(lay_out_boxes(tensors(), 2)), source.state)
    assert code in {problem.code for problem in found}


def test_what_is_left_out_must_be_named(source: PieceCheckpoint) -> None:
    plan = lay_out_boxes(tensors()[:1], 1)
    assert [problem.code for problem in check_destination(plan, source.state)] == ["SR-COPY-FORGOTTEN"]
    assert check_destination(replace(plan, dropped={"param:b": "no room"}), source.state) == []
    assert check_destination(plan, source.state, embedded={"param:b"}) == []


@pytest.mark.parametrize("change", ["lost", "twice", "moved"])
def test_copies_that_do_not_fill_their_box(change: str, source: PieceCheckpoint) -> None:
    plan = plan_conversion(lay_out_boxes(tensors(), 2), source, "")
    rows = {"lost": [0, 1, 2, 4], "twice": [0, 1, 1, 2, 3, 4], "moved": [0, 1, 2, 3, 4]}[change]
    columns = {name: getattr(plan.copies, name)[rows] for name in Copies.__slots__}
    if change == "moved":
        columns["origin"] = columns["origin"].copy()
        columns["origin"][0] = columns["origin"][1]
    broken = replace(plan, copies=Copies(**columns))
    assert {problem.code for problem in check_plan(broken, source.state)} == {"SR-COPY-VALUES"}


@pytest.mark.parametrize(
    "path", ["", ".", "..", "/", "a//b", "a/../b", "a/./b", "a/", "a\0b", "a\nb", "..\\b", "x" * 256, "a/" + "y" * 300]
)
def test_paths_that_no_file_gets(path: str) -> None:
    assert why_unsafe(path)


@pytest.mark.parametrize(
    "path", ["a", "a/b.c", "..a", "a..", "ü/ä", ".metadata", "__0_0.distcp", "sub/samerun-proof.json"]
)
def test_paths_that_are_fine(path: str) -> None:
    assert why_unsafe(path) is None


def test_a_plan_has_one_hash_and_a_readable_form(source: PieceCheckpoint) -> None:
    def plan(files: int, fingerprint: str = "f") -> ConversionPlan:
        return plan_conversion(lay_out_boxes(tensors(), files), source, fingerprint)

    assert plan(2).hash == plan(2).hash
    assert len({plan(1).hash, plan(2).hash, plan(2, "other").hash}) == 3
    body = plan(2).to_json(copies=True)
    assert body["copies"] == len(body["copy_list"]) == 5
    assert body["bytes_read"] == (24 + 5) * 4
    assert {item["tensor"] for item in body["copy_list"]} == {"param:w", "param:b"}
    assert FilePlan(path="x", size=0).literals == ()
