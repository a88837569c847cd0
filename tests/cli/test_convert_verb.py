"""`samerun convert` as a user and a script see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from samerun.cli import root
from samerun.cli.output import report_failure
from support.exports import write_export


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("source") / "ckpt")


def run(*arguments: object) -> tuple[int, str]:
    """Runs a verb in this process as `main` would; returns the exit code and stdout."""
    result = CliRunner().invoke(root, ["convert", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        return report_failure(result.exception), result.stdout
    return result.return_value or 0, result.stdout


def test_the_document_of_a_conversion(source: Path, tmp_path: Path) -> None:
    code, out = run(source, tmp_path / "dest", "--to", "safetensors", "--json")
    body = json.loads(out)
    assert code == 0
    assert body["schema"] == "samerun/convert/1"
    assert body["dest"] == str(tmp_path / "dest")
    assert body["bytes_written"] == sum(path.stat().st_size for path in (tmp_path / "dest").glob("state.*"))
    assert body["seconds"] > 0
    assert json.loads(Path(body["proof"]).read_text())["state"] == body["state"]


@pytest.mark.parametrize(("options", "schema"), [([], "convert"), (["--dry-run"], "convert-plan")])
def test_what_findings_stopped_is_a_document_too(options: list[str], schema: str, tmp_path: Path) -> None:
    masters = Path(__file__).parents[1] / "golden" / "deepspeed" / "z3_sub_bf16"
    code, out = run(masters, tmp_path / "dest", "--to", "torch", "--json", *options)
    body = json.loads(out)
    assert code == 1
    assert body["schema"] == f"samerun/{schema}/1"
    assert [problem["code"] for problem in body["problems"]] == ["SR-WRITE-MASTERS"]
    assert (body["dest"], body["proof"], body["bytes_written"]) == (str(tmp_path / "dest"), None, 0)
    assert run(masters, tmp_path / "dest", "--to", "nothing", "--json") == (2, "")  # a usage error is a message
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    code, out = run(source, tmp_path / "dest", "--to", "safetensors", "--dry-run", "--json")
    body = json.loads(out)
    assert code == 0
    assert body["schema"] == "samerun/convert-plan/1"
    assert body["copies"] == len(body["copy_list"]) == 12
    assert body["casts"] == 0
    assert body["peak_memory_bytes"] < 100 << 20
    code, out = run(source, tmp_path / "dest", "--to", "safetensors", "--dry-run", "--dtype", "param=bf16")
    assert code == 0
    assert "3 of them casts" in out
    assert "state.safetensors" in out
    assert list(tmp_path.iterdir()) == []


def test_what_people_read(source: Path, tmp_path: Path) -> None:
    code, out = run(source, tmp_path / "dest", "--to", "safetensors", "--max-shard", "100kB")
    assert code == 0
    assert "12 tensors read back equal" in out
    assert len(list((tmp_path / "dest").glob("*.safetensors"))) > 3


def test_names_change_with_a_map(source: Path, tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text("layers.*: blocks.*\n")
    code, _ = run(source, tmp_path / "dest", "--to", "safetensors", "--map", tmp_path / "names.yaml")
    assert code == 0
    assert "param:blocks.0.w" in json.loads((tmp_path / "dest" / "samerun-proof.json").read_text())["tensors"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--to", "nothing"], 2),
        (["--to", "safetensors", "--dtype", "param"], 2),
        (["--to", "safetensors", "--dtype", "param=int7"], 2),
        (["--to", "safetensors", "--dtype", "nothing=float16"], 2),
        (["--to", "safetensors", "--layout", "dp:4"], 2),
        (["--to", "safetensors", "--memory-budget", "much"], 2),
        (["--to", "dcp", "--max-shard", "5GB"], 2),
        (["--to", "dcp", "--allow", "SR-NOPE"], 2),
        (["--to", "dcp", "--layout", "dp_shard=99999999999"], 2),
        ([], 2),
    ],
)
def test_what_makes_no_sense(arguments: list[str], code: int, source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "dest", *arguments)[0] == code
    assert list(tmp_path.iterdir()) == []


def test_blocking_findings_exit_1(tmp_path: Path) -> None:
    source = write_export(tmp_path / "source")
    (source / "state.json").unlink()
    assert run(source, tmp_path / "dest", "--to", "safetensors")[0] == 1
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_where_it_can_go_on(number: signal.Signals, tmp_path: Path) -> None:
    source = write_export(tmp_path / "source", rows=80_000)
    command = [sys.executable, "-m", "samerun", "convert", str(source), str(tmp_path / "dest"), "--to", "safetensors"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    until = time.monotonic() + 60
    while not list(tmp_path.glob(".dest.samerun-partial-*/journal")) and time.monotonic() < until:
        time.sleep(0.002)
    job.send_signal(number)
    _, err = job.communicate(timeout=120)
    assert (job.returncode, "SR-CONVERT-INTERRUPTED" in err) == (3, True)
    assert not (tmp_path / "dest").exists()
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "source"]


def test_no_framework_is_imported(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from samerun.cli import root; "
        f"root.main(['convert', {str(source)!r}, {str(tmp_path / 'dest')!r}, '--to', 'safetensors'], "
        "standalone_mode=False); print(sorted(set(sys.modules) & {'torch', 'deepspeed', 'safetensors'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip().endswith("[]")


def test_options_that_are_for_some_formats_only(source: Path, tmp_path: Path) -> None:
    for more in (["--to", "dcp", "--stage", "2"], ["--to", "zero", "--masters", "params"]):
        code, out = run(source, tmp_path / "dest", *more)
        assert (code, out) == (2, "")
    assert not (tmp_path / "dest").exists()


def test_a_destination_with_an_odd_name_is_shown_on_one_line(source: Path, tmp_path: Path) -> None:
    code, out = run(source, tmp_path / "new\n\x1b[31mname", "--to", "dcp")
    assert code == 0
    assert "new\\n\\x1b[31mname: " in out


def test_maps_follow_one_another(source: Path, tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("layers.*: blocks.*\n")
    (tmp_path / "second.yaml").write_text("blocks.*: h.*\n")
    maps = ["--map", tmp_path / "first.yaml", "--map", tmp_path / "second.yaml"]
    code, _ = run(source, tmp_path / "dest", "--to", "safetensors", *maps)
    assert code == 0
    assert "param:h.0.w" in json.loads((tmp_path / "dest" / "samerun-proof.json").read_text())["tensors"]
    wrong_order = ["--map", tmp_path / "second.yaml", "--map", tmp_path / "first.yaml"]
    assert run(source, tmp_path / "other", "--to", "safetensors", *wrong_order)[0] == 2  # no rule fits
