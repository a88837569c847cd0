"""`--weights-only`: parameters and buffers with all their values, nothing else, and everything left out is named."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samerun.cli import main
from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.errors import UndecidedError, UsageError
from samerun.formats.base import Checkpoint
from samerun.formats.detect import open_checkpoint
from support.exports import NAMES

SOURCE = Path(__file__).parents[1] / "golden" / "deepspeed" / "z3_sub_bf16"


@pytest.fixture
def source() -> Any:
    checkpoint = open_checkpoint(SOURCE)
    yield checkpoint
    checkpoint.close()


def weights_of(source: Checkpoint, masters: str) -> dict[str, bytes]:
    """Returns the bytes of every parameter and buffer by its name in the model, masters in place of parameters."""
    found: dict[str, bytes] = {}
    for key, entry in source.state.tensors.items():
        if entry.key.role in ("param", "buffer"):
            master = f"master:{entry.key.fqn}"
            taken = master if masters == "params" and master in source.state.tensors else key
            found |= dict.fromkeys((entry.key.fqn, *entry.aliases), source.read(taken).tobytes())
    return found


@pytest.mark.parametrize("masters", ["params", "drop"])
def test_torch_loads_a_plain_state_dict(masters: str, source: Checkpoint, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    done = carry_out(prepare(source, tmp_path / "w.pt", to="torch", masters=masters, weights_only=True))
    assert "SR-CONVERT-WEIGHTS" in {problem.code for problem in done.problems}
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    expected = weights_of(source, masters)
    assert {
        name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in loaded.items()
    } == expected
    other = weights_of(source, "drop" if masters == "params" else "params")
    assert other != expected  # rounding shows


@pytest.mark.framework
def test_the_file_is_that_of_zero_to_fp32(tmp_path: Path, source: Checkpoint) -> None:
    """DeepSpeed's own tool, on the same checkpoint: the same names, and the same bits of everything that it gives."""
    torch = pytest.importorskip("torch")
    tool = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    expected = tool.get_fp32_state_dict_from_zero_checkpoint(str(SOURCE))
    carry_out(prepare(source, tmp_path / "w.pt", to="torch", masters="params", weights_only=True))
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert expected
    assert [name for name in expected if not torch.equal(loaded[name].float(), expected[name].float())] == []
    assert set(loaded) == set(expected)


@pytest.mark.parametrize("to", ["dcp", "safetensors", "huggingface"])
def test_other_formats_hold_the_weights_alone(to: str, source: Checkpoint, tmp_path: Path) -> None:
    carry_out(prepare(source, tmp_path / "w", to=to, masters="params", weights_only=True))
    found = open_checkpoint(tmp_path / "w")
    assert {entry.key.role for entry in found.state.tensors.values()} <= {"param", "buffer"}
    assert weights_of(found, "drop") == weights_of(source, "params")
    assert not any((found.state.groups, found.state.scheduler, found.state.rng, found.state.data))
    found.close()


@pytest.mark.parametrize(("damaged", "stops"), [("master", True), ("optim.exp_avg", False)])
def test_checksums_of_what_is_written_are_compared_and_no_others(damaged: str, stops: bool, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "ckpt")
    with closing(open_checkpoint(tmp_path / "ckpt")) as source:
        key = next(key for key in source.state.tensors if key.startswith(f"{damaged}:"))
        extent = source.locate(key, 0)
        assert extent.crc32 is not None
    content = bytearray(extent.file.read_bytes())
    content[extent.offset_bytes] ^= 1
    extent.file.write_bytes(content)
    with closing(open_checkpoint(tmp_path / "ckpt")) as source:
        go = partial(prepare, source, tmp_path / "w.pt", to="torch", masters="params", weights_only=True)
        if not stops:
            assert weights_of(source, "params")
            carry_out(go())
            return
        with pytest.raises(UndecidedError, match="SR-FILE-CRC"):
            go()


def test_safetensors_reads_a_model_file(source: Checkpoint, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    carry_out(prepare(source, tmp_path / "w", to="huggingface", masters="params", weights_only=True))
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["model.safetensors", "samerun-proof.json"]
    for name, value in load_file(tmp_path / "w" / "model.safetensors").items():
        master = f"master:{name}"
        key = (
            master
            if master in source.state.tensors
            else next(key for key, entry in source.state.tensors.items() if key in (f"param:{name}", f"buffer:{name}"))
        )
        assert np.array_equal(value, source.read(key).astype(value.dtype))


def test_the_proof_names_everything_that_was_left_out(source: Checkpoint, tmp_path: Path) -> None:
    done = carry_out(prepare(source, tmp_path / "w", to="safetensors", masters="params", weights_only=True))
    dropped = json.loads(Path(done.proof).read_text())["dropped"]
    lost = {key for key, entry in source.state.tensors.items() if entry.key.role == "optim"}
    assert lost
    assert lost | {"groups", "scheduler", "rng", "progress"} <= set(dropped)
    assert set(dropped.values()) == {"only the weights were asked for"}


def test_masters_are_asked_for(source: Checkpoint, tmp_path: Path) -> None:
    for masters in (None, "slots"):
        with pytest.raises(UndecidedError, match="SR-WRITE-MASTERS"):
            prepare(source, tmp_path / "w", to="torch", masters=masters, weights_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["zero", "universal", "megatron"])
def test_a_run_is_not_weights(to: str, source: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SR-USAGE-OPTION"):
        prepare(source, tmp_path / "w", to=to, masters=None, weights_only=True)


def test_without_the_option_everything_travels(shared_source: Path, tmp_path: Path) -> None:
    for name, options in (("all.pt", []), ("w.pt", ["--weights-only"])):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["convert", str(shared_source), str(tmp_path / name), "--to", "torch", *options])
    whole, weights = open_checkpoint(tmp_path / "all.pt"), open_checkpoint(tmp_path / "w.pt")
    assert set(weights.state.tensors) == {f"param:{name}" for name in NAMES}
    assert set(weights.state.tensors) < set(whole.state.tensors)
    for checkpoint in (whole, weights):
        checkpoint.close()


def test_a_source_of_weights_alone_needs_no_decision(tmp_path: Path) -> None:
    export = Path(__file__).parents[1] / "golden" / "maps" / "llama-gqa" / "hf"
    checkpoint = open_checkpoint(export)
    with pytest.raises(UndecidedError, match="SR-OPT-MISSING"):
        prepare(checkpoint, tmp_path / "run", to="dcp")
    carry_out(prepare(checkpoint, tmp_path / "weights", to="dcp", weights_only=True))
    written = open_checkpoint(tmp_path / "weights")
    assert written.state.tensors.keys() == checkpoint.state.tensors.keys()
    checkpoint.close()
