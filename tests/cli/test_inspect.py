"""`samerun inspect` as a user and a script see it: documents, exit codes, speed, no framework imported."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samerun.cli.output import print_problems
from samerun.errors import Problem
from samerun.formats.detect import open_checkpoint
from samerun.verify.state.checksums import combine_checksums
from support.dcp import job_state, save, split_tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(job_state(), tmp_path_factory.mktemp("saved") / "step-3")
    split_tensor(folder, "model.0.weight", 3)
    return folder


def run(*arguments: str | Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "samerun"]
    return subprocess.run([*start, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def document(*arguments: str | Path) -> dict[str, Any]:
    return json.loads(run("inspect", "--json", *arguments).stdout)


def test_document_is_the_published_one(saved: Path):
    found = document(saved)
    assert found["schema"] == "samerun/inspect/1"
    assert found["path"] == str(saved)
    assert found["format"] == "dcp"
    assert found["topology"]["world_size"] == 1
    assert found["topology"]["layout"] is None  # one tensor in three parts by one rank: no layout does that
    assert "names of data files" in found["topology"]["inferred"]
    assert found["complete"] is True
    assert found["intact"] is None
    assert found["resumable"]["verdict"] == "yes"
    assert {"params", "optimizer", "groups", "scheduler", "rng", "data", "progress"} <= set(found["resumable"]["have"])
    assert found["resumable"]["lack"] == []
    assert found["counts"]["tensors"] == len(found["tensors"]) == 24
    assert found["counts"]["files"] == 5
    assert found["progress"] == {"update": 3, "samples": 24, "tokens": 240, "epoch": 0}
    weight = next(row for row in found["tensors"] if row["key"] == "param:0.weight")
    assert (weight["shape"], weight["dtype"], weight["pieces"], weight["digest"]) == ([9, 6], "float32", 3, None)
    assert {frozenset(group["params"]) for group in found["groups"]} == {
        frozenset({"0.weight", "2.weight"}),
        frozenset({"0.bias", "1.weight", "1.bias", "2.bias"}),
    }
    assert found["groups"][0]["hyperparameters"]["weight_decay"] == 0.1
    assert found["problems"] == []


def test_deep_gives_digests_that_equal_the_digest_verb(saved: Path):
    digests = {row["key"]: row["digest"] for row in document(saved, "--deep")["tensors"]}
    assert digests == json.loads(run("digest", saved, "--json").stdout)["tensors"]


def test_text_says_what_matters(saved: Path):
    done = run("inspect", saved, "--to", "dp=4")
    assert done.returncode == 0
    for words in (
        "step-3",
        "1 rank",
        "update 3, 24 samples, 240 tokens",
        "complete   yes",
        "resumable  yes",
        "dp_shard=4",
    ):
        assert words in done.stdout
    assert "optim.exp_avg" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()[:9]) < 160


def sums(path: Path) -> Any:
    return combine_checksums(open_checkpoint(path))


def test_what_was_done_with_checksums_is_said(saved: Path, tmp_path: Path):
    """Plain: the recorded ones put together, nothing read. Deep: compared with the bytes. None: why."""
    plain, deep = document(saved)["checksums"], document(saved, "--deep")["checksums"]
    assert plain["tensors"] == {"combined": 24, "numbers": 0, "pieces": 0, "none": 0}
    assert plain["fingerprint"] == deep["fingerprint"] == sums(saved).fingerprint is not None
    assert plain["compared_with_bytes"] is None
    assert deep["compared_with_bytes"]["payloads"] == deep["compared_with_bytes"]["of"] > 20
    text = run("inspect", saved).stdout
    assert (
        f"checksums  fingerprint {plain['fingerprint']} from the recorded CRC-32 of 24 tensors; no values read" in text
    )


def test_the_fingerprint_is_that_of_the_values_and_does_not_see_the_cut(saved: Path, tmp_path: Path):
    state = job_state()
    whole = save(state, tmp_path / "whole")
    split_tensor(Path(shutil.copytree(whole, tmp_path / "cut")), "model.0.weight", 3)
    assert sums(tmp_path / "cut").fingerprint == sums(whole).fingerprint is not None
    state["model"]["0.weight"][0, 0] += 1
    assert sums(save(state, tmp_path / "other")).fingerprint != sums(whole).fingerprint


def test_a_flipped_bit_shows_only_when_checksums_are_compared(saved: Path, tmp_path: Path):
    folder = Path(shutil.copytree(saved, tmp_path / "step-3"))
    extent = open_checkpoint(folder).locate("param:2.weight", 0)
    with open(extent.file, "r+b") as file:
        file.seek(extent.offset_bytes)
        byte = file.read(1)
        file.seek(extent.offset_bytes)
        file.write(bytes([byte[0] ^ 1]))
    assert sums(folder).fingerprint == sums(saved).fingerprint is not None
    assert "they do not all agree" in run("inspect", folder, "--deep").stdout


def test_without_checksums_it_is_said_why(tmp_path: Path):
    import torch
    from safetensors.torch import save_file

    save_file({"a.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"model": {"a.weight": torch.ones(3)}}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("model.safetensors", "old.pt"):
        found = sums(tmp_path / name)
        assert (found.fingerprint, found.why) == (None, "these files record no checksum")
        deep = run("inspect", tmp_path / name, "--deep").stdout
        assert "no fingerprint: these files record no checksum; every byte read, no checksum recorded" in deep
        assert "intact     undecided  these files record nothing that bytes could be compared with" in deep


def test_what_keeps_intact_open_is_said():
    golden = Path(__file__).parent.parent / "golden" / "statedict"
    some = run("inspect", golden / "trainer" / "checkpoint-4", "--deep").stdout
    assert "intact     undecided  only 60 of 80 payloads have a checksum; those agree" in some
    several = run("inspect", golden / "fsdp1-orig" / "local", "--deep").stdout
    assert "intact     undecided  every checksum agrees; nothing shows that all files are of one save" in several


def test_groups_that_went_with_a_file_are_not_described(saved: Path, tmp_path: Path):
    """A half-copied directory: metadata is there, the file that holds the groups' settings is cut off."""
    assert " parameters, lr" in run("inspect", saved).stdout
    folder = Path(shutil.copytree(saved, tmp_path / "step-3"))
    with open(folder / "__0_0.distcp", "r+b") as file:
        file.truncate(300)
    told = run("inspect", folder).stdout
    assert "groups     not readable, because of SR-FILE-TRUNCATED" in told
    assert "lr None" not in told


def test_exit_codes(saved: Path, tmp_path: Path):
    assert run("inspect", saved).returncode == 0
    warned = Path(shutil.copytree(saved, tmp_path / "step-4"))
    assert run("inspect", warned).returncode == 0
    damaged = Path(shutil.copytree(saved, tmp_path / "damaged"))
    (damaged / "__0_8.distcp").unlink()
    done = run("inspect", damaged)
    assert done.returncode == 1
    assert "SR-FILE-MISSING" in done.stdout
    assert document(damaged)["complete"] is False
    for path in (tmp_path / "absent", tmp_path):
        done = run("inspect", path)
        assert done.returncode == 2
        assert "SR-PATH-" in done.stderr
        assert not done.stdout
    for arguments in (("--to", "dp_shards=3"), ("--to", "dp=0"), ("--format", "tar")):
        done = run("inspect", saved, *arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_many_findings_of_a_kind_are_condensed_in_text_only(saved: Path, tmp_path: Path):
    damaged = Path(shutil.copytree(saved, tmp_path / "step-3"))
    data = bytearray((damaged / "__0_0.distcp").read_bytes())
    for at in range(0, len(data), 1500):
        data[at : at + 40] = bytes(40)
    (damaged / "__0_0.distcp").write_bytes(data)
    listed = document(damaged)["problems"]
    assert sum(problem["code"] == "SR-PKL-ZIP" for problem in listed) > 5
    text = run("inspect", damaged).stdout
    assert "more of these" in text
    assert text.count("SR-PKL-ZIP") == 6  # three, how many more, what follows from them, and why there are no groups


def test_no_framework_is_imported(saved: Path):
    probe = (
        "import sys; from samerun.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print('exit', end.code)\n"
        "print([name for name in ('torch', 'numba', 'pydantic') if name in sys.modules])"
    )
    done = run("inspect", saved, code=probe)
    assert done.stdout.splitlines()[-2:] == ["exit 0", "[]"]
    assert done.stderr == ""


def test_a_small_checkpoint_takes_less_than_half_a_second_of_work(saved: Path):
    used: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("inspect", saved).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used) < 0.5 * float(os.environ.get("SAMERUN_SLOWNESS", "1.5"))


@pytest.mark.parametrize(
    "verb", [["inspect"], ["digest"], ["memory", "--layout", "dp_shard=2"], ["draft", "--to", "dp_shard=2"]]
)
def test_where_one_is_has_a_path_and_nothing_has_none(verb: list[str], saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(saved)
    assert run(*verb, ".").returncode == 0
    done = run(*verb, "")
    assert done.returncode == 2
    assert "the path is empty" in done.stderr


def test_memory_reads_a_url_and_a_manifest_names_none(saved: Path):
    local = run("memory", saved, "--layout", "dp_shard=3", "--json")
    assert local.returncode == 0
    assert run("memory", f"file://{saved}", "--layout", "dp_shard=3", "--json").stdout == local.stdout
    done = run("draft", f"file://{saved}", "--to", "dp_shard=3")
    assert done.returncode == 2
    assert f"file {f'file://{saved}'}" in done.stderr


def test_patterns_that_choose_nothing_have_no_digest(saved: Path):
    assert run("digest", saved, "--include", "param:*").returncode == 0
    done = run("digest", saved, "--include", "parm:*")
    assert (done.returncode, done.stdout) == (2, "")
    assert "SR-USAGE-KEY" in done.stderr


@pytest.mark.parametrize("tolerance", ["nan", "inf"])
def test_tolerances_that_decide_nothing_are_refused(tolerance: str, saved: Path):
    for name in ("--rtol", "--atol"):
        done = run("diff", saved, saved, name, tolerance)
        assert (done.returncode, done.stdout) == (2, "")
        assert "SR-USAGE-OPTION" in done.stderr


def test_a_value_that_is_not_there_is_not_printed(capsys: pytest.CaptureFixture[str]):
    print_problems([Problem("SR-X", "x", expected=3), Problem("SR-X", "y", found=0), Problem("SR-X", "z")])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if not line.startswith("error")]
    assert lines == ["expected 3", "found 0"]
