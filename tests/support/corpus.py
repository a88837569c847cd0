"""Real checkpoints with their truth, where a collection of them lies beside the repository; tests skip without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64}


def find_corpus() -> Path | None:
    """Returns the collection: `SAMERUN_CORPUS`, else `shared/corpus` beside a parent of the repository."""
    named = os.environ.get("SAMERUN_CORPUS")
    if named:
        return Path(named)
    parents = Path(__file__).resolve().parents
    return next((found for parent in parents if (found := parent / "shared" / "corpus").is_dir()), None)


CORPUS = find_corpus()
needs_corpus = pytest.mark.skipif(CORPUS is None, reason="no collection of real checkpoints here (SAMERUN_CORPUS)")


def corpus(name: str) -> Path:
    assert CORPUS is not None
    return CORPUS / name


def read_truth(folder: Path) -> dict[str, np.ndarray]:
    """Reads `truth.safetensors`: full tensors taken from the live run."""
    data = (folder / "truth.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    return {
        name: np.frombuffer(body[slice(*info["data_offsets"])], _TYPES[info["dtype"]]).reshape(info["shape"])
        for name, info in header.items()
    }


def read_truth_json(folder: Path) -> dict[str, Any]:
    """Reads `truth.json`: groups by FQN, layout, scheduler, RNG hashes."""
    return json.loads((folder / "truth.json").read_text())
