"""The shipped maps against models that give the same logits in megatron-core and transformers (`golden/maps`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from samerun.core.digest import state_digest
from samerun.formats.detect import open_checkpoint
from samerun.formats.mapfile import read_name_map
from samerun.formats.mapped import MappedCheckpoint
from samerun.verify.state.digest import digest_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "maps"
PROVED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "proved.json").read_text())
SETTINGS = {"llama-gqa": "megatron-to-llama,heads=4,groups=2", "llama-mha": "megatron-to-llama,heads=4,groups=4",
            "gpt2": "megatron-to-gpt2,heads=4"}  # fmt: skip
# Two libraries, fp32: see LIMIT in make.py.
_LIMIT = 2e-5


def mapped(source: Path, setting: str) -> MappedCheckpoint:
    checkpoint = open_checkpoint(source)
    return MappedCheckpoint(checkpoint, read_name_map(setting, checkpoint.state))


def arrays(checkpoint: MappedCheckpoint) -> dict[str, np.ndarray[Any, Any]]:
    return {entry.key.fqn: checkpoint.read(key) for key, entry in checkpoint.state.tensors.items()}


@pytest.mark.parametrize("case", SETTINGS)
def test_what_is_mapped_is_what_was_proved_with_the_libraries(case: str):
    proved = PROVED[case]
    for kind in ("stacked", "plain"):
        assert (
            state_digest(digest_checkpoint(mapped(GOLDEN / case / f"{kind}.pt", SETTINGS[case])))
            == proved[f"{kind}_state"]
        )
        assert proved[f"{kind}_max_abs"] <= _LIMIT * proved["scale"]
    back = mapped(GOLDEN / case / "hf", f"inverse:{SETTINGS[case]}")
    assert state_digest(digest_checkpoint(back)) == proved["back_state"]
    assert proved["back_max_abs"] <= _LIMIT * proved["back_scale"]


@pytest.mark.parametrize("case", SETTINGS)
def test_there_and_back_is_the_same_model(case: str):
    """Under the names of the other library, and back: every value in its place, nothing left over."""
    stacked = torch.load(GOLDEN / case / "stacked.pt", weights_only=True)["model"]
    there = MappedCheckpoint(
        one := open_checkpoint(GOLDEN / case / "stacked.pt"), read_name_map(SETTINGS[case], one.state)
    )
    back = arrays(MappedCheckpoint(there, read_name_map(f"inverse:{SETTINGS[case]}", there.state)))
    assert back.keys() == stacked.keys()
    for name, value in stacked.items():
        assert back[name].tobytes() == value.detach().numpy().tobytes(), name


@pytest.mark.parametrize("case", SETTINGS)
def test_another_number_of_groups_is_another_model(case: str):
    """The proof is able to fail: a wrong count gives other tensors, or none."""
    wrong = SETTINGS[case].replace("heads=4", "heads=2").replace("groups=4", "groups=2").replace("groups=2", "groups=1")
    found = arrays(mapped(GOLDEN / case / "stacked.pt", SETTINGS[case]))
    other = arrays(mapped(GOLDEN / case / "stacked.pt", wrong)) if case != "llama-gqa" else {}
    assert any(name not in other or other[name].tobytes() != value.tobytes() for name, value in found.items())


@pytest.mark.framework
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", SETTINGS)
def test_transformers_gives_megatron_s_logits(case: str):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(GOLDEN / case / "hf")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = {
        name: torch.from_numpy(value)
        for name, value in arrays(mapped(GOLDEN / case / "plain.pt", SETTINGS[case])).items()
    }
    assert found.keys() == load_file(GOLDEN / case / "hf" / "model.safetensors").keys()
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    tokens = torch.from_numpy(np.random.default_rng(4).integers(0, config.vocab_size, (3, 11)))
    with torch.no_grad():
        logits = model(tokens).logits.numpy()
    assert np.abs(logits - np.load(GOLDEN / case / "megatron-logits.npy")).max() <= _LIMIT * PROVED[case]["scale"]


TITAN, TITAN_MAP = GOLDEN / "titan", "torchtitan-to-llama,heads=4,groups=2"


def test_torchtitan_s_weights_are_what_its_own_adapter_gives() -> None:
    """Both ways, bit by bit: `Llama3StateDictAdapter.to_hf` of torchtitan 0.3.0 (`golden/maps/make_titan.py`)."""
    adapted = load_file(TITAN / "hf.safetensors")
    there = mapped(TITAN / "step.pt", TITAN_MAP)
    found = {entry.key.fqn: there.read(key) for key, entry in there.state.tensors.items() if entry.key.role == "param"}
    assert found.keys() == adapted.keys()
    assert [name for name, value in adapted.items() if found[name].tobytes() != value.numpy().tobytes()] == []
    straight = {fqn: there.source.read(f"param:{old}") for fqn, old in (("model.layers.0.self_attn.q_proj.weight",
                "layers.0.attention.qkv_linear.wq.weight"),)}  # fmt: skip
    assert all(adapted[fqn].numpy().tobytes() != value.tobytes() for fqn, value in straight.items())  # rows do move
    weights = torch.load(TITAN / "step.pt", weights_only=True)["model"]
    back = arrays(mapped(TITAN / "hf.safetensors", f"inverse:{TITAN_MAP}"))
    assert {name: value.tobytes() for name, value in back.items()} == {
        name: value.numpy().tobytes() for name, value in weights.items()
    }


def test_torchtitan_s_fused_moments_follow_the_weights_and_find_back() -> None:
    saved = torch.load(TITAN / "step.pt", weights_only=True)["optimizer"]
    there = mapped(TITAN / "step.pt", TITAN_MAP)
    for layer in range(2):
        fused = (
            saved["state"][f"layers.{layer}.attention.qkv_linear.wqkv.weight"]["exp_avg"].numpy().reshape(2, 4, 6, 24)
        )
        parts = {"q_proj": fused[:, :2], "k_proj": fused[:, 2:3], "v_proj": fused[:, 3:]}
        for name, part in parts.items():
            rows = part if name == "v_proj" else part.reshape(2, -1, 3, 2, 24).swapaxes(2, 3)
            found = there.read(f"optim.exp_avg:model.layers.{layer}.self_attn.{name}.weight")
            assert found.tobytes() == np.ascontiguousarray(rows).tobytes(), name
    names = set(there.state.groups[0].params)
    assert names == {entry.key.fqn for entry in there.state.tensors.values() if entry.key.role == "optim"}
    back = MappedCheckpoint(there, read_name_map(f"inverse:{TITAN_MAP}", there.state))
    before = there.source.state
    assert set(back.state.tensors) == set(before.tensors)
    assert [key for key in before.tensors if back.read(key).tobytes() != there.source.read(key).tobytes()] == []
    assert back.state.groups[0].params == before.groups[0].params


@pytest.mark.framework
@pytest.mark.filterwarnings("default")
def test_transformers_gives_torchtitan_s_logits() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    there = mapped(TITAN / "step.pt", TITAN_MAP)
    found = {
        entry.key.fqn: torch.from_numpy(there.read(key).copy())
        for key, entry in there.state.tensors.items()
        if entry.key.role == "param"
    }
    model.load_state_dict(found, strict=True)
    tokens = torch.from_numpy(np.random.default_rng(4).integers(0, 37, (3, 11)))
    expected = np.load(TITAN / "logits.npy")
    with torch.no_grad():
        assert np.abs(model(tokens).logits.numpy() - expected).max() <= _LIMIT * np.abs(expected).max()
        straight = dict(found)
        for name, heads in (("q_proj", 4), ("k_proj", 2)):  # as if only the names were changed
            key = f"model.layers.0.self_attn.{name}.weight"
            straight[key] = found[key].reshape(heads, 2, 3, 24).transpose(1, 2).reshape(found[key].shape)
        model.load_state_dict(straight, strict=True)
        assert np.abs(model(tokens).logits.numpy() - expected).max() > 1e-2
