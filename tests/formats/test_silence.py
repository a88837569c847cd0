"""What inspecting real checkpoints says, reading every byte: this and nothing else, so every other finding is silent.

These are whole checkpoints that frameworks wrote, each with what it really lacks. A finding that appears here without a
change to the checkpoint is a false alarm; one that goes has stopped being made. Those of Megatron
and torchtitan that are kept packed are asked the same beside their values.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.packed import unpack

GOLDEN = Path(__file__).parents[1] / "golden"
# By checkpoint: codes without `SR-`, then complete and intact.
SAID: dict[str, tuple[str, bool | None]] = {
    "statedict/torch/zip.pt": ("DATA-MISSING NAME-WRAPPED OPT-NOSTATE OPT-ORDER RNG-MISSING SCHED-LAMBDA", True),
    "statedict/torch/legacy.pt": ("DATA-MISSING NAME-WRAPPED OPT-NOSTATE OPT-ORDER RNG-MISSING SCHED-LAMBDA", None),
    "statedict/bare": ("DATA-MISSING OPT-NOSTATE OPT-ORDER RANK-GEOMETRY RANK-INFERRED SCHED-LAMBDA", None),
    "statedict/fsdp1-orig": ("DATA-MISSING FSDP1-SHAPES OPT-ORDER RNG-MISSING SCHED-MISSING VAL-ZERO", None),
    "statedict/shards": ("OPT-MISSING", None),
    "statedict/shards-object": ("OPT-MISSING ST-OBJECT", None),
    "statedict/trainer/checkpoint-4": ("HF-CURSOR OPT-ASSUMED SCHED-LAMBDA", None),
    "statedict/adapters/checkpoint-4": ("GROUP-EMPTY HF-ADAPTER HF-CURSOR OPT-ASSUMED SCHED-LAMBDA", None),
    "statedict/accelerate": ("DATA-MISSING OPT-ASSUMED OPT-NOSTATE SCHED-LAMBDA SCHED-POSITION", None),
    "statedict/accelerate-local": ("DATA-MISSING FILE-GENERATION-OPEN SCHED-MISSING VAL-ZERO", None),
    "statedict/lightning/step3.ckpt": ("DATA-MISSING OPT-NOSTATE OPT-ORDER PL-EPOCH RNG-MISSING SCHED-POSITION", True),
    "statedict/lightning-sharded/step2.ckpt": (
        "DATA-MISSING FILE-GENERATION-OPEN OPT-NOSTATE PL-EPOCH RNG-MISSING SCHED-POSITION", None,
    ),
    "wrapped/accelerate_z2": ("DATA-MISSING SCHED-POSITION ZERO-RIGID", None),
    "wrapped/trainer_z2": ("HF-CURSOR HF-EXPORT RNG-SHARED SCHED-LAMBDA ZERO-RIGID", None),
    "docs/step-400": ("DATA-MISSING FILE-GENERATION-OPEN RNG-MISSING", None),
    "deepspeed/z0_bf16": ("CNT-OPTIMIZER DATA-MISSING RNG-SHARED SCHED-LAMBDA VAL-ZERO", True),
    "deepspeed/z1_bf16opt": ("DATA-MISSING RNG-SHARED SCHED-LAMBDA VAL-ZERO ZERO-RIGID", True),
    "deepspeed/z2_align_rr": ("DATA-MISSING RNG-SHARED SCHED-LAMBDA VAL-ZERO ZERO-RIGID ZERO-ROUNDROBIN", True),
    "deepspeed/z3_sub_bf16": ("DATA-MISSING SCHED-LAMBDA VAL-ZERO ZERO-GROUPZERO ZERO-REPLICA ZERO-RIGID", None),
    "deepspeed/pp2dp2bf16": ("DATA-MISSING RNG-MISSING SCHED-MISSING ZERO-RIGID", True),
    "deepspeed/moe4": ("DATA-MISSING RNG-MISSING SCHED-MISSING ZERO-RIGID", True),
    "deepspeed/tp2dp2": ("DATA-MISSING RNG-MISSING SCHED-MISSING ZERO-RIGID", True),
    "deepspeed/universal_z3_bf16": (
        "DATA-MISSING SCHED-LAMBDA UNI-GROUPZERO UNI-MODELSTATE UNI-OPEN UNI-SHAREDSTEP UNI-STAGE VAL-ZERO", None,
    ),
    "deepspeed/z3_still.tar.xz": ("DATA-MISSING SCHED-LAMBDA VAL-ZERO ZERO-GROUPZERO ZERO-RANKOPEN ZERO-RIGID", None),
    "deepspeed/z3_pair.tar.xz": ("DATA-MISSING SCHED-LAMBDA VAL-ZERO ZERO-GROUPZERO ZERO-RIGID", True),
    "deepspeed/universal_z1_even.tar.xz": ("DATA-MISSING RNG-MISSING SCHED-MISSING UNI-OPEN UNI-STAGE", None),
    "megatron/fr_tp2pp2": ("FILE-GENERATION-OPEN MEG-VOCAB", None),
    "megatron/dpr_buckets_dp2": ("FILE-GENERATION-OPEN MEG-BOUND MEG-VOCAB", None),
    "megatron/lg_dist_tied_pp2_dp2": ("MEG-BOUND MEG-VOCAB", True),
    "megatron/lg_moe_tp2ep2": ("MEG-BOUND MEG-VOCAB", True),
    "averages/diffusers.pt": ("DATA-MISSING OPT-ORDER RNG-MISSING SCHED-MISSING", True),
    "averages/timm.pt": ("DATA-MISSING OPT-ORDER RNG-MISSING SCHED-MISSING", True),
    "averages/averaged.pt": ("DATA-MISSING OPT-ORDER RNG-MISSING SCHED-MISSING", True),
    "averages/mmengine.pth": (
        "DATA-MISSING EMA-SWAPPED OPT-ORDER PKL-UNKNOWN RNG-MISSING SCHED-MISSING", True,
    ),
    "averages/registered": ("DATA-MISSING OPT-ASSUMED SCHED-MISSING", None),
    "averages/hooked": ("DATA-MISSING OPT-ASSUMED SCHED-MISSING", None),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_real_checkpoints_say_this_and_nothing_else(name: str, tmp_path: Path):
    path = unpack(GOLDEN / name, tmp_path) if name.endswith(".tar.xz") else GOLDEN / name
    report = inspect_checkpoint(open_checkpoint(path), deep=True)
    codes, intact = SAID[name]
    assert " ".join(sorted({problem.code.removeprefix("SR-") for problem in report.problems})) == codes
    assert report.complete
    assert report.intact is intact
    errors = {problem.code for problem in report.problems if problem.severity.value == "error"}
    assert errors <= {"SR-OPT-MISSING", "SR-ST-OBJECT"}  # of weights without an optimizer
