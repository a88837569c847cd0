"""Which generators a checkpoint holds, of which ranks: every framework's way to save them, from real checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from samerun.core.state import LogicalState
from samerun.formats.detect import open_checkpoint
from samerun.verify.generators import describe_generators, saved_generators
from support.corpus import CORPUS, needs_corpus

CPU = ["numpy", "python", "torch"]
MEGATRON = ["cuda", "megatron-tracker", *CPU]
SAVED = {
    "torch/hf_trainer_ws2/checkpoint-5": {"0": CPU, "1": CPU},
    "torch/accel_ddp_stateful_ws2": {"0": CPU, "1": CPU},
    "torch/ranklocal_fsdp2_ws3": {"0": CPU, "1": CPU, "2": CPU},
    "torch/dcp_fsdp2_ws2": {"0": CPU, "1": CPU, "every": CPU},
    "deepspeed/z1_fp32_untied_ws3": {"every": ["torch"]},
    "deepspeed/z3_fp32_untied_ws2": {"0": ["torch"], "1": ["torch"]},
    "megatron/td016_fr_tp2pp2dp1": {str(rank): MEGATRON for rank in range(4)},
    "megatron/lg016_bf16_tp2pp1dp1": {"0": MEGATRON, "1": MEGATRON},
}


@needs_corpus
@pytest.mark.parametrize("name", SAVED)
def test_generators_of_real_checkpoints(name: str) -> None:
    assert CORPUS is not None
    place = Path(CORPUS) / name
    checkpoint = open_checkpoint(place if place.exists() else place.parent)
    try:
        assert saved_generators(checkpoint.state) == SAVED[name]
    finally:
        checkpoint.close()


def found(rng: dict[str, object]) -> dict[str, list[str]]:
    return saved_generators(LogicalState(format="dcp", tensors={}, rng=rng))


def test_other_shapes() -> None:
    torch_state, cuda = np.zeros(5056, np.uint8), np.zeros(16, np.uint8)
    assert found({}) == {}
    assert found({"rng": [{"torch": torch_state}, {"torch": torch_state}]}) == {"0": ["torch"], "1": ["torch"]}
    assert found({"rng.3": {"cuda": [cuda, cuda], "np": np.random.get_state()}}) == {"3": ["cuda", "numpy"]}
    assert found({"np": np.random.get_state(legacy=False), "py": random.getstate()}) == {"every": ["numpy", "python"]}
    assert found({"jax": np.zeros(2, np.uint32), "seed": 5}) == {"every": ["other"]}
    many = {str(rank): ["torch"] for rank in range(8)} | {"every": ["numpy"]}
    assert describe_generators(many) == "torch of ranks 0 to 7 (8); numpy of no rank in particular"
