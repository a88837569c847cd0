"""DCP directories that samerun lays out, loaded by torch at other layouts: every tensor equal, and training goes on."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from samerun.core.mesh import Layout
from samerun.formats.dcp.write import lay_out as lay_out_dcp
from samerun.formats.detect import open_checkpoint
from samerun.formats.torch.write import lay_out as lay_out_torch
from samerun.verify.inspection.structure import inspect_checkpoint
from samerun.verify.state.compare import compare_checkpoints
from support import toy
from support.gloo import import_once, run_ranks
from support.skeleton import build_model, build_optimizer, check_loaded, distribute, load_dcp
from support.written import carry_out, source_of

pytestmark = pytest.mark.multiprocess

SOURCE = Layout(dp_shard=2)
TARGETS = ["dp_shard=3", "dp_shard=2,tp=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A job after two updates on two ranks, its DCP directory, and torch's own full state of it."""
    import_once()
    folder = tmp_path_factory.mktemp("source") / "step-2"
    return folder, run_ranks(SOURCE.world_size, _train, str(folder))[0]


def _train(rank: int, world_size: int, folder: str) -> dict[str, np.ndarray]:
    job = toy.build(SOURCE)
    toy.train(job, 2)
    toy.save(job, Path(folder))
    return toy.full_state(job)


@pytest.fixture(scope="module")
def converted(trained: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint moved twice: to one torch.save file, and that to DCP for three ranks; and directly to DCP."""
    folder = tmp_path_factory.mktemp("moved")
    source = open_checkpoint(trained[0])
    carry_out(lay_out_dcp(source_of(source), Layout(dp_shard=3)), source, folder / "direct")
    carry_out(lay_out_torch(source_of(source)), source, folder / "f.pt")
    single = open_checkpoint(folder / "f.pt")
    carry_out(lay_out_dcp(source_of(single), Layout(dp_shard=3)), single, folder / "through")
    return {"direct": folder / "direct", "through": folder / "through"}


@pytest.mark.parametrize("target", TARGETS)
def test_torch_loads_it_at_another_layout(trained: tuple[Path, Any], converted: dict[str, Path], target: str):
    """One directory is loaded by the job itself, the other by a model of the same names, shapes and ties."""
    layout = Layout.parse(target)
    ranks = run_ranks(layout.world_size, _load, str(trained[0]), {k: str(v) for k, v in converted.items()}, target)
    for found, wrong in ranks:
        assert wrong == []
        assert {key: value.tobytes() for key, value in found.items()} == {
            key: value.tobytes() for key, value in trained[1].items()
        }


def _load(
    rank: int, world_size: int, source: str, folders: dict[str, str], target: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    warnings.simplefilter("ignore")
    layout = Layout.parse(target)
    job = toy.build(layout, seed=9)
    toy.load(job, Path(folders["direct"]))
    assert job.progress == {"update": 2, "samples": 16, "epoch": 0}
    assert job.scheduler.last_epoch == 2
    state = {key: value.copy() for key, value in toy.full_state(job).items()}
    toy.train(job, 1)
    assert job.progress["update"] == 3
    checkpoint = open_checkpoint(Path(source))
    model = distribute(build_model(checkpoint.state), layout)
    optimizer = build_optimizer(model, checkpoint.state)
    rest = load_dcp(Path(folders["through"]), model, optimizer, names=("model", "optimizer"))
    assert rest["progress.update"] == 2
    return state, check_loaded(model, optimizer, checkpoint)


def test_it_reads_back_as_the_same_state(trained: tuple[Path, Any], converted: dict[str, Path]):
    source = open_checkpoint(trained[0])
    for folder in converted.values():
        found = open_checkpoint(folder)
        assert compare_checkpoints(source, found).equal
        assert set(found.state.tensors) == set(source.state.tensors)
        report = inspect_checkpoint(found, deep=True)
        assert report.complete
        assert report.intact
        assert found.state.topology.layout == Layout(dp_shard=3)


def test_names_kinds_and_paths_are_the_source_s(trained: tuple[Path, Any], converted: dict[str, Path]):
    theirs, mine = (pickle.loads((folder / ".metadata").read_bytes()) for folder in (trained[0], converted["direct"]))
    assert set(mine.state_dict_metadata) == set(theirs.state_dict_metadata)
    assert mine.planner_data == theirs.planner_data
    for name, entry in mine.state_dict_metadata.items():
        assert type(entry) is type(theirs.state_dict_metadata[name]), name
        if hasattr(entry, "size"):
            other = theirs.state_dict_metadata[name]
            assert (entry.size, entry.properties) == (other.size, other.properties), name
    for key, place in mine.storage_data.items():
        assert place.offset % 64 == 0, key
        assert place.transform_descriptors is None


def test_chunks_are_those_of_torch_chunk(converted: dict[str, Path]):
    saved = dcp.FileSystemReader(converted["direct"]).read_metadata().state_dict_metadata
    for name, rows in (("model.tok.weight", [10, 10, 9]), ("optim.state.router.exp_avg", [1, 1, 1])):
        assert [chunk.sizes[0] for chunk in saved[name].chunks] == rows
    assert [len(part) for part in torch.chunk(torch.empty(29), 3)] == [10, 10, 9]
    assert len(saved["model.average"].chunks) == 1
    assert saved["optim.state.router.step"].size == torch.Size(())


def test_torch_s_own_tool_reads_it(converted: dict[str, Path], trained: tuple[Path, Any], tmp_path: Path):
    with toy.quiet():
        dcp_to_torch_save(converted["direct"], tmp_path / "f.pt")
    saved = torch.load(tmp_path / "f.pt", weights_only=False)
    assert saved["model"]["tok.weight"].numpy().tobytes() == trained[1]["param:tok.weight"].tobytes()
    assert saved["optim"]["param_groups"][0]["betas"] == (0.9, 0.95)


def test_a_box_in_the_wrong_place_is_seen(trained: tuple[Path, Any], tmp_path: Path):
    """The proof above is able to fail: one chunk of one tensor written where its neighbour belongs."""
    source = open_checkpoint(trained[0])
    plan = lay_out_dcp(source_of(source), Layout(dp_shard=2))
    slots = next(slots for slots in plan.tensors if slots.key == "param:mlp.gate.weight")
    slots.at[:2], slots.file[:2] = slots.at[1::-1].copy(), slots.file[1::-1].copy()
    carry_out(plan, source, tmp_path / "d")
    assert [value.key for value in compare_checkpoints(source, open_checkpoint(tmp_path / "d")).values] == [
        "param:mlp.gate.weight"
    ]
