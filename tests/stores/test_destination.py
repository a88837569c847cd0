"""Destinations in object stores: whole or refused by every reader, whatever fails and whenever a process is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from samerun.convert import stored  # noqa: E402
from samerun.convert.convert import Converted, convert  # noqa: E402
from samerun.convert.together import meet  # noqa: E402
from samerun.errors import (  # noqa: E402
    CorruptCheckpoint,
    ExecutionError,
    StalePlan,
    UsageError,
    VerificationError,
)
from samerun.execute import upload as upload_module  # noqa: E402
from samerun.execute.engine import Settings  # noqa: E402
from samerun.execute.ranks import Launch  # noqa: E402
from samerun.formats.detect import open_checkpoint  # noqa: E402
from samerun.stores import destination  # noqa: E402
from samerun.stores.destination import StoredPlace  # noqa: E402
from samerun.verify.state.digest import digest_checkpoint  # noqa: E402
from support.exports import tree_bytes, write_export  # noqa: E402

ALLOW = {"SR-CONVERT-OBJECT", "SR-WRITE-OBJECT"}
MARKER, PROOF = "samerun-incomplete.json", "samerun-proof.json"


@pytest.fixture
def bucket() -> Iterator[str]:
    """The URL of a place in memory that fsspec serves."""
    store = fsspec.filesystem("memory")
    name = f"samerun-{uuid.uuid4().hex}"
    yield f"memory://{name}"
    if store.exists(f"/{name}"):
        store.rm(f"/{name}", recursive=True)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket of moto's S3 server, in a process of its own on this machine."""
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    from support.stores import s3_server

    with s3_server("runs", tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many parts and many windows, however small they are. Not for S3, which takes no small parts."""
    monkeypatch.setattr(destination, "PART_BYTES", 1_000)
    monkeypatch.setattr(stored, "part_bytes", lambda size: 1_000)
    monkeypatch.setattr(upload_module, "WINDOW_BYTES", 20_000)


def run(source: Path | str, dest: str | Path, to: str = "safetensors", **options: Any) -> Converted:
    checkpoint = open_checkpoint(source)
    try:
        return convert(checkpoint, dest, to=to, allow=ALLOW, settings=Settings(threads=2), **options)
    finally:
        checkpoint.close()


def objects(url: str) -> dict[str, bytes]:
    """Everything at or beside a URL, by what follows it."""
    store, root = fsspec.core.url_to_fs(url)
    store.invalidate_cache()
    parent = root.rpartition("/")[0]
    found = store.find(parent) if store.exists(parent) else []
    return {path[len(root) :].lstrip("/"): store.cat_file(path) for path in found if path.startswith(root)}


def digests(where: str | Path) -> dict[str, str]:
    checkpoint = open_checkpoint(where)
    try:
        return digest_checkpoint(checkpoint)
    finally:
        checkpoint.close()


def refused(url: str | Path) -> set[str]:
    with pytest.raises(CorruptCheckpoint) as error:
        open_checkpoint(url)
    return {problem.code for problem in error.value.problems}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch", "huggingface", "universal", "zero"])
def test_the_same_bytes_as_on_a_disk(to: str, bucket: str, tmp_path: Path) -> None:
    source = write_export(tmp_path / "ckpt")
    near = run(source, tmp_path / "dest", to)
    far = run(source, f"{bucket}/dest", to)
    assert (far.dest, far.state) == (f"{bucket}/dest", near.state)
    written = {name: content for name, content in objects(f"{bucket}/dest").items() if PROOF not in name}
    on_disk = {name: content for name, content in tree_bytes(tmp_path / "dest").items() if PROOF not in name}
    assert written == (on_disk if to != "torch" else {"": on_disk["dest"]})
    assert far.proof == (f"{bucket}/dest/{PROOF}" if to != "torch" else f"{bucket}/dest.{PROOF}")
    proof = json.loads(objects(f"{bucket}/dest")[PROOF if to != "torch" else f".{PROOF}"])
    assert proof["tensors"] == json.loads(Path(near.proof).read_text())["tensors"]
    assert digests(f"{bucket}/dest") == digests(tmp_path / "dest")


@pytest.mark.usefixtures("small_parts")
def test_from_one_store_into_another_with_a_cast(bucket: str, tmp_path: Path) -> None:
    from samerun.core.dtype import parse_dtype

    source = write_export(tmp_path / "ckpt")
    run(source, f"{bucket}/a")
    casts = {"param": parse_dtype("bfloat16")}
    far = run(f"{bucket}/a", f"{bucket}/b", "torch", dtype=casts)
    assert far.state == run(source, tmp_path / "b", "torch", dtype=casts).state
    for dest in (f"{bucket}/a/inside", bucket):
        with pytest.raises(UsageError, match=r"SR-CONVERT-(NESTED|EXISTS)"):
            run(f"{bucket}/a", dest)


def test_what_is_there_is_refused(bucket: str, tmp_path: Path) -> None:
    source = write_export(tmp_path / "ckpt")
    store, root = fsspec.core.url_to_fs(bucket)
    for name in ("prefix/some/object", "object", f"single.{PROOF}", f"other/{MARKER}"):
        store.pipe_file(f"{root}/{name}", b"{}")
    before = objects(bucket)
    for name in ("prefix", "prefix/some", "object", "single", "other"):
        with pytest.raises(UsageError, match="SR-CONVERT-EXISTS"):
            run(source, f"{bucket}/{name}", "torch")
    assert objects(bucket) == before
    for url, code in ((f"file://{tmp_path}/x", "SR-REMOTE-DEST"), ("nosuch://a/b", "SR-REMOTE-OPEN")):
        with pytest.raises(UsageError, match=code):
            run(source, url)


class Cut(Exception):
    """Where a process is cut off."""


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_cut_off_at_every_call_to_the_store(
    to: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_export(tmp_path / "ckpt", rows=33)
    expected = run(source, tmp_path / "dest", to).state
    calls = ("pipe_file", "rm_file", "open")
    real = {name: getattr(type(fsspec.filesystem("memory")), name) for name in calls}
    number, ended = 0, False
    while not ended:
        number += 1
        dest = f"{bucket}/{number}/dest"
        count = 0

        def cut(name: str, number: int = number) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal count
                mode = args[1] if len(args) > 1 else kwargs.get("mode", "rb")
                if name != "open" or "w" in mode:
                    count += 1
                    if count == number:
                        raise Cut
                return real[name](self, *args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(type(fsspec.filesystem("memory")), name, cut(name))
            try:
                run(source, dest, to)
                ended = True
            except ExecutionError:
                pass
        there = set(objects(dest))
        if not ended and there:
            assert refused(dest) == {"SR-REMOTE-INCOMPLETE"}
        if not ended:
            with monkeypatch.context() as patch:
                patch.setattr(stored, "is_running", lambda marker: False)  # this process lives, as it happens
                assert run(source, dest, to).state == expected
        assert not [name for name in objects(dest) if MARKER in name]
        assert digests(dest) == digests(tmp_path / "dest")
    assert number > 5


def test_copied_from_the_store_before_it_was_whole(bucket: str, tmp_path: Path) -> None:
    source = write_export(tmp_path / "ckpt")
    run(source, tmp_path / "whole")
    (tmp_path / "whole" / MARKER).write_text("{}")
    assert refused(tmp_path / "whole") == {"SR-REMOTE-INCOMPLETE"}
    (tmp_path / "whole" / MARKER).unlink()
    assert digests(tmp_path / "whole") == digests(source)
    run(source, tmp_path / "one.pt", "torch")
    (tmp_path / f"one.pt.{MARKER}").write_text("{}")
    assert refused(tmp_path / "one.pt") == {"SR-REMOTE-INCOMPLETE"}


def failing_read_back(*args: Any, **kwargs: Any) -> Any:
    raise TimeoutError("no answer")


def test_another_plan_or_source_removes_what_was_left(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write_export(tmp_path / "one"), write_export(tmp_path / "two", seed=1)
    dest = f"{bucket}/dest"

    def interrupted(source: Path, to: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(stored, "read_back", failing_read_back)
            with pytest.raises(ExecutionError, match="SR-CONVERT-IO"):
                run(source, dest, to)

    interrupted(one, "dcp")
    with pytest.raises(UsageError, match="SR-CONVERT-BUSY"):  # the process that the marker names still lives
        run(one, dest, "dcp")
    monkeypatch.setattr(stored, "is_running", lambda marker: False)
    written = objects(dest)
    interrupted(one, "dcp")
    assert {n: c for n, c in objects(dest).items() if n != MARKER} == {n: c for n, c in written.items() if n != MARKER}
    interrupted(two, "dcp")  # the same names, other values
    interrupted(two, "torch")  # one object where a prefix was
    done = run(two, dest, "safetensors")
    assert "SR-CONVERT-STALE" in {problem.code for problem in done.problems}
    assert digests(dest) == digests(two)
    assert set(objects(dest)) == {"state.json", "state.safetensors", PROOF}


def test_a_marker_that_names_objects_elsewhere(bucket: str, tmp_path: Path) -> None:
    source = write_export(tmp_path / "ckpt")
    store, root = fsspec.core.url_to_fs(bucket)
    marker = {"schema": destination.INCOMPLETE_SCHEMA, "files": ["../precious"]}
    store.pipe_file(f"{root}/dest/{MARKER}", json.dumps(marker).encode())
    store.pipe_file(f"{root}/precious", b"kept")
    with pytest.raises(UsageError, match="SR-CONVERT-EXISTS"):
        run(source, f"{bucket}/dest")
    assert objects(f"{bucket}/precious") == {"": b"kept"}


def test_a_source_that_changes_meanwhile(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_export(tmp_path / "ckpt")
    real = stored.read_back

    def changed(*args: Any) -> Any:
        found = real(*args)
        (source / "state.json").write_text((source / "state.json").read_text() + " ")
        return found

    monkeypatch.setattr(stored, "read_back", changed)
    with pytest.raises(StalePlan, match="SR-FILE-CHANGED"):
        run(source, f"{bucket}/dest")
    assert objects(bucket) == {}


def test_a_store_that_returns_other_bytes(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_export(tmp_path / "ckpt")
    real = StoredPlace.upload

    def flipped(self: StoredPlace, name: str, size: int, parts: Any) -> None:
        content = bytearray(b"".join(parts))
        if name.endswith(".safetensors"):
            content[-1] ^= 1
        real(self, name, size, [content])

    monkeypatch.setattr(StoredPlace, "upload", flipped)
    with pytest.raises(VerificationError, match="SR-CONVERT-DIFFERS"):
        run(source, f"{bucket}/dest")
    assert objects(bucket) == {}


def test_somebody_else_in_the_same_place(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_export(tmp_path / "ckpt")
    store, root = fsspec.core.url_to_fs(bucket)
    real = stored.read_back
    for name, code in ((MARKER, "SR-CONVERT-BUSY"), ("more.bin", "SR-CONVERT-EXISTS")):

        def and_then(*args: Any, name: str = name) -> Any:
            found = real(*args)
            store.pipe_file(f"{root}/{name}/{name}", b"{}")
            return found

        monkeypatch.setattr(stored, "read_back", and_then)
        with pytest.raises(UsageError, match=code):
            run(source, f"{bucket}/{name}")


def test_on_a_launch(bucket: str, tmp_path: Path) -> None:
    launch, cancel = Launch(0, 2), Event()
    for folder in (None, str(tmp_path / "none")):
        with pytest.raises(UsageError, match="SR-LAUNCH-MEETING"):
            meet(launch, tmp_path, f"{bucket}/dest", cancel, folder=folder)
    meeting = meet(launch, tmp_path, f"{bucket}/dest", cancel, folder=str(tmp_path))
    assert meeting.folder == tmp_path / ".dest.samerun-ranks"


# --- a real server ------------------------------------------------------------------------------------------------

S3 = pytest.mark.filterwarnings("ignore")  # of botocore and aiohttp


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tensors are together larger than several parts: 24 MB."""
    return write_export(tmp_path_factory.mktemp("large") / "ckpt", rows=20_000)


@pytest.mark.framework
@S3
@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_an_s3_server(to: str, s3: str, large: Path, tmp_path: Path) -> None:
    near = run(large, tmp_path / "dest", to)
    far = run(large, f"{s3}/{to}/dest", to)
    assert far.state == near.state
    assert digests(f"{s3}/{to}/dest") == digests(tmp_path / "dest")
    assert open_uploads(s3) == []
    with pytest.raises(UsageError, match="SR-CONVERT-EXISTS"):
        run(large, f"{s3}/{to}/dest", to)
    with pytest.raises(UsageError, match="SR-REMOTE-DEST"):
        run(large, s3, to)
    with pytest.raises(UsageError, match="SR-REMOTE-DEST"):
        run(large, "s3://no-such-bucket/x", to)


def open_uploads(s3: str) -> list[str]:
    return [upload["Key"] for upload in fsspec.filesystem("s3").list_multipart_uploads(s3.removeprefix("s3://"))]


def start(source: Path, dest: str, to: str = "dcp", **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "samerun", "convert", str(source), dest, "--to", to, "--threads", "2"]
    command += [part for code in sorted(ALLOW) for part in ("--allow", code)]
    if environ:
        command += ["--meeting", environ.pop("meeting")]
    return subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.framework
@S3
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_killed_at_random_times(to: str, s3: str, large: Path) -> None:
    """Whatever is there is refused, or whole and proved; the same command ends it, and no open upload stays."""
    expected = digests(large)
    chance = random.Random(7)
    began = time.monotonic()
    assert start(large, f"{s3}/warm-{to}", to).wait() == 0
    whole = time.monotonic() - began
    refusals = 0
    for number in range(3):
        dest = f"{s3}/killed-{to}/{number}"
        child = start(large, dest, to)
        if number == 0:  # once when it is certainly under way, however busy the machine is
            while child.poll() is None and not any(MARKER in name for name in objects(dest)):
                time.sleep(0.01)
        else:
            time.sleep(whole * (0.3 + 0.7 * chance.random()))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        there = objects(dest)
        if any(MARKER in name for name in there):
            refusals += 1
            assert refused(dest) == {"SR-REMOTE-INCOMPLETE"}
        elif there:
            assert any(PROOF in name for name in there)
        again = start(large, dest, to)
        text = again.communicate()[1]
        assert again.returncode == 0 or "SR-CONVERT-EXISTS" in text, text
        assert digests(dest) == expected if to == "dcp" else digests(dest).keys() == expected.keys()
        assert not any(MARKER in name for name in objects(dest))
    assert refusals > 0
    assert open_uploads(s3) == []


@pytest.mark.framework
@S3
def test_a_server_that_fails_while_parts_arrive(s3: str, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.exceptions
    from s3fs.core import S3File

    dest, real, count = f"{s3}/failing/dest", S3File._upload_chunk, 0

    def failing(self: Any, final: bool = False) -> Any:
        nonlocal count
        count += 1
        if count > 3:
            raise botocore.exceptions.EndpointConnectionError(endpoint_url="http://gone")
        return real(self, final)

    with monkeypatch.context() as patch:
        patch.setattr(S3File, "_upload_chunk", failing)
        with pytest.raises(ExecutionError, match="SR-REMOTE-WRITE"):
            run(large, dest, "torch")
    assert refused(dest) == {"SR-REMOTE-INCOMPLETE"}
    assert open_uploads(s3) == []
    monkeypatch.setattr(stored, "is_running", lambda marker: False)
    assert run(large, dest, "torch").dest == dest


@pytest.mark.framework
@S3
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [3])
def test_processes_that_write_into_a_store_together(ranks: int, s3: str, large: Path, tmp_path: Path) -> None:
    dest, port = f"{s3}/together/{ranks}", str(random.Random(ranks).randrange(10_000, 60_000))

    def launch() -> list[subprocess.Popen[str]]:
        common = {"WORLD_SIZE": str(ranks), "MASTER_PORT": port, "meeting": str(tmp_path)}
        return [start(large, dest, "zero", RANK=str(rank), **common) for rank in range(ranks)]

    processes = launch()
    deadline = time.monotonic() + 60
    while not any(name == MARKER for name in objects(dest)) and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[-1].kill()
    ends = [(process.communicate()[1], process.returncode) for process in processes]
    assert [code for _, code in ends[:-1]] == [3] * (ranks - 1), ends
    assert "SR-LAUNCH-LOST" in ends[0][0]
    assert refused(dest) == {"SR-REMOTE-INCOMPLETE"}
    ends = [(process.communicate()[1], process.returncode) for process in launch()]
    assert [code for _, code in ends] == [0] * ranks, ends
    near = run(large, tmp_path / "dest", "zero")
    assert digests(dest) == digests(near.dest)
    assert [path.name for path in tmp_path.iterdir() if path.name != "dest"] == []
