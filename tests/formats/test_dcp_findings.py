"""Everything that a DCP directory can show to be wrong: provoked once, and silent on a directory that is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties

from samerun.errors import CorruptCheckpoint, Severity
from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint
from support.dcp import edit_metadata, job_state, read_metadata, save, split_tensor

Damage = Callable[[Path], None]
WEIGHT = "model.0.weight"  # (9, 6) float32


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete directory: one tensor in three files of its own, the rest in one."""
    folder = save(job_state(), tmp_path_factory.mktemp("dcp") / "step-3")
    split_tensor(folder, WEIGHT, 3)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "step-3"))


def inspect(folder: Path, *, deep: bool = False) -> InspectReport:
    return inspect_checkpoint(open_checkpoint(folder), deep=deep)


def codes(report: InspectReport) -> set[str]:
    return {problem.code for problem in report.problems}


def errors(report: InspectReport) -> set[str]:
    return {problem.code for problem in report.problems if problem.severity is Severity.ERROR}


def item(found: Metadata, name: str, number: int = 0) -> Any:
    """Returns the place of chunk `number` of a tensor, or of an object."""
    return next(info for key, info in found.storage_data.items() if key.fqn == name and key.index in (None, number))


def key_of(found: Metadata, name: str, number: int) -> MetadataIndex:
    return next(key for key in found.storage_data if key.fqn == name and key.index == number)


def chunks(found: Metadata, name: str = WEIGHT) -> list[ChunkStorageMetadata]:
    entry: Any = found.state_dict_metadata[name]
    return entry.chunks


def edited(change: Callable[[Metadata], Any]) -> Damage:
    return lambda folder: edit_metadata(folder, lambda found: (change(found), None)[1])


# Damage that needs no payload to be seen, with the codes that it must give and whether the result is still complete.


def drop_chunk(found: Metadata) -> None:
    del chunks(found)[1]
    del found.storage_data[key_of(found, WEIGHT, 1)]


def halve_chunk(found: Metadata) -> None:
    """Eight of sixteen rows, as an edit that torch loads without an error."""
    chunk = chunks(found)[0]
    chunk.sizes = torch.Size((2, 6))


def overlap_chunks(found: Metadata) -> None:
    key = key_of(found, WEIGHT, 1)
    place = found.storage_data.pop(key)
    chunks(found)[1].offsets = torch.Size((2, 0))
    found.storage_data[MetadataIndex(WEIGHT, torch.Size((2, 0)), 1)] = place


def outside_chunk(found: Metadata) -> None:
    key = key_of(found, WEIGHT, 2)
    place = found.storage_data.pop(key)
    chunks(found)[2].offsets = torch.Size((7, 0))
    found.storage_data[MetadataIndex(WEIGHT, torch.Size((7, 0)), 2)] = place


def truncate(name: str, keep: float) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        os.truncate(path, int(path.stat().st_size * keep))

    return damage


def truncate_by_a_byte(folder: Path) -> None:
    os.truncate(folder / "__0_8.distcp", (folder / "__0_8.distcp").stat().st_size - 1)


def replace_by_directory(folder: Path) -> None:
    (folder / "__0_8.distcp").unlink()
    (folder / "__0_8.distcp").mkdir()


def replace_by_pipe(folder: Path) -> None:
    (folder / "__0_8.distcp").unlink()
    os.mkfifo(folder / "__0_8.distcp")


def replace_by_link(folder: Path) -> None:
    outside = folder.parent / "outside.distcp"
    shutil.move(folder / "__0_8.distcp", outside)
    (folder / "__0_8.distcp").symlink_to(outside)


def link_to_itself(folder: Path) -> None:
    (folder / "__0_8.distcp").unlink()
    (folder / "__0_8.distcp").symlink_to("__0_8.distcp")


def move_place(name: str) -> Callable[[Metadata], None]:
    def change(found: Metadata) -> None:
        item(found, WEIGHT, 1).relative_path = name

    return change


def swap_files(folder: Path) -> None:
    """Chunks of unequal shape change places, as rank files do when two are swapped."""
    for a, b in (("__0_7.distcp", "swap"), ("__0_0.distcp", "__0_7.distcp"), ("swap", "__0_0.distcp")):
        (folder / a).rename(folder / b)


def set_length(length: int) -> Callable[[Metadata], None]:
    def change(found: Metadata) -> None:
        item(found, WEIGHT, 1).length = length

    return change


def share_bytes(found: Metadata) -> None:
    a, b = item(found, "model.1.weight"), item(found, "model.1.bias")
    b.offset = a.offset


def lose_place(found: Metadata) -> None:
    del found.storage_data[key_of(found, WEIGHT, 1)]


def lose_object_place(found: Metadata) -> None:
    del found.storage_data[next(key for key in found.storage_data if key.fqn == "progress.update")]


def transform(found: Metadata) -> None:
    item(found, WEIGHT, 1).transform_descriptors = ("stream.cipher/1",)


def change_type(found: Metadata) -> None:
    entry: Any = found.state_dict_metadata[WEIGHT]
    entry.properties = TensorProperties(dtype=torch.float16)


def change_shape(found: Metadata) -> None:
    entry: Any = found.state_dict_metadata["model.1.weight"]
    entry.size = torch.Size((3, 3))
    entry.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((3, 3)))]
    place = found.storage_data.pop(key_of(found, "model.1.weight", 0))
    found.storage_data[MetadataIndex("model.1.weight", torch.Size((0, 0)), 0)] = place


def claim_a_huge_shape(found: Metadata) -> None:
    entry: Any = found.state_dict_metadata["model.1.weight"]
    entry.size = torch.Size((1 << 40,))
    entry.chunks = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((1 << 40,)))]


def negative_size(found: Metadata) -> None:
    chunk = chunks(found, "model.1.weight")[0]
    chunk.sizes = torch.Size((-9,))


def other_dimensions(found: Metadata) -> None:
    chunk = chunks(found, "model.1.weight")[0]
    chunk.sizes = torch.Size((9, 1))


def complex32(found: Metadata) -> None:
    entry: Any = found.state_dict_metadata[WEIGHT]
    entry.properties = TensorProperties(dtype=torch.complex32)


SEEN_FROM_METADATA: dict[str, tuple[Damage, str]] = {
    "chunk dropped": (edited(drop_chunk), "SR-COV-GAP"),
    "chunk halved": (edited(halve_chunk), "SR-COV-GAP"),
    "chunks overlap": (edited(overlap_chunks), "SR-COV-OVERLAP"),
    "chunk outside": (edited(outside_chunk), "SR-COV-BOUNDS"),
    "negative size": (edited(negative_size), "SR-COV-BOUNDS"),
    "file missing": (lambda folder: (folder / "__0_8.distcp").unlink(), "SR-FILE-MISSING"),
    "file is a link to itself": (link_to_itself, "SR-FILE-MISSING"),
    "file cut in half": (truncate("__0_0.distcp", 0.5), "SR-FILE-TRUNCATED"),
    "file empty": (truncate("__0_9.distcp", 0), "SR-FILE-TRUNCATED"),
    "file one byte short": (truncate_by_a_byte, "SR-FILE-TRUNCATED"),
    "file is a directory": (replace_by_directory, "SR-FILE-SPECIAL"),
    "file is a pipe": (replace_by_pipe, "SR-FILE-SPECIAL"),
    "file is a link outside": (replace_by_link, "SR-FILE-ESCAPE"),
    "path climbs": (edited(move_place("../step-3/__0_8.distcp")), "SR-FILE-ESCAPE"),
    "path absolute": (edited(move_place("/etc/passwd")), "SR-FILE-ESCAPE"),
    "path empty": (edited(move_place("")), "SR-FILE-ESCAPE"),
    "files swapped": (swap_files, "SR-FILE-TRUNCATED"),
    "item too small": (edited(set_length(90)), "SR-FILE-ITEM"),
    "item length negative": (edited(set_length(-5)), "SR-FILE-TRUNCATED"),
    "items share bytes": (edited(share_bytes), "SR-FILE-OVERLAP"),
    "tensor without place": (edited(lose_place), "SR-FILE-NOPLACE"),
    "object without place": (edited(lose_object_place), "SR-FILE-NOPLACE"),
    "transformed": (edited(transform), "SR-FILE-TRANSFORM"),
    "another type": (edited(change_type), "SR-FILE-MISMATCH"),
    "another shape": (edited(change_shape), "SR-FILE-MISMATCH"),
    "huge shape": (edited(claim_a_huge_shape), "SR-FILE-ITEM"),
    "another number of dimensions": (edited(other_dimensions), "SR-META-ENTRY"),
    "unknown type": (edited(complex32), "SR-META-ENTRY"),
}


@pytest.mark.parametrize("name", list(SEEN_FROM_METADATA))
def test_damage_is_named_and_makes_it_incomplete(name: str, copy: Path):
    damage, code = SEEN_FROM_METADATA[name]
    damage(copy)
    report = inspect(copy)
    assert code in errors(report)
    assert report.complete is False
    assert report.intact is None
    assert report.resumable.verdict == "no"
    assert all(problem.hint for problem in report.problems)


def test_a_whole_directory_has_none_of_these(whole: Path):
    report = inspect(whole)
    assert codes(report) == set()
    assert report.complete
    assert report.intact is None
    assert report.resumable.verdict == "yes"
    assert report.resumable.lack == ()


def test_missing_file_counts_its_items_and_points_to_a_leftover_beside_it(copy: Path):
    (copy.parent / ".step-3.tmp").mkdir()
    shutil.move(copy / "__0_8.distcp", copy.parent / ".step-3.tmp")
    (problem,) = [problem for problem in inspect(copy).problems if problem.code == "SR-FILE-MISSING"]
    assert "1 items" in problem.message
    assert ".step-3.tmp" in problem.hint


def test_values_that_are_left_can_still_be_read(copy: Path):
    (copy / "__0_8.distcp").unlink()
    checkpoint = open_checkpoint(copy)
    assert checkpoint.read("param:0.weight", (0, 0), (3, 6)).shape == (3, 6)
    with pytest.raises(CorruptCheckpoint, match="SR-FILE-MISSING"):
        checkpoint.read("param:0.weight")


@pytest.mark.parametrize("name", ["chunk dropped", "chunks overlap"])
def test_reading_a_tensor_that_is_not_covered_refuses(name: str, copy: Path):
    SEEN_FROM_METADATA[name][0](copy)
    with pytest.raises(CorruptCheckpoint, match="SR-COV-"):
        open_checkpoint(copy).read("param:0.weight")


def flip(path: Path, offset: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def test_a_flipped_bit_is_seen_by_the_checksum_only(copy: Path):
    extent = open_checkpoint(copy).locate("param:0.weight", 1)
    flip(extent.file, extent.offset_bytes + 5)
    assert codes(inspect(copy)) == set()
    report = inspect(copy, deep=True)
    assert errors(report) == {"SR-FILE-CRC"}
    assert report.complete
    assert report.intact is False


def test_a_flipped_bit_in_an_object_is_always_seen(copy: Path):
    place = read_metadata(copy, lambda found: item(found, "progress.update"))
    data = (copy / "__0_0.distcp").read_bytes()
    flip(copy / "__0_0.distcp", data.index(b"\x80\x02K\x03", place.offset) + 3)
    report = inspect(copy)
    assert errors(report) == {"SR-PKL-CRC"}
    assert report.intact is False
    assert report.complete is False


def test_deep_on_one_data_file_is_intact_and_digested(tmp_path: Path):
    report = inspect(save(job_state(), tmp_path / "step-3"), deep=True)
    assert report.intact is True
    assert codes(report) == set()
    assert report.digests is not None
    assert report.digests.keys() == report.state.tensors.keys()


def test_files_without_a_counter_leave_intact_undecided(whole: Path):
    report = inspect(whole, deep=True)
    assert report.intact is None
    assert codes(report) == {"SR-FILE-GENERATION-OPEN"}


def put_steps(folder: Path, step: float, numbers: tuple[int, ...]) -> None:
    """Saves the optimizer's step of some parameters again, as a later save would, in a file of its own."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    def change(found: Metadata) -> None:
        position = 0
        with open(folder / "__0_1.distcp", "wb") as file:
            for number in numbers:
                name = f"optim.state.{number}.bias.step"
                torch.save(torch.tensor(step), file)
                key = key_of(found, name, 0)
                found.storage_data[key] = _StorageInfo("__0_1.distcp", position, file.tell() - position)
                position = file.tell()

    edit_metadata(folder, change)


def test_files_of_two_saves_are_told_by_their_counters(tmp_path: Path):
    folder = save(job_state(), tmp_path / "step-3")
    put_steps(folder, 3.0, (0, 1))
    assert inspect(folder, deep=True).intact is True
    put_steps(folder, 8.0, (0, 1))
    report = inspect(folder)
    assert "SR-FILE-GENERATION" in errors(report)
    assert report.intact is False
    assert report.resumable.verdict == "no"


def test_stale_files_of_a_larger_world_are_a_warning(copy: Path):
    shutil.copy(copy / "__0_0.distcp", copy / "__2_0.distcp")
    shutil.copy(copy / ".metadata", copy / "__3.metadata")
    report = inspect(copy)
    assert codes(report) == {"SR-FILE-STALE"}
    assert report.complete
    (problem,) = report.problems
    assert "__2_0.distcp" in problem.message
    assert "__3.metadata" in problem.message


def test_unfinished_save_has_no_metadata(copy: Path):
    (copy / ".metadata").rename(copy / ".metadata.tmp")
    with pytest.raises(CorruptCheckpoint, match="SR-META-MISSING") as caught:
        open_checkpoint(copy)
    assert ".metadata.tmp" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04}.", b"not a pickle", b"\x80\x04N."])
def test_metadata_that_is_none_is_refused(content: bytes, copy: Path):
    (copy / ".metadata").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"SR-META-BROKEN|SR-PKL-"):
        open_checkpoint(copy)


def split_ranks(folder: Path) -> None:
    """Turns a directory into what two ranks write that do not coordinate: everything twice, metadata per rank."""
    for path in list(folder.glob("__0_*.distcp")):
        shutil.copy(path, folder / path.name.replace("__0_", "__1_"))
    shutil.copy(folder / ".metadata", folder / "__0.metadata")
    (folder / ".metadata").rename(folder / "__1.metadata")

    def change(found: Metadata) -> None:
        for info in found.storage_data.values():
            info.relative_path = info.relative_path.replace("__0_", "__1_")

    edit_metadata(folder, change, "__1.metadata")


def test_ranks_without_collectives_are_joined_and_a_lost_one_is_a_gap(copy: Path):
    split_ranks(copy)

    def keep(numbers: set[int]) -> Callable[[Metadata], None]:
        def change(found: Metadata) -> None:
            kept = [chunk for i, chunk in enumerate(chunks(found)) if i in numbers]
            for i in range(3):
                if i not in numbers:
                    del found.storage_data[key_of(found, WEIGHT, i)]
            entry: Any = found.state_dict_metadata[WEIGHT]
            entry.chunks = kept

        return change

    edit_metadata(copy, keep({0, 2}), "__0.metadata")
    edit_metadata(copy, keep({1}), "__1.metadata")
    report = inspect(copy, deep=True)
    assert not errors(report)
    assert len(report.state.tensors["param:2.weight"].tiling) == 2  # saved by both: replicas
    (copy / "__1.metadata").unlink()
    assert "SR-COV-GAP" in errors(inspect(copy))


def test_ranks_that_disagree_about_a_tensor_are_a_conflict(copy: Path):
    split_ranks(copy)
    edit_metadata(copy, change_shape, "__1.metadata")
    assert "SR-META-CONFLICT" in errors(inspect(copy))


def test_replicas_that_differ_are_seen_when_deep(copy: Path):
    split_ranks(copy)
    assert not errors(inspect(copy, deep=True))
    torch.save(torch.full((3, 6), 7.0), copy / "__1_8.distcp")
    assert "SR-COV-REPLICA" not in codes(inspect(copy))
    report = inspect(copy, deep=True)
    assert errors(report) == {"SR-COV-REPLICA"}
    assert report.complete


def test_wrapped_and_unwrapped_model_meet_under_one_key(tmp_path: Path):
    state = job_state()
    state["model"]["module.0.weight"] = state["model"]["0.weight"].clone()
    report = inspect(save(state, tmp_path / "ckpt"))
    assert "SR-KEY-TWICE" in errors(report)
    wrapped = {f"module._orig_mod.{name}": value for name, value in state["model"].items() if "module" not in name}
    clean = inspect(save({**state, "model": wrapped}, tmp_path / "clean"))
    assert not errors(clean)
    assert clean.state.tensors["param:0.weight"].original == "model.module._orig_mod.0.weight"


def test_classes_that_are_not_known_are_a_note(tmp_path: Path):
    state = {**job_state(), "extra": Path("/data"), "custom": Custom(3)}
    report = inspect(save(state, tmp_path / "ckpt"))
    (problem,) = [problem for problem in report.problems if problem.code == "SR-PKL-UNKNOWN"]
    assert problem.severity is Severity.NOTE
    assert "Custom" in problem.message
    assert report.state.objects["extra"] == "/data"
    assert report.state.objects["custom"].state == {"value": 3}


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value
