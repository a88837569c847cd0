"""Long work as a stream of events, one JSON document a line. It ends soon after nobody listens any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from samerun.errors import SamerunError

Event = dict[str, Any]
Emit = Callable[[Event], None]


PAUSE_SECONDS = 0.1
"""Progress that follows sooner on what was sent before is not sent."""


class NobodyListens(Exception):
    """No error: how work is told to end, when its event reaches nobody."""


class Workers:
    """Few threads for work that reads whole tensors; further work waits for its turn."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="samerun-ui")
        self._leave: set[Callable[[], None]] = set()
        self._counting = threading.Lock()
        self.running = 0
        """Works that were begun and have not ended."""

    async def stream(
        self, work: Callable[[Emit], None], explain: Callable[[SamerunError], Event]
    ) -> AsyncIterator[str]:
        """Yields what `work` emits, as lines. Leaving the iterator makes the work's next event raise.

        Args:
            work: called in a thread with the function that takes its events. Every event is a chance to be cancelled,
                so it emits one per block that it reads.
            explain: makes an event of what the work could not do.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        left = threading.Event()

        told = 0.0

        def emit(event: Event) -> None:
            nonlocal told
            if left.is_set():
                raise NobodyListens
            now = time.monotonic()
            if event["kind"] == "progress" and now - told < PAUSE_SECONDS:
                return
            told = now
            loop.call_soon_threadsafe(events.put_nowait, event)

        def run() -> None:
            try:
                emit({"kind": "begin"})
                work(emit)
            except NobodyListens:
                return
            except SamerunError as error:
                emit(explain(error))
            except Exception as error:
                emit({"kind": "failed", "message": f"{type(error).__name__}: {error}"})
            finally:
                if not left.is_set():
                    loop.call_soon_threadsafe(events.put_nowait, None)

        def leave() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the stream with it
                loop.call_soon_threadsafe(events.put_nowait, None)

        with self._counting:
            self.running += 1
        self._leave.add(leave)
        try:
            self._pool.submit(run).add_done_callback(self._ended)

            while (event := await events.get()) is not None:
                yield encode(event) + "\n"
        finally:
            left.set()
            self._leave.discard(leave)

    def _ended(self, _: Future[None]) -> None:
        with self._counting:
            self.running -= 1

    def close(self) -> None:
        """Ends every stream and drops the work that waits; what runs ends at its next event."""
        for leave in list(self._leave):
            leave()
        self._pool.shutdown(wait=False, cancel_futures=True)


def encode(value: Any) -> str:
    """Returns JSON. Numbers that it does not have become text, halves of surrogate pairs escapes."""
    return json.dumps(_finite(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
