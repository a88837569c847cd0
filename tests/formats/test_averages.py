"""Averages of a model as diffusers, timm, torch and Lightning save them: read, and named where they are wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from samerun.core.state import Role
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from support.dcp import save

GOLDEN = Path(__file__).parent.parent / "golden" / "averages"
FILES = ("diffusers.pt", "timm.pt", "averaged.pt", "registered", "hooked")


def truth_of(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "truth.npz") as truth:
        return {key.removeprefix(f"{name}/"): truth[key] for key in truth if key.startswith(f"{name}/")}


def inspect(path: Path, *, deep: bool = False) -> InspectReport:
    return inspect_checkpoint(open_checkpoint(path), deep=deep)


def codes(report: InspectReport) -> list[str]:
    return [problem.code for problem in report.problems if problem.code.startswith("SR-EMA")]


def damaged(name: str, folder: Path, edit: Callable[[dict[str, Any]], Any]) -> InspectReport:
    """Inspects, reading all, a copy of a file with one edit."""
    state = torch.load(GOLDEN / name, weights_only=False)
    edit(state)
    torch.save(state, folder / name)
    return inspect(folder / name, deep=True)


@pytest.mark.parametrize("name", FILES)
def test_averages_are_those_of_the_live_object_and_nothing_is_said(name: str):
    checkpoint = open_checkpoint(GOLDEN / name)
    truth = truth_of(name)
    assert {key for key, entry in checkpoint.state.tensors.items() if entry.key.role is Role.EMA} == truth.keys()
    for key, value in truth.items():
        assert np.array_equal(checkpoint.read(key), value), key
    report = inspect(GOLDEN / name, deep=True)
    assert codes(report) == []
    assert report.complete
    assert "ema" in report.resumable.have


def test_mmengine_saves_the_average_in_the_models_place(tmp_path: Path):
    """Read the wrong way round, the run would go on from the average with the trained weights' moments."""
    checkpoint = open_checkpoint(GOLDEN / "mmengine.pth")
    truth = truth_of("mmengine.pth")
    moved = [key for key in truth if key.startswith("param:")]
    assert moved
    assert any(not np.array_equal(truth[key], truth[key.replace("param:", "ema:")]) for key in moved)
    for key, value in truth.items():
        assert np.array_equal(checkpoint.read(key), value), key
    assert codes(inspect(GOLDEN / "mmengine.pth", deep=True)) == ["SR-EMA-SWAPPED"]

    def again(**meta: str) -> list[str]:
        names = [key.removeprefix("param:") for key in moved]
        state = {"meta": {"iter": 3, **meta}, "state_dict": {n: torch.from_numpy(truth[f"ema:{n}"]) for n in names}}
        state["ema_state_dict"] = {f"module.{n}": torch.from_numpy(truth[f"param:{n}"]) for n in names}
        torch.save(state, tmp_path / "a.pth")
        return codes(inspect(tmp_path / "a.pth"))

    assert again(mmengine_version="0.10.7") == ["SR-EMA-SWAPPED"]
    assert again(version="1") == []  # by any other program names mean what they say


def test_what_an_average_counts_is_kept():
    assert open_checkpoint(GOLDEN / "diffusers.pt").state.objects["ema.optimization_step"] == 3
    assert open_checkpoint(GOLDEN / "averaged.pt").state.objects["smoothed.n_averaged"] == 3
    assert open_checkpoint(GOLDEN / "hooked").state.objects["unet_ema.config.optimization_step"] == 2


def test_a_list_without_the_optimizer_is_named_by_order_and_shape(tmp_path: Path):
    report = damaged("diffusers.pt", tmp_path, lambda state: state.pop("optimizer"))
    assert codes(report) == ["SR-EMA-ORDER"]
    checkpoint = open_checkpoint(tmp_path / "diffusers.pt")
    for key, value in truth_of("diffusers.pt").items():
        assert np.array_equal(checkpoint.read(key), value), key


def test_a_list_alone_has_no_names(tmp_path: Path):
    report = damaged("diffusers.pt", tmp_path, lambda state: [state.pop("optimizer"), state.pop("model")])
    assert codes(report) == ["SR-EMA-UNMATCHED"]
    assert list(report.state.tensors) == [f"ema:#{number}" for number in range(8)]


@pytest.mark.parametrize(
    "edit",
    [
        lambda shadow: shadow.pop(0),
        lambda shadow: shadow.pop(),
        lambda shadow: shadow.append(torch.zeros(3)),
        lambda shadow: shadow.__setitem__(0, torch.zeros(4, 3)),
        lambda shadow: shadow.reverse(),
    ],
    ids=["first lost", "last lost", "one more", "transposed", "reversed"],
)
def test_a_list_that_does_not_fit_is_named(edit: Callable[[list[Any]], Any], tmp_path: Path):
    report = damaged("diffusers.pt", tmp_path, lambda state: edit(state["ema"]["shadow_params"]))
    assert set(codes(report)) & {"SR-EMA-UNMATCHED", "SR-EMA-NAMES"}


@pytest.mark.parametrize(("name", "section"), [("timm.pt", "state_dict_ema"), ("averaged.pt", "smoothed")])
def test_another_shape_and_lost_names_are_named(name: str, section: str, tmp_path: Path):
    def reshape(state: dict[str, Any]) -> None:
        key = next(key for key in state[section] if key.endswith("0.weight"))
        state[section][key] = torch.zeros(3, 5)

    assert codes(damaged(name, tmp_path, reshape)) == ["SR-EMA-SHAPE"]
    lost = damaged(name, tmp_path, lambda state: state[section].pop(next(k for k in state[section] if "3.bias" in k)))
    assert codes(lost) == ["SR-EMA-NAMES"]
    assert "lacks 1 that the optimizer trains: 3.bias" in lost.problems[-1].message + "".join(
        problem.message for problem in lost.problems
    )

    def rename(state: dict[str, Any]) -> None:
        key = next(key for key in state[section] if key.endswith("3.bias"))
        state[section][key.replace("3.bias", "9.bias")] = state[section].pop(key)

    assert codes(damaged(name, tmp_path, rename)) == ["SR-EMA-NAMES"]


def test_the_model_saved_in_place_of_its_average_is_named(tmp_path: Path):
    assert codes(
        damaged("timm.pt", tmp_path, lambda state: state.update(state_dict_ema=dict(state["state_dict"])))
    ) == ["SR-EMA-SAME"]


def test_an_average_that_the_arguments_declare_and_nothing_holds_is_named(tmp_path: Path):
    assert codes(damaged("timm.pt", tmp_path, lambda state: state.pop("state_dict_ema"))) == ["SR-EMA-MISSING"]

    def without(state: dict[str, Any]) -> None:
        state.pop("state_dict_ema")
        state["args"].model_ema, state["args"].model_ema_decay = False, 0.0

    assert codes(damaged("timm.pt", tmp_path, without)) == []
    assert codes(damaged("diffusers.pt", tmp_path, lambda state: state["ema"].pop("shadow_params"))) == [
        "SR-EMA-MISSING"
    ]
    folder = shutil.copytree(GOLDEN / "registered", tmp_path / "registered")
    (folder / "custom_checkpoint_0.pkl").unlink()
    assert codes(inspect(folder)) == []  # nothing here says that there was one


def test_several_averages_are_kept_apart(tmp_path: Path):
    def another(state: dict[str, Any]) -> None:
        state["ema_slow"] = {name: value + 1 for name, value in state["state_dict_ema"].items()}

    report = damaged("timm.pt", tmp_path, another)
    assert report.complete
    assert codes(report) == []
    checkpoint = open_checkpoint(tmp_path / "timm.pt")
    assert np.array_equal(checkpoint.read("ema:ema_slow.0.bias"), checkpoint.read("ema:0.bias") + 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_list_in_a_dcp_directory(groups: int, tmp_path: Path):
    """An optimizer of one group lists the names in the order of the list; of two groups it does not."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    every = list(model.parameters())
    split = [{"params": every}] if groups == 1 else [{"params": every[::2]}, {"params": every[1::2], "lr": 1e-3}]
    optimizer = torch.optim.AdamW(split, lr=1e-2)
    model(torch.randn(2, 6)).square().sum().backward()
    optimizer.step()
    truth = {name: param.detach() + 1 for name, param in model.named_parameters()}
    names, settings = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": names, "optim": settings}
    state["ema"] = {"decay": 0.9, "optimization_step": 3, "shadow_params": list(truth.values())}
    report = inspect(save(state, tmp_path / "whole"), deep=True)
    assert codes(report) == ([] if groups == 1 else ["SR-EMA-ORDER"])
    checkpoint = open_checkpoint(tmp_path / "whole")
    assert report.state.objects["ema.optimization_step"] == 3
    for name, value in truth.items():
        assert np.array_equal(checkpoint.read(f"ema:{name}"), value.numpy()), name
    del state["ema"]["shadow_params"][0]
    assert {"SR-EMA-UNMATCHED", "SR-EMA-NAMES"} & set(codes(inspect(save(state, tmp_path / "short"))))
    del state["ema"]["shadow_params"]
    assert codes(inspect(save(state, tmp_path / "gone"))) == ["SR-EMA-MISSING"]


def test_an_average_beside_its_settings_in_one_mapping(tmp_path: Path):
    def nest(state: dict[str, Any]) -> None:
        state["ema"] = {"decay": 0.9, "shadow": state.pop("state_dict_ema")}

    report = damaged("timm.pt", tmp_path, nest)
    assert codes(report) == []
    assert {key for key in report.state.tensors if key.startswith("ema:")} == truth_of("timm.pt").keys()


@pytest.mark.framework
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"])
def test_what_the_callbacks_of_lightning_save(name: str, tmp_path: Path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch import callbacks

    class Job(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)

    averaging: Any = {
        "WeightAveraging": lambda: callbacks.WeightAveraging(),
        "EMAWeightAveraging": lambda: callbacks.EMAWeightAveraging(decay=0.9),
        "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1),
    }[name]()
    keep = [
        callbacks.ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, every_n_train_steps=9),
        callbacks.ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0),
    ]
    runner = lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, callbacks=[averaging, *keep], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    module = Job()
    runner.fit(module, torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    path = next(tmp_path.glob("epoch=2-*.ckpt"))
    raw = torch.load(path, weights_only=False)
    truth = raw["callbacks"][name].get("average_model_state", raw["state_dict"])
    checkpoint = open_checkpoint(path)
    assert {key for key in checkpoint.state.tensors if key.startswith("ema:")} == {f"ema:{key}" for key in truth}
    for key, value in truth.items():
        assert np.array_equal(checkpoint.read(f"ema:{key}"), value.numpy()), key
    report = inspect(path, deep=True)
    assert codes(report) == []
    assert report.complete
    # When training ends these callbacks copy the average into the model, and only then is the last one saved.
    assert codes(inspect(tmp_path / "last.ckpt", deep=True)) == ["SR-EMA-SAME"]
