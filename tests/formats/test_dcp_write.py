"""What samerun writes as DCP: the source's names and styles, every type and role, and nothing under two names."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from samerun.core.dtype import DTYPES
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, RecordedProgress, TensorEntry, TensorKey, Tiling
from samerun.errors import PlanError
from samerun.formats.base import WriteSource, numpy_dtype
from samerun.formats.dcp.write import lay_out
from samerun.formats.detect import open_checkpoint
from samerun.verify.state.compare import compare_checkpoints
from support import dcp as saving
from support.corpus import corpus, needs_corpus
from support.states import adam_state
from support.toy import quiet
from support.written import carry_out, source_of


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("momentum", [False, True])
def test_names_and_style_are_the_source_s(flatten: bool, momentum: bool, tmp_path: Path):
    state = saving.job_state(flatten=flatten, momentum=momentum)
    source = open_checkpoint(saving.save(state, tmp_path / "source"))
    carry_out(lay_out(source_of(source), Layout(dp_shard=2, dp_replicate=2)), source, tmp_path / "moved")
    theirs, mine = metadata(tmp_path / "source"), metadata(tmp_path / "moved")
    assert set(mine.state_dict_metadata) == set(theirs.state_dict_metadata)
    assert mine.planner_data == theirs.planner_data
    with quiet():
        dcp.load(state, checkpoint_id=tmp_path / "moved", no_dist=True)
    assert compare_checkpoints(source, open_checkpoint(tmp_path / "moved")).equal


@needs_corpus
@pytest.mark.parametrize("name", ["dcp_pp2/ckpt", "titan_fsdp_dp2/checkpoint", "dcp_tpfsdp_dp2tp2", "fsdp1_ws2_orig"])
def test_real_checkpoints_keep_their_names(name: str, tmp_path: Path):
    folder = corpus("torch") / name / ("sharded_dcp" if name.startswith("fsdp1") else "")
    source = open_checkpoint(folder)
    carry_out(lay_out(source_of(source), Layout(dp_shard=3)), source, tmp_path / "moved")
    theirs, mine = metadata(source.path), metadata(tmp_path / "moved")
    assert set(mine.state_dict_metadata) == set(theirs.state_dict_metadata)
    assert mine.planner_data == theirs.planner_data
    assert compare_checkpoints(source, open_checkpoint(tmp_path / "moved")).equal


@needs_corpus
def test_torchtitan_s_loader_states_are_pickles_again(tmp_path: Path):
    source = open_checkpoint(corpus("torch") / "titan_fsdp_dp2" / "checkpoint")
    carry_out(lay_out(source_of(source)), source, tmp_path / "moved")
    state: dict[str, Any] = {"dataloader": {"dp_rank_0": None, "world_size": None}}
    with quiet():
        dcp.load(state, checkpoint_id=tmp_path / "moved", no_dist=True)
    assert isinstance(state["dataloader"]["dp_rank_0"], bytes)
    assert pickle.loads(state["dataloader"]["dp_rank_0"])["_sampler_iter_state"] == {"samples_yielded": 10}
    assert state["dataloader"]["world_size"] == 2


# ---------------------------------------------------------------- states made by hand


class Made:
    """A state made by hand with values to go with it."""

    def __init__(self, values: dict[str, np.ndarray], **more: Any) -> None:
        tensors: dict[str, TensorEntry] = {}
        for key, value in values.items():
            parsed = TensorKey.parse(key)
            aliases = ("tied.w",) if key.endswith("float32") and key.startswith("param") else ()
            tensors[key] = TensorEntry(
                parsed, value.shape, DTYPES[value.dtype.name], Tiling.whole(value.shape), parsed.fqn, aliases
            )
        self.path, self.values = Path("made"), values
        self.state = LogicalState(format="made", tensors=tensors, **more)

    def read(self, key: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Any:
        box = tuple(slice(a, a + n) for a, n in zip(offsets or (), sizes or (), strict=True))
        return np.asarray(self.values[key][box])


def every_type() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    found: dict[str, np.ndarray] = {}
    for name, dtype in DTYPES.items():
        raw = random.integers(0, 2, (5, 3, dtype.num_bytes), dtype=np.uint8)
        found[f"param:{name}"] = raw.view(numpy_dtype(dtype)).reshape(5, 3)
    return found


@pytest.mark.parametrize("layout", [None, Layout(dp_shard=4), Layout(dp_shard=2, tp=2, cp=2)])
def test_every_type_shape_and_role_is_loaded_by_torch(layout: Layout | None, tmp_path: Path):
    values = every_type() | {
        "param:none": np.zeros((0, 3), np.float32),
        "param:one": np.ones(1, np.float32),
        "param:scalar": np.array(2.5, np.float32),
        "buffer:seen": np.array(9, np.int64),
        "ema:float32": np.ones((5, 3), np.float32),
        "master:bfloat16": np.full((5, 3), 1.25, np.float32),
        "optim.step:float32": np.array(7, np.int64),
        "optim.exp_avg:float32": np.full((5, 3), 0.5, np.float32),
        "optim.inner.row:float32": np.full(5, 0.25, np.float32),
    }
    groups = (ParamGroup(("float32",), {"lr": 1.0, "momentum": 0.9}),)
    progress = RecordedProgress(update=7, samples=70)
    made = Made(values, groups=groups, progress=progress, objects={"a": [{}, {}], "b": {}, "c.d": 1})
    plan = lay_out(source_of(made), layout)
    assert {slots.key for slots in plan.tensors} == set(values)
    carry_out(plan, made, tmp_path / "d")
    saved = metadata(tmp_path / "d").state_dict_metadata
    template = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        for name, entry in saved.items()
    }
    with quiet():
        dcp.load(template, checkpoint_id=tmp_path / "d", no_dist=True)
    names = {"param": "model.{}", "buffer": "model.{}", "ema": "ema.{}", "master": "optim.state.{}.master"}
    for key, value in values.items():
        role, _, slot = key.partition(":")[0].partition(".")
        name = names.get(role, f"optim.state.{{}}.{slot}").format(key.partition(":")[2])
        loaded = template[name].contiguous()
        assert tuple(loaded.shape) == value.shape, key
        assert loaded.flatten().view(torch.uint8).numpy().tobytes() == value.tobytes(), key
    assert torch.equal(template["model.tied.w"], template["model.float32"])
    assert (template["progress.update"], template["progress.samples"], template["c.d"]) == (7, 70, 1)
    assert (template["optim.param_groups.0.params"], template["a"], template["b"]) == (["float32"], [{}, {}], {})


def test_without_a_layout_it_is_cut_as_the_source_was():
    state = adam_state(shards=4)
    source = WriteSource(state, lambda key: np.zeros(()))
    assert [file.path for file in lay_out(source).files] == [*(f"__{rank}_0.distcp" for rank in range(4)), ".metadata"]
    nothing = replace(state, topology=replace(state.topology, layout=None))
    files = lay_out(WriteSource(nothing, source.scalar)).files
    assert [file.path for file in files] == ["__0_0.distcp", ".metadata"]


def test_files_are_of_about_the_same_size():
    state = adam_state({f"layers.{i}.w": (64, 8 + i) for i in range(40)})
    layout = Layout(dp_replicate=3, dp_shard=2)
    files = lay_out(WriteSource(state, lambda key: np.zeros(())), layout).files[:-1]
    sizes = [file.size for file in files]
    assert len(sizes) == 6
    assert max(sizes) < 1.2 * min(sizes)


def test_two_values_of_one_name_are_refused():
    source = WriteSource(adam_state(objects={"embed.weight": 3}), lambda key: np.zeros(()))
    with pytest.raises(PlanError, match="SR-WRITE-TWICE"):
        lay_out(source)
    lay_out(WriteSource(adam_state(objects={"embed.size": 3}), source.scalar))
