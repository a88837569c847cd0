"""Checkpoints at URLs: read by ranges, equal to what lies on disk, and never whole in memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from samerun.convert.convert import convert  # noqa: E402
from samerun.errors import CorruptCheckpoint, ExecutionError, StalePlan, UsageError  # noqa: E402
from samerun.execute.engine import Settings  # noqa: E402
from samerun.execute.journal import Journal  # noqa: E402
from samerun.formats.base import Inspectable  # noqa: E402
from samerun.formats.detect import open_checkpoint  # noqa: E402
from samerun.stores import remote  # noqa: E402
from samerun.stores.local import fingerprint_tree, open_regular  # noqa: E402
from samerun.stores.remote import RemoteFile, is_url  # noqa: E402
from samerun.verify.state.digest import digest_checkpoint  # noqa: E402
from support.exports import tree_bytes, write_export  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINTS = [
    "deepspeed/pp2dp2bf16", "deepspeed/universal_z3_bf16", "deepspeed/z2_align_rr", "statedict/accelerate",
    "statedict/bare", "statedict/fsdp1-orig", "statedict/lightning", "statedict/lightning-sharded", "statedict/shards",
    "statedict/shards-object", "statedict/trainer", "wrapped/trainer_z2",
]  # fmt: skip


@pytest.fixture
def bucket() -> Iterator[str]:
    """The URL of a place in memory that fsspec serves."""
    store = fsspec.filesystem("memory")
    name = f"samerun-{uuid.uuid4().hex}"
    yield f"memory://{name}"
    if store.exists(f"/{name}"):
        store.rm(f"/{name}", recursive=True)


@pytest.fixture
def all_by_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched whole: every object goes through ranges, in blocks so small that there are many."""
    monkeypatch.setattr(remote, "SMALL_FILE_BYTES", 200)
    monkeypatch.setattr(remote, "HEAD_BYTES", 600)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 512)
    monkeypatch.setattr(remote, "REQUEST_BYTES", 2_000)


def upload(folder: Path, url: str) -> str:
    store, root = fsspec.core.url_to_fs(url)
    for name, content in tree_bytes(folder).items():
        store.pipe_file(f"{root}/{name}", content)
    return url


def views() -> list[str]:
    return [str(path) for path in remote._views]


def facts(where: str | Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(where)
    try:
        found = {"digests": digest_checkpoint(checkpoint), "codes": [p.code for p in checkpoint.state.problems]}
        found["format"] = checkpoint.state.format
        if isinstance(checkpoint, Inspectable):
            check = checkpoint.check_payloads()
            found |= {"items": [p.code for p in checkpoint.check_items()], "intact": check.intact, "all": check.total}
        return found
    finally:
        checkpoint.close()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_format_reads_the_same(name: str, bucket: str, tmp_path: Path) -> None:
    folder = GOLDEN / name
    if not folder.exists():
        pytest.skip("not in this tree")
    assert facts(upload(folder, bucket)) == facts(folder)
    assert views() == []


@pytest.mark.usefixtures("all_by_range")
@pytest.mark.parametrize(
    "name",
    ["deepspeed/pp2dp2bf16", "deepspeed/moe4", "statedict/shards", "statedict/lightning", "statedict/trainer"],
)
def test_every_format_reads_the_same_by_ranges(name: str, bucket: str) -> None:
    assert facts(upload(GOLDEN / name, bucket)) == facts(GOLDEN / name)


@pytest.mark.usefixtures("all_by_range")
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_what_samerun_writes_reads_the_same_by_ranges(to: str, bucket: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_export(tmp_path / "ckpt"))
    dest = tmp_path / "far" / "dest"
    dest.parent.mkdir()
    convert(checkpoint, dest, to=to, allow={"SR-CONVERT-OBJECT", "SR-WRITE-OBJECT"})
    checkpoint.close()
    assert facts(f"{upload(dest.parent, bucket)}/dest") == facts(dest)


def test_a_large_checkpoint_is_not_fetched_whole(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_export(tmp_path / "ckpt", rows=20_000)
    url = upload(source, bucket)
    asked: list[int] = []
    store = type(fsspec.filesystem("memory"))
    cat = store.cat_file

    def counted(self: Any, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        found = cat(self, path, start=start, end=end, **options)
        asked.append(len(found))
        return found

    monkeypatch.setattr(store, "cat_file", counted)
    checkpoint = open_checkpoint(url)
    assert sum(asked) < 2 << 20 < (source / "state.safetensors").stat().st_size
    checkpoint.read("param:head.w", (5, 0), (2, 33))
    checkpoint.close()
    assert max(asked) <= remote.REQUEST_BYTES


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_converted_from_a_url_as_from_a_disk(to: str, bucket: str, tmp_path: Path) -> None:
    source = write_export(tmp_path / "ckpt", rows=9_000)
    url = upload(source, bucket)
    settings = Settings(threads=2, budget_bytes=8 << 20)
    allow = {"SR-CONVERT-OBJECT", "SR-WRITE-OBJECT"}
    (tmp_path / "near").mkdir()
    (tmp_path / "far").mkdir()
    for where, dest in ((source, tmp_path / "near" / "dest"), (url, tmp_path / "far" / "dest")):
        checkpoint = open_checkpoint(where)
        done = convert(checkpoint, dest, to=to, settings=settings, allow=allow)
        checkpoint.close()
    proof = json.loads(done.proof.read_text())
    assert proof["source"]["path"] == url
    near, far = tree_bytes(tmp_path / "near"), tree_bytes(tmp_path / "far")
    assert {n: d for n, d in near.items() if "proof" not in n} == {n: d for n, d in far.items() if "proof" not in n}
    assert views() == []


def test_the_same_plan_wherever_the_view_lies(bucket: str, tmp_path: Path) -> None:
    """An interrupted conversion is gone on with, although what was fetched lies in another directory."""
    url = upload(write_export(tmp_path / "ckpt", rows=9_000), bucket)
    unit, written = Journal.unit, list[int]()

    def failing(self: Journal, number: int, segments: Any) -> None:
        unit(self, number, segments)
        written.append(number)
        raise OSError(5, "gone")

    def run() -> None:
        checkpoint = open_checkpoint(url)
        try:
            convert(checkpoint, tmp_path / "dest", to="torch", settings=Settings(threads=1),
                    allow={"SR-CONVERT-OBJECT", "SR-WRITE-OBJECT"})  # fmt: skip
        finally:
            checkpoint.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "unit", failing)
        with pytest.raises(ExecutionError):
            run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "unit", lambda self, n, s: (written.append(n), unit(self, n, s))[1])
        run()
    assert sorted(set(written)) == sorted(written)


def test_an_object_that_changes_meanwhile(bucket: str, tmp_path: Path) -> None:
    url = upload(write_export(tmp_path / "ckpt"), bucket)
    store, root = fsspec.core.url_to_fs(url)
    checkpoint = open_checkpoint(url)
    stage = Journal.stage

    def changed(self: Journal, name: str) -> None:
        stage(self, name)
        if name == "written":
            store.pipe_file(f"{root}/state.json", b"{}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "stage", changed)
        with pytest.raises(StalePlan, match="SR-FILE-CHANGED"):
            convert(checkpoint, tmp_path / "dest", to="safetensors", settings=Settings(threads=1))
    checkpoint.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_an_object_that_is_cut_off_or_goes_meanwhile(bucket: str, tmp_path: Path) -> None:
    url = upload(write_export(tmp_path / "ckpt", rows=9_000), bucket)
    store, root = fsspec.core.url_to_fs(url)
    checkpoint = open_checkpoint(url)
    store.pipe_file(f"{root}/state.safetensors", store.cat_file(f"{root}/state.safetensors")[: 2 << 20])
    with pytest.raises(CorruptCheckpoint, match="SR-FILE-TRUNCATED"):
        digest_checkpoint(checkpoint)
    store.rm(f"{root}/state.safetensors")
    with pytest.raises(CorruptCheckpoint, match="SR-FILE-CHANGED"):
        checkpoint.read("param:head.w")
    checkpoint.close()


def test_a_store_that_fails(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload(write_export(tmp_path / "ckpt", rows=9_000), bucket)
    checkpoint = open_checkpoint(url)

    def fail(*rest: Any, **options: Any) -> bytes:
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", fail)
    with pytest.raises(ExecutionError, match="SR-REMOTE-READ"):
        digest_checkpoint(checkpoint)
    checkpoint.close()


def test_placeholders_are_never_read_as_objects(bucket: str, tmp_path: Path) -> None:
    url = upload(write_export(tmp_path / "ckpt", rows=9_000), bucket)
    checkpoint = open_checkpoint(url)
    place = checkpoint.path / "state.safetensors"
    assert place.stat().st_size == (tmp_path / "ckpt" / "state.safetensors").stat().st_size
    with pytest.raises(OSError, match="no descriptor"):
        open_regular(place)
    assert fingerprint_tree(checkpoint.path).root == url
    checkpoint.close()
    assert not place.exists()


def test_urls_that_lead_nowhere(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def codes(url: str) -> set[str]:
        with pytest.raises(UsageError) as error:
            open_checkpoint(url)
        return {problem.code for problem in error.value.problems}

    assert codes(bucket) == {"SR-PATH-NONE"}
    assert codes("nosuchstore://a/b") == {"SR-REMOTE-OPEN"}
    store, root = fsspec.core.url_to_fs(bucket)
    for number in range(4):
        store.pipe_file(f"{root}/{number}", b"x" * 100)
    monkeypatch.setattr(remote, "_MAX_OBJECTS", 3)
    assert codes(bucket) == {"SR-REMOTE-LARGE"}
    monkeypatch.setattr(remote, "_MAX_OBJECTS", 300)
    monkeypatch.setattr(remote, "_MAX_SMALL_BYTES", 300)
    assert codes(bucket) == {"SR-REMOTE-LARGE"}
    store.store[f"{root}/a/../../b"] = store.store[f"{root}/0"]
    monkeypatch.setattr(remote, "_MAX_SMALL_BYTES", 3000)
    assert codes(bucket) == {"SR-REMOTE-NAME"}
    del store.store[f"{root}/a/../../b"]
    assert views() == []
    assert [is_url(text) for text in ("file:///x", "s3://b/k", "C:/x", "/x", "x")] == [True, True, False, False, False]


def test_a_file_url_and_a_single_file(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "statedict" / "torch", tmp_path / "torch")
    for name in ("zip.pt", "legacy.pt"):
        file = tmp_path / "torch" / name
        assert facts(f"file://{file}") == facts(file)
        assert file.exists()


def test_slices_and_searches_are_those_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 64)
    monkeypatch.setattr(remote, "REQUEST_BYTES", 256)
    monkeypatch.setattr(remote, "_MAX_BLOCKS", 2)
    chance = random.Random(3)
    data = bytes(chance.choices(b"abPK", k=1_000))
    file = RemoteFile("x://y", len(data), lambda start, stop: data[start:stop])
    for _ in range(500):
        a, b = sorted(chance.choices(range(-20, 1_020), k=2))
        assert file[a:b] == data[a:b]
        sub = data[(at := chance.randrange(990)) : at + chance.randrange(1, 9)]
        a, b = max(0, a), max(0, b)
        assert (file.find(sub, a, b), file.rfind(sub, a, b)) == (data.find(sub, a, b), data.rfind(sub, a, b))
        assert bytes(memoryview(file.view(a, min(b, 1_000)))) == data[a:b] if a < min(b, 1_000) else True
    assert bytes(file) == data


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of moto's S3 server on this machine."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server = server_module.ThreadedMotoServer(port=0, verbose=False)
        server.start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
        fsspec.filesystem("s3").mkdir("runs")
        yield "s3://runs"
        server.stop()


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
def test_an_s3_server(s3: str, tmp_path: Path) -> None:
    source = write_export(tmp_path / "ckpt", rows=40_000)
    url = upload(source, f"{s3}/{os.getpid()}/step-5")
    assert facts(url) == facts(source)
    golden = GOLDEN / "deepspeed" / "z2_align_rr"
    assert facts(upload(golden, f"{s3}/{os.getpid()}/zero")) == facts(golden)
    checkpoint = open_checkpoint(url)
    done = convert(checkpoint, tmp_path / "dest", to="safetensors", settings=Settings(threads=2))
    checkpoint.close()
    assert facts(tmp_path / "dest")["digests"] == facts(source)["digests"]
    assert json.loads(done.proof.read_text())["source"]["path"] == url
