"""Ordinary random number generators, told by what their states look like, and their states as comparable bytes.

A framework saves the same generator as a tensor, an array, a tuple or a mapping. Here one state is one array of bytes
and one digest, whoever saved it and wherever it is compared: in a checkpoint without torch, or in a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from samerun.core.digest import digest_array
from samerun.core.mesh import Layout

TORCH_BYTES = 5056
"""Length of `torch.get_rng_state()`: MT19937 with its counters (torch 2.13.0)."""
CUDA_BYTES = 16
"""Length of a CUDA generator's state: Philox seed and offset, both 8 bytes, little-endian (torch 2.13.0)."""

TRACKER = "megatron:"
"""Begins the name of a generator of Megatron's tracker, such as `megatron:model-parallel-rng`."""
MODEL_PARALLEL, DATA_PARALLEL, EXPERT_PARALLEL = "model-parallel-rng", "data-parallel-rng", "expert-parallel-rng"
"""The tracker's own names (megatron-core 0.13 to 0.19)."""

Bytes = npt.NDArray[np.uint8]


def generator_kind(state: Any) -> str | None:
    """Returns `torch`, `cuda`, `numpy` or `python` for a generator's state, `other` for another value.

    None for a container that may hold states. Arrays are NumPy's.
    """
    if isinstance(state, np.ndarray):
        array = cast("npt.NDArray[Any]", state)
        return {TORCH_BYTES: "torch", CUDA_BYTES: "cuda"}.get(array.nbytes, "other")
    if isinstance(state, Mapping):
        return "numpy" if "bit_generator" in state else None
    if isinstance(state, list | tuple):
        items = cast("list[Any]", state)
        if items and isinstance(items[0], str):
            return "numpy"
        if len(items) == 3 and isinstance(items[1], list | tuple) and len(cast("list[Any]", items[1])) == 625:
            return "python"
        return None
    return "other"


def generator_digest(state: Any) -> str | None:
    """Returns the digest of a generator's state, or None for what is none (`generator_kind`) or is garbled.

    Equal states have equal digests, in whatever container a framework saved them.
    """
    kind = generator_kind(state)
    try:
        match kind:
            case "torch" | "cuda":
                content = np.ascontiguousarray(cast("npt.NDArray[Any]", state)).reshape(-1).view(np.uint8)
            case "numpy":
                content = _numpy_bytes(state)
            case "python":
                version, words, gauss = state
                content = _joined([np.array([version], np.int64), np.array(words, np.int64), _optional(gauss)])
            case _:
                return None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return digest_array(f"rng:{kind}", content)


def _numpy_bytes(state: Any) -> Bytes:
    """MT19937 as `numpy.random.get_state` gives it, in its old and its new form; others by their text."""
    if isinstance(state, Mapping):
        body = cast("Mapping[str, Any]", state)
        if body["bit_generator"] != "MT19937":
            return np.frombuffer(repr(sorted(_plain(body).items())).encode(), np.uint8)
        inner = body["state"]
        parts = (inner["key"], inner["pos"], body.get("has_gauss", 0), body.get("gauss", 0.0))
    else:
        parts = tuple(state[1:5])
    key, position, has_gauss, gauss = parts
    numbers = np.array([int(position), int(has_gauss)], np.int64)
    return _joined([np.asarray(key, np.int64).reshape(-1), numbers, _optional(gauss if has_gauss else None)])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in cast("Mapping[Any, Any]", value).items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _optional(number: float | None) -> npt.NDArray[Any]:
    return np.array([] if number is None else [float(number)], np.float64)


def _joined(arrays: list[npt.NDArray[Any]]) -> Bytes:
    return np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays])


def cuda_state(seed: int, offset: int = 0) -> Bytes:
    """Returns the state of a CUDA generator that was seeded and has drawn `offset` numbers per thread, 16 uint8.

    What `torch.cuda.manual_seed(seed)` leaves behind for `torch.cuda.get_rng_state()`, without a device.

    >>> cuda_state(258).tolist()
    [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

    Raises:
        ValueError: unless the seed has 64 bits at most, and the offset is a multiple of 4 (Philox gives four at once).
    """
    if not 0 <= seed < 1 << 64 or not 0 <= offset < 1 << 63 or offset % 4:
        raise ValueError(f"a CUDA generator has no seed {seed} at offset {offset}")
    return np.array([seed, offset], "<u8").view(np.uint8)


def tracker_streams(layout: Layout, rank: int, *, expert_tensor: int | None = None) -> dict[str, int]:
    """Returns which stream each generator of Megatron's tracker belongs to on `rank`, by Megatron's own rule.

    `data-parallel-rng` is one per pipeline stage, `model-parallel-rng` one per tensor-parallel rank of a stage,
    `expert-parallel-rng` one per expert-parallel and expert-tensor-parallel rank of a stage; data-parallel ranks share
    all three (`model_parallel_cuda_manual_seed`, megatron-core 0.13 to 0.19).

    Args:
        layout: the job's; ranks lie in it as Megatron orders them (tp, cp, ep, dp, pp).
        rank: in 0..world_size-1.
        expert_tensor: expert tensor parallelism (`etp`); `layout.tp` by default, as Megatron's.

    Raises:
        ValueError: for a rank outside the layout, or expert sizes that do not divide the ranks of a stage.
    """
    at = layout.coordinate(rank)
    within, width = layout.world_size // layout.pp, expert_tensor if expert_tensor is not None else layout.tp
    if width < 1 or within % (width * layout.ep):
        raise ValueError(
            f"ep={layout.ep} and expert tensor parallelism {width} do not divide {within} ranks of a stage"
        )
    place = rank % within
    expert = place // width % layout.ep * width + place % width
    return {
        DATA_PARALLEL: at["pp"],
        MODEL_PARALLEL: at["pp"] * layout.tp + at["tp"],
        EXPERT_PARALLEL: at["pp"] * layout.ep * width + expert,
    }
