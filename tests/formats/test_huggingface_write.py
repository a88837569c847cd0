"""What is written for Trainer and Accelerate, against files that the libraries themselves wrote. No library needed.

`tests/multiprocess/test_huggingface_written.py` resumes from it where they are installed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from samerun.cli import main
from samerun.convert.convert import convert
from samerun.convert.prepare import prepare
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, RecordedProgress, Role
from samerun.core.written import DestinationPlan
from samerun.errors import Severity, UndecidedError
from samerun.formats.base import WriteSource
from samerun.formats.detect import open_checkpoint
from samerun.formats.huggingface.groups import deal_groups
from samerun.formats.huggingface.write import lay_out
from samerun.formats.torchfile import Inert
from samerun.verify.state.compare import compare_checkpoints
from support.corpus import corpus, needs_corpus
from support.states import adam_state, tensor, without
from support.written import carry_out, source_of

GOLDEN = Path(__file__).parents[1] / "golden" / "statedict"
TRAINER, ACCELERATE = GOLDEN / "trainer" / "checkpoint-4", GOLDEN / "accelerate"


def same(a: Any, b: Any) -> bool:
    """Whether two loaded values are equal: tensors bit for bit, lists and tuples of generators as such."""
    if isinstance(a, torch.Tensor | np.ndarray) or isinstance(b, torch.Tensor | np.ndarray):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def load(file: Path, **options: Any) -> Any:
    return torch.load(file, weights_only=True, **options)


def real(file: Path) -> Any:
    """Loads what a library wrote: its own files hold NumPy's arrays."""
    return torch.load(file, weights_only=False)


def moved(source: Path, folder: Path) -> Path:
    """Goes over DCP, where everything is kept by name, and back."""
    for start, name, to in ((source, "dcp", "dcp"), (folder / "dcp", "moved", "huggingface")):
        checkpoint = open_checkpoint(start)
        convert(checkpoint, folder / name, to=to, allow=("SR-WRITE-OBJECT",))
        checkpoint.close()
    return folder / "moved"


def check_optimizer(found: Any, expected: Any) -> None:
    """The same positions with the same values in the same groups; names come beside."""
    assert same(found["state"], expected["state"])
    names = [group.pop("param_names") for group in found["param_groups"]]
    assert [len(group) for group in names] == [len(group["params"]) for group in expected["param_groups"]]
    assert same(found["param_groups"], expected["param_groups"])


def test_a_trainer_checkpoint_comes_back_as_trainer_wrote_it(tmp_path: Path):
    found = moved(TRAINER, tmp_path)
    assert same(load_file(found / "model.safetensors"), load_file(TRAINER / "model.safetensors"))
    for name in ("optimizer.pt", "optimizer.bin"):
        check_optimizer(load(found / name), real(TRAINER / "optimizer.pt"))
    for name in ("scheduler.pt", "scheduler.bin"):
        assert same(load(found / name), real(TRAINER / "scheduler.pt"))
    for name in ("config.json", "trainer_state.json"):
        assert json.loads((found / name).read_text()) == json.loads((TRAINER / name).read_text())
    for rank in range(3):
        states, beside = load(found / f"rng_state_{rank}.pth"), load(found / f"random_states_{rank}.pkl")
        assert same(states, real(TRAINER / f"rng_state_{rank}.pth"))
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(beside["torch_manual_seed"])
    report = open_checkpoint(found)
    assert report.state.format == "huggingface"
    assert compare_checkpoints(open_checkpoint(TRAINER), report).equal


def test_an_accelerate_checkpoint_comes_back_as_accelerate_wrote_it(tmp_path: Path):
    found = moved(ACCELERATE, tmp_path)
    assert same(load_file(found / "model.safetensors"), load_file(ACCELERATE / "model.safetensors"))
    check_optimizer(load(found / "optimizer.bin"), real(ACCELERATE / "optimizer.bin"))
    assert same(load(found / "scheduler.bin"), real(ACCELERATE / "scheduler.bin"))
    for rank in range(3):
        states = load(found / f"random_states_{rank}.pkl")
        assert same(states, real(ACCELERATE / f"random_states_{rank}.pkl"))
    assert compare_checkpoints(open_checkpoint(ACCELERATE), open_checkpoint(found, "accelerate")).equal


def test_each_flavour_has_its_own_names(tmp_path: Path):
    source = open_checkpoint(TRAINER)
    names: dict[Any, set[str]] = {}
    for flavour in ("trainer", "accelerate", "both"):
        plan = lay_out(source_of(source), flavour=flavour)
        names[flavour] = {file.path for file in plan.files}
        carry_out(plan, source, tmp_path / flavour)
        read = open_checkpoint(tmp_path / flavour)
        assert read.state.format == plan.format == ("accelerate" if flavour == "accelerate" else "huggingface")
        assert compare_checkpoints(source, read).equal
    assert names["trainer"] | names["accelerate"] == names["both"]
    assert {"optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json"} <= names["trainer"]
    assert not {"optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json"} & names["accelerate"]


def test_a_model_in_parts_has_an_index(tmp_path: Path):
    source = open_checkpoint(TRAINER)
    plan = lay_out(source_of(source), flavour="trainer", max_shard_bytes=1_500)
    carry_out(plan, source, tmp_path / "parts")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    loaded: dict[str, Any] = {}
    for name in set(index["weight_map"].values()):
        part = load_file(tmp_path / "parts" / name)
        assert {key for key, where in index["weight_map"].items() if where == name} == part.keys()
        loaded |= part
    assert same(dict(sorted(loaded.items())), load_file(TRAINER / "model.safetensors"))
    assert compare_checkpoints(source, open_checkpoint(tmp_path / "parts")).equal


def test_a_swapped_moment_in_either_file_is_seen(tmp_path: Path):
    """Both copies of the optimizer are read back: damage to one of them fails the proof."""
    source = open_checkpoint(TRAINER)
    plan = lay_out(source_of(source))
    slots = {item.key: item for item in plan.tensors}
    layers = [slots[f"optim.exp_avg:model.layers.{n}.self_attn.q_proj.weight"] for n in (0, 1)]
    assert [len(item) for item in layers] == [2, 2]
    for row in (0, 1):
        places = [int(item.at[row]) for item in layers]
        layers[0].at[row], layers[1].at[row] = places[1], places[0]
        carry_out(plan, source, tmp_path / str(row))
        layers[0].at[row], layers[1].at[row] = places
        wrong = [
            format
            for format in (plan.format, *plan.read_as)
            if not compare_checkpoints(source, open_checkpoint(tmp_path / str(row), format)).equal
        ]
        assert wrong == [("huggingface", "accelerate")[row]]


def test_the_verb_takes_a_flavour(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["convert", str(TRAINER), str(tmp_path / "out"), "--to"]

    def verb(*more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *more])
        return int(ended.value.code or 0)

    assert verb("huggingface", "--flavour", "trainer", "--max-shard", "2KB") == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert not (tmp_path / "out" / "optimizer.bin").exists()
    assert verb("huggingface", "--flavour", "keras") == 2
    assert verb("dcp", "--flavour", "trainer") == 2
    assert "SR-USAGE-OPTION" in capsys.readouterr().err


# ---------------------------------------------------------------- groups

DECAYING = ("model.embed.weight", "model.layers.0.mlp.up.weight")
RESTING = ("model.layers.0.mlp.up.bias", "model.layers.0.ln_1.weight", "model.norm.weight")
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(DECAYING, (5, 4)),
    **dict.fromkeys(RESTING, (4,)),
}
SETTINGS = {"lr": 1.0, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}


def grouped(*groups: tuple[str, ...]) -> LogicalState:
    return adam_state(SHAPES, groups=tuple(ParamGroup(names, SETTINGS) for names in groups))


def dealt(state: LogicalState) -> tuple[list[tuple[str, ...]], dict[str, Severity]]:
    found = deal_groups(state)
    return [group.params for group in found.groups], {one.code: one.severity for one in found.problems}


def test_groups_of_trainer_stay_and_swapped_ones_are_swapped_back():
    for state in (grouped(DECAYING, RESTING), grouped(RESTING, DECAYING)):
        assert dealt(state) == ([DECAYING, RESTING], {})


def test_one_group_is_dealt_to_two_and_vectors_without_a_telling_name_are_a_warning():
    mixed = (RESTING[0], DECAYING[0], RESTING[1], DECAYING[1], RESTING[2])
    assert dealt(grouped(mixed)) == ([DECAYING, RESTING], {"SR-HFW-DEALT": Severity.WARNING})
    named = tuple(name for name in mixed if "ln_1" not in name)
    assert dealt(grouped(named))[1] == {"SR-HFW-DEALT": Severity.NOTE}


@pytest.mark.parametrize(
    "groups",
    [(DECAYING, RESTING[:1], RESTING[1:]), (DECAYING[:1], (*RESTING, *DECAYING[1:])), (RESTING[1:], RESTING[:1])],
)
def test_groups_that_trainer_would_not_make_stay_and_are_found(groups: Any):
    assert dealt(grouped(*groups)) == (list(groups), {"SR-HFW-GROUPS": Severity.WARNING})


# ---------------------------------------------------------------- findings


def plan_of(state: LogicalState, **options: Any) -> DestinationPlan:
    return lay_out(WriteSource(state, lambda key: np.zeros(())), options.pop("layout", None), **options)


def codes(state: LogicalState, **options: Any) -> dict[str, Severity]:
    return {problem.code: problem.severity for problem in plan_of(state, **options).problems}


STREAMS = {"python": [3, list(range(625)), None], "numpy": ["MT19937", np.zeros(624, np.uint32), 1, 0, 0.0],
           "cpu": np.zeros(5056, np.uint8)}  # fmt: skip
SCHEDULE = {"base_lrs": [1.0, 1.0], "last_epoch": 2, "_step_count": 3, "_last_lr": [0.5, 0.5]}


def whole(**more: Any) -> LogicalState:
    """A state that has everything, and nothing that Trainer's files have no place for."""
    objects = {"trainer_state.global_step": 2, "trainer_state.epoch": 0.5}
    given: dict[str, Any] = {
        "scheduler": SCHEDULE | {"lr_lambdas": [{}, {}]},
        "rng": {"rng_state_0": STREAMS, "rng_state_1": STREAMS},
        "objects": objects,
        "progress": RecordedProgress(update=2),
    }
    return replace(grouped(DECAYING, RESTING), **(given | more))


def test_a_whole_state_for_one_library_has_no_findings_of_its_own():
    assert not [code for code in codes(whole(), flavour="trainer", layout=Layout(dp_shard=2)) if "HFW" in code]


@pytest.mark.parametrize(
    ("code", "severity", "damaged"),
    [
        ("SR-HFW-RNG", Severity.WARNING, lambda: codes(whole(), flavour="trainer", layout=Layout(dp_shard=3))),
        ("SR-HFW-PARTS", Severity.WARNING, lambda: codes(whole(), max_shard_bytes=64)),
        ("SR-HFW-PARTS", Severity.ERROR, lambda: codes(whole(), max_shard_bytes=64, flavour="accelerate")),
        ("SR-HFW-TWICE", Severity.NOTE, lambda: codes(whole())),
        (
            "SR-HFW-COUNTER",
            Severity.ERROR,
            lambda: codes(whole(objects={}, progress=RecordedProgress()), flavour="trainer"),
        ),
        ("SR-HFW-COUNTER", Severity.WARNING, lambda: codes(whole(objects={}, progress=RecordedProgress()))),
        ("SR-HFW-STATE", Severity.WARNING, lambda: codes(whole(objects={}), flavour="trainer")),
        ("SR-HFW-LAMBDAS", Severity.NOTE, lambda: codes(whole(scheduler=SCHEDULE), flavour="trainer")),
        (
            "SR-HFW-BESIDE",
            Severity.WARNING,
            lambda: codes(whole(data={"loader": {"position": 3}}), flavour="trainer"),
        ),
        (
            "SR-WRITE-OBJECT",
            Severity.ERROR,
            lambda: codes(whole(data={"loader": Inert("somewhere.Config", ("x",))}), flavour="trainer"),
        ),
    ],
)
def test_what_cannot_be_carried_is_found(code: str, severity: Severity, damaged: Callable[[], dict[str, Severity]]):
    assert damaged()[code] is severity


def test_averages_and_unknown_sections_lie_beside_and_are_read_back(tmp_path: Path):
    source = open_checkpoint(TRAINER)
    average = {"ema:" + entry.key.fqn: entry for entry in source.state.tensors.values() if entry.key.role is Role.PARAM}
    state = replace(
        source.state,
        tensors={
            **source.state.tensors,
            **{key: replace(entry, key=tensor(key, entry.shape).key) for key, entry in average.items()},
        },
        objects={**source.state.objects, "note.text": "kept"},
    )

    class Averaged:
        path = source.path

        def __init__(self) -> None:
            self.state = state

        def read(self, key: str, *box: Any) -> Any:
            return source.read(key.replace("ema:", "param:"), *box)

    carry_out(lay_out(WriteSource(state, source.read)), Averaged(), tmp_path / "out")  # type: ignore[arg-type]
    found = open_checkpoint(tmp_path / "out")
    assert set(average) <= set(found.state.tensors)
    assert found.state.objects["note.text"] == "kept"
    assert load(tmp_path / "out" / "extra_state.pt")["note"] == {"text": "kept"}


def test_weights_alone_are_a_model_and_nothing_else(tmp_path: Path):
    state = replace(without(adam_state(), Role.OPTIM), groups=(), progress=RecordedProgress(), objects={})
    plan = plan_of(replace(state, scheduler=None, rng={}, data={}))
    assert [file.path for file in plan.files] == ["model.safetensors"]
    assert plan.problems == ()


def test_only_torch_s_scaler_becomes_the_scaler():
    """Trainer loads `scaler.pt` where there is one, and in fp32 it has nothing to load it into."""
    torch_s = {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    for value, written in ((torch_s, True), ({"cur_scale": 1.0, "dynamic": False}, False)):
        plan = plan_of(replace(adam_state(), objects={"loss_scaler": value}))
        assert ("scaler.pt" in [file.path for file in plan.files]) is written


def test_nothing_is_written_before_what_blocks_is_decided(tmp_path: Path):
    source = open_checkpoint(ACCELERATE)
    writer = partial(lay_out, flavour="accelerate", max_shard_bytes=500)
    with pytest.raises(UndecidedError) as refused:
        prepare(source, tmp_path / "out", to="huggingface", writer=writer)
    assert {problem.code for problem in refused.value.problems} == {"SR-HFW-PARTS"}
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- real checkpoints


@needs_corpus
@pytest.mark.parametrize(
    "name",
    ["hf_trainer_ws2/checkpoint-5", "accel_ddp_stateful_ws2/state", "accel_fsdp2_sharded_ws2", "dcp_fsdp2_ws4",
     "dcp_tpfsdp_dp2tp2", "torchsave_ddp_ws2/checkpoint_5.pt"],
)  # fmt: skip
def test_real_checkpoints_are_the_same_state_for_both_libraries(name: str, tmp_path: Path):
    source = open_checkpoint(corpus("torch") / name)
    convert(source, tmp_path / "out", to="huggingface")
    for format in ("huggingface", "accelerate"):
        assert compare_checkpoints(source, open_checkpoint(tmp_path / "out", format)).equal
