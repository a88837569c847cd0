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
from samerun.verify.digest import digest_checkpoint

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
