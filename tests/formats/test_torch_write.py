"""One torch.save file for a whole run: stock torch loads it strictly, and the next update is the source's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samerun.core.dtype import DTYPES
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, Role, TensorEntry, TensorKey, Tiling
from samerun.core.written import DestinationPlan
from samerun.errors import Severity
from samerun.formats.base import Checkpoint, WriteSource
from samerun.formats.dcp.write import lay_out as lay_out_dcp
from samerun.formats.detect import open_checkpoint
from samerun.formats.torch.write import lay_out
from samerun.formats.torchfile import Inert
from samerun.verify.inspection.structure import inspect_checkpoint
from samerun.verify.state.compare import compare_checkpoints
from support import toy
from support.corpus import corpus, needs_corpus, read_truth
from support.states import adam_state, without
from support.toy import as_numpy
from support.written import carry_out, source_of


def write(checkpoint: Checkpoint, path: Path) -> DestinationPlan:
    plan = lay_out(source_of(checkpoint))
    carry_out(plan, checkpoint, path)
    return plan


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[toy.Job, Path]:
    """A job after three updates, and its checkpoint as DCP."""
    made = toy.build(Layout())
    toy.train(made, 3)
    folder = tmp_path_factory.mktemp("job") / "step-3"
    toy.save(made, folder)
    return made, folder


@pytest.fixture(scope="module")
def moved(job: tuple[toy.Job, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moved") / "checkpoint.pt"
    write(open_checkpoint(job[1]), path)
    return path


def test_stock_torch_loads_it_and_goes_on_as_the_source_does(job: tuple[toy.Job, Path], moved: Path):
    for mapped in (False, True):
        saved = torch.load(moved, weights_only=True, mmap=mapped)
        fresh = toy.build(Layout(), seed=5)
        fresh.model.load_state_dict(saved["model"], strict=True)
        fresh.optimizer.load_state_dict(saved["optimizer"])
        fresh.scheduler.load_state_dict(saved["lr_scheduler"])
        fresh.progress = dict(saved["progress"])
        twin = toy.build(Layout())
        toy.train(twin, 3)
        for one in (fresh, twin):
            toy.train(one, 1)
        assert fresh.model.tok.weight is fresh.model.head.weight
        expected, found = toy.full_state(twin), toy.full_state(fresh)
        assert {key: value.tobytes() for key, value in found.items()} == {
            key: value.tobytes() for key, value in expected.items()
        }
        assert [group["lr"] for group in fresh.optimizer.param_groups] == [
            group["lr"] for group in twin.optimizer.param_groups
        ]


def test_it_reads_back_as_the_same_state(job: tuple[toy.Job, Path], moved: Path):
    source, found = open_checkpoint(job[1]), open_checkpoint(moved)
    assert compare_checkpoints(source, found).equal
    assert set(source.state.tensors) == set(found.state.tensors)
    assert source.state.progress == found.state.progress
    assert not [problem for problem in found.state.problems if problem.severity is not Severity.NOTE]


def test_tied_weights_share_a_storage(moved: Path):
    model = torch.load(moved, weights_only=True)["model"]
    assert model["head.weight"].untyped_storage().data_ptr() == model["tok.weight"].untyped_storage().data_ptr()


def test_the_plan_is_a_function_of_the_state(job: tuple[toy.Job, Path]):
    source = source_of(open_checkpoint(job[1]))
    assert lay_out(source).files == lay_out(source, Layout(dp_shard=3)).files


def test_checksums_of_each_other_and_boxes_in_each_other_s_place_are_seen(job: tuple[toy.Job, Path], tmp_path: Path):
    """What the tests above and `inspect --deep` look at is able to fail."""
    source = open_checkpoint(job[1])
    plan = lay_out(source_of(source))
    (file,) = plan.files
    first, second = file.checksums[:2]
    swapped = (replace(first, places=second.places), replace(second, places=first.places), *file.checksums[2:])
    carry_out(replace(plan, files=(replace(file, checksums=swapped),)), source, tmp_path / "sums.pt")
    report = inspect_checkpoint(open_checkpoint(tmp_path / "sums.pt"), deep=True)
    assert report.intact is False
    assert "SR-FILE-CRC" in {problem.code for problem in report.problems}
    one, other = (slots for slots in plan.tensors if slots.key in ("param:norm.weight", "param:norm.bias"))
    one.at[0], other.at[0] = int(other.at[0]), int(one.at[0])
    carry_out(plan, source, tmp_path / "boxes.pt")
    compared = compare_checkpoints(source, open_checkpoint(tmp_path / "boxes.pt"))
    assert {value.key for value in compared.values} == {"param:norm.weight", "param:norm.bias"}


# ---------------------------------------------------------------- parts that only some sources have


class Made:
    """A state made by hand with values to go with it."""

    def __init__(self, state: LogicalState, values: dict[str, np.ndarray]) -> None:
        self.path, self.state, self.values = Path("made"), state, values

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Any:
        value = self.values[key]
        box = tuple(slice(a, a + n) for a, n in zip(offsets or (), sizes or (), strict=True))
        return np.asarray(value[box])


def entry(key: str, value: np.ndarray, **more: Any) -> TensorEntry:
    parsed = TensorKey.parse(key)
    return TensorEntry(parsed, value.shape, DTYPES[value.dtype.name], Tiling.whole(value.shape), parsed.fqn, **more)


def made(values: dict[str, Any], **more: Any) -> Made:
    arrays = {key: np.asarray(value) for key, value in values.items()}
    state = LogicalState(format="made", tensors={key: entry(key, value) for key, value in arrays.items()}, **more)
    return Made(state, arrays)


def weights(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def test_integer_counters_masters_averages_and_nested_slots(tmp_path: Path):
    checkpoint = made(
        {
            "param:w": weights(3, 5),
            "buffer:seen": np.int64(9),
            "ema:w": weights(3, 5),
            "master:w": weights(3, 5),
            "optim.step:w": np.int64(7),
            "optim.exp_avg:w": weights(3, 5),
            "optim.inner.row:w": weights(3),
        },
        groups=(ParamGroup(("w",), {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}),),
    )
    plan = lay_out(source_of(checkpoint))
    assert {slots.key for slots in plan.tensors} == set(checkpoint.state.tensors)
    carry_out(plan, checkpoint, tmp_path / "f.pt")
    saved = torch.load(tmp_path / "f.pt", weights_only=True)
    slots = saved["optimizer"]["state"][0]
    assert slots["step"] == 7
    assert type(slots["step"]) is int
    assert set(slots) == {"step", "exp_avg", "inner", "master"}
    assert saved["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.99)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, 5))])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.state_dict()["state"][0]["step"].item() == 7
    found = open_checkpoint(tmp_path / "f.pt")
    assert {key: found.read(key).tobytes() for key in found.state.tensors} == {
        key: value.tobytes() for key, value in checkpoint.values.items()
    }
    assert found.state.tensors["optim.step:w"].dtype.name == "int64"


def test_generators_can_be_set_from_what_is_written(tmp_path: Path):
    import random

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    torch.save({"model": {"w": torch.ones(2)}, "rng": states}, tmp_path / "source.pt")
    checkpoint = open_checkpoint(tmp_path / "source.pt")
    write(checkpoint, tmp_path / "moved.pt")
    carry_out(lay_out_dcp(source_of(checkpoint)), checkpoint, tmp_path / "dcp")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        torch.load(tmp_path / "source.pt", weights_only=True)  # NumPy's arrays are what torch refuses
    for rng in (torch.load(tmp_path / "moved.pt", weights_only=True)["rng"], load_objects(tmp_path / "dcp")):
        random.setstate(rng["python"])
        np.random.set_state(rng["numpy"])
        torch.set_rng_state(rng["torch"])
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def load_objects(folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {"rng": {"python": None, "numpy": None, "torch": torch.empty(5056, dtype=torch.uint8)}}
    with toy.quiet():
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["rng"]


# ---------------------------------------------------------------- findings


def codes(state: LogicalState, lay: Any = lay_out) -> dict[str, Severity]:
    plan = lay(WriteSource(state, lambda key: np.zeros(())))
    return {problem.code: problem.severity for problem in plan.problems}


FULL = {"lr": 1.0, "betas": [0.9, 0.99], "eps": 1e-8, "amsgrad": False, "maximize": False, "foreach": None,
        "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True}  # fmt: skip


def test_a_plain_state_has_no_findings_but_the_note_on_positions():
    state = adam_state()
    assert codes(state) == {"SR-WRITE-POSITIONS": Severity.NOTE}
    assert codes(state, lay_out_dcp) == {}
    assert codes(replace(without(state, Role.OPTIM), groups=())) == {}


@pytest.mark.parametrize("lay", [lay_out, lay_out_dcp])
def test_objects_of_unknown_classes_are_left_out_and_named(lay: Any):
    record = Inert("somewhere.Config", ("x",))
    state = adam_state(objects={"config.inner": record, "config.width": 3, "list": [1, record]})
    assert codes(state, lay)["SR-WRITE-OBJECT"] is Severity.ERROR
    plan = lay(WriteSource(state, lambda key: np.zeros(())))
    assert set(plan.dropped) == {"config.inner", "list"}
    assert b"somewhere" not in b"".join(literal.content for file in plan.files for literal in file.literals)
    assert "SR-WRITE-OBJECT" not in codes(adam_state(objects={"config.width": 3}), lay)


@pytest.mark.parametrize("lay", [lay_out, lay_out_dcp])
def test_settings_that_torch_wants_are_completed(lay: Any):
    few = {"lr": 1.0, "betas": [0.9, 0.99], "eps": 1e-8}
    names = tuple(adam_state().groups[0].params)
    assert codes(adam_state(groups=(ParamGroup(names, few),)), lay)["SR-WRITE-SETTINGS"] is Severity.NOTE
    assert "SR-WRITE-SETTINGS" not in codes(adam_state(groups=(ParamGroup(names, FULL),)), lay)
    assert "SR-WRITE-SETTINGS" not in codes(adam_state(groups=(ParamGroup(names, {"lr": 1.0, "momentum": 0.9}),)), lay)


@pytest.mark.parametrize("lay", [lay_out, lay_out_dcp])
def test_state_without_a_group_is_found(lay: Any):
    state = adam_state()
    lost = replace(state, groups=(ParamGroup(state.groups[0].params[1:], FULL),))
    assert codes(lost, lay)["SR-WRITE-GROUPLESS"] is Severity.ERROR
    assert codes(replace(state, groups=()), lay)["SR-WRITE-GROUPLESS"] is Severity.WARNING


@pytest.mark.parametrize("lay", [lay_out, lay_out_dcp])
def test_masters_that_torch_does_not_look_at_are_named(lay: Any):
    checkpoint = made({"param:w": weights(3), "master:w": weights(3), "optim.exp_avg:w": weights(3)})
    assert codes(checkpoint.state, lay)["SR-WRITE-MASTERS"] is Severity.ERROR
    assert "SR-WRITE-MASTERS" not in codes(adam_state(), lay)


def test_state_without_a_name_cannot_be_written_by_name():
    state = adam_state({"#0": (3, 4), "#1": (5,)})
    assert codes(state, lay_out_dcp)["SR-WRITE-NAMELESS"] is Severity.ERROR
    assert set(codes(state)) == {"SR-WRITE-POSITIONS"}


# ---------------------------------------------------------------- real checkpoints


@needs_corpus
@pytest.mark.parametrize(
    "name",
    ["torchsave_ddp_ws2/checkpoint_5.pt", "dcp_fsdp2_ws4", "dcp_tpfsdp_dp2tp2", "dcp_fsdp2_ws4_bf16", "dcp_pp2/ckpt",
     "ranklocal_fsdp2_ws3", "fsdp1_ws2_flat/full.pt"],
)  # fmt: skip
def test_real_checkpoints_hold_their_truth(name: str, tmp_path: Path):
    source = open_checkpoint(corpus("torch") / name)
    write(source, tmp_path / "f.pt")
    assert compare_checkpoints(source, open_checkpoint(tmp_path / "f.pt")).equal
    saved = torch.load(tmp_path / "f.pt", weights_only=True)
    numbers = {
        label: number
        for group in saved["optimizer"]["param_groups"]
        for number, label in zip(group["params"], group["param_names"], strict=True)
    }
    truth = read_truth(corpus("torch") / name.split("/")[0])
    for label, value in truth.items():
        section, _, rest = label.partition(".")
        fqn, _, slot = rest.rpartition(".")
        tensor = saved["model"][rest] if section == "model" else saved["optimizer"]["state"][numbers[fqn]][slot]
        assert as_numpy(tensor).tobytes() == value.astype(as_numpy(tensor).dtype).tobytes(), label


def test_a_scheduler_in_a_list_is_read_back_as_the_scheduler(tmp_path: Path):
    scheduler = {"base_lrs": [0.1, 0.2], "last_epoch": 5}
    objects = {f"lr_schedulers.0.{name}": value for name, value in scheduler.items()}
    objects |= {"lr_schedulers.1.gamma": 0.5, "epoch": 1}
    checkpoint = made({"param:w": weights(3)}, scheduler=scheduler, objects=objects)
    carry_out(lay_out(source_of(checkpoint)), checkpoint, tmp_path / "f.pt")
    saved = torch.load(tmp_path / "f.pt", weights_only=True)
    assert saved["lr_scheduler"] == scheduler
    assert saved["lr_schedulers"] == {"1": {"gamma": 0.5}}
    carry_out(lay_out_dcp(source_of(checkpoint)), checkpoint, tmp_path / "dcp")
    for written in (tmp_path / "f.pt", tmp_path / "dcp"):
        found = open_checkpoint(written)
        assert found.state.scheduler == scheduler
        assert found.state.objects["lr_schedulers.1.gamma"] == 0.5
        found.close()
