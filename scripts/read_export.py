"""Reads an export of samerun as anybody can, by the safetensors library and json; prints what it holds.

    python -I scripts/read_export.py EXPORT

Shapes and SHA-256 of the values by key, and the parameter groups.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

folder = Path(sys.argv[1])
tensors = {}
for file in sorted(folder.glob("*.safetensors")):
    with safe_open(file, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118
            value = opened.get_tensor(key)
            content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            tensors[key] = [list(value.shape), hashlib.sha256(content).hexdigest()]
state = json.loads((folder / "state.json").read_text())
print(json.dumps({"tensors": tensors, "groups": state["groups"], "samerun": "samerun" in sys.modules}))
