"""Every real DeepSpeed checkpoint at hand reads equal to the live run that wrote it, element for element."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.core.box import check_tilings
from samerun.core.mesh import Layout
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from support.corpus import CORPUS, corpus, needs_corpus
from support.zero import codes

pytestmark = needs_corpus


def folders(name: str) -> list[str]:
    return sorted(path.name for path in (CORPUS / name).iterdir()) if CORPUS and (CORPUS / name).is_dir() else []


def key_of(checkpoint: Checkpoint, role: str, name: str) -> str:
    if role == "fp32":
        return f"master:{name}" if f"master:{name}" in checkpoint.state.tensors else f"param:{name}"
    return {"module": f"param:{name}", "buffer": f"buffer:{name}"}.get(role, f"optim.{role}:{name}")


def assert_equal(checkpoint: Checkpoint, key: str, truth: np.ndarray) -> None:
    found = checkpoint.read(key)
    assert found.shape == truth.shape, key
    assert np.array_equal(found.astype(truth.dtype), truth), key


def assert_is_truth(checkpoint: Checkpoint, truth: Any, facts: dict[str, Any]) -> None:
    for item in truth.files:
        role, _, name = item.partition("/")
        if role == "buffer" and not facts["buffers"][name]["persistent"]:
            continue
        assert_equal(checkpoint, key_of(checkpoint, role, name), truth[item])
    for name, param in facts["params"].items():
        if param["trainable"] and param.get("step"):
            assert checkpoint.read(f"optim.step:{name}").reshape(-1)[0] == param["step"][0]


def assert_nothing_else(checkpoint: Checkpoint, truth: Any) -> None:
    known = {item.partition("/")[2] for item in truth.files}
    assert {entry.key.fqn for entry in checkpoint.state.tensors.values()} <= known
    assert all(cover.exact for cover in check_tilings([(e.shape, e.tiling) for e in checkpoint.state.tensors.values()]))


@pytest.mark.parametrize("case", folders("deepspeed"))
def test_native_checkpoints_equal_their_truth(case: str) -> None:
    folder = corpus("deepspeed") / case
    checkpoint = open_checkpoint(folder)
    facts = json.loads((folder / "truth_step5.json").read_text())
    truth = np.load(folder / "truth_step5.npz")
    assert checkpoint.state.format == "zero"
    assert_is_truth(checkpoint, truth, facts)
    assert_nothing_else(checkpoint, truth)
    state = checkpoint.state
    assert [list(group.params) for group in state.groups] == facts["param_groups"]
    for group in state.groups:
        for name in group.params:
            param = facts["params"][name]
            for key in ("lr", "weight_decay", "eps"):
                assert group.hyperparameters[key] == param[key]
            assert list(group.hyperparameters["betas"]) == param["betas"]
    assert (state.progress.update, state.progress.samples) == (facts["global_steps"], facts["global_samples"])
    assert state.scheduler == facts["lr_scheduler"]
    assert state.topology.world_size == facts["world_size"]
    axis = "dp_replicate" if facts["stage"] == 0 else "dp_shard"
    assert state.topology.layout == Layout(**{axis: facts["world_size"]})
    assert f"ZeRO stage {facts['stage']}" in state.written_by["recognised"]
    ties = {alias: entry.key.fqn for entry in state.tensors.values() for alias in entry.aliases}
    assert ties == facts["shared"]
    assert not [problem for problem in state.problems if problem.severity != "note"]
    checkpoint.close()


def test_boxes_of_a_flat_tensor_are_read_alone():
    folder = corpus("deepspeed") / "z3_fp32_untied_ws4"
    checkpoint = open_checkpoint(folder)
    truth = np.load(folder / "truth_step5.npz")
    found = checkpoint.read("optim.exp_avg:blocks.0.qkv.weight", (13, 5), (30, 9))
    assert np.array_equal(found, truth["exp_avg/blocks.0.qkv.weight"][13:43, 5:14])


def test_parameters_of_a_16_bit_run_at_stage_3_are_the_rounded_masters():
    folder = corpus("deepspeed") / "z3_bf16_untied_ws3"
    checkpoint = open_checkpoint(folder)
    assert checkpoint.state.tensors["param:tok.weight"].dtype.name == "bfloat16"
    assert checkpoint.state.tensors["master:tok.weight"].dtype.name == "float32"
    assert checkpoint.locate("param:tok.weight", 0).dtype.name == "float32"


def global_name(name: str, rank: int, experts: int = 2) -> str:
    match = re.fullmatch(r"(.*deepspeed_experts\.)(\d+)(\..*)", name)
    return f"{match[1]}{rank * experts + int(match[2])}{match[3]}" if match else name


@pytest.mark.parametrize("case", folders("deepspeed-special"))
def test_tensor_pipeline_and_expert_parallel_checkpoints_equal_what_each_rank_held(case: str) -> None:
    folder = corpus("deepspeed-special") / case
    checkpoint = open_checkpoint(folder)
    names: set[str] = set()
    for rank in (0, 1):
        truth = np.load(folder / f"truth_rank{rank}.npz")
        for item in truth.files:
            role, _, local = item.partition("/")
            name = global_name(local, rank)
            names.add(name)
            found = checkpoint.read(key_of(checkpoint, role, name))
            held = truth[item]
            for axis, (whole, part) in enumerate(zip(found.shape, held.shape, strict=True)):
                if whole != part:  # cut over tensor-parallel ranks
                    found = np.take(found, range(rank * part, (rank + 1) * part), axis=axis)
            assert np.array_equal(found.astype(held.dtype), held), item
    assert {entry.key.fqn for entry in checkpoint.state.tensors.values()} == names
    assert all(cover.exact for cover in check_tilings([(e.shape, e.tiling) for e in checkpoint.state.tensors.values()]))
    expected = {"moe2_ws2": Layout(dp_shard=2, ep=2), "pp2_ws2": Layout(pp=2)}
    assert checkpoint.state.topology.layout == expected.get(case, Layout(tp=2))


def test_samples_are_those_that_were_consumed_where_tensor_parallel_ranks_were_counted_too():
    state = open_checkpoint(corpus("deepspeed-special") / "tp2_ws2").state
    assert state.progress.samples == 60
    assert codes(state.problems).count("SR-CNT-DISAGREE") == 1


def test_universal_checkpoints_equal_their_truth():
    found = 0
    for case in folders("deepspeed-universal"):
        native = corpus("deepspeed") / case
        if native.is_dir() and "_rr_" not in case:
            checkpoint = open_checkpoint(corpus("deepspeed-universal") / case)
            facts = json.loads((native / "truth_step5.json").read_text())
            truth = np.load(native / "truth_step5.npz")
            assert checkpoint.state.format == "universal"
            assert_is_truth(checkpoint, truth, facts)
            assert_nothing_else(checkpoint, truth)
            assert [list(group.params) for group in checkpoint.state.groups] == facts["param_groups"]
            found += 1
    assert found >= 2


def test_a_conversion_scrambled_by_round_robin_gradients_is_named():
    state = open_checkpoint(corpus("deepspeed-universal") / "z2_fp32_tied_rr_ws3").state
    assert "SR-UNI-ROUNDROBIN" in codes(state.problems)


DAMAGED = {
    "z2_missing_last_rank": ("SR-FILE-MISSING", "zero_pp_rank_2_mp_rank_00_optim_states.pt", False, None),
    "z2_rank1_from_other_step": ("SR-FILE-GENERATION", "zero_pp_rank_1_mp_rank_00_optim_states.pt", True, False),
    "z3_bitflip_payload": ("SR-FILE-CRC", "zero_pp_rank_1_mp_rank_00_optim_states.pt", True, False),
    "z3_stale_rank3_both_files": ("SR-ZERO-STALE", "zero_pp_rank_3_mp_rank_00_model_states.pt", True, None),
    "z3_truncated": ("SR-FILE-TRUNCATED", "zero_pp_rank_1_mp_rank_00_optim_states.pt", False, None),
}


@pytest.mark.parametrize("case", folders("deepspeed-damaged"))
def test_damage_is_named_with_its_file(case: str) -> None:
    from samerun.verify.inspection.structure import inspect_checkpoint

    code, file, complete, intact = DAMAGED[case]
    report = inspect_checkpoint(open_checkpoint(corpus("deepspeed-damaged") / case), deep=True)
    found = [problem for problem in report.problems if problem.code == code]
    assert [Path(problem.where["file"]).name for problem in found] == [file]
    assert (report.complete, report.intact) == (complete, intact)
    assert report.resumable.verdict == "no"
