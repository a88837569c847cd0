"""What one framework keeps otherwise than another, on the way between them: groups, their order, schedules, objects.

No framework is needed here; `tests/multiprocess/test_llama_between.py` loads such conversions with them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.errors import UndecidedError
from samerun.formats.detect import open_checkpoint
from samerun.formats.mapfile import read_name_map
from samerun.formats.mapped import MappedCheckpoint

GOLDEN = Path(__file__).parents[1] / "golden"
MEGATRON, ACCELERATE = GOLDEN / "megatron" / "fr_tp2pp2", GOLDEN / "statedict" / "accelerate"
MAPPED = "inverse:megatron-to-llama,heads=4,groups=2"


def convert(source: Path, dest: Path, to: str, *, names: str | None = None, **options: Any) -> set[str]:
    """Converts; returns the codes of everything that was said."""
    checkpoint = open_checkpoint(source)
    mapped = MappedCheckpoint(checkpoint, read_name_map(names, checkpoint.state)) if names else checkpoint
    prepared = prepare(mapped, dest, to=to, original=checkpoint, **options)
    done = carry_out(prepared)
    checkpoint.close()
    return {problem.code for problem in (*done.problems, *prepared.decisions)}


# In the order in which transformers 5.24 registers the parameters of one layer of a Llama.
_LAYER = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def registered(layers: int) -> list[str]:
    inner = [f"model.layers.{i}.{name}.weight" for i in range(layers) for name in _LAYER]
    return ["model.embed_tokens.weight", *inner, "lm_head.weight"]


def test_behind_a_map_parameters_stand_as_transformers_registers_them(tmp_path: Path) -> None:
    said = convert(MEGATRON, tmp_path / "hf", "huggingface", names="megatron-to-llama", masters="params")
    assert "SR-MAP-ORDER" in said
    saved = torch.load(tmp_path / "hf" / "optimizer.bin", weights_only=True)
    assert saved["param_groups"][0]["param_names"] == registered(4)
    truth = np.load(MEGATRON / "truth.npz")["optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight"]
    for layer in range(4):
        position = registered(4).index(f"model.layers.{layer}.self_attn.o_proj.weight")
        assert saved["state"][position]["exp_avg"].numpy().tobytes() == truth[layer].tobytes()
    assert "SR-MAP-ORDER" not in convert(MEGATRON, tmp_path / "uni", "universal", names="megatron-to-llama")


def test_a_map_of_names_alone_keeps_the_order(tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text('"model.*": "net.*"\n')
    source = write_llama(tmp_path / "run.pt")
    said = convert(source, tmp_path / "out.pt", "torch", names=str(tmp_path / "names.yaml"))
    assert "SR-MAP-ORDER" not in said
    before, after = (torch.load(path, weights_only=True)["optimizer"] for path in (source, tmp_path / "out.pt"))
    assert [group["params"] for group in after["param_groups"]] == [group["params"] for group in before["param_groups"]]


def test_another_library_s_schedule_becomes_a_position_and_comes_back(tmp_path: Path) -> None:
    said = convert(MEGATRON, tmp_path / "hf", "huggingface", names="megatron-to-llama", masters="params")
    assert "SR-HFW-SCHEDULE" in said
    for name in ("scheduler.pt", "scheduler.bin"):
        found = torch.load(tmp_path / "hf" / name, weights_only=True)
        assert found == {"last_epoch": 3, "_step_count": 4, "lr_lambdas": [None, None]}
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        schedule.load_state_dict({**found, "lr_lambdas": found["lr_lambdas"][:1]})
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 1 / 5  # the job's own peak, at the source's place
    before, after = open_checkpoint(MEGATRON).state.scheduler, open_checkpoint(tmp_path / "hf").state.scheduler
    assert before is not None
    assert after == before
    torch_s = write_llama(tmp_path / "run.pt", schedule=True)
    assert "SR-HFW-SCHEDULE" not in convert(torch_s, tmp_path / "own", "huggingface")
    none = write_llama(tmp_path / "none.pt")
    assert "SR-HFW-SCHEDULE" in convert(none, tmp_path / "without", "huggingface")
    assert open_checkpoint(tmp_path / "without").state.scheduler is None


def test_registered_objects_stay_one_file_each_however_often_it_is_converted(tmp_path: Path) -> None:
    source = tmp_path / "state"
    shutil.copytree(ACCELERATE, source)
    (source / "scheduler.bin").rename(source / "custom_checkpoint_0.pkl")
    torch.save({"seen": 17}, source / "custom_checkpoint_1.pkl")
    convert(source, tmp_path / "once", "huggingface")
    convert(tmp_path / "once", tmp_path / "twice", "huggingface")
    assert open_checkpoint(tmp_path / "once").state.format == "huggingface"
    expected = torch.load(source / "custom_checkpoint_0.pkl", weights_only=False)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        assert sorted(path.name for path in folder.glob("custom_*")) == [f"custom_checkpoint_{i}.pkl" for i in (0, 1)]
        assert torch.load(folder / "custom_checkpoint_0.pkl", weights_only=True) == expected
        assert torch.load(folder / "custom_checkpoint_1.pkl", weights_only=True) == {"seen": 17}
        assert not (folder / "scheduler.bin").exists()
    for name in ("random_states_0.pkl", "random_states_2.pkl"):
        before, after = (torch.load(tmp_path / f / name, weights_only=True) for f in ("once", "twice"))
        assert before.keys() == after.keys()
        assert before["step"] == after["step"]


# --- groups of torch's optimizers under Megatron ----------------------------------------------------------------------


def write_llama(file: Path, groups: str = "usual", *, schedule: bool = False) -> Path:
    """Saves a small Llama under AdamW after one update, with groups of a kind, as a script of torch alone does."""
    weights = load_file(GOLDEN / "maps" / "llama-gqa" / "hf" / "model.safetensors")
    names = [*registered(2), *(name for name in weights if "norm" in name)]
    model = {name: torch.nn.Parameter(weights[name].float()) for name in names}
    for name, parameter in model.items():
        parameter.grad = torch.full_like(parameter, 0.25 if "norm" in name else 0.5)
    matrices, norms = ([p for name, p in model.items() if ("norm" in name) == one] for one in (False, True))
    made: dict[str, list[dict[str, Any]]] = {
        "usual": [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        "one": [{"params": [*matrices, *norms], "weight_decay": 0.1}],
        "one without decay": [{"params": [*matrices, *norms], "weight_decay": 0.0}],
        "embedding apart": [
            {"params": matrices[1:], "weight_decay": 0.1},
            {"params": [matrices[0], *norms], "weight_decay": 0.0},
        ],
        "two rates": [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0, "lr": 5e-3}],
    }
    optimizer = torch.optim.AdamW(made[groups], lr=1e-3, betas=(0.9, 0.95), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.step()
    state = {"model": {name: p.detach() for name, p in model.items()}, "optimizer": optimizer.state_dict(), "update": 1}
    torch.save(state | ({"scheduler": scheduler.state_dict()} if schedule else {}), file)
    return file


@pytest.mark.parametrize(
    ("groups", "codes", "decays"),
    [
        ("usual", {"SR-MGW-ARGS"}, [0.1, 0.0]),
        ("one without decay", {"SR-MGW-ARGS"}, [0.0, 0.0]),
        ("one", {"SR-MGW-ARGS", "SR-MGW-GROUPS"}, [0.1, 0.1]),
        ("two rates", {"SR-MGW-ARGS", "SR-MGW-GROUPS"}, [0.1, 0.0]),
        ("embedding apart", {"SR-MGW-ARGS", "SR-MGW-GROUPS"}, None),
    ],
)
def test_groups_are_dealt_as_megatron_deals_them(
    groups: str, codes: set[str], decays: list[float] | None, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "run.pt", groups, schedule=True)
    with pytest.raises(UndecidedError) as refused:
        convert(source, tmp_path / "meg", "megatron", names=MAPPED)
    assert {problem.code for problem in refused.value.problems} == codes
    for problem in refused.value.problems:
        if problem.code == "SR-MGW-GROUPS":
            assert problem.where  # a place, both values, and what to do
            assert problem.expected != problem.found
            assert "--allow SR-MGW-GROUPS" in (problem.hint or "")
    said = convert(source, tmp_path / "meg", "megatron", names=MAPPED, allow=codes)
    common = torch.load(tmp_path / "meg" / "iter_0000001" / "common.pt", weights_only=False)
    assert "opt_param_scheduler" not in common
    if decays is None:
        assert "optimizer" not in common
        return
    assert {"SR-MGW-REGROUPED", "SR-MGW-LEFTOUT"} <= said
    found = common["optimizer"]["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in found] == decays
    assert [group["wd_mult"] for group in found] == [1.0, 0.0]
    for group in found:
        assert (group["betas"], group["eps"], group["step"]) == ((0.9, 0.95), 1e-9, 1)
        assert (group["is_expert_parallel"], group["bias_correction"]) == (False, True)


def test_what_another_framework_keeps_as_arrays_does_not_stop_megatron_s_loader(tmp_path: Path) -> None:
    """megatron.core reads `common.pt` with torch.load's default, which refuses NumPy's arrays."""
    source = write_llama(tmp_path / "run.pt")
    mixture = {"counts": np.arange(5), "draws": np.random.RandomState(3).get_state()}
    torch.save({**torch.load(source, weights_only=True), "mixture": mixture}, source)
    convert(source, tmp_path / "meg", "megatron", names=MAPPED, allow=["SR-MGW-ARGS"])
    common = torch.load(tmp_path / "meg" / "iter_0000001" / "common.pt", weights_only=True)
    assert common["mixture.counts"].tolist() == [0, 1, 2, 3, 4]
    assert common["mixture.draws"][1].tolist() == mixture["draws"][1].tolist()


def test_groups_of_megatron_s_own_stay(tmp_path: Path) -> None:
    assert "SR-MGW-REGROUPED" not in convert(MEGATRON, tmp_path / "out", "megatron")


def test_rows_of_values_are_no_parameters_until_that_is_allowed(tmp_path: Path) -> None:
    source = GOLDEN / "statedict" / "fsdp1-orig" / "local"
    with pytest.raises(UndecidedError) as refused:
        convert(source, tmp_path / "out", "safetensors")
    assert [problem.code for problem in refused.value.problems] == ["SR-CONVERT-SHAPES"]
    assert "SR-CONVERT-SHAPES" in convert(source, tmp_path / "out", "safetensors", allow=["SR-CONVERT-SHAPES"])
    full = write_llama(tmp_path / "run.pt")
    assert "SR-CONVERT-SHAPES" not in convert(full, tmp_path / "full", "safetensors")
