"""What lies at a path: found, followed through trackers, refused with what was looked for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from samerun.errors import CorruptCheckpoint, FormatError, UnsupportedVersion, UsageError
from samerun.formats.base import Checkpoint, Inspectable
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from support.corpus import corpus, needs_corpus
from support.dcp import job_state, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(job_state(), tmp_path_factory.mktemp("saved") / "step-3")


def test_a_directory_and_its_metadata_file_are_the_checkpoint(saved: Path):
    for path in (saved, str(saved), saved / ".metadata"):
        checkpoint = open_checkpoint(path, "dcp")
        assert isinstance(checkpoint, Checkpoint)
        assert isinstance(checkpoint, Inspectable)
        assert checkpoint.path == saved
        assert checkpoint.state.format == "dcp"


def test_one_checkpoint_below_is_found(saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "run" / "checkpoints" / "step-3")
    assert open_checkpoint(tmp_path / "run").path == tmp_path / "run" / "checkpoints" / "step-3"


def test_several_are_listed_in_order_and_none_is_chosen(saved: Path, tmp_path: Path):
    for step in (10, 9, 100):
        shutil.copytree(saved, tmp_path / f"step-{step}")
    with pytest.raises(UsageError, match="SR-PATH-SEVERAL") as caught:
        open_checkpoint(tmp_path)
    assert "step-9, step-10, step-100" in str(caught.value)


def test_a_tracker_is_followed(saved: Path, tmp_path: Path):
    for name in ("global_step5", "global_step9", "iter_0000010"):
        shutil.copytree(saved, tmp_path / name)
    (tmp_path / "latest").write_text("global_step5\n")
    assert open_checkpoint(tmp_path).path.name == "global_step5"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert open_checkpoint(tmp_path).path.name == "iter_0000010"


@pytest.mark.parametrize("content", ["step-4", "", "../elsewhere", "/etc", "step-3\n/x", "x" * 5000, "\0"])
def test_a_tracker_that_leads_nowhere_names_what_is_there(content: str, saved: Path, tmp_path: Path):
    shutil.copytree(saved, tmp_path / "step-3")
    (tmp_path / "latest").write_text(content)
    with pytest.raises(CorruptCheckpoint, match="SR-PATH-TRACKER") as caught:
        open_checkpoint(tmp_path)
    assert "step-3" in str(caught.value)
    assert ("the tracker is empty" in str(caught.value)) == (not content)


def test_nothing_there_names_neighbours(saved: Path):
    with pytest.raises(UsageError, match="SR-PATH-NONE") as caught:
        open_checkpoint(saved.parent / "step-4")
    assert "step-3" in str(caught.value)


def test_an_unknown_format_name_lists_those_that_are_read(saved: Path):
    with pytest.raises(UsageError, match="SR-PATH-FORMAT") as caught:
        open_checkpoint(saved, "onnx")
    assert "dcp" in str(caught.value)


def test_a_whole_dcp_directory_read_as_something_else_is_not_called_unfinished(saved: Path):
    with pytest.raises(UnsupportedVersion, match=r"SR-PATH-UNKNOWN.*torch\.distributed\.checkpoint"):
        open_checkpoint(saved, "zero")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("last.ckpt", "Lightning"),
        ("model.pt", "torch.save"),
        ("notes.txt", "nothing in it is known"),
    ],
)
def test_what_is_not_read_is_named_and_what_was_looked_for(name: str, what: str, tmp_path: Path):
    (tmp_path / name).write_text("x")
    with pytest.raises(FormatError, match="SR-PATH-UNKNOWN") as caught:
        open_checkpoint(tmp_path)
    assert what in str(caught.value)
    assert ".metadata" in str(caught.value)


def test_a_single_file_is_not_read(tmp_path: Path):
    (tmp_path / "model.pt").write_bytes(b"PK")
    with pytest.raises(UnsupportedVersion, match=r"torch\.save"):
        open_checkpoint(tmp_path / "model.pt")


def test_links_are_not_searched(saved: Path, tmp_path: Path):
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "elsewhere").symlink_to(saved)
    with pytest.raises(FormatError, match="SR-PATH-UNKNOWN"):
        open_checkpoint(tmp_path)


@needs_corpus
def test_formats_on_top_of_dcp_are_told_apart_and_several_are_listed():
    found = open_checkpoint(corpus("megatron/td016_fr_tp2pp2dp1"))
    assert (found.state.format, found.path.name) == ("megatron", "iter_0000010")
    assert open_checkpoint(corpus("megatron/lg016_dist_vpp_pp2vp2")).state.format == "megatron-legacy"
    with pytest.raises(FormatError):
        open_checkpoint(corpus("megatron/td016_fr_tp2pp2dp1/iter_0000010"), "dcp")
    with pytest.raises(UsageError, match="SR-PATH-SEVERAL"):
        open_checkpoint(corpus("torch/dcp_pp2"))


@pytest.mark.parametrize(
    ("name", "format_name"),
    [("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero"), ("trainer_state.json", "huggingface")],
)
def test_a_broken_checkpoint_of_a_known_format_is_incomplete(name: str, format_name: str, tmp_path: Path):
    (tmp_path / name).write_text("x")
    report = inspect_checkpoint(open_checkpoint(tmp_path)).to_json()
    assert report["format"] == format_name
    assert report["complete"] is False
    assert report["resumable"]["verdict"] == "no"
    assert any(problem["severity"] == "error" for problem in report["problems"])


def test_a_cut_safetensors_file_is_named(tmp_path: Path):
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(FormatError, match="SR-FILE-TRUNCATED"):
        open_checkpoint(tmp_path)


def test_an_empty_file_is_called_empty_and_not_by_its_name(tmp_path: Path):
    for name in ("model.pt", "last.ckpt", "pytorch_model.bin"):
        (tmp_path / name).touch()
        with pytest.raises(FormatError, match="the file is empty") as caught:
            open_checkpoint(tmp_path / name)
        assert [problem.code for problem in caught.value.problems] == ["SR-FILE-EMPTY"]
    with pytest.raises(FormatError, match=r"SR-FILE-EMPTY.* and 2 more beside it"):
        open_checkpoint(tmp_path)


def test_one_empty_file_among_those_of_ranks_is_named(tmp_path: Path):
    import torch

    for rank in range(2):
        torch.save({"model": {"w.weight": torch.ones(3)}}, tmp_path / f"model_rank{rank}.pt")
    assert "SR-FILE-EMPTY" not in {problem.code for problem in open_checkpoint(tmp_path).state.problems}
    (tmp_path / "model_rank1.pt").write_bytes(b"")
    problems = {problem.code: problem for problem in open_checkpoint(tmp_path).state.problems}
    assert problems["SR-FILE-EMPTY"].where == {"file": str(tmp_path / "model_rank1.pt")}


def test_a_file_that_is_not_what_its_name_says_is_shown_by_its_first_bytes(tmp_path: Path):
    (tmp_path / "model.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(FormatError, match=r"SR-PATH-UNKNOWN.*begins with b'version '"):
        open_checkpoint(tmp_path / "model.pt")
