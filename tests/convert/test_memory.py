"""Anonymous memory of a conversion stays below its budget plus 100 MB, however large the checkpoint. Seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from samerun.core.state import LogicalState, ParamGroup, RecordedProgress
from samerun.formats.safetensors.sidecar import dump_sidecar

BUDGET_MIB, REST_BYTES = 16, 100_000_000
ROWS, COLUMNS, TENSORS = 4096, 2048, 12  # 403 MB, several times what is allowed

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of four parameters with AdamW's moments, each of 34 MB."""
    folder = tmp_path_factory.mktemp("large") / "ckpt"
    folder.mkdir()
    names = [f"layers.{number}.w" for number in range(TENSORS // 3)]
    keys = [f"{role}:{name}" for name in names for role in ("param", "optim.exp_avg", "optim.exp_avg_sq")]
    size = ROWS * COLUMNS * 4
    places = [[number * size, (number + 1) * size] for number in range(TENSORS)]
    header = {
        key: {"dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": place}
        for key, place in zip(keys, places, strict=True)
    }
    text = json.dumps(header).encode()
    values = np.random.default_rng(0).random((ROWS, COLUMNS), dtype=np.float32)
    with open(folder / "state.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in keys:
            values += np.float32(0.5)
            file.write(values.data)
    groups = (ParamGroup(tuple(names), {"lr": 1e-3, "weight_decay": 0.1}),)
    state = LogicalState(format="x", tensors={}, groups=groups, progress=RecordedProgress(update=5))
    (folder / "state.json").write_text(dump_sidecar(state))
    return folder


def peak_anonymous_bytes(*command: str) -> int:
    """Runs a command to its end and returns the most anonymous memory that it was seen with."""
    job = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while job.poll() is None:
        try:
            lines = Path(f"/proc/{job.pid}/status").read_text().splitlines()
        except OSError:
            continue
        peak = max([peak, *(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.002)
    assert job.returncode == 0
    return peak


@pytest.mark.parametrize(
    "options", [["--to", "dcp", "--layout", "dp_shard=3"], ["--to", "torch", "--dtype", "optim=bfloat16"]]
)
def test_a_conversion_holds_no_more_than_its_budget_allows(options: list[str], large: Path, tmp_path: Path) -> None:
    budget = ["--memory-budget", f"{BUDGET_MIB}MiB"]
    peak = peak_anonymous_bytes("-m", "samerun", "convert", str(large), str(tmp_path / "dest"), *options, *budget)
    assert 5 << 20 < peak < (BUDGET_MIB << 20) + REST_BYTES


def test_a_process_that_reads_it_whole_is_seen_to_hold_more(large: Path) -> None:
    script = f"import numpy as np; held = np.fromfile({str(large / 'state.safetensors')!r}, np.uint8)"
    assert peak_anonymous_bytes("-c", f"{script}; import time; time.sleep(0.2)") > (BUDGET_MIB << 20) + REST_BYTES
