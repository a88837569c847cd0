"""samerun's own export, opened by the real safetensors library, and everything beside the tensors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from samerun.convert.convert import Converted, carry_out, convert
from samerun.convert.objects import settle_objects
from samerun.convert.prepare import prepare
from samerun.core.dtype import DTYPES, parse_dtype
from samerun.core.namemap import NameMap
from samerun.core.state import LogicalState
from samerun.errors import SamerunError, UndecidedError, UsageError
from samerun.execute.engine import Settings
from samerun.execute.planner import plan_conversion
from samerun.formats.base import WriteSource, numpy_dtype
from samerun.formats.detect import open_checkpoint
from samerun.formats.mapped import MappedCheckpoint
from samerun.formats.safetensors.sidecar import dump_sidecar
from samerun.formats.safetensors.write import lay_out
from samerun.verify.inspection.structure import inspect_checkpoint
from samerun.verify.state.digest import digest_cast, digest_checkpoint
from support.corpus import corpus, needs_corpus
from support.exports import write_export


def run(source: Path, dest: Path, **options: object) -> Converted:
    checkpoint = open_checkpoint(source)
    try:
        return convert(checkpoint, dest, to="safetensors", settings=Settings(threads=1), **options)  # type: ignore[arg-type]
    finally:
        checkpoint.close()


def test_the_library_reads_what_was_written(shared_source: Path, tmp_path: Path) -> None:
    run(shared_source, tmp_path / "dest")
    with (
        safe_open(shared_source / "state.safetensors", "np") as before,
        safe_open(tmp_path / "dest" / "state.safetensors", "np") as after,
    ):
        assert set(before.keys()) == set(after.keys())
        for key in before.keys():  # noqa: SIM118
            assert np.array_equal(before.get_tensor(key), after.get_tensor(key))
    assert json.loads((tmp_path / "dest" / "state.json").read_text())["schema"] == "samerun/state/1"


def test_bytes_are_as_the_library_writes_them(tmp_path: Path) -> None:
    """Same order, same padding: the library writes the very same file."""
    tensors = {
        "param:w": np.ones((3, 5), np.float32),
        "param:a": np.ones(7, np.float64),
        "buffer:count": np.array(3, np.int64),
        "param:half": np.ones(3, np.float16),
        "param:none": np.ones((0, 4), np.float32),
    }
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "state.safetensors", metadata={"format": "pt"})
    state = LogicalState(format="x", tensors={})
    (tmp_path / "source" / "state.json").write_text(dump_sidecar(state))
    checkpoint = open_checkpoint(tmp_path / "source")
    allowed = {problem.code for problem in inspect_checkpoint(checkpoint).problems}
    done = convert(checkpoint, tmp_path / "dest", to="safetensors", allow=allowed)
    written = (tmp_path / "dest" / "state.safetensors").read_bytes()
    assert written == (tmp_path / "source" / "state.safetensors").read_bytes()
    assert done.bytes_written == sum(path.stat().st_size for path in (tmp_path / "dest").glob("state.*"))


def test_shards_with_an_index(shared_source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shared_source)

    def sharded(source: WriteSource, layout: object) -> object:
        return lay_out(source, None, max_shard_bytes=100_000)

    done = convert(checkpoint, tmp_path / "dest", to="safetensors", settings=Settings(threads=1))
    prepared = prepare(checkpoint, tmp_path / "many", to="safetensors", writer=sharded)  # type: ignore[arg-type]
    again = carry_out(prepared)
    assert done.state == again.state
    index = json.loads((tmp_path / "many" / "state.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 5
    assert set(index["weight_map"]) == set(checkpoint.state.tensors)
    for key, name in index["weight_map"].items():
        with safe_open(tmp_path / "many" / name, "np") as file:
            assert np.array_equal(file.get_tensor(key), checkpoint.read(key))
    assert open_checkpoint(tmp_path / "many").state.progress.update == 5
    checkpoint.close()


def test_everything_beside_the_tensors_travels(shared_source: Path, tmp_path: Path) -> None:
    done = run(shared_source, tmp_path / "dest")
    before, after = open_checkpoint(shared_source).state, open_checkpoint(tmp_path / "dest").state
    assert (after.groups, after.progress, after.scheduler) == (before.groups, before.progress, before.scheduler)
    assert after.rng == {"rng": {"rank0": {"seed": 1}, "rank1": {"seed": 2}}}
    assert after.data == {"cursor": 80}  # equal on all ranks: one
    assert [problem.code for problem in done.problems] == ["SR-CONVERT-RANKS"]


def test_objects_travel_by_rule() -> None:
    ranks = {"rank0": {"a": np.arange(3)}, "rank1": {"a": np.arange(3)}}
    other = {"rank0": 1, "rank1": 2, "rank2": 1}
    one = {"rank0": 4}
    state = LogicalState(
        format="x", tensors={}, objects={"same": ranks, "deep": {"in": other}}, rng={"r": one}, data={"n": 5}
    )
    settled, problems = settle_objects(state)
    assert settled.objects["same"]["a"].tolist() == [0, 1, 2]
    assert settled.objects["deep"] == {"in": other}
    assert (settled.rng, settled.data) == ({"r": one}, {"n": 5})
    assert [problem.code for problem in problems] == ["SR-CONVERT-RANKS"]
    assert "objects.deep.in" in problems[0].message
    assert settle_objects(LogicalState(format="x", tensors={}, objects={"same": ranks}))[1] == []


def test_types_change_by_role_and_are_proved_by_the_digest_of_the_cast(shared_source: Path, tmp_path: Path) -> None:
    bf16 = parse_dtype("bf16")
    done = run(shared_source, tmp_path / "dest", dtype={"param": bf16, "optim.exp_avg": parse_dtype("float64")})
    before, after = open_checkpoint(shared_source), open_checkpoint(tmp_path / "dest")
    kinds = {key: entry.dtype.name for key, entry in after.state.tensors.items()}
    assert kinds["param:head.w"] == "bfloat16"
    assert kinds["optim.exp_avg:head.w"] == "float64"
    assert kinds["optim.exp_avg_sq:head.w"] == "float32"
    assert kinds["optim.step:head.w"] == "float32"
    expected = before.read("param:head.w").astype(ml_dtypes.bfloat16)
    assert np.array_equal(after.read("param:head.w"), expected)
    proof = json.loads(done.proof.read_text())
    assert proof["tensors"]["param:head.w"]["cast_from"] == "float32"
    assert proof["tensors"]["param:head.w"]["digest"] == digest_cast(before, "param:head.w", "param:head.w", bf16)
    assert proof["dtypes"]["param:head.w"] == "bfloat16"


@pytest.mark.parametrize(
    "wanted", [{"weights": "float16"}, {"param.x": "float16"}, {"param": "int8"}, {"ema": "float16"}]
)
def test_types_that_cannot_be_asked_for(wanted: dict[str, str], shared_source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        run(shared_source, tmp_path / "dest", dtype={role: parse_dtype(name) for role, name in wanted.items()})
    assert {problem.code for problem in error.value.problems} == {"SR-USAGE-DTYPE"}


def test_other_names_are_proved_under_the_new_keys(shared_source: Path, tmp_path: Path) -> None:
    renamed = MappedCheckpoint(open_checkpoint(shared_source), NameMap.of({"layers.*": "blocks.*"}))
    done = convert(renamed, tmp_path / "dest", to="safetensors", settings=Settings(threads=1))
    proof = json.loads(done.proof.read_text())
    after = open_checkpoint(tmp_path / "dest")
    assert {key: entry["digest"] for key, entry in proof["tensors"].items()} == digest_checkpoint(after)
    assert "optim.exp_avg:blocks.1.w" in after.state.tensors
    assert after.state.groups[0].params == ("blocks.0.w", "blocks.1.w", "head.w")
    with pytest.raises(UsageError, match="SR-MAP-RULE"):
        MappedCheckpoint(open_checkpoint(shared_source), NameMap.of({"layers.0.w": "layers.1.w"}))


def test_the_proof_says_what_was_proved(shared_source: Path, tmp_path: Path) -> None:
    done = run(shared_source, tmp_path / "dest")
    proof = json.loads((tmp_path / "dest" / "samerun-proof.json").read_text())
    source = open_checkpoint(shared_source)
    assert proof["schema"] == "samerun/convert-proof/1"
    assert proof["source"]["path"] == str(shared_source.resolve())
    assert {key: entry["digest"] for key, entry in proof["tensors"].items()} == digest_checkpoint(source)
    assert proof["state"] == done.state
    assert proof["destination"]["bytes"] == done.bytes_written
    assert done.proof == tmp_path / "dest" / "samerun-proof.json"


def test_what_has_no_form_in_the_format_is_a_decision(tmp_path: Path) -> None:
    source = open_checkpoint(write_export(tmp_path / "source"))
    odd = replace(source.state, objects={"odd": {1, 2}, "fine": 3})
    plan = lay_out(WriteSource(odd, source.read))
    assert [problem.code for problem in plan.problems] == ["SR-CONVERT-OBJECT"]
    assert list(plan.dropped) == ["objects.odd"]
    tensors = dict(odd.tensors)
    tensors["param:head.w"] = replace(tensors["param:head.w"], dtype=DTYPES["complex128"])
    plan = lay_out(WriteSource(replace(source.state, tensors=tensors), source.read))
    assert [problem.code for problem in plan.problems] == ["SR-CONVERT-TYPE"]
    assert lay_out(WriteSource(source.state, source.read)).problems == ()
    assert plan_conversion(lay_out(WriteSource(source.state, source.read)), source, "").problems == ()


@needs_corpus
@pytest.mark.parametrize(
    "name",
    [
        "torch/dcp_fsdp2_ws3",
        "torch/dcp_fsdp2_ws4_bf16",
        "torch/dcp_tpfsdp_dp2tp2",
        "torch/ranklocal_fsdp2_ws3",
        "deepspeed/z3_bf16_untied_ws3",
        "deepspeed-special/tp2_ws2",
    ],
)
def test_real_checkpoints(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(corpus(name))
    convert(source, tmp_path / "dest", to="safetensors", settings=Settings(threads=1))
    with safe_open(tmp_path / "dest" / "state.safetensors", "np") as file:
        for key, entry in source.state.tensors.items():
            if entry.dtype.name != "bfloat16":
                assert np.array_equal(file.get_tensor(key), source.read(key).astype(numpy_dtype(entry.dtype)))
    after = open_checkpoint(tmp_path / "dest")
    assert digest_checkpoint(after) == digest_checkpoint(source)


@needs_corpus
def test_a_flipped_byte_in_the_source_is_refused(tmp_path: Path) -> None:
    copy = shutil.copytree(corpus("deepspeed/z3_fp32_untied_ws2"), tmp_path / "copy")
    file = next(path for path in sorted(copy.rglob("*optim_states.pt")))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(SamerunError) as error:
        run(copy, tmp_path / "dest")
    assert isinstance(error.value, UndecidedError)
    assert {problem.code for problem in error.value.problems} & {"SR-FILE-CRC", "SR-PKL-CRC"}
