"""The explorer's addresses: answers as JSON, long work as a stream, the page, a run's report and records."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from samerun.errors import Problem, SamerunError, UsageError
from samerun.report.html import render_html
from samerun.report.model import read_run
from samerun.report.style import read_static, shared_style
from samerun.web.explorer.answers import Answers, Query
from samerun.web.explorer.findings import explain
from samerun.web.explorer.guard import Guard
from samerun.web.explorer.places import Places, confine, is_run
from samerun.web.explorer.stream import Emit, Workers, encode
from samerun.web.serve import LOOPBACK

_PACKAGE = "samerun.web.explorer"
_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
EVIDENCE = (".json", ".jsonl", ".txt", ".yaml")
"""Files of a run directory that are shown, as text."""
_REPORT_POLICY = "connect-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Beside the report's own policy, which names its only script by hash and forbids every fetch."""


def make_application(answers: Answers, workers: Workers, token: str) -> ASGIApp:
    """Returns the guarded application, for a server that listens on the loopback interface."""
    told = (answers.start, answers.checkpoint, answers.tensors, answers.tree, answers.tensor, answers.run)
    works = (answers.values, answers.diff, answers.deep)
    routes = [
        Route("/", _shell),
        Route("/static/{name}", _static),
        Route("/run/{path:path}", _records(answers.places)),
        *(Route(f"/api/{answer.__name__}", _json(answer)) for answer in told),
        *(Route(f"/stream/{work.__name__}", _stream(work, workers)) for work in works),
    ]
    return Guard(Starlette(routes=routes), token, frozenset({LOOPBACK, "localhost"}))


def _json(answer: Callable[[Query], dict[str, Any]]) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        try:
            body = await run_in_threadpool(answer, request.query_params)
        except (SamerunError, OSError) as error:
            return _refusal(error)
        return Response(encode(body), media_type="application/json")

    return respond


def _stream(work: Callable[[Query, Emit], None], workers: Workers) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        def begin(emit: Emit) -> None:
            work(request.query_params, emit)

        events = workers.stream(begin, lambda error: {"kind": "refused", "findings": explain(error.problems)})
        return StreamingResponse(events, media_type="application/x-ndjson")

    return respond


async def _shell(request: Request) -> Response:
    return HTMLResponse(read_static(_PACKAGE, "explorer.html"))


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in {item.name for item in resources.files(_PACKAGE).joinpath("static").iterdir()}:
        return PlainTextResponse("there is no such file\n", 404)
    text = read_static(_PACKAGE, name)
    return Response(
        shared_style() + text if name == "explorer.css" else text, media_type=_TYPES[name.rpartition(".")[2]]
    )


def _records(places: Places) -> Callable[[Request], Any]:
    """Returns what answers `<place>/-/report.html` and `<place>/-/<file of the run directory>`."""

    async def respond(request: Request) -> Response:
        place, _, below = request.path_params["path"].partition("/-/")
        try:
            return await run_in_threadpool(_record, places, place, below)
        except (SamerunError, OSError) as error:
            return _refusal(error)

    return respond


def _record(places: Places, place: str, below: str) -> Response:
    root = places.resolve(place)
    if not isinstance(root, Path) or not is_run(root):
        raise UsageError(Problem("SR-RUN-DIRECTORY", "this is not a run directory", where={"file": place}))
    if below == "report.html":  # written now: one that lies there may be old, or anybody's
        return HTMLResponse(render_html(read_run(root)), headers={"Content-Security-Policy": _REPORT_POLICY})
    path = confine(root, below)
    if path.is_dir():
        listed = sorted(f"{item.name}{'/' * item.is_dir()}" for item in path.iterdir() if not item.is_symlink())
        return PlainTextResponse("\n".join(listed) + "\n")
    if path.suffix not in EVIDENCE:
        raise UsageError(Problem("SR-UI-OUTSIDE", "only a run's own records are shown", where={"file": below}))
    return FileResponse(
        path, media_type="text/plain", headers={"Content-Security-Policy": "default-src 'none'; sandbox"}
    )


def _refusal(error: SamerunError | OSError) -> Response:
    """403 for what lies outside, 404 for what is not there, 422 for what cannot be read."""
    if isinstance(error, OSError):
        where = {"file": str(error.filename)} if error.filename else {}
        error = UsageError(Problem("SR-IO-FAILED", str(error.strerror or error), where=where))
    codes = {problem.code for problem in error.problems}
    status = 403 if "SR-UI-OUTSIDE" in codes else 404 if codes & {"SR-PATH-NONE", "SR-USAGE-KEY"} else 422
    return Response(encode({"findings": explain(error.problems)}), status, media_type="application/json")
