"""Writes the checkpoints of this directory again, with the real averages of diffusers, timm, torch and mmengine.

    PYTHONPATH=src:tests python tests/golden/averages/generate.py

See PROVENANCE.md for versions. `truth.npz` holds, by file and samerun's key, the averages as the live objects had them.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent
DECAY = 0.9


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))


def timm_average(model: nn.Module) -> Any:
    """Returns timm's ModelEmaV3, from its own file: the package as a whole wants torchvision."""
    package = importlib.util.find_spec("timm")
    assert package is not None
    folder = Path(str(package.origin)).parent
    spec = importlib.util.spec_from_file_location("model_ema", folder / "utils" / "model_ema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ModelEmaV3(model, decay=DECAY)


def train(model: nn.Module, optimizer: Any, after: Any, backward: Any = torch.Tensor.backward) -> None:
    for _ in range(3):
        backward(model(torch.randn(5, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        after()


def listed(average: Any, model: nn.Module) -> dict[str, Any]:
    """Returns the truth of an average that is a list: the parameters' names come from the model it was made from."""
    pairs = zip(model.named_parameters(), average.shadow_params, strict=True)
    return {f"ema:{name}": tensor.numpy().copy() for (name, _), tensor in pairs}


def named(average: nn.Module) -> dict[str, Any]:
    return {f"ema:{name}": tensor.numpy().copy() for name, tensor in average.state_dict().items()}


def files(truth: dict[str, dict[str, Any]]) -> None:
    from diffusers.training_utils import EMAModel
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    shadow, module = EMAModel(model.parameters(), decay=DECAY), timm_average(model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)

    def step() -> None:
        shadow.step(model.parameters())
        module.update(model)
        averaged.update_parameters(model)

    train(model, optimizer, step)
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "global_step": 3}
    torch.save({**held, "ema": shadow.state_dict()}, HERE / "diffusers.pt")
    arguments = argparse.Namespace(model_ema=True, model_ema_decay=DECAY, lr=1e-2)
    checkpoint = {
        "epoch": 0, "arch": "net", "state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "version": 2,
        "args": arguments, "state_dict_ema": module.module.state_dict(), "metric": 0.5,
    }  # fmt: skip
    torch.save(checkpoint, HERE / "timm.pt")
    torch.save({**held, "smoothed": averaged.state_dict()}, HERE / "averaged.pt")
    truth["diffusers.pt"] = listed(shadow, model)
    truth["timm.pt"], truth["averaged.pt"] = named(module.module), named(averaged.module)


def registered(truth: dict[str, dict[str, Any]]) -> None:
    """An average that a script registers for Accelerate's checkpoints: a list beside a file that sorts names."""
    from accelerate import Accelerator
    from diffusers.training_utils import EMAModel

    runner = Accelerator(cpu=True)
    model: Any = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    model, optimizer = runner.prepare(model, optimizer)
    average = EMAModel(model.parameters(), decay=DECAY)
    runner.register_for_checkpointing(average)
    train(model, optimizer, lambda: average.step(model.parameters()), runner.backward)
    runner.save_state(str(HERE / "registered"))
    truth["registered"] = listed(average, model)


def hooked(truth: dict[str, dict[str, Any]]) -> None:
    """Models and averages in folders of their own, by the hook that diffusers' training scripts register."""
    from accelerate import Accelerator
    from diffusers import UNet2DModel
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    runner = Accelerator(cpu=True)
    unet = UNet2DModel(
        sample_size=4, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4,), norm_num_groups=2,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), add_attention=False,
    )  # fmt: skip
    average = EMAModel(unet.parameters(), decay=DECAY, model_cls=UNet2DModel, model_config=unet.config)

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        average.save_pretrained(str(Path(folder) / "unet_ema"))
        for model in models:
            model.save_pretrained(str(Path(folder) / "unet"))
            weights.pop()

    runner.register_save_state_pre_hook(save)
    model: Any
    optimizer: Any
    model, optimizer = runner.prepare(unet, torch.optim.AdamW(unet.parameters(), lr=1e-2, foreach=False))
    for _ in range(2):
        runner.backward(model(torch.randn(2, 1, 4, 4), torch.tensor([1, 2])).sample.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
    runner.save_state(str(HERE / "hooked"))
    truth["hooked"] = listed(average, unet)


def swapped(truth: dict[str, dict[str, Any]]) -> None:
    """What mmengine saves with its EMAHook: the average in the model's place."""
    from mmengine.hooks import EMAHook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    torch.manual_seed(1)
    rows = [{"x": row} for row in torch.randn(15, 4)]
    loader = {"batch_size": 5, "dataset": rows, "sampler": {"type": "DefaultSampler"}, "num_workers": 0}
    loader["collate_fn"] = {"type": "default_collate"}
    hook = EMAHook(momentum=1 - DECAY)
    runner = Runner(
        model=Model(), work_dir="/tmp/run", train_dataloader=loader, train_cfg={"by_epoch": False, "max_iters": 3},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-2, "foreach": False}}, custom_hooks=[hook],
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 3, "by_epoch": False}},
        experiment_name="run", default_scope="mmengine", log_level="ERROR",
    )  # fmt: skip
    runner.train()
    shutil.copy("/tmp/run/iter_3.pth", HERE / "mmengine.pth")
    held = {f"param:{name}": value.detach().numpy().copy() for name, value in runner.model.named_parameters()}
    truth["mmengine.pth"] = named(hook.ema_model.module) | held


def main() -> None:
    warnings.simplefilter("ignore")
    for name in ("registered", "hooked"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    truth: dict[str, dict[str, Any]] = {}
    for make in (files, registered, hooked, swapped):
        make(truth)
    flat = {f"{file}/{key}": value for file, tensors in truth.items() for key, value in tensors.items()}
    np.savez_compressed(HERE / "truth.npz", **flat)
    print(sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()), "bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
