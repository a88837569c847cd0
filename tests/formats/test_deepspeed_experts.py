"""DeepSpeed's experts, written at other degrees: they read back equal; what no job could load is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.core.dtype import DTYPES
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, TensorEntry, TensorKey, Tiling, Topology
from samerun.core.written import DestinationPlan
from samerun.errors import PlanError
from samerun.formats.base import Checkpoint, WriteSource
from samerun.formats.deepspeed import dealing
from samerun.formats.deepspeed.training import plan_training
from samerun.formats.detect import open_checkpoint
from samerun.formats.universal.write import lay_out as lay_out_universal
from samerun.formats.zero.write import lay_out as lay_out_zero
from support.zero import codes

GOLDEN = Path(__file__).parents[1] / "golden" / "deepspeed" / "moe4"  # 4 ranks, ep 2, two layers of four experts, bf16
FIRST = "moe.0.deepspeed_moe.experts.deepspeed_experts."
SECOND = "moe.1.deepspeed_moe.experts.deepspeed_experts."


def move(source: Path, dest: Path, layout: str, to: str = "zero") -> Path:
    checkpoint = open_checkpoint(source)
    carry_out(prepare(checkpoint, dest, to=to, layout=Layout.parse(layout)))
    checkpoint.close()
    return dest


def differing(first: Checkpoint, second: Checkpoint) -> list[str]:
    keys = sorted({*first.state.tensors, *second.state.tensors})
    return [key for key in keys if first.read(key).tobytes() != second.read(key).tobytes()]


@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", "dp_shard=3", "dp_shard=8,ep=4", "dp_shard=4,ep=2"])
def test_experts_come_back_at_another_degree(layout: str, tmp_path: Path) -> None:
    source, moved = open_checkpoint(GOLDEN), open_checkpoint(move(GOLDEN, tmp_path / "moved", layout))
    assert differing(source, moved) == []
    assert moved.state.topology.layout == Layout.parse(layout)
    assert [set(group.params) for group in moved.state.groups] == [set(g.params) for g in source.state.groups]
    assert [group.hyperparameters for group in moved.state.groups] == [g.hyperparameters for g in source.state.groups]
    back = open_checkpoint(move(tmp_path / "moved", tmp_path / "back", "dp_shard=4,ep=2"))
    assert differing(source, back) == []
    assert back.state.groups == source.state.groups


def test_experts_of_a_run_in_another_format_are_dealt_in_the_order_of_its_groups(tmp_path: Path) -> None:
    there = move(GOLDEN, tmp_path / "there", "dp_shard=4", to="safetensors")
    dealt = open_checkpoint(move(there, tmp_path / "dealt", "dp_shard=4,ep=2"))
    source = open_checkpoint(GOLDEN)
    assert differing(source, dealt) == []
    assert [group.params for group in dealt.state.groups] == [group.params for group in source.state.groups]


def test_a_wrong_dealing_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that hold each other's part are seen when the destination is read back."""
    honest = dealing.share_of

    def turned(group: Any, rank: int, ranks: int, *, data_first: bool) -> Any:
        return honest(group, rank, ranks, data_first=not data_first)

    monkeypatch.setattr("samerun.formats.zero.write.share_of", turned)
    with pytest.raises(Exception, match="SR-CONVERT-DIFFERS"):
        move(GOLDEN, tmp_path / "moved", "dp_shard=4,ep=2")


# --- states by hand ---------------------------------------------------------------------------------------------------


def state_of(order: list[str], *others: str, ep: int = 1, **more: Any) -> LogicalState:
    """A run in fp32 whose experts' group has this order; every expert has a matrix and a bias of other sizes."""
    entries: dict[str, TensorEntry] = {}
    for name in (*others, *dict.fromkeys(order)):
        shape = (3, 2) if name.endswith("w") else (5,)
        for text in (f"param:{name}", f"optim.exp_avg:{name}", f"optim.exp_avg_sq:{name}"):
            key = TensorKey.parse(text)
            entries[text] = TensorEntry(key, shape, DTYPES["float32"], Tiling.whole(shape), key.fqn)
    groups = (ParamGroup(others, {"lr": 0.1}), ParamGroup(tuple(order), {"lr": 0.2}))
    topology = Topology(world_size=4, layout=Layout(dp_shard=4, ep=ep))
    return LogicalState(**{"format": "zero", "tensors": entries, "groups": groups, "topology": topology, **more})


def plan_of(lay_out: Callable[..., DestinationPlan], state: LogicalState, layout: str, **more: Any) -> DestinationPlan:
    return lay_out(WriteSource(state, lambda _: np.array(3.0, np.float32)), Layout.parse(layout), **more)


def experts(prefix: str, *numbers: int, parts: str = "wb") -> list[str]:
    return [f"{prefix}{number}.{part}" for number in numbers for part in parts]


IN_ORDER = [*experts(FIRST, 0, 1, 2, 3), *experts(SECOND, 0, 1)]
REFUSED: list[tuple[str, LogicalState, str, dict[str, Any]]] = [
    ("cannot be dealt to ep=4 ranks", state_of(IN_ORDER, "tok.w"), "dp_shard=4,ep=4", {}),
    ("does not train its experts at stage 3", state_of(IN_ORDER, "tok.w"), "dp_shard=2", {"stage": 3}),
    ("are [0, 1, 3] only", state_of(experts(FIRST, 0, 1, 3), "tok.w"), "dp_shard=2", {}),
    ("not in the model's order", state_of(experts(FIRST, 1, 0, 2, 3), "tok.w"), "dp_shard=2,ep=2", {}),
    ("same parameters of every rank's", state_of(experts(FIRST, 0, 1, 3, 2), "tok.w", ep=2), "dp_shard=2", {}),
    ("beside other parameters", state_of([*IN_ORDER, "norm.b"], "tok.w"), "dp_shard=2", {}),
]


@pytest.mark.parametrize(("message", "state", "layout", "more"), REFUSED)
def test_what_no_job_of_the_degree_could_have_is_refused(
    message: str, state: LogicalState, layout: str, more: dict[str, Any]
) -> None:
    with pytest.raises(PlanError, match="SR-DSW-EXPERTS") as refused:
        plan_of(lay_out_zero, state, layout, **more)
    assert message in str(refused.value)


def test_an_order_of_the_script_s_own_is_kept_at_the_same_degree_and_refused_at_another() -> None:
    """By expert, then by layer: as if two ranks had dealt them, but the flat buffers say that one rank held all."""
    order = [*experts(FIRST, 0), *experts(SECOND, 0), *experts(FIRST, 1), *experts(SECOND, 1)]
    state = state_of(order, "tok.w", objects={"ds_config": {"zero_optimization": {"stage": 2}}})
    training = plan_training(WriteSource(state, lambda _: np.array(3.0)), Layout(dp_shard=2), "zero")
    dealing.deal_experts(state, training, 1)
    assert [member.name for member in training.groups[1].dealt[0]] == order
    with pytest.raises(PlanError, match="SR-DSW-EXPERTS"):
        plan_of(lay_out_zero, state, "dp_shard=2,ep=2")


def test_what_can_be_dealt_is_dealt_without_a_word() -> None:
    for layout in ("dp_shard=2", "dp_shard=2,ep=2", "dp_shard=6,ep=2"):
        assert codes(plan_of(lay_out_zero, state_of(IN_ORDER, "tok.w"), layout).problems) == ["SR-DSW-ASSUMES"]


def test_universal_is_for_jobs_that_do_not_deal_experts() -> None:
    state = state_of(IN_ORDER, "tok.w", ep=2)
    ranks_2 = [*experts(FIRST, 0, 1), *experts(SECOND, 0), *experts(FIRST, 2, 3), *experts(SECOND, 1)]
    with pytest.raises(PlanError, match="SR-DSW-EXPERTS"):
        plan_of(lay_out_universal, state, "dp_shard=4,ep=2")
    plan = plan_of(lay_out_universal, state_of(ranks_2, "tok.w", ep=2), "dp_shard=3")
    assert "SR-DSW-EXPERTS" not in codes(plan.problems)


def test_a_group_that_is_too_long_is_cut_as_the_job_of_that_degree_cuts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert has 11 elements, a group of a rank at most 16: every expert becomes a group, and they join again."""
    monkeypatch.setattr(dealing, "MOST_ELEMENTS", 16)

    def groups_at(state: LogicalState, ep: int) -> list[list[str]]:
        training = plan_training(WriteSource(state, lambda _: np.array(3.0)), Layout(dp_shard=2, ep=ep), "zero")
        dealing.deal_experts(state, training, ep)
        return [
            [member.name.removeprefix(FIRST) for member in group.dealt[0]] for group in training.groups if group.dealt
        ]

    whole = state_of(experts(FIRST, *range(4)), "tok.w", format="dcp")
    two = groups_at(whole, 2)
    assert two == [["0.w", "0.b"], ["1.w", "1.b"]]
    one = groups_at(whole, 1)
    assert one == [["0.w", "0.b"], ["1.w", "1.b"], ["2.w", "2.b"], ["3.w", "3.b"]]
    cut = state_of(experts(FIRST, *range(4)), "tok.w", ep=2)
    groups = (cut.groups[0], *(ParamGroup(tuple(experts(FIRST, n, n + 2)), {"lr": 0.2}) for n in range(2)))
    assert groups_at(replace(cut, groups=groups), 1) == one


def test_the_proof_names_every_expert(tmp_path: Path) -> None:
    dest = move(GOLDEN, tmp_path / "moved", "dp_shard=2")
    proof = json.loads((dest / "samerun-proof.json").read_text())
    names = [key for key in proof["tensors"] if "deepspeed_experts" in key]
    assert len(names) == len([key for key in open_checkpoint(GOLDEN).state.tensors if "deepspeed_experts" in key])
