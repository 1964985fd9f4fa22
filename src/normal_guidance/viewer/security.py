"""Access to the server: only from this machine, only with the token, only to read.

Scans are patients' data.  The server listens on the loopback interface, which other users of the machine and every web
page in the user's browser can also reach.  So four rules are checked for each request before anything else sees it:

1. The Host header names this server.  A foreign web page can make its own name lead to 127.0.0.1 (DNS rebinding), but
   the browser then sends that name.
2. The method is GET or HEAD: no client can write anything.
3. Everything but the files of the page, which hold no data, needs the token in the Authorization header.  There is no
   cookie: browsers send cookies to every port of a host, so other servers on this machine would receive it.  The token
   stands behind the # of the printed address, which browsers do not send.  The page keeps it in the tab's session
   storage, which pages of other ports cannot read, and sends it to its own server only.
4. Headers keep browsers from storing, framing or sniffing answers, other pages from reading them, and the page from
   loading anything from elsewhere or running text as code.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

LOOPBACK = "127.0.0.1"

METHODS = ("GET", "HEAD")

SCHEME = "Bearer"
"""The word before the token in the Authorization header."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # widths that scripts set
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # scripts can read the token, so text never becomes a script
    ]
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every answer."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Access:
    """The secret of one start of the server, which is never written to a file.

    Args:
        port: the port that the server listens on.
    """

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        return f"http://{LOOPBACK}:{self.port}/#token={self.token}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The Host headers that a browser on this machine sends."""
        return (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}")

    @property
    def authorization(self) -> str:
        """The Authorization header that opens everything."""
        return f"{SCHEME} {self.token}"

    def allows(self, authorization: str) -> bool:
        """Compare in a time that does not reveal how much is right."""
        return hmac.compare_digest(authorization.encode("utf-8", "replace"), self.authorization.encode())


class Guard:
    """An ASGI application in front of another, which passes on only requests that obey the rules.

    Args:
        app: the application behind it.
        access: the secret of this start.
        open_paths: the files of the page, which hold no data and need no token.
    """

    def __init__(self, app: App, access: Access, open_paths: Collection[str] = ()) -> None:
        self._app, self._access, self._open = app, access, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, with_headers(send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        access = self._access
        if header(scope, b"host").lower() not in access.hosts:
            await refuse(send, 403, f"Open http://{LOOPBACK}:{access.port}/; this server has no other name.")
        elif scope["method"] not in METHODS:
            allow = {"Allow": ", ".join(METHODS)}
            await refuse(send, 405, f"{scope['method']} is not possible: this server can only be read.", allow)
        elif scope["path"] in self._open or access.allows(header(scope, b"authorization")):
            await self._app(scope, receive, send)
        else:
            await refuse(send, 401, "This needs the token; open the address that nguide view printed.")


def header(scope: Scope, name: bytes) -> str:
    """The value of a header; empty where it is missing or occurs twice."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def with_headers(send: Send) -> Send:
    """Add `HEADERS` to whatever is sent."""

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = [(key.lower().encode(), value.encode()) for key, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return send_with_headers


async def refuse(send: Send, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
    """Answer with a sentence in JSON."""
    await answer(send, status, "application/json", json.dumps({"error": sentence}).encode(), headers or {})


async def answer(send: Send, status: int, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a whole answer."""
    all_headers = {"Content-Type": kind, "Content-Length": str(len(body)), **headers}
    pairs = [(key.lower().encode(), value.encode()) for key, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
