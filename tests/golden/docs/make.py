"""Writes the checkpoint that the documentation's commands are tried on: `python tests/golden/docs/make.py`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "src")]

from support.checkpoints import write_fsdp2_checkpoint  # noqa: E402

if __name__ == "__main__":
    target = HERE / "step-400"
    shutil.rmtree(target, ignore_errors=True)
    write_fsdp2_checkpoint(target, 4, updates=400)
