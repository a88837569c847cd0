"""Small exports as convert reads and writes them, made by the safetensors library and by hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from samerun.core.state import LogicalState, ParamGroup, RecordedProgress, Topology
from samerun.formats.safetensors.sidecar import dump_sidecar

NAMES = ("layers.0.w", "layers.1.w", "head.w")


def write_export(folder: Path, *, rows: int = 257, seed: int = 0, **state: Any) -> Path:
    """Writes a model of three matrices with AdamW's state, as samerun's own export; returns its directory."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for name in NAMES:
        for key in (f"param:{name}", f"optim.exp_avg:{name}", f"optim.exp_avg_sq:{name}"):
            tensors[key] = np.abs(random.standard_normal((rows, 33), dtype=np.float32))
        tensors[f"optim.step:{name}"] = np.array(5.0, np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "state.safetensors")
    settings = {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    parts: dict[str, Any] = {
        "groups": (ParamGroup(NAMES, settings),),
        "progress": RecordedProgress(update=5, samples=80),
        "scheduler": {"last_epoch": 5},
        "rng": {"rng": {"rank0": {"seed": 1}, "rank1": {"seed": 2}}},
        "data": {"cursor": {"rank0": 80, "rank1": 80}},
        "topology": Topology(world_size=2),
    }
    state_now = LogicalState(format="safetensors", tensors={}, **{**parts, **state})
    (folder / "state.json").write_text(dump_sidecar(state_now))
    return folder


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """Returns every file below a folder (a single file under its own name)."""
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def in_child(work: Callable[[], None], *, kill_after: float | None = None) -> int:
    """Runs `work` in a forked process; returns its exit code, or minus the signal that ended it.

    With `kill_after`, SIGKILL comes that many seconds in, if it still runs.
    """
    import time

    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.close(2)
            work()
            code = 0
        except BaseException as error:
            code = getattr(error, "exit_code", 71)
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)
