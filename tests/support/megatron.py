"""Comparing Megatron checkpoints with the truth of the run that wrote them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun.core.state import Role
from samerun.formats.base import Checkpoint
from samerun.formats.mcore.held import HeldCheckpoint
from support.corpus import _TYPES
from support.packed import packed_in, unpack

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "megatron"
_SLOT = re.compile(r"optimizer\.state\.(fp32_param|exp_avg|exp_avg_sq)\.(.+)")
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def golden() -> list[str]:
    """Returns the names of the golden checkpoints, kept as directories or packed."""
    return sorted([path.name for path in GOLDEN.iterdir() if (path / "truth.npz").exists()] + packed_in(GOLDEN))


def golden_at(name: str, to: Path) -> Path:
    """Returns the directory of a golden checkpoint; one that is packed is unpacked into `to`."""
    packed = GOLDEN / f"{name}.tar.xz"
    return unpack(packed, to) if packed.exists() else GOLDEN / name


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    return {
        name: np.frombuffer(body[slice(*info["data_offsets"])], _TYPES[info["dtype"]]).reshape(info["shape"])
        for name, info in header.items()
    }


def key_of(name: str) -> str:
    """Returns the key under which a truth's tensor is read."""
    match = _SLOT.fullmatch(name)
    if match is None:
        return f"param:{name}"
    return f"master:{match[2]}" if match[1] == "fp32_param" else f"optim.{match[1]}:{match[2]}"


def unstack(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of single layers and experts, under the names of local layers, that a stack holds."""
    if ".layers." not in name:
        return {name: value}
    numbered = re.search(r"\.layers\.\d", name) is not None  # layers that are not alike are not stacked
    layers = (
        {name: value}
        if numbered
        else {name.replace(".layers.", f".layers.{layer}."): value[layer] for layer in range(value.shape[0])}
    )
    found: dict[str, np.ndarray] = {}
    for single, part in layers.items():
        for fused, own in _FUSED.items():
            single = single.replace(fused, own)
        if ".experts.experts." not in single:
            found[single] = part
            continue
        for expert in range(part.shape[0]):
            found[single.replace(".experts.experts.", f".experts.local_experts.{expert}.")] = part[expert]
    return found


def differences(checkpoint: Checkpoint, truth: dict[str, np.ndarray], vocab: int, *, legacy: bool = False) -> list[str]:
    """Compares every tensor of the truth, and that there are no others. Vocabulary padding is not compared."""
    wrong: list[str] = []
    expected: set[str] = set()
    for name, value in truth.items():
        for named, part in unstack(key_of(name), value).items() if legacy else [(key_of(name), value)]:
            buffer = named.replace("param:", "buffer:", 1)
            key = buffer if buffer in checkpoint.state.tensors else named
            expected.add(key)
            if key not in checkpoint.state.tensors:
                wrong.append(f"{key} is missing")
                continue
            rows = part[:vocab] if "word_embeddings" in key or "output_layer" in key else part
            found = checkpoint.read(key)
            if found.shape != rows.shape:
                wrong.append(f"{key} has shape {found.shape}, not {rows.shape}")
            elif not np.array_equal(found.astype(np.float32), rows):
                wrong.append(f"{key} differs in {(found.astype(np.float32) != rows).sum()} of {rows.size} values")
    tensors = checkpoint.state.tensors
    extra = {key for key, entry in tensors.items() if entry.key.slot != "step" and entry.key.role is not Role.BUFFER}
    return [*wrong, *(f"{key} is not in the truth" for key in sorted(extra - expected))]


def codes(checkpoint: Checkpoint) -> set[str]:
    """Returns the codes of the findings of opening."""
    return {problem.code for problem in checkpoint.state.problems}


def copy_golden(name: str, to: Path) -> Path:
    """Copies a golden checkpoint and returns the directory of its iteration."""
    shutil.copytree(GOLDEN / name, to / name)
    return to / name / "iter_0000003"


def edit_saved(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites a torch.save file after a change to what it holds."""
    value = torch.load(file, weights_only=False)
    edit(value)
    torch.save(value, file)


def overwrite(checkpoint: HeldCheckpoint, key: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Changes the values of a tensor where they lie, without touching the recorded checksums."""
    entry = checkpoint.state.tensors[key]
    for piece in range(len(entry.tiling)):
        extent = checkpoint.locate(key, piece)
        data = bytearray(extent.file.read_bytes())
        values = change(np.array(checkpoint.read_piece(key, piece)))
        view = np.ndarray(
            extent.shape,
            values.dtype,
            buffer=data,
            offset=extent.offset_bytes,
            strides=[step * values.dtype.itemsize for step in extent.strides],
        )
        view[...] = values
        extent.file.write_bytes(data)
