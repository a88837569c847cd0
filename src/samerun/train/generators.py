"""This process's ordinary generators: torch, CUDA, NumPy, Python, and those of Megatron's tracker, by name.

Megatron keeps the states of further CUDA generators by name: which regions draw what is decided by the name under which
a region forks. A state is 16 bytes in host memory, so it can be read, compared and made anew without a device; to draw
from one takes a device. Graph-safe trackers hold generators instead; Megatron's own function turns those into states.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from samerun.core.generators import TRACKER, cuda_state, generator_digest

if TYPE_CHECKING:
    import torch

_MEGATRON = "megatron.core.tensor_parallel.random"


def generator_states() -> dict[str, Any]:
    """Returns the states of this process's generators, as their libraries give them.

    `torch`, `numpy` and `python` always; `cuda` (the current device's) where one is in use; `megatron:NAME` for each of
    Megatron's tracker, where the job has one. Nothing is imported or initialised for it.
    """
    import numpy as np
    import torch

    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found | {TRACKER + name: state for name, state in tracker_states().items()}


def generator_digests() -> dict[str, str]:
    """Returns the digest of each of this process's generators, by name."""
    digests = {name: generator_digest(_array(state)) for name, state in generator_states().items()}
    return {name: digest for name, digest in digests.items() if digest is not None}


def _array(state: Any) -> Any:
    numpy: Any = getattr(state, "numpy", None)
    return numpy() if callable(numpy) else state


def tracker_states() -> dict[str, torch.Tensor]:
    """Returns the states of Megatron's tracker by name; empty where the job has none."""
    if (tracker := _tracker()) is None:
        return {}
    as_tensor = sys.modules[_MEGATRON].convert_cuda_rng_state if _is_graph_safe(tracker) else None
    return {name: as_tensor(state) if as_tensor else state for name, state in tracker.get_states().items()}


def set_tracker_states(states: Mapping[str, Any]) -> None:
    """Gives Megatron's tracker these states, in place of all that it has. A name's state is 16 bytes (`cuda_state`)."""
    import torch

    tracker: Any = _tracker()
    given = {name: torch.as_tensor(state, dtype=torch.uint8).cpu().clone() for name, state in states.items()}
    if _is_graph_safe(tracker):
        convert = sys.modules[_MEGATRON].convert_cuda_rng_state
        given = {name: convert(state, to_graphable=True) for name, state in given.items()}
    tracker.set_states(given)


def seed_generator(name: str, seed: int) -> None:
    """Seeds one of `torch`, `cuda`, `numpy`, `python`."""
    import numpy as np
    import torch

    match name:
        case "torch":
            torch.default_generator.manual_seed(seed)
        case "cuda":
            torch.cuda.manual_seed(seed)
        case "numpy":
            np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        case _:
            random.seed(seed)


def restore_generator(name: str, state: Any) -> None:
    """Sets one of `torch`, `cuda`, `numpy`, `python` to a state that `generator_states` returned."""
    import numpy as np
    import torch

    match name:
        case "torch":
            torch.set_rng_state(state)
        case "cuda":
            torch.cuda.set_rng_state(state)
        case "numpy":
            np.random.set_state(state)
        case _:
            version, words, gauss = state
            random.setstate((version, tuple(words), gauss))


def seeded_state(seed: int) -> torch.Tensor:
    """Returns the state that a CUDA generator has after `manual_seed(seed)`, 16 uint8 on the CPU."""
    import torch

    return torch.from_numpy(cuda_state(seed).copy())


def _tracker() -> Any:
    """Megatron's tracker if the job has made one with states, else None. Asking Megatron for it would make one."""
    module = sys.modules.get(_MEGATRON)
    tracker: Any = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)
    return tracker if tracker is not None and tracker.is_initialized() else None


def _is_graph_safe(tracker: Any) -> bool:
    safe: Any = getattr(sys.modules[_MEGATRON], "is_graph_safe_cuda_rng_tracker", None)  # not in old releases
    return bool(safe(tracker)) if safe is not None else False
