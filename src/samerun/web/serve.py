"""A page on this machine only: one address, one answer, no writes."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOOPBACK = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serves one page at `/` to browsers on this machine, and nothing else."""

    daemon_threads = True

    def __init__(self, page: str, port: int = 0) -> None:
        """Listens on the loopback interface.

        Args:
            page: the whole page, as HTML.
            port: where to listen; 0 takes a free one.

        Raises:
            OSError: if the port is taken.
        """
        self.page = page.encode()
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def serve_until_interrupted(self, listening: Callable[[str], None]) -> None:
        """Calls `listening` with the address, then serves until Ctrl-C."""
        with self:
            listening(self.address)
            try:
                self.serve_forever(poll_interval=0.1)
            except KeyboardInterrupt:
                return


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "samerun", ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        # Another name for this machine in Host means that a page elsewhere has its own name point here.
        named = self.headers.get("Host", "").rpartition(":")[0]
        if named not in (LOOPBACK, "localhost"):
            self.send_error(403)
        elif self.path != "/":
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(self.server.page)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if with_body:
                self.wfile.write(self.server.page)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: one page for one person needs no log."""
