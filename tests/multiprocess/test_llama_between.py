"""A run of one framework that another goes on with: the framework's own loader at another degree, value for value.

One of each kind of way; `scripts/proof_llama.py` makes all of them (docs/proofs.md).
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.core.mesh import Layout
from samerun.formats.detect import open_checkpoint
from samerun.formats.mapfile import read_name_map
from samerun.formats.mapped import MappedCheckpoint
from support import llamajob
from support.gloo import import_frameworks, run_ranks
from support.llamanames import load_megatron, settings_differ, truth_of_megatron, write_truth
from support.megatron import GOLDEN
from support.warm_ranks import HUGGING_FACE

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]

MEGATRON = GOLDEN / "fr_tp2pp2"
SHAPE = {
    "vocab_size": 29, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 3,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What every rank would import."""
    import_frameworks(*HUGGING_FACE)


def convert(source: Path, dest: Path, to: str, names: str, **options: Any) -> Path:
    checkpoint = open_checkpoint(source)
    mapped = MappedCheckpoint(checkpoint, read_name_map(names, checkpoint.state))
    carry_out(prepare(mapped, dest, to=to, original=checkpoint, **options))
    checkpoint.close()
    return dest


def test_megatron_s_run_goes_on_under_accelerate(tmp_path: Path) -> None:
    moved = convert(MEGATRON, tmp_path / "hf", "huggingface", "megatron-to-llama", masters="params")
    truth = truth_of_megatron(MEGATRON, SHAPE, masters_are_params=True)
    (found,) = run_ranks(1, llamajob.resume_accelerate, moved, partial(llamajob.build, **SHAPE), timeout=300)
    assert llamajob.differences(found, truth) == []
    assert found["position"] == truth["position"] == 3
    spoil(moved / "optimizer.bin")
    (found,) = run_ranks(1, llamajob.resume_accelerate, moved, partial(llamajob.build, **SHAPE), timeout=300)
    assert llamajob.differences(found, truth) != []


def spoil(file: Path) -> None:
    """Exchanges the moments of two tensors of equal shape, as a wrong order of registration would."""
    import torch

    saved = torch.load(file, weights_only=True)
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    one, other = (names.index(f"model.layers.0.self_attn.{name}_proj.weight") for name in "kv")
    saved["state"][one], saved["state"][other] = saved["state"][other], saved["state"][one]
    torch.save(saved, file)


def test_megatron_s_run_goes_on_in_deepspeed(tmp_path: Path) -> None:
    moved = convert(MEGATRON, tmp_path / "zero", "zero", "megatron-to-llama", layout=Layout(dp_shard=3))
    truth = truth_of_megatron(MEGATRON, SHAPE, masters_are_params=False)
    stage = 3 if (moved / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt").exists() else 2
    found = run_ranks(3, llamajob.resume_engine, moved, stage, False, True, SHAPE, timeout=300)[0]
    assert llamajob.differences(found, truth) == []


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_a_run_of_torch_goes_on_in_megatron(tmp_path: Path) -> None:
    source, truth = llamajob.save("torch", tmp_path / "run")
    count = write_truth(truth, tmp_path / "truth")
    names = f"inverse:megatron-to-llama,heads={llamajob.HEADS},groups={llamajob.GROUPS}"
    moved = convert(source, tmp_path / "meg", "megatron", names, allow=["SR-MGW-ARGS"])
    found = load_megatron(moved, tmp_path / "truth", ("tp=2,pp=2",))["tp=2,pp=2"]
    assert found.get("error") is None, found
    assert (found["differences"], found["tensors"]) == ([], count)
    assert settings_differ(found, truth) == []
