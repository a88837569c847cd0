"""A part of the proof matrix: a torchtitan checkpoint, converted, loaded by torchtitan's own model and optimizer."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from samerun.formats.detect import open_checkpoint

TOP = Path(__file__).resolve().parents[1]
SOURCE = "torch/titan_fsdp_dp2"
LAYERS, WIDTH, INNER, VOCAB, HEADS = 3, 32, 88, 96, 4


def prove_with_torchtitan(
    sources: Iterator[tuple[str, Path]], convert: Callable[..., tuple[str, list[str]]]
) -> Iterator[dict[str, Any]]:
    """Yields a row per layout and destination: FSDP2 over torchtitan's Llama, its weights apart, its moments fused."""
    from support.gloo import run_ranks

    try:
        by = f"torchtitan {version('torchtitan')}"
    except PackageNotFoundError:
        by = "torchtitan"
    path = dict(sources)[SOURCE]
    for to, layouts in (("dcp", (1, 2, 3, 4)), ("torch", (1,))):
        row: dict[str, Any] = {"to": to, "source": SOURCE, "loaded_by": by}
        with tempfile.TemporaryDirectory() as scratch:
            dest = Path(scratch) / "moved"
            row["from"], row["decisions"] = convert(path, dest, to)
            for ranks in layouts:
                row["layout"] = f"dp_shard={ranks}"
                try:
                    found = run_ranks(ranks, _held, str(path), str(dest), to, timeout=300)
                    wrong = sorted({key for _, keys in found for key in keys})
                    yield {**row, "tensors": found[0][0], "different": wrong}
                except RuntimeError as error:
                    yield {**row, "failed": str(error).strip().splitlines()[-1][:160]}


def _held(rank: int, ranks: int, source: str, folder: str, to: str) -> tuple[int, list[str]]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, default_adamw

    warnings.simplefilter("ignore")
    model = _model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = OptimizersContainer(default_adamw(lr=77.0), model_parts=[model])
    if to == "dcp":
        weights = model.state_dict()
        dcp.load({**weights, "optimizer": optimizers}, checkpoint_id=folder)
    else:
        saved = torch.load(folder, weights_only=True)
        weights, (inner,) = saved["model"], optimizers.optimizers
        inner.load_state_dict(next(saved[name] for name in ("optimizer", "optim") if name in saved))
    model.load_state_dict(weights, strict=True)
    return _compare(model, optimizers.optimizers[0], source)


def _compare(model: Any, optimizer: Any, source: str) -> tuple[int, list[str]]:
    from support.skeleton import full

    checkpoint = open_checkpoint(Path(source))
    trained, weights = dict(model.named_parameters()), model.state_dict()
    wrong: list[str] = []
    for key, entry in checkpoint.state.tensors.items():
        held = optimizer.state[trained[entry.key.fqn]][entry.key.slot] if entry.key.slot else weights[entry.key.fqn]
        if full(held).tobytes() != checkpoint.read(key).tobytes():
            wrong.append(key)
    rates = {group["lr"] for group in optimizer.param_groups}
    saved = {group.hyperparameters["lr"] for group in checkpoint.state.groups}
    wrong += [] if rates == saved else [f"rates {sorted(rates)} for {sorted(saved)}"]
    checkpoint.close()
    return len(checkpoint.state.tensors), wrong


def _model() -> Any:
    sys.path.insert(0, str(TOP / "tests" / "golden" / "maps"))
    import make_titan

    make_titan.WIDTH, make_titan.INNER, make_titan.VOCAB, make_titan.LAYERS = WIDTH, INNER, VOCAB, LAYERS
    make_titan.HEADS = make_titan.GROUPS = HEADS
    return make_titan.build()[0]
