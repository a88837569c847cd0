"""Who may ask: a browser on this machine that knows the token, under this machine's own name, and only to read.

The token is the first part of every address, so that nothing else has to carry it: no cookie, which every other server
on this machine would be sent too, and nothing that a page elsewhere could make a browser add by itself.
"""

from __future__ import annotations

from hmac import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""What the explorer's pages may do: run its own files, talk to its own server. No inline script, style or handler."""

_HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses what is not allowed before the application sees it. An ASGI middleware."""

    def __init__(self, app: ASGIApp, token: str, names: frozenset[str]) -> None:
        """Takes the application, the token, and the names in `Host` that this server answers to, at any port.

        A tunnel from another machine may end at another port there.
        """
        self.app = app
        self.token = token.encode()
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Content-Security-Policy", POLICY)
            await send(message)

        if refusal is not None:
            await refusal(scope, receive, hardened)
            return
        inside = {**scope, "root_path": f"/{self.token.decode()}"}
        await self.app(inside, receive, hardened)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        # Another name for this machine in Host means that a page elsewhere has its own name point here.
        name, colon, port = headers.get("host", "").rpartition(":")
        if name not in self.names or not colon or not port.isdigit() or len(headers.getlist("host")) != 1:
            return PlainTextResponse("this server answers to this machine's own name only\n", 403)
        if scope.get("method") not in ("GET", "HEAD"):
            return PlainTextResponse("this server only reads: GET\n", 405, {"Allow": "GET, HEAD"})
        given = f"{scope['path']}/".split("/")[1].encode("utf-8", "surrogatepass")
        if not compare_digest(given, self.token):
            return PlainTextResponse("open the address that `samerun ui` printed: it holds the token\n", 403)
        return None
