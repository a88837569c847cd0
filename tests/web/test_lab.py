"""The lab's numbers against torch's own optimizers and exact arithmetic; its page as text; its server."""

from __future__ import annotations

import doctest
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from samerun.catalog import load_catalog
from samerun.core import lab
from samerun.core.lab import HIDDEN, LabState, Rule, advance, forget, lab_vectors, trajectory
from samerun.web.lab.experiments import EXPERIMENTS, RATE_CODES
from samerun.web.lab.page import render_lab
from samerun.web.serve import PageServer


def positions(rule: Rule, eta: float, x0: float, num_updates: int) -> list[float]:
    return [state.x for state in trajectory(rule, eta, LabState(x0), num_updates)]


def test_the_exercise() -> None:
    assert positions(Rule.GRADIENT, 0.5, 2.0, 3) == [2.0, 1.0, 0.5, 0.25]
    assert positions(Rule.GRADIENT, 1.5, 2.0, 3) == [2.0, -1.0, 0.5, -0.25]


@pytest.mark.parametrize("rule", [Rule.GRADIENT, Rule.MOMENTUM, Rule.ADAM])
def test_the_rules_are_torchs(rule: Rule) -> None:
    torch = pytest.importorskip("torch")
    weight: Any = torch.tensor(-1.7, dtype=torch.float64, requires_grad=True)
    makers = {
        Rule.GRADIENT: lambda: torch.optim.SGD([weight], lr=0.1, foreach=False),
        Rule.MOMENTUM: lambda: torch.optim.SGD([weight], lr=0.1, momentum=lab.MOMENTUM, foreach=False),
        Rule.ADAM: lambda: torch.optim.Adam([weight], lr=0.1, betas=(lab.BETA1, lab.BETA2), eps=lab.EPSILON),
    }
    optimizer = makers[rule]()
    state = LabState(-1.7)
    for _ in range(25):
        optimizer.zero_grad()
        (weight**2 / 2).backward()
        optimizer.step()
        state = advance(rule, 0.1, state)
        assert state.x == pytest.approx(weight.item(), rel=1e-12, abs=1e-14)


def test_schedule_and_samples_in_exact_arithmetic() -> None:
    x, y = Fraction(2), Fraction(2)
    eta = Fraction(3, 8)
    falling, sampled = LabState(2.0), LabState(2.0)
    for k in range(8):
        x -= eta * max(0, 1 - Fraction(k, lab.HORIZON_UPDATES)) * x
        y -= eta * (y - Fraction(lab.SAMPLES[k % 4]))
        falling, sampled = advance(Rule.SCHEDULE, 0.375, falling), advance(Rule.SAMPLES, 0.375, sampled)
        assert falling.x == pytest.approx(float(x), rel=1e-14)
        assert sampled.x == pytest.approx(float(y), rel=1e-12, abs=1e-14)
    assert (falling.index, sampled.cursor) == (8, 8)
    assert sum(lab.SAMPLES) == 0  # so that the samples together make f


def test_behind_its_horizon_the_schedule_stands_still() -> None:
    assert advance(Rule.SCHEDULE, 0.5, LabState(2.0, index=11)).x == 2.0


@pytest.mark.parametrize("rule", [rule for rule in Rule if HIDDEN[rule]])
def test_every_lost_part_shows_in_the_next_update_and_in_nothing_before(rule: Rule) -> None:
    saved = trajectory(rule, 0.3, LabState(2.0), lab.CHECKPOINT_UPDATES)[-1]
    for part in HIDDEN[rule]:
        resumed = forget(saved, (part,))
        assert resumed.x == saved.x
        assert resumed != saved
        assert advance(rule, 0.3, resumed).x != advance(rule, 0.3, saved).x
    assert advance(rule, 0.3, forget(saved, ())) == advance(rule, 0.3, saved)


def test_only_parts_that_exist_can_be_lost() -> None:
    for wrong in ("x", "momentum"):
        with pytest.raises(ValueError, match=wrong):
            forget(LabState(1.0), ["m", wrong])


def test_vectors_survive_json_bit_for_bit() -> None:
    vectors = lab_vectors()
    assert json.loads(json.dumps(vectors)) == vectors
    assert {vector["rule"] for vector in vectors} == set(Rule)


def test_examples_in_docstrings_run() -> None:
    assert doctest.testmod(lab).failed == 0


def test_the_page_names_only_findings_that_exist_and_explains_them() -> None:
    page = render_lab()
    catalog = load_catalog()
    codes = {code for item in EXPERIMENTS for part in item.parts for code in part.codes} | set(RATE_CODES)
    assert set(re.findall(r"SR-[A-Z]+(?:-[A-Z]+)+", page)) >= codes
    assert codes <= set(catalog)
    for item in EXPERIMENTS:
        assert tuple(part.name for part in item.parts) == HIDDEN[item.rule]
        assert item.findings()[0][0].code.startswith("SR-LOAD-")


def test_the_page_holds_all_that_it_needs() -> None:
    page = render_lab()
    assert page == render_lab()
    assert re.findall(r"(?:src|href)=[\"'](?!#|data:)", page) == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert len(page.encode()) < 200_000
    assert "no topology here, no sharding and no distributed optimizer" in page


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer("<p>page</p>") as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("method", "path", "host", "status", "body"),
    [
        ("GET", "/", None, 200, b"<p>page</p>"),
        ("HEAD", "/", None, 200, b""),
        ("GET", "/", "localhost:{port}", 200, b"<p>page</p>"),
        ("GET", "/", "elsewhere.example:{port}", 403, None),
        ("GET", "/../etc/passwd", None, 404, None),
        ("GET", "/?x", None, 404, None),
        ("POST", "/", None, 501, None),
    ],
)
def test_the_server_gives_one_page_to_this_machine(
    server: PageServer, method: str, path: str, host: str | None, status: int, body: bytes | None
) -> None:
    assert server.server_address[0] == "127.0.0.1"
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host.format(port=server.server_port)} if host else {})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    assert response.status == status
    assert body is None or content == body


def samerun(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "samerun", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_verb_writes_the_page(tmp_path: Path) -> None:
    target = tmp_path / "lab.html"
    process = samerun("lab", "--output", str(target))
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out.strip(), err) == (0, str(target), "")
    assert target.read_text(encoding="utf-8") == render_lab()


def test_the_verb_serves_the_page_until_interrupted() -> None:
    process = samerun("lab", "--no-open")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", address)
    assert match
    connection = HTTPConnection("127.0.0.1", int(match[1]), timeout=60)
    connection.request("GET", "/")
    assert connection.getresponse().read().decode() == render_lab()
    connection.close()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "", "Ctrl-C ends it\n")


def test_a_taken_port_is_one_clear_message() -> None:
    with PageServer("") as server:
        process = samerun("lab", "--no-open", "--port", str(server.server_port))
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert "SR-IO-FAILED" in err
    assert "Traceback" not in err
