"""The explorer on the loopback interface, under an address that nobody can guess."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from samerun.web.explorer.answers import Answers
from samerun.web.explorer.app import make_application
from samerun.web.explorer.places import Places
from samerun.web.explorer.stream import Workers
from samerun.web.serve import LOOPBACK


class _Server(uvicorn.Server):
    """Ends long answers before it waits for them."""

    def __init__(self, config: uvicorn.Config, workers: Workers) -> None:
        super().__init__(config)
        self.workers = workers

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.workers.close()
        super().handle_exit(sig, frame)


class ExplorerServer:
    """The application, served on the loopback interface until it is told to stop."""

    def __init__(self, named: Sequence[str | Path], port: int = 0) -> None:
        """Listens at once, so that a taken port is known before anything is printed.

        Raises:
            UsageError: if nothing lies at a named path.
            OSError: if the port is taken.
        """
        self._answers = Answers(Places(named))
        self._workers = Workers()
        self.token = secrets.token_urlsafe(24)
        self._socket = socket.create_server((LOOPBACK, port))  # from here on a browser waits instead of being refused
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            make_application(self._answers, self._workers, self.token),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config, self._workers)

    @property
    def address(self) -> str:
        """Where the explorer is, with its token. A page below it can be linked to with `#`."""
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Serves until `stop`, or until Ctrl-C where this is the main thread."""
        try:
            self._server.run(sockets=[self._socket])
        except KeyboardInterrupt:
            return
        finally:
            self._workers.close()
            self._answers.library.close()

    def stop(self) -> None:
        """Ends `serve` from another thread."""
        self._workers.close()
        self._server.should_exit = True

    def start_in_thread(self) -> threading.Thread:
        """Serves from a thread of its own; for programs and tests."""
        thread = threading.Thread(target=self.serve, daemon=True)
        thread.start()
        return thread
