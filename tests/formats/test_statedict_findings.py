"""Every finding of the readers of saved state dicts: provoked on what a real framework wrote, and silent elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model

from samerun.core.mesh import Layout
from samerun.errors import CorruptCheckpoint, Problem
from samerun.formats.base import Checkpoint, Rigid
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "statedict"


def copy(name: str, tmp_path: Path) -> Path:
    target = tmp_path / name
    shutil.copytree(GOLDEN / name, target)
    (target / "truth.npz").unlink(missing_ok=True)
    return target


def find(checkpoint: Checkpoint, code: str) -> list[Problem]:
    return [problem for problem in checkpoint.state.problems if problem.code == code]


def codes(checkpoint: Checkpoint) -> set[str]:
    return {problem.code for problem in checkpoint.state.problems}


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    """Loads a file with torch, changes what it holds, and saves it again."""
    state = torch.load(file, weights_only=False)
    torch.save(change(state) or state, file)


def complete(path: Path) -> bool:
    return inspect_checkpoint(open_checkpoint(path)).complete


# ---- one file per rank ----


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return copy("bare", tmp_path)


def test_whole_rank_files_raise_only_what_they_lack(bare: Path):
    checkpoint = open_checkpoint(bare)
    assert codes(checkpoint) == {"SR-RANK-INFERRED", "SR-RANK-GEOMETRY", "SR-OPT-ORDER"}
    ambiguous = find(checkpoint, "SR-RANK-GEOMETRY")[0].message
    assert "model.router (dim 0 or 1)" in ambiguous
    assert "tok.weight" not in ambiguous  # 4, 4, 3 rows: only one dimension fits
    assert complete(bare)


def test_a_missing_rank_is_a_gap(bare: Path):
    (bare / "rank_1.pt").unlink()
    checkpoint = open_checkpoint(bare)
    assert find(checkpoint, "SR-FILE-MISSING")[0].where["rank"] == 1
    assert not complete(bare)


def test_a_missing_last_rank_is_not_proven_absent(bare: Path):
    """The two files left hold equal chunks of everything: nothing shows that a third is missing, and that is said."""
    (bare / "rank_2.pt").unlink()
    assert "SR-RANK-OPEN" in codes(open_checkpoint(bare))


def test_swapped_files_show_where_chunks_differ(bare: Path):
    (bare / "rank_0.pt").rename(bare / "other.pt")
    (bare / "rank_2.pt").rename(bare / "rank_0.pt")
    (bare / "other.pt").rename(bare / "rank_2.pt")
    assert "SR-RANK-CHUNKS" in codes(open_checkpoint(bare))


def test_a_rank_from_another_update_is_found(bare: Path):
    def age(state: Any) -> None:
        state["progress"]["update"] = 1
        for slots in state["optimizer"]["state"].values():
            slots["step"] -= 1

    edit(bare / "rank_1.pt", age)
    found = find(open_checkpoint(bare), "SR-RANK-STEP")
    assert [problem.where["key"] for problem in found if "key" in problem.where] == ["progress.update"]
    assert any("step counters" in problem.message for problem in found)


def test_a_truncated_rank_file_is_one_finding(bare: Path):
    file = bare / "rank_1.pt"
    file.write_bytes(file.read_bytes()[:-500])
    checkpoint = open_checkpoint(bare)
    assert find(checkpoint, "SR-PKL-ZIP")[0].where["file"] == str(file)
    assert not complete(bare)


def test_files_of_other_sets_are_left_out_and_named(bare: Path):
    shutil.copy(bare / "rank_0.pt", bare / "old_rank_0.pt")
    assert "old_rank_0.pt" in find(open_checkpoint(bare), "SR-RANK-LEFT")[0].message


def test_values_that_differ_between_ranks_are_kept_apart(bare: Path):
    edit(bare / "rank_1.pt", lambda state: state.update(loss=1.0))
    for rank in (0, 2):
        edit(bare / f"rank_{rank}.pt", lambda state: state.update(loss=0.5))
    checkpoint = open_checkpoint(bare)
    assert "loss" in find(checkpoint, "SR-RANK-OBJECT")[0].message
    assert checkpoint.state.objects["loss.rank1"] == 1.0


def test_more_files_than_ranks_are_stale(bare: Path):
    for rank in range(3):
        edit(bare / f"rank_{rank}.pt", lambda state: state.update(world_size=2))
    problem = find(open_checkpoint(bare), "SR-RANK-STALE")[0]
    assert (problem.expected, problem.found) == (2, 3)


def test_the_rank_inside_a_file_goes_before_its_name(bare: Path):
    before = open_checkpoint(bare).read("param:tok.weight")
    for rank in range(3):
        edit(bare / f"rank_{rank}.pt", lambda state, rank=rank: state.update(rank=rank))
    assert "SR-RANK-SWAPPED" not in codes(open_checkpoint(bare))
    (bare / "rank_0.pt").rename(bare / "other.pt")
    (bare / "rank_1.pt").rename(bare / "rank_0.pt")
    (bare / "other.pt").rename(bare / "rank_1.pt")
    checkpoint = open_checkpoint(bare)
    problem = find(checkpoint, "SR-RANK-SWAPPED")[0]
    assert (problem.expected, problem.found) == (0, 1)
    assert np.array_equal(checkpoint.read("param:tok.weight"), before)


def test_rank_files_load_on_as_many_ranks_only(bare: Path):
    checkpoint = open_checkpoint(bare)
    assert isinstance(checkpoint, Rigid)
    assert checkpoint.check_destination(Layout(dp_shard=3)) == []
    assert [problem.code for problem in checkpoint.check_destination(Layout(dp_shard=2))] == ["SR-RANK-RIGID"]


def replicas(folder: Path, change: Callable[[int, dict[str, Any]], Any] = lambda rank, state: None) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    for rank in range(3):
        torch.manual_seed(0)
        weights = {f"layers.{i}.weight": torch.randn(4, 3) for i in range(4)} | {"norm.running_mean": torch.randn(3)}
        state: dict[str, Any] = {"model": weights, "step": 7}
        change(rank, state)
        torch.save(state, folder / f"rank{rank}.pt")
    return open_checkpoint(folder)


def test_replicas_must_be_equal(tmp_path: Path):
    assert codes(replicas(tmp_path)) == set()

    def drift(rank: int, state: dict[str, Any]) -> None:
        state["model"]["layers.2.weight"] += rank == 1

    problem = find(replicas(tmp_path, drift), "SR-RANK-REPLICA")[0]
    assert (problem.severity, problem.where["tensor"]) == ("error", "model.layers.2.weight")


def test_statistics_of_a_rank_may_differ(tmp_path: Path):
    def drift(rank: int, state: dict[str, Any]) -> None:
        state["model"]["norm.running_mean"] += rank

    assert find(replicas(tmp_path, drift), "SR-RANK-REPLICA")[0].severity == "warning"


def test_a_shard_without_values_repeats_nothing(tmp_path: Path):
    """Zeros on every rank are replicas or shards of zeros: said to be open, read as shards beside others."""
    for rank in range(2):
        model = {"a.weight": torch.randn(4, 3) + rank, "b.weight": torch.randn(2, 3) + rank, "b.bias": torch.zeros(5)}
        torch.save({"model": model}, tmp_path / f"rank{rank}.pt")
    checkpoint = open_checkpoint(tmp_path)
    assert "model.b.bias (replica or shard)" in find(checkpoint, "SR-RANK-GEOMETRY")[0].message
    assert checkpoint.state.tensors["param:b.bias"].shape == (10,)


def test_distributed_tensors_that_cannot_be_placed_make_it_incomplete(tmp_path: Path):
    """A DTensor that is pending a sum over ranks, pickled by torch itself."""
    write_partial(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert "partial sum" in find(checkpoint, "SR-COV-PLACEMENT")[0].message
    assert not complete(tmp_path)


def write_partial(folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        shard = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        torch.save({"model": {"a.weight": shard, "a.bias": partial}}, folder / "rank0.pt")
        torch.save({"model": {"a.weight": shard, "a.bias": partial}}, folder / "rank1.pt")
    finally:
        dist.destroy_process_group()


def test_ranks_that_disagree_about_a_whole_tensor(tmp_path: Path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for rank, rows in ((0, 3), (1, 4)):
            tensor = DTensor.from_local(torch.ones(rows, 2), DeviceMesh("cpu", [0]), [Shard(0)])
            torch.save({"model": {"a.weight": tensor, "b.weight": tensor}}, tmp_path / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
    assert len(find(open_checkpoint(tmp_path), "SR-RANK-SHAPE")) == 2


# ---- safetensors ----


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return copy("shards", tmp_path)


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(3, 2) for i in range(4)}


def indexed(folder: Path) -> Path:
    """A model in two parts with an index, as transformers lays it out."""
    names = list(weights())
    parts = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for part, held in parts.items():
        save_file({name: weights()[name] for name in held}, folder / part)
    weight_map = {name: part for part, held in parts.items() for name in held}
    index = {"metadata": {"total_size": 4 * 24}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def test_whole_safetensors_raise_nothing(shards: Path, tmp_path: Path):
    assert codes(open_checkpoint(shards)) == set()
    (tmp_path / "m").mkdir()
    assert codes(open_checkpoint(indexed(tmp_path / "m"))) == set()


@pytest.mark.parametrize("number", [1, 2])
def test_a_missing_shard_file_is_found(number: int, shards: Path):
    (shards / f"shard-0000{number}-model-00001-of-00001.safetensors").unlink()
    assert find(open_checkpoint(shards), "SR-FILE-MISSING")[0].where["rank"] == number - 1
    assert not complete(shards)


def test_a_missing_last_shard_file_is_said_to_be_open(shards: Path):
    """Rows 4, 4, 3: without the last file every tensor looks whole and even. Nothing proves it; that is said."""
    (shards / "shard-00003-model-00001-of-00001.safetensors").unlink()
    assert "SR-RANK-OPEN" in codes(open_checkpoint(shards))


def test_shards_that_do_not_say_where_they_belong(shards: Path):
    file = shards / "shard-00002-model-00001-of-00001.safetensors"
    save_file(load_file(file), file)  # rewriting drops the metadata
    assert "SR-COV-PLACEMENT" in codes(open_checkpoint(shards))
    assert not complete(shards)


def test_an_object_in_front_of_the_header_is_stepped_over(tmp_path: Path):
    path = copy("shards-object", tmp_path)
    assert codes(open_checkpoint(path)) == {"SR-ST-OBJECT"}
    assert complete(path)


def test_an_empty_file_is_named(shards: Path):
    (shards / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"")
    assert "SR-FILE-EMPTY" in codes(open_checkpoint(shards))
    assert not complete(shards)


@pytest.mark.parametrize("extra", [b"zz", bytes(4096)])
def test_bytes_behind_the_tensors_are_loose(extra: bytes, tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file(weights(), file)
    assert "SR-ST-LOOSE" not in codes(open_checkpoint(file))
    file.write_bytes(file.read_bytes() + extra)
    assert f"{len(extra)} bytes" in find(open_checkpoint(file), "SR-ST-LOOSE")[0].message
    with pytest.raises(SafetensorError):  # what the finding says
        load_file(file)


def test_a_truncated_file_loses_what_lies_behind(tmp_path: Path):
    save_file(weights(), tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-30])
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert codes(checkpoint) == {"SR-FILE-TRUNCATED"}
    assert [len(entry.tiling) for entry in checkpoint.state.tensors.values()] == [1, 1, 0, 0]
    assert not complete(tmp_path / "model.safetensors")


def header(entries: dict[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + payload


@pytest.mark.parametrize(
    "content",
    [
        b"\x10\x00\x00\x00\x00\x00\x00\x00{ no json at all",
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": 3}),
        header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, b"1234"),
        (1 << 60).to_bytes(8, "little") + b"{}",
        b"[" * 8 + b"[" * 100_000,
    ],
    ids=["json", "size", "range", "negative", "entry", "overlap", "length", "deep"],
)
def test_headers_that_make_no_sense_are_refused(content: bytes, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"SR-FILE-HEADER|SR-FILE-TRUNCATED"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_tensor_of_an_unknown_type_that_is_cut_off_leaves_no_loose_bytes(tmp_path: Path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert codes(open_checkpoint(tmp_path / "m.safetensors")) == {"SR-FILE-DTYPE"}


def test_unknown_element_types_are_left_out(tmp_path: Path):
    entries = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F4", "shape": [8], "data_offsets": [4, 8]},
    }
    (tmp_path / "model.safetensors").write_bytes(header(entries, bytes(8)))
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert codes(checkpoint) == {"SR-FILE-DTYPE"}
    assert list(checkpoint.state.tensors) == ["param:a"]


def test_an_index_that_names_a_missing_file(tmp_path: Path):
    (indexed(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    assert codes(open_checkpoint(tmp_path)) == {"SR-FILE-MISSING"}
    assert not complete(tmp_path)


def test_an_index_that_promises_what_a_file_lacks(tmp_path: Path):
    edit_index(indexed(tmp_path), lambda index: index["weight_map"].update(extra="model-00001-of-00002.safetensors"))
    problem = find(open_checkpoint(tmp_path), "SR-FILE-INDEX")[0]
    assert problem.where["tensor"] == "extra"
    assert not complete(tmp_path)


def test_tensors_that_no_index_lists(tmp_path: Path):
    edit_index(indexed(tmp_path), lambda index: index["weight_map"].pop("layers.0.weight"))
    assert codes(open_checkpoint(tmp_path)) == {"SR-ST-UNLISTED", "SR-ST-TOTAL"}


def test_a_size_that_does_not_add_up(tmp_path: Path):
    edit_index(indexed(tmp_path), lambda index: index["metadata"].update(total_size=90))
    assert codes(open_checkpoint(tmp_path)) == {"SR-ST-TOTAL"}


def test_parts_of_another_number_of_files_are_stale(tmp_path: Path):
    shutil.copy(indexed(tmp_path) / "model-00001-of-00002.safetensors", tmp_path / "model-00003-of-00003.safetensors")
    assert codes(open_checkpoint(tmp_path)) == {"SR-FILE-STALE"}


def test_an_index_that_leads_elsewhere_is_not_followed(tmp_path: Path):
    edit_index(indexed(tmp_path), lambda index: index["weight_map"].update(x="../../etc/passwd"))
    assert "SR-FILE-ESCAPE" in codes(open_checkpoint(tmp_path))


def test_an_index_that_is_none(tmp_path: Path):
    (indexed(tmp_path) / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match="SR-META-INDEX"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("part", [5, None, ["model-00001-of-00002.safetensors"]])
def test_an_index_that_names_no_file_for_a_tensor(part: Any, tmp_path: Path):
    edit_index(indexed(tmp_path), lambda index: index["weight_map"].update(x=part))
    with pytest.raises(CorruptCheckpoint, match=r"SR-META-INDEX.*'x'"):
        open_checkpoint(tmp_path)


def test_numbered_parts_without_an_index(tmp_path: Path):
    (indexed(tmp_path) / "model.safetensors.index.json").unlink()
    assert codes(open_checkpoint(tmp_path)) == set()
    assert len(open_checkpoint(tmp_path).state.tensors) == 4
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert codes(open_checkpoint(tmp_path)) == {"SR-FILE-MISSING"}


def test_names_that_save_model_dropped_are_aliases(tmp_path: Path):
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(5, 2), "head": torch.nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["emb"].weight
    save_model(model, str(tmp_path / "model.safetensors"))
    entries = list(open_checkpoint(tmp_path / "model.safetensors").state.tensors.values())
    assert [{entry.key.fqn, *entry.aliases} for entry in entries] == [{"emb.weight", "head.weight"}]


# ---- Hugging Face ----


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    return copy("trainer", tmp_path) / "checkpoint-4"


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_trainer_in_the_middle_of_an_epoch_has_a_cursor_bound_to_its_processes(trainer: Path):
    assert codes(open_checkpoint(trainer)) == {"SR-HF-CURSOR", "SR-OPT-ASSUMED"}
    assert "6 samples per update on 3 processes" in find(open_checkpoint(trainer), "SR-HF-CURSOR")[0].message
    edit_json(trainer / "trainer_state.json", epoch=1.0)
    assert codes(open_checkpoint(trainer)) == {"SR-OPT-ASSUMED"}


def test_a_model_in_a_torch_file_keeps_its_order(trainer: Path):
    """With pytorch_model.bin nothing about the optimizer's positions is assumed."""
    from_file = load_file(trainer / "model.safetensors")
    groups = open_checkpoint(trainer).state.groups
    order = dict.fromkeys((*groups[0].params, *groups[1].params))
    (trainer / "model.safetensors").unlink()
    torch.save({name: from_file[name] for name in in_registration_order(order)}, trainer / "pytorch_model.bin")
    checkpoint = open_checkpoint(trainer)
    assert codes(checkpoint) == {"SR-HF-CURSOR", "SR-OPT-ORDER"}
    assert checkpoint.state.groups == groups


def in_registration_order(names: Any) -> list[str]:
    parts = (
        "embed_tokens",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "input",
        "post",
    )

    def place(name: str) -> tuple[int, int]:
        layer = next((int(part) for part in name.split(".") if part.isdigit()), -1 if "embed" in name else 99)
        return layer, next((i for i, part in enumerate(parts) if part in name), 99)

    return sorted(names, key=place)


def test_a_lost_trainer_state_is_missed(trainer: Path):
    (trainer / "trainer_state.json").unlink()
    assert "SR-HF-STATE" in codes(open_checkpoint(trainer))


def test_a_damaged_trainer_state_is_named(trainer: Path):
    (trainer / "trainer_state.json").write_text("{")
    assert "SR-FILE-BESIDE" in codes(open_checkpoint(trainer))
    assert "SR-HF-STATE" not in codes(open_checkpoint(trainer))  # it is there


@pytest.mark.parametrize("updates", ["five", -3, 2.5, None])
def test_a_trainer_state_without_a_number_of_updates(updates: Any, trainer: Path):
    edit_json(trainer / "trainer_state.json", global_step=updates)
    problem = find(open_checkpoint(trainer), "SR-HF-STATE")[0]
    assert problem.found == ("nothing" if updates is None else repr(updates))


def test_a_trainer_state_with_absurd_numbers_is_read(trainer: Path):
    edit_json(trainer / "trainer_state.json", global_step=10**400)
    assert "SR-CNT-OPTIMIZER" in {problem.code for problem in inspect_checkpoint(open_checkpoint(trainer)).problems}


def test_generator_states_of_more_processes_are_stale(trainer: Path):
    shutil.copy(trainer / "rng_state_0.pth", trainer / "rng_state_3.pth")
    assert "rng_state_3.pth" in find(open_checkpoint(trainer), "SR-FILE-STALE")[0].message


def test_a_generator_state_that_is_missing_in_between(trainer: Path):
    (trainer / "rng_state_1.pth").unlink()
    assert find(open_checkpoint(trainer), "SR-RNG-LOST")[0].where["rank"] == 1
    found = {problem.code for problem in inspect_checkpoint(open_checkpoint(trainer)).problems}
    assert "SR-RNG-RANKS" not in found  # it is the same loss


def test_a_checkpoint_without_a_model(trainer: Path):
    (trainer / "model.safetensors").unlink()
    assert {"SR-FILE-MISSING", "SR-OPT-UNMATCHED"} <= codes(open_checkpoint(trainer))


@pytest.mark.parametrize(("layers", "severity"), [(3, "error"), (1, "warning")])
def test_layers_must_be_those_of_the_configuration(layers: int, severity: str, trainer: Path):
    edit_json(trainer / "config.json", num_hidden_layers=layers)
    problem = find(open_checkpoint(trainer), "SR-HF-LAYERS")[0]
    assert (problem.severity, problem.expected, problem.found) == (severity, layers, 2)


def test_a_head_that_is_not_what_the_configuration_ties(trainer: Path):
    tensors = load_file(trainer / "model.safetensors")
    for head, expected in ((tensors["model.embed_tokens.weight"].clone(), False), (torch.zeros(11, 10), True)):
        save_file({**tensors, "lm_head.weight": head}, trainer / "model.safetensors")
        assert ("SR-TIE-DIFFERS" in codes(open_checkpoint(trainer))) == expected


def test_adapters_alone_are_said_to_be_that(tmp_path: Path):
    save_file(weights(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 1.0}))
    assert codes(open_checkpoint(tmp_path)) == {"SR-HF-ADAPTER"}


# ---- Accelerate and Lightning ----


def test_a_loader_state_of_one_process_is_one_processs(tmp_path: Path):
    path = copy("accelerate", tmp_path)
    assert codes(open_checkpoint(path)) == {"SR-OPT-ASSUMED"}
    torch.save({"_num_yielded": 5, "_sampler_iter_yielded": 5}, path / "dl_state_dict.bin")
    checkpoint = open_checkpoint(path)
    assert "SR-ACC-CURSOR" in codes(checkpoint)
    assert checkpoint.state.data["dl_state_dict"]["_num_yielded"] == 5
    for rank in (1, 2):
        (path / f"random_states_{rank}.pkl").unlink()
    assert "SR-ACC-CURSOR" not in codes(open_checkpoint(path))


def test_an_accelerate_directory_without_its_model(tmp_path: Path):
    path = copy("accelerate", tmp_path)
    (path / "model.safetensors").unlink()
    assert "SR-FILE-MISSING" in codes(open_checkpoint(path))
    assert not complete(path)


def test_checkpoints_inside_are_put_together(tmp_path: Path):
    """What Accelerate writes under FSDP: the model and the optimizer as DCP directories of their own."""
    from support.dcp import job_state, save

    state = job_state()
    save({"model": state["model"]}, tmp_path / "pytorch_model_fsdp_0")
    save({"optimizer": state["optim"]}, tmp_path / "optimizer_0")
    torch.save({"step": 3, "torch_manual_seed": torch.get_rng_state()}, tmp_path / "random_states_0.pkl")
    torch.save(state["scheduler"], tmp_path / "scheduler.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.state.format == "accelerate"
    for name, tensor in state["model"].items():
        assert np.array_equal(checkpoint.read(f"param:{name}"), tensor)
        assert np.array_equal(checkpoint.read(f"optim.exp_avg:{name}"), state["optim"]["state"][name]["exp_avg"])
    assert [len(group.params) for group in checkpoint.state.groups] == [2, 4]
    report = inspect_checkpoint(checkpoint, deep=True)
    assert report.complete
    (tmp_path / "pytorch_model_fsdp_0" / "__0_0.distcp").unlink()
    assert not complete(tmp_path)


def test_lightning_in_the_middle_of_an_epoch_restarts_it(tmp_path: Path):
    path = copy("lightning", tmp_path) / "step3.ckpt"
    assert "after 3 batches" in find(open_checkpoint(path), "SR-PL-EPOCH")[0].message

    def with_loader(state: Any) -> None:
        state["loops"]["fit_loop"]["state_dict"] = {"combined_loader": [{"_num_yielded": 3}]}

    edit(path, with_loader)
    checkpoint = open_checkpoint(path)
    assert "SR-PL-EPOCH" not in codes(checkpoint)
    assert checkpoint.state.data["combined_loader"]["batches"] == 3


def test_the_place_that_samerun_keeps_in_a_lightning_checkpoint(tmp_path: Path):
    from samerun.train import ElasticSampler

    path = copy("lightning", tmp_path) / "step3.ckpt"
    sampler = ElasticSampler(40, global_batch=4, replicas=2, replica=0, max_microbatch=2)
    for _ in range(3):
        sampler.commit()

    def with_position(state: Any) -> None:
        state["callbacks"]["SamerunCallback"] = sampler.state_dict()

    edit(path, with_position)
    checkpoint = open_checkpoint(path)
    assert "SR-PL-EPOCH" not in codes(checkpoint)
    assert (checkpoint.state.progress.update, checkpoint.state.progress.samples) == (3, 12)
    assert "data" in inspect_checkpoint(checkpoint).to_json()["resumable"]["have"]


def test_lightning_with_averaged_weights_keeps_both(tmp_path: Path):
    path = copy("lightning", tmp_path) / "step3.ckpt"
    assert "SR-PL-AVERAGE" not in codes(open_checkpoint(path))

    def averaged(state: Any) -> None:
        state["current_model_state"] = state["state_dict"]
        state["state_dict"] = {name: tensor.clone() + 1 for name, tensor in state["current_model_state"].items()}

    before = open_checkpoint(path).read("param:net.tok.weight").copy()  # not the view of a file about to change
    edit(path, averaged)
    checkpoint = open_checkpoint(path)
    assert "SR-PL-AVERAGE" in codes(checkpoint)
    assert np.array_equal(checkpoint.read("param:net.tok.weight"), before)
    assert np.array_equal(checkpoint.read("ema:net.tok.weight"), before + 1)


# ---- samerun's own export ----


def test_an_export_reads_back_as_it_was(tmp_path: Path):
    from safetensors.numpy import save_file as save_arrays

    from samerun.formats.safetensors.sidecar import dump_sidecar

    source = open_checkpoint(GOLDEN / "bare")
    tensors = {key: np.ascontiguousarray(source.read(key)) for key in source.state.tensors}
    save_arrays(tensors, tmp_path / "state.safetensors")
    (tmp_path / "state.json").write_text(dump_sidecar(source.state))
    found = open_checkpoint(tmp_path)
    assert codes(found) == set()
    assert found.state.format == "safetensors"
    assert {key: entry.aliases for key, entry in found.state.tensors.items()} == {
        key: entry.aliases for key, entry in source.state.tensors.items()
    }
    assert all(np.array_equal(found.read(key), value) for key, value in tensors.items())
    for part in ("groups", "progress", "scheduler", "topology"):
        assert getattr(found.state, part) == getattr(source.state, part)
    rng = found.state.rng["rng"]["rank1"]
    assert np.array_equal(rng["torch"], source.state.rng["rng"]["rank1"]["torch"])
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="SR-META-SIDECAR"):
        open_checkpoint(tmp_path)
    (tmp_path / "state.json").unlink()
    assert codes(open_checkpoint(tmp_path)) == {"SR-META-MISSING"}


def test_every_finding_is_in_the_catalogue_and_in_a_test():
    import re

    from samerun.catalog import load_catalog

    source = Path(__file__).parents[2] / "src" / "samerun" / "formats"
    packages = ("statedict", "torch", "ranklocal", "fsdp1", "safetensors", "huggingface", "accelerate", "lightning")
    text = "".join(file.read_text() for package in packages for file in (source / package).glob("*.py"))
    emitted = set(re.findall(r'"(SR-[A-Z0-9-]+)"', text)) - {"SR-USAGE-PIECE"}
    assert emitted - set(load_catalog()) == set()
    tests = "".join(file.read_text() for file in Path(__file__).parents[1].glob("*/test_*.py"))
    assert {code for code in emitted if code not in tests} == set()
