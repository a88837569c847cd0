"""Which generators a checkpoint holds, of which ranks: every framework's way to save them, from real checkpoints."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from samerun.core.generators import cuda_state, generator_digest, tracker_streams
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState
from samerun.formats.detect import open_checkpoint
from samerun.verify.state.generators import describe_generators, saved_digests, saved_generators
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


@needs_corpus
def test_the_states_of_megatrons_tracker_by_name() -> None:
    """Seeded by `model_parallel_cuda_manual_seed(1234)` on 2 x TP 2, and nothing drawn yet."""
    assert CORPUS is not None
    with contextlib.closing(open_checkpoint(Path(CORPUS) / "megatron/td016_fr_tp2pp2dp1")) as checkpoint:
        digests = saved_digests(checkpoint.state)
    for name, seeds in {
        "data-parallel-rng": [1234] * 4,
        "model-parallel-rng": [1234 + 2718 + tp for tp in (0, 1, 0, 1)],
        "expert-parallel-rng": [1234 + 1024 + etp for etp in (0, 1, 0, 1)],
    }.items():
        expected = {str(rank): {generator_digest(cuda_state(seed))} for rank, seed in enumerate(seeds)}
        assert digests[f"megatron:{name}"] == expected


def test_cuda_states_are_laid_out_as_torch_lays_them_out() -> None:
    """torch builds a state from seed and offset for its own functional random numbers; no device is needed for it."""
    from torch._prims.rng_prims import CUDARngStateHelper

    queued = torch.cuda._queued_calls
    before = len(queued)
    CUDARngStateHelper.set_torch_state_tensor(torch.tensor(7 << 40 | 9), torch.tensor(1 << 33))
    ((call, *_),) = queued[before:]
    del queued[before:]
    laid_out = [c.cell_contents for c in call.__closure__ if isinstance(c.cell_contents, torch.Tensor)]
    assert [state.tolist() for state in laid_out] == [cuda_state(7 << 40 | 9, 1 << 33).tolist()]
    for seed, offset in ((1 << 64, 0), (-1, 0), (1, 2), (1, -4)):
        with pytest.raises(ValueError, match="CUDA generator"):
            cuda_state(seed, offset)


def test_one_state_has_one_digest_in_whatever_it_is_saved() -> None:
    np.random.seed(3)
    np.random.normal()
    old, new = np.random.get_state(), np.random.get_state(legacy=False)
    assert generator_digest(old) == generator_digest(new) == generator_digest(list(old))
    np.random.normal()
    assert generator_digest(np.random.get_state()) != generator_digest(old)
    random.seed(4)
    version, words, gauss = state = random.getstate()
    assert generator_digest(state) == generator_digest([version, list(words), gauss])
    random.gauss()
    assert generator_digest(random.getstate()) != generator_digest(state)
    one, two = (np.random.Generator(np.random.Philox(seed)).bit_generator.state for seed in (1, 2))
    assert generator_digest(one) != generator_digest(two)
    for garbled in (None, {"bit_generator": "MT19937"}, [3, ["x"] * 625, None], ["MT19937", 3], np.zeros(9), "text"):
        assert generator_digest(garbled) is None


@pytest.mark.parametrize(
    ("layout", "etp", "rank", "expected"),
    [
        ("pp=2,dp_shard=2,tp=2", None, 7, (1, 3, 3)),
        ("dp_shard=2,tp=2", None, 2, (0, 0, 0)),
        ("dp_shard=2,tp=2,ep=2", None, 3, (0, 1, 3)),
        ("dp_shard=2,tp=2,ep=2", 1, 3, (0, 1, 1)),
        ("dp_shard=4,ep=2", None, 3, (0, 0, 1)),
    ],
)
def test_streams_of_the_tracker(layout: str, etp: int | None, rank: int, expected: tuple[int, int, int]) -> None:
    found_ = tracker_streams(Layout.parse(layout), rank, expert_tensor=etp)
    assert tuple(found_[f"{name}-parallel-rng"] for name in ("data", "model", "expert")) == expected


def test_expert_ranks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        tracker_streams(Layout.parse("dp_shard=3,tp=2,ep=3"), 0, expert_tensor=4)


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
    assert describe_generators({"0": ["torch"], "every": ["torch"]}) == "torch of rank 0 and of no rank in particular"
