"""The explorer's answers are those of the verbs; long work ends when nobody listens; the verb itself."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from samerun.formats.detect import open_checkpoint
from samerun.verify.inspection.structure import inspect_checkpoint
from samerun.verify.state.compare import compare_checkpoints
from samerun.web.explorer.server import ExplorerServer
from samerun.web.explorer.stream import NobodyListens, Workers
from support.explorer import HOSTILE, WHOLE, answer, ask, codes, events, serving, write_many, write_safetensors

# ------------------------------------------------------------------------------------------------ the verbs' answers


def test_the_start_lists_every_place(server: ExplorerServer) -> None:
    found = answer(server, "start")
    kinds = {place["name"]: place["kind"] for place in found["places"]}
    assert kinds == {"0": "checkpoint", "1": "run", "2/gap": "checkpoint", "2/hostile.safetensors": "checkpoint"}
    assert next(place for place in found["places"] if place["kind"] == "run")["state"]["verdict"] == "reject"


def test_a_checkpoint_is_what_inspect_says(server: ExplorerServer, folder: Path) -> None:
    for place, path in (("0", WHOLE), ("2/gap", folder / "gap")):
        report = inspect_checkpoint(open_checkpoint(path))
        found, whole = answer(server, "checkpoint", place=place), report.to_json()
        for name in ("format", "complete", "resumable", "counts", "progress", "topology"):
            assert found[name] == whole[name]
        told = {group["code"] for group in found["findings"]} | {
            c for g in found["findings"] for c in g["consequences"]
        }
        assert told == {problem.code for problem in report.problems}
        assert all(group["meaning"] and group["do"] for group in found["findings"])
    assert answer(server, "checkpoint", place="0")["broken"] == 0
    assert answer(server, "checkpoint", place="2/gap")["broken"] == 1


def test_tensors_are_paged_sorted_and_searched(server: ExplorerServer) -> None:
    every = answer(server, "tensors", place="0", count=500)
    assert every["count"] == len(open_checkpoint(WHOLE).state.tensors) == len(every["rows"])
    paged = [row for first in (0, 7, 14) for row in answer(server, "tensors", place="0", first=first, count=7)["rows"]]
    assert paged == every["rows"]
    largest = answer(server, "tensors", place="0", sort="bytes", descending=1)["rows"]
    assert largest[0]["bytes"] == max(row["bytes"] for row in largest)
    found = answer(server, "tensors", place="0", find="1.bias exp_avg_sq")
    assert [row["key"] for row in found["rows"]] == ["optim.exp_avg_sq:1.bias"]
    assert answer(server, "tensors", place="2/gap", broken=1)["rows"][0]["codes"] == ["SR-COV-GAP"]
    for wrong in ({"sort": "__class__"}, {"first": "-1"}, {"count": "1e9"}):
        response, body = ask(server, f"/api/tensors?{urlencode({'place': '0', **wrong})}")
        assert response.status == 422
        assert codes(body) <= {"SR-USAGE-OPTION"}


def test_a_tensor_shows_its_gap(server: ExplorerServer) -> None:
    found = answer(server, "tensor", place="2/gap", key="param:0.weight")
    assert [(gap["rows"], gap["columns"]) for gap in found["picture"]["gaps"]] == [([26, 52], [0, 6])]
    assert found["picture"]["missing_elements"] == 26 * 6
    assert [piece["holder"] for piece in found["picture"]["pieces"]] == ["rank 0", "rank 2", "rank 3"]
    assert [group["code"] for group in found["findings"]] == ["SR-COV-GAP"]
    assert set(found["siblings"]) == {"optim.exp_avg:0.weight", "optim.exp_avg_sq:0.weight", "optim.step:0.weight"}
    response, body = ask(server, "/api/tensor?place=0&key=param:none")
    assert response.status == 404
    assert codes(body) == {"SR-USAGE-KEY"}


def test_two_checkpoints_are_compared_as_diff_does(server: ExplorerServer, folder: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(WHOLE, tmp_path / "changed")
    bytes_of = bytearray((changed / "__1_0.distcp").read_bytes())
    extent = open_checkpoint(WHOLE).locate("param:0.weight", 1)
    bytes_of[extent.offset_bytes + 3] ^= 0x40
    (changed / "__1_0.distcp").write_bytes(bytes(bytes_of))
    with serving([WHOLE, changed]) as here:
        found = events(here, "diff", place="0", other="1")
        same = events(here, "diff", place="0", other="0")[-1]
    wanted = compare_checkpoints(open_checkpoint(WHOLE), open_checkpoint(changed)).to_json()
    assert found[-1]["values"] == json.loads(json.dumps(wanted["values"]))
    assert [row["key"] for row in found[-1]["values"]] == ["param:0.weight"]
    assert found[-1]["values"][0]["changed"] == 1
    assert (same["equal"], same["compared"]) == (True, 20)
    broken = events(server, "diff", place="0", other="2/gap")[-1]
    assert (broken["kind"], broken["findings"][0]["code"]) == ("refused", "SR-COV-GAP")
    wrong = events(server, "diff", place="0", other="0", rtol="-1")[-1]
    assert wrong["findings"][0]["code"] == "SR-USAGE-OPTION"


def test_every_byte_is_read_on_demand(server: ExplorerServer) -> None:
    deep = inspect_checkpoint(open_checkpoint(WHOLE), deep=True)
    found = events(server, "deep", place="0")[-1]
    assert (found["kind"], found["intact"], found["complete"]) == ("deep", deep.intact, deep.complete)
    assert {group["code"] for group in found["findings"]} == {problem.code for problem in deep.problems}


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = write_safetensors(tmp_path / "m.safetensors", {"param:w": torch.ones(3)})
    with serving([path]) as here:
        assert answer(here, "checkpoint", place="0")["counts"]["elements"] == 3
        write_safetensors(path, {"param:w": torch.ones(5)})
        assert answer(here, "checkpoint", place="0")["counts"]["elements"] == 5


def test_a_folder_that_holds_no_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with serving([tmp_path]) as here:
        places = answer(here, "start")["places"]
        assert [place["kind"] for place in places] == ["unreadable"]
        response, body = ask(here, "/api/checkpoint?place=0")
        assert response.status == 422
        assert codes(body) == {"SR-PATH-UNKNOWN"}


def test_hostile_names_stay_text(server: ExplorerServer) -> None:
    response, body = ask(server, "/api/tensors?place=2/hostile.safetensors")
    assert response.headers["Content-Type"].startswith("application/json")
    assert json.loads(body)["rows"][0]["key"] == f"param:{HOSTILE}"
    assert body.isascii()


def test_ten_thousand_tensors_come_in_pages(tmp_path: Path) -> None:
    path = write_many(tmp_path / "many.safetensors", 10_000)
    with serving([path]) as here:
        assert answer(here, "checkpoint", place="0")["counts"]["tensors"] == 10_000
        page = ask(here, "/api/tensors?place=0&sort=name&first=5000&count=100")[1]
        assert len(json.loads(page)["rows"]) == 100
        assert len(page) < 40_000
        top = answer(here, "tree", place="0")
        assert [node["prefix"] for node in top["nodes"]] == ["model.decoder.layers"]
        below = answer(here, "tree", place="0", under="model.decoder.layers")
        assert (len(below["nodes"]), below["nodes"][-1]["label"]) == (313, "312.mlp.experts")
        assert len(below["tiles"]) <= 61


# ------------------------------------------------------------------------------------------------ long work


def test_work_ends_when_nobody_listens() -> None:
    workers = Workers(1)
    ended, sent = threading.Event(), []

    def work(emit: Any) -> None:
        try:
            while True:
                sent.append(1)
                emit({"kind": "step"})
        except NobodyListens:
            ended.set()
            raise

    async def leave_early() -> None:
        stream = workers.stream(work, lambda error: {})
        first = [json.loads(await anext(stream)) for _ in range(3)]
        await stream.aclose()
        assert [event["kind"] for event in first] == ["begin", "step", "step"]

    asyncio.run(leave_early())
    assert ended.wait(30)
    workers.close()


def write_zeros(path: Path) -> Path:
    """Writes a checkpoint of one tensor of eight GiB of zeros, which take no room."""
    count = 2 << 30
    header = json.dumps({"param:w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * count)
    return path


def test_a_closed_connection_ends_the_reading(tmp_path: Path) -> None:
    path = write_zeros(tmp_path / "large.safetensors")
    with serving([path]) as here:
        with socket.create_connection(("127.0.0.1", here.port), timeout=60) as connection:
            query = (
                f"GET /{here.token}/stream/values?place=0&key=param:w HTTP/1.1\r\nHost: 127.0.0.1:{here.port}\r\n\r\n"
            )
            connection.sendall(query.encode())
            seen = b""
            while b'"progress"' not in seen:
                seen += connection.recv(4096)
        assert b'"values"' not in seen
        for _ in range(600):
            if here._workers.running == 0:
                break
            threading.Event().wait(0.05)
        assert here._workers.running == 0


# ------------------------------------------------------------------------------------------------ the verb


def samerun(*words: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "samerun", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_the_verb_serves_until_interrupted() -> None:
    process = samerun("ui", "--no-open", str(WHOLE))
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32,})/", address)
    assert match
    for _ in range(200):
        connection = HTTPConnection("127.0.0.1", int(match[1]), timeout=60)
        connection.request("GET", f"/{match[2]}/api/checkpoint?place=0")
        if connection.getresponse().status == 200:
            break
    connection.close()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "", "Ctrl-C ends it\n")


def test_ctrl_c_ends_the_reading_too(tmp_path: Path) -> None:
    path = write_zeros(tmp_path / "large.safetensors")
    process = samerun("ui", "--no-open", str(path))
    assert process.stdout is not None
    match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.*/)", process.stdout.readline().strip())
    assert match
    with socket.create_connection(("127.0.0.1", int(match[1])), timeout=60) as connection:
        query = f"GET {match[2]}stream/values?place=0&key=param:w HTTP/1.1\r\nHost: 127.0.0.1:{match[1]}\r\n\r\n"
        connection.sendall(query.encode())
        seen = b""
        while b'"progress"' not in seen:
            seen += connection.recv(4096)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "", "Ctrl-C ends it\n")


@pytest.mark.parametrize("name", ["none", ""])
def test_a_path_that_is_not_there_is_one_clear_message(tmp_path: Path, name: str) -> None:
    out, err = samerun("ui", "--no-open", str(tmp_path / name) if name else "").communicate(timeout=300)
    assert out == ""
    assert "SR-PATH-NONE" in err
    assert "Traceback" not in err


def test_a_taken_port_is_one_clear_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = samerun("ui", "--no-open", "--port", str(taken.getsockname()[1]), str(WHOLE))
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert "SR-IO-FAILED" in err
    assert "Traceback" not in err


def test_without_its_extra_the_verb_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('no', name='uvicorn')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from samerun.cli import main; main(['ui', {str(WHOLE)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "SR-UI-EXTRA" in done.stderr
    assert "pip install samerun[ui]" in done.stderr
