"""Native ZeRO directories, written by hand after the facts of the layout, and edits of files, for tests.

The writer is deliberately simple: NumPy concatenation, no code of the reader.
"""

from __future__ import annotations

import math
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samerun.formats.torchfile import read_archive, read_value

Full = Mapping[str, np.ndarray]


def tensor(values: np.ndarray) -> torch.Tensor:
    """Returns a torch tensor of its own with these values."""
    return torch.from_numpy(np.array(values, copy=True))


def model_state(
    groups: Sequence[Full], module: Mapping[str, torch.Tensor] | None, ranks: int, **more: Any
) -> dict[str, Any]:
    """Returns the content of a model file; `more` overrides or adds keys."""
    return {
        "module": None if module is None else dict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: torch.Size(values.shape) for name, values in group.items()} for group in groups],
        "frozen_param_shapes": {},
        "shared_params": {},
        "frozen_param_fragments": {},
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 12,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"train_batch_size": 4, "zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
        **more,
    }


def hyper(number: int) -> dict[str, Any]:
    """Returns a group's hyperparameters."""
    return {"lr": 0.01 / (number + 1), "betas": (0.9, 0.95), "weight_decay": 0.0, "decoupled_weight_decay": True}


def flat_parts(full: Full, ranks: int, gaps: Sequence[int]) -> list[np.ndarray]:
    """Concatenates a group with `gaps[i]` of padding after parameter i, pads it to 2 x ranks, and cuts it."""
    parts: list[np.ndarray] = []
    for values, gap in zip(full.values(), gaps, strict=True):
        parts += [values.reshape(-1), np.zeros(gap, values.dtype)]
    whole = np.concatenate(parts)
    whole = np.concatenate([whole, np.zeros(-len(whole) % (2 * ranks), whole.dtype)])
    return np.split(whole, ranks)


def paddings(full: Full, ranks: int, gaps: Sequence[int]) -> list[int]:
    """Returns how much of each rank's part is padding at the end of the group."""
    count = sum(values.size for values in full.values()) + sum(gaps)
    part = -(-count // (2 * ranks)) * 2
    return [min(part, max(0, (rank + 1) * part - count)) for rank in range(ranks)]


def write_stage2(
    root: Path,
    groups: Sequence[Mapping[str, Full]],
    ranks: int,
    *,
    gaps: Sequence[Sequence[int]] | None = None,
    elastic: bool = False,
    padded: bool = False,
    step: Any = None,
    prefix: str = "",
    **more: Any,
) -> Path:
    """Writes a directory of stage 2 (or of BF16_Optimizer with `padded`).

    Each group maps `fp32`, `exp_avg`, `exp_avg_sq` to full tensors by name, in flattened order.
    """
    root.mkdir(parents=True, exist_ok=True)
    step = torch.tensor(3.0) if step is None else step
    spaces = gaps or [[0] * len(group["fp32"]) for group in groups]
    module = {name: tensor(values) for group in groups for name, values in group["fp32"].items()}
    module = more.pop("module", module)
    torch.save(
        model_state([group["fp32"] for group in groups], module, ranks, **more), root / "mp_rank_00_model_states.pt"
    )
    for rank in range(ranks):
        masters, states, tails = [], [], []
        for group, gap in zip(groups, spaces, strict=True):
            tail = paddings(group["fp32"], ranks, gap)[rank]
            cut = {slot: flat_parts(full, ranks, gap)[rank] for slot, full in group.items()}
            lean = {slot: part[: len(part) - tail] for slot, part in cut.items()}
            masters.append(tensor(cut["fp32"] if padded else lean["fp32"]))
            held = lean if elastic else cut
            states.append({"step": step} | {slot: tensor(part) for slot, part in held.items() if slot != "fp32"})
            tails.append(tail)
        numbered = {
            "state": dict(enumerate(states)),
            "param_groups": [{**hyper(number), "params": [number]} for number in range(len(groups))],
        }
        content = {
            "clip_grad": 1.0,
            "base_optimizer_state": states if elastic else numbered,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": tails,
            "partition_count": [ranks] * len(groups),
        }
        if not padded:
            content |= {"zero_stage": 2, "param_alignment_paddings": [list(gap) for gap in spaces]}
        whole = {"optimizer_state_dict": content, "ds_config": more.get("ds_config", {"train_batch_size": 4})}
        torch.save(whole, root / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return root


def write_stage3(
    root: Path,
    groups: Sequence[Sequence[Mapping[str, Full]]],
    ranks: int,
    *,
    dtype: torch.dtype = torch.float32,
    noise: float = 7.0,
    **more: Any,
) -> Path:
    """Writes a directory of stage 3. Each group is a list of sub-groups; masters' padding is filled with `noise`."""
    root.mkdir(parents=True, exist_ok=True)
    flat = [sub for group in groups for sub in group]
    names = [name for sub in flat for name in sub["fp32"]]
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "bf16": {"enabled": dtype != torch.float32}}
    for rank in range(ranks):
        state = model_state(
            [sub["fp32"] for sub in flat],
            {name: torch.empty(0, dtype=dtype) for name in names},
            ranks,
            **{"ds_config": config, **more},
        )
        torch.save(state, root / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        pieces = [{slot: _own_pieces(full, ranks, rank, slot, noise) for slot, full in sub.items()} for sub in flat]
        numbers = iter(range(len(flat)))
        inner = {
            "state": {
                number: {"step": torch.tensor(3.0)}
                | {slot: tensor(part) for slot, part in piece.items() if slot != "fp32"}
                for number, piece in enumerate(pieces)
            },
            "param_groups": [{**hyper(n), "params": [next(numbers) for _ in group]} for n, group in enumerate(groups)],
        }
        content = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": [tensor(piece["fp32"]) for piece in pieces],
        }
        bf16 = "bf16_" if dtype == torch.bfloat16 else ""
        torch.save(
            {"optimizer_state_dict": content, "ds_config": config},
            root / f"{bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return root


def _own_pieces(full: Full, ranks: int, rank: int, slot: str, noise: float) -> np.ndarray:
    parts: list[np.ndarray] = []
    for values in full.values():
        size = math.ceil(values.size / ranks)
        own = values.reshape(-1)[rank * size : (rank + 1) * size]
        filler = np.full(size - len(own), noise if slot == "fp32" else 0.0, values.dtype)
        parts += [own, filler]
    return np.concatenate(parts)


def slots_of(rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, np.ndarray]]:
    """Returns random masters and moments for parameters of these shapes."""
    return {
        slot: {name: rng.standard_normal(shape, np.float32) ** power for name, shape in shapes.items()}
        for slot, power in (("fp32", 1), ("exp_avg", 1), ("exp_avg_sq", 2))
    }


def edit_state(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Loads a state file that names no class but torch's, changes it, and writes it back."""
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def copy_tree(source: Path, target: Path) -> Path:
    """Copies a read-only directory so that it can be changed."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def rewrite_record(path: Path, record: str, change: Callable[[bytes], bytes]) -> None:
    """Replaces one entry of a torch.save archive, with a right checksum; its length must stay."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            archive.writestr(name, change(data) if name.partition("/")[2] == record else data)


def flip_byte(path: Path, record: str, at: int = 3) -> None:
    """Flips one bit inside an entry and leaves its recorded checksum as it was."""
    data = bytearray(path.read_bytes())
    found = read_archive(bytes(data), path).records[record]
    data[found.offset_bytes + at] ^= 0x10
    path.write_bytes(bytes(data))


def read_state(path: Path) -> Any:
    """Decodes a state file with the restricted reader."""
    data = path.read_bytes()
    return read_value(data, read_archive(data, path)).value


def codes(problems: Any) -> list[str]:
    """Returns the codes of findings."""
    return [problem.code for problem in problems]
