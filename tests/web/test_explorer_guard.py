"""The explorer's server: who is refused, and what is never reachable."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from samerun.web.explorer.server import ExplorerServer
from support.explorer import WHOLE, answer, ask, codes, events, serving

API = ("/", "/static/main.js", "/api/start", "/api/checkpoint?place=0", "/run/1/-/report.html", "/stream/deep?place=0")

# ------------------------------------------------------------------------------------------------ who may ask


def test_it_listens_on_the_loopback_interface_only(server: ExplorerServer) -> None:
    assert server._socket.getsockname()[0] == "127.0.0.1"
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        return
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address, server.port), timeout=5).close()


@pytest.mark.parametrize("path", API)
@pytest.mark.parametrize("token", ["", "x", "{token}x", "{half}", "é", "%00"])
def test_without_the_token_nothing_is_answered(server: ExplorerServer, path: str, token: str) -> None:
    wrong = token.format(token=server.token, half=server.token[:-1])
    response, body = ask(server, path, token=quote(wrong, safe="%"))
    assert response.status == 403
    assert b"secret" not in body
    assert b"samerun ui" in body


def test_the_token_is_long_and_new_each_time() -> None:
    with serving([WHOLE]) as one, serving([WHOLE]) as two:
        assert one.token != two.token
        assert len(one.token) >= 32
        assert one.address == f"http://127.0.0.1:{one.port}/{one.token}/"


@pytest.mark.parametrize("path", API)
@pytest.mark.parametrize(
    "host", ["elsewhere.example:{port}", "127.0.0.1", "127.0.0.1:x", "localhost.:{port}", "[::1]:{port}"]
)
def test_another_name_for_this_machine_is_refused(server: ExplorerServer, path: str, host: str) -> None:
    response, _ = ask(server, path, headers={"Host": host.format(port=server.port)})
    assert response.status == 403


def test_localhost_is_this_machine(server: ExplorerServer) -> None:
    for host in (f"localhost:{server.port}", "127.0.0.1:9000", "localhost:80"):  # also at the other end of a tunnel
        assert ask(server, "/", headers={"Host": host})[0].status == 200


@pytest.mark.parametrize(
    "line",
    ["GET x HTTP/1.1", "GET * HTTP/1.1", "GET http://127.0.0.1/ HTTP/1.1", "GET // HTTP/1.1", "OPTIONS * HTTP/1.1"],
)
def test_odd_requests_are_refused_too(server: ExplorerServer, line: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(f"{line}\r\nHost: 127.0.0.1:{server.port}\r\nConnection: close\r\n\r\n".encode())
        first = connection.makefile("rb").readline()
    assert re.match(rb"HTTP/1\.1 40[035]", first), first


def test_two_host_lines_are_refused(server: ExplorerServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        two = f"Host: 127.0.0.1:{server.port}\r\nHost: elsewhere.example\r\n"
        connection.sendall(f"GET /{server.token}/ HTTP/1.1\r\n{two}Connection: close\r\n\r\n".encode())
        first = connection.makefile("rb").readline()
    assert re.match(rb"HTTP/1\.1 40[03]", first), first


def test_a_checkpoint_at_an_address_is_shown() -> None:
    pytest.importorskip("fsspec")
    from samerun.stores import remote

    before = set(remote._views)
    address = WHOLE.resolve().as_uri()
    with serving([address]) as here:
        assert answer(here, "start")["places"][0]["name"] == "0"
        assert answer(here, "checkpoint", place="0")["counts"]["tensors"] == 20
        assert events(here, "values", place="0", key="param:1.bias")[-1]["seen"] == 9
        response, body = ask(here, "/api/checkpoint?place=0/..")
        assert (response.status, codes(body)) == (403, {"SR-UI-OUTSIDE"})
    assert set(remote._views) == before  # what was fetched of it is gone with the server


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", API)
def test_nothing_but_reading_is_answered(server: ExplorerServer, method: str, path: str) -> None:
    response, _ = ask(server, path, method=method)
    assert response.status == 405
    assert "Access-Control-Allow-Origin" not in response.headers


def test_every_answer_forbids_referrers_frames_and_foreign_scripts(server: ExplorerServer) -> None:
    for path in (*API, "/nothing", "/api/checkpoint?place=9"):
        response, _ = ask(server, path)
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers.get_all("Set-Cookie") is None
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
    policy = ask(server, "/")[0].headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy


def test_the_page_has_no_inline_script_style_or_handler(server: ExplorerServer) -> None:
    html = ask(server, "/")[1].decode()
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", html)
    assert server.token not in html
    scripts = list((Path(__file__).parents[2] / "src/samerun/web/explorer/static").glob("*.js"))
    assert len(scripts) > 5
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://(?!www\.w3\.org)", text
        ), script


# ------------------------------------------------------------------------------------------------ what is reachable


@pytest.mark.parametrize(
    "place",
    [
        "2/../secret.txt",
        "2/..",
        "2/link",
        "2/link/.metadata",
        "2//etc/passwd",
        "/etc/passwd",
        "3",
        "-1",
        "",
        "2/gap/../../outside",
    ],
)
def test_places_outside_are_refused(server: ExplorerServer, place: str) -> None:
    for path in (f"/api/checkpoint?{urlencode({'place': place})}", f"/api/run?{urlencode({'place': place})}"):
        response, body = ask(server, path)
        assert response.status == 403
        assert codes(body) == {"SR-UI-OUTSIDE"}
    found = events(server, "deep", place=place)[-1]
    assert (found["kind"], found["findings"][0]["code"]) == ("refused", "SR-UI-OUTSIDE")


@pytest.mark.parametrize(
    ("below", "status"),
    [
        ("../secret.txt", 403),
        ("..%2fsecret.txt", 403),
        ("%2e%2e/secret.txt", 403),
        ("stages/link.txt", 403),
        ("stages/page.html", 403),
        ("/etc/passwd", 403),
        ("stages/none.json", 404),
    ],
)
def test_records_outside_a_run_are_refused(server: ExplorerServer, below: str, status: int) -> None:
    response, body = ask(server, f"/run/1/-/{below}")
    assert response.status == status
    assert b"secret" not in body.replace(b"secret.txt", b"")


def test_a_checkpoint_is_no_run_and_its_files_are_not_handed_out(server: ExplorerServer) -> None:
    for path in ("/run/0/-/.metadata", "/run/0/-/report.html", "/run/2/-/hostile.safetensors"):
        response, body = ask(server, path)
        assert response.status == 422
        assert codes(body) == {"SR-RUN-DIRECTORY"}
    for name in ("../app.py", "..%2fapp.py", "explorer.css%00", ""):
        assert ask(server, f"/static/{name}")[0].status == 404


def test_records_of_a_run_are_text_and_its_report_is_written_anew(server: ExplorerServer, run: Path) -> None:
    response, body = ask(server, "/run/1/-/verdict.json")
    assert response.headers["Content-Type"].startswith("text/plain")
    assert "sandbox" in response.headers["Content-Security-Policy"]
    assert body == (run / "verdict.json").read_bytes()
    response, body = ask(server, "/run/1/-/report.html")
    assert response.headers["Content-Type"].startswith("text/html")
    assert b"REJECT" in body
    assert b"alert(1)" not in body
    assert (run / "report.html").read_text() == "<script>alert(1)</script>"
    listed = ask(server, "/run/1/-/stages/03-load/")[1].decode().split()
    assert {"result.json", "trace/"} <= set(listed)
