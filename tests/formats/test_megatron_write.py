"""Megatron checkpoints as samerun writes them: proved against the truth of real runs, and every finding both ways."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from samerun.convert.convert import convert
from samerun.core.dtype import parse_dtype
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, Role, TensorEntry, TensorKey, Tiling
from samerun.errors import PlanError, UndecidedError
from samerun.formats.base import WriteSource
from samerun.formats.detect import open_checkpoint
from samerun.formats.megatron.write import adapt, lay_out
from support.corpus import CORPUS, corpus, needs_corpus
from support.megatron import GOLDEN, differences, read_tensors

GOLDENS = ["fr_tp2pp2", "lg_dist_tied_pp2_dp2"]
DECISIONS = ["SR-MGW-DEALT"]


def source_of(name: str) -> Any:
    return adapt(open_checkpoint(GOLDEN / name))


def plan(state: LogicalState, checkpoint: Any, layout: Layout | None = None) -> Any:
    return lay_out(WriteSource(state, checkpoint.read), layout)


def codes(found: Any) -> set[str]:
    return {problem.code for problem in found.problems}


@pytest.mark.parametrize("case", GOLDENS)
@pytest.mark.parametrize("layout", [None, Layout(tp=1, dp_shard=3)])
def test_written_checkpoints_equal_the_truth(case: str, layout: Layout | None, tmp_path: Path) -> None:
    done = convert(open_checkpoint(GOLDEN / case), tmp_path / "out", to="megatron", layout=layout)
    written = open_checkpoint(tmp_path / "out")
    facts = json.loads((GOLDEN / case / "truth.json").read_text())
    assert differences(written, dict(np.load(GOLDEN / case / "truth.npz")), facts["case"]["vocab"]) == []
    assert written.state.written_by["optimizer_encoding"] == "fully_reshardable"
    assert (written.state.progress.update, written.state.progress.samples) == (3, 36)
    assert not [problem for problem in (*done.problems, *written.state.problems) if problem.severity == "error"]
    assert {float(written.read(key)) for key in written.state.tensors if key.startswith("optim.step:")} == {3.0}


def cases() -> list[str]:
    folder = CORPUS / "megatron" if CORPUS else None
    return sorted(path.name for path in folder.iterdir()) if folder and folder.is_dir() else []


@needs_corpus
@pytest.mark.parametrize("case", cases())
def test_the_corpus_goes_round(case: str, tmp_path: Path) -> None:
    folder = corpus("megatron") / case
    facts = json.loads((folder / "TRUTH.json").read_text())
    other = Layout(tp=2, dp_shard=2, ep=1)
    convert(open_checkpoint(folder), tmp_path / "out", to="megatron", layout=other, allow=DECISIONS)
    written = open_checkpoint(tmp_path / "out")
    assert differences(written, read_tensors(folder / "TRUTH.safetensors"), facts["padded_vocab"]) == []
    saved = written.state.objects["args"]
    assert saved["expert_model_parallel_size"] == 1
    assert not any(group.hyperparameters["is_expert_parallel"] for group in written.state.groups)
    trained = {entry.key.fqn for entry in written.state.tensors.values() if entry.key.role is Role.OPTIM}
    assert sorted(fqn for group in written.state.groups for fqn in group.params) == sorted(trained)


def test_common_state_is_what_megatron_reads(tmp_path: Path) -> None:
    convert(open_checkpoint(GOLDEN / "fr_tp2pp2"), tmp_path / "out", to="megatron")
    folder = tmp_path / "out" / "iter_0000003"
    common = torch.load(folder / "common.pt", weights_only=False)
    assert common["args"].params_dtype is torch.bfloat16
    assert common["iteration"] == 3
    assert [group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]] == [3, 3]
    assert common["optimizer"]["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_random_states_are_what_generators_take(tmp_path: Path) -> None:
    convert(open_checkpoint(GOLDEN / "fr_tp2pp2"), tmp_path / "out", to="megatron")
    folder = tmp_path / "out" / "iter_0000003"
    places = FileSystemReader(folder).read_metadata().storage_data
    for pp, tp in ((0, 0), (0, 1), (1, 0), (1, 1)):
        place = next(at for index, at in places.items() if index.fqn == f"rng_state/shard_{pp}.{tp}_2.2")
        data = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        [[state]] = torch.load(io.BytesIO(data), weights_only=False)
        assert torch.equal(state["torch_rng_state"], torch.full((8,), tp + 10 * pp, dtype=torch.uint8))
        assert state["random_rng_state"] == [tp, pp]


def test_random_states_are_dealt_by_place() -> None:
    checkpoint = source_of("fr_tp2pp2")
    same = plan(checkpoint.state, checkpoint)
    names = b"".join(literal.content for file in same.files for literal in file.literals)
    assert all(f"rng_state/shard_{pp}.{tp}_2.2".encode() in names for pp in (0, 1) for tp in (0, 1))
    assert codes(same) & {"SR-MGW-STREAMS", "SR-MGW-DEALT"} == set()
    assert "SR-MGW-STREAMS" in codes(plan(checkpoint.state, checkpoint, Layout(tp=2)))
    states = dict(checkpoint.state.rng)
    states.pop("rank3")
    assert "SR-MGW-STREAMS" in codes(plan(replace(checkpoint.state, rng=states), checkpoint))


def test_random_states_that_differ_are_a_decision() -> None:
    checkpoint = source_of("lg_dist_tied_pp2_dp2")
    states = dict(checkpoint.state.rng)
    assert "SR-MGW-DEALT" not in codes(plan(checkpoint.state, checkpoint, Layout(pp=2, dp_shard=3)))
    states["rank1"] = {"torch_rng_state": np.ones(8, np.uint8)}
    odd = replace(checkpoint.state, rng=states)
    assert "SR-MGW-DEALT" in codes(plan(odd, checkpoint, Layout(pp=2, dp_shard=3)))


def _drop(prefixes: tuple[str, ...]) -> Callable[[LogicalState], LogicalState]:
    def change(state: LogicalState) -> LogicalState:
        return replace(state, tensors={k: e for k, e in state.tensors.items() if not k.startswith(prefixes)})

    return change


def _args(**new: Any) -> Callable[[LogicalState], LogicalState]:
    return lambda state: replace(state, objects={**state.objects, "args": {**state.objects["args"], **new}})


def _settings(**new: Any) -> Callable[[LogicalState], LogicalState]:
    def change(state: LogicalState) -> LogicalState:
        first, *others = state.groups
        settings = {k: v for k, v in {**first.hyperparameters, **new}.items() if v != "absent"}
        return replace(state, groups=(ParamGroup(first.params, settings), *others))

    return change


def _doubled(state: LogicalState) -> LogicalState:
    first = state.groups[0]
    other = ParamGroup(first.params[:1], {**first.hyperparameters, "is_expert_parallel": True, "lr": 0.5})
    return replace(state, groups=(*state.groups, other))


def _shaped(state: LogicalState) -> LogicalState:
    key = next(key for key in state.tensors if key.startswith("optim.exp_avg:"))
    odd = replace(state.tensors[key], shape=(3,), tiling=Tiling.whole((3,)))
    return replace(state, tensors={**state.tensors, key: odd})


def _foreign(state: LogicalState) -> LogicalState:
    key = TensorKey(Role.PARAM, "model.layers.0.w")
    entry = TensorEntry(key, (2,), parse_dtype("float32"), Tiling.whole((2,)), "w")
    return replace(state, format="dcp", tensors={**state.tensors, str(key): entry})


def _no_args(state: LogicalState) -> LogicalState:
    return replace(state, objects={name: value for name, value in state.objects.items() if name != "args"})


def _cut(state: LogicalState) -> LogicalState:
    return _args(vocab_size=29)(state)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("SR-MGW-NAMES", _foreign),
        ("SR-MGW-ARGS", _no_args),
        ("SR-MGW-UNVERIFIED", _args(multi_latent_attention=True)),
        ("SR-MGW-UNVERIFIED", _args(pipeline_model_parallel_layout="Et|L")),
        ("SR-MGW-SLOT", _shaped),
        ("SR-MGW-NOOPTIM", _drop(("optim.", "master:"))),
        ("SR-MGW-VOCAB", _cut),
        ("SR-MGW-ROWS", _args(vocab_size=20)),
        ("SR-MGW-ITERATION", lambda state: replace(state, progress=replace(state.progress, update=None))),
        ("SR-MGW-GROUPS", _settings(wd_mult="absent")),
        ("SR-MGW-GROUPS", _doubled),
        ("SR-MGW-CHANGED", _args(ckpt_format="torch")),
    ],
)
def test_findings(code: str, change: Callable[[LogicalState], LogicalState]) -> None:
    checkpoint = source_of("fr_tp2pp2")
    quiet = {"dist_ckpt_optim_fully_reshardable": True, "padded_vocab_size": 32, "vocab_size": None}
    state = _args(**quiet)(checkpoint.state)
    assert code not in codes(plan(state, checkpoint))
    assert code in codes(plan(change(state), checkpoint))


def test_objects_that_loaders_refuse_are_left_out() -> None:
    from samerun.formats.torchfile.values import Inert

    checkpoint = source_of("fr_tp2pp2")
    assert "SR-MGW-LEFTOUT" not in codes(plan(checkpoint.state, checkpoint))
    unknown = _args(scope=Inert("somewhere.Thing", (1,)))(checkpoint.state)
    found = plan(unknown, checkpoint)
    assert "SR-MGW-LEFTOUT" in codes(found)
    assert "args.scope" in found.dropped
    known = _args(attention_backend=Inert("megatron.core.transformer.enums.AttnBackend", (5,)))(checkpoint.state)
    assert "SR-MGW-LEFTOUT" not in codes(plan(known, checkpoint))


def test_masters_are_not_made_of_rounded_weights() -> None:
    checkpoint = source_of("fr_tp2pp2")
    with pytest.raises(PlanError, match="fp32 master"):
        plan(_drop(("master:",))(checkpoint.state), checkpoint)
    wide = {
        key: replace(entry, dtype=parse_dtype("float32")) if key.startswith("param:") else entry
        for key, entry in checkpoint.state.tensors.items()
        if not key.startswith("master:")
    }
    names = {slots.key for slots in plan(replace(checkpoint.state, tensors=wide), checkpoint).tensors}
    assert not any(name.startswith("master:") for name in names)


def test_steps_must_agree_within_a_group() -> None:
    checkpoint = source_of("fr_tp2pp2")
    steps = iter(range(1000))

    def scalar(key: str) -> Any:
        return np.float32(next(steps)) if key.startswith("optim.step:") else checkpoint.read(key)

    assert "SR-MGW-STEPS" not in codes(plan(checkpoint.state, checkpoint))
    assert "SR-MGW-STEPS" in codes(lay_out(WriteSource(checkpoint.state, scalar), None))


def test_a_layer_that_is_missing_is_refused(tmp_path: Path) -> None:
    from samerun.errors import UsageError

    checkpoint = open_checkpoint(GOLDEN / "lg_dist_tied_pp2_dp2")
    tensors = {k: e for k, e in checkpoint.state.tensors.items() if ".layers.0." not in k}
    checkpoint.state = replace(checkpoint.state, tensors=tensors)  # type: ignore[misc]
    with pytest.raises(UsageError, match="missing"):
        adapt(checkpoint)


def test_blocking_findings_are_refused_until_allowed(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "fr_tp2pp2", tmp_path / "src")
    common = tmp_path / "src" / "iter_0000003" / "common.pt"
    value = torch.load(common, weights_only=False)
    value["args"].multi_latent_attention = True
    torch.save(value, common)
    with pytest.raises(UndecidedError, match="latent"):
        convert(open_checkpoint(tmp_path / "src"), tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


@pytest.mark.framework
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_the_real_megatron_loads_it_at_other_layouts(tmp_path: Path) -> None:
    convert(open_checkpoint(GOLDEN / "lg_dist_tied_pp2_dp2"), tmp_path / "out", to="megatron")
    script = GOLDEN / "load.py"
    layouts = ["tp=1", "tp=2", "dp=3"]
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "out"), str(GOLDEN / "lg_dist_tied_pp2_dp2")]
    subprocess.run([*command, *layouts], check=True, timeout=500)
