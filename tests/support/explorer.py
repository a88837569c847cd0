"""A running explorer, and checkpoints that are awkward to show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

if TYPE_CHECKING:
    from samerun.web.explorer.server import ExplorerServer

GOLDEN = Path(__file__).parents[1] / "golden"
WHOLE = GOLDEN / "docs" / "step-400"
HOSTILE = "</script><img src=x onerror=alert(1)><b onmouseover='alert(2)'>\u202e&quot;${7*7}"


@contextmanager
def serving(named: Sequence[str | Path]) -> Iterator[ExplorerServer]:
    """Serves the paths from a thread of this process. Skips the test where the web framework is not installed."""
    pytest.importorskip("uvicorn")
    from samerun.web.explorer.server import ExplorerServer

    server = ExplorerServer(named)
    thread = server.start_in_thread()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)


def ask(
    server: ExplorerServer,
    path: str,
    *,
    method: str = "GET",
    token: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[HTTPResponse, bytes]:
    """Sends one request, by default with the token, the path as it is given."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, f"/{server.token if token is None else token}{path}", headers=headers or {})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def answer(server: ExplorerServer, name: str, **values: Any) -> dict[str, Any]:
    response, body = ask(server, f"/api/{name}?{urlencode(values)}")
    assert response.status == 200, body
    return json.loads(body)


def events(server: ExplorerServer, name: str, **values: Any) -> list[dict[str, Any]]:
    response, body = ask(server, f"/stream/{name}?{urlencode(values)}")
    assert response.status == 200, body
    return [json.loads(line) for line in body.splitlines()]


def codes(body: bytes) -> set[str]:
    return {group["code"] for group in json.loads(body)["findings"]}


def write_gap(folder: Path) -> Path:
    """Copies the golden checkpoint, with the second rank's part of `param:0.weight` (101 x 6, 4 ranks) in no piece."""
    from support.dcp import edit_metadata

    shutil.copytree(WHOLE, folder)

    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["model.0.weight"].chunks
        del chunks[1]

    edit_metadata(folder, change)
    return folder


def write_safetensors(path: Path, tensors: dict[str, Any]) -> Path:
    """Writes torch tensors with the library itself."""
    from safetensors.torch import save_file

    save_file(tensors, path)
    return path


def write_many(path: Path, count: int) -> Path:
    """Writes a checkpoint of `count` small tensors under names as large models have them."""
    import torch

    parts = ("param", "optim.exp_avg", "optim.exp_avg_sq", "optim.step")
    names = [f"model.decoder.layers.{i // 8}.mlp.experts.{i % 8}.w" for i in range(count // 4)]
    one, step = torch.ones(3, 2), torch.tensor(7.0)
    named = {
        f"{part}:{name}": step.clone() if part == "optim.step" else one.clone() for name in names for part in parts
    }
    return write_safetensors(path, named)
