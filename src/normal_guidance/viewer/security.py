"""Access to the server: only from this machine, only with the token, only to read.

Scans are patients' data.  The server listens on the loopback interface, which other users of the machine and every web
page in the user's browser can also reach.  So four rules are checked for each request before anything else sees it:

1. The Host header names this server.  A foreign web page can make its own name lead to 127.0.0.1 (DNS rebinding), but
   the browser then sends that name.
2. The method is GET or HEAD: no client can write anything.
3. The first request has the token, in the address that the command prints; later ones have a cookie, which scripts
   cannot read and other sites' pages cannot send.
4. Headers keep browsers from storing, framing or sniffing answers, other pages from reading them, and the page from
   loading anything from elsewhere.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from html import escape
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

LOOPBACK = "127.0.0.1"

METHODS = ("GET", "HEAD")

OPEN = ("/style.css", "/icon.svg")
"""Files of the login page, which hold no data."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # widths and colours that scripts set
        "img-src 'self' data: blob:",  # NiiVue's font is a picture inside its code
        "connect-src 'self' data:",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
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

LOGIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>nguide view: log in</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/style.css"></head>
<body class="login"><main><h1>nguide view</h1><p>{message}</p>
<form method="get" action="/"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="off" autofocus required>
<button type="submit">Log in</button></form></main></body></html>
"""

ASK = "The command nguide view printed an address with a token. Open that address, or copy its token here."
WRONG = "This is not the token. Copy it again from where nguide view runs; every start has a new one."

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Access:
    """The secrets of one start of the server, which are never written to a file.

    Args:
        port: the port that the server listens on.
    """

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """Value of the cookie, so that a leaked cookie does not reveal the token."""

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The Host headers that a browser on this machine sends."""
        return (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}")

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers send cookies to all ports of a host, so each viewer has its own."""
        return f"nguide-{self.port}"

    def is_token(self, given: str) -> bool:
        return _same(given, self.token)

    def is_session(self, given: str) -> bool:
        return _same(given, self.session)


def _same(given: str, secret: str) -> bool:
    """Compare in a time that does not reveal how much is right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


class Guard:
    """An ASGI application in front of another, which passes on only requests that obey the rules."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, with_headers(send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        access, path = self._access, scope["path"]
        if header(scope, b"host").lower() not in access.hosts:
            await refuse(send, 403, f"Open http://{LOOPBACK}:{access.port}/; this server has no other name.")
        elif scope["method"] not in METHODS:
            allow = {"Allow": ", ".join(METHODS)}
            await refuse(send, 405, f"{scope['method']} is not possible: this server can only be read.", allow)
        elif path == "/" and (given := _given_token(scope)) is not None:
            await self._log_in(given, send)
        elif path in OPEN or access.is_session(_cookie(scope, access.cookie)):
            await self._app(scope, receive, send)
        elif path == "/":
            await _send_login(send, 401, ASK)
        else:
            await refuse(send, 401, "You are not logged in; open the address that nguide view printed.")

    async def _log_in(self, given: str, send: Send) -> None:
        access = self._access
        if not access.is_token(given):
            await _send_login(send, 403, WRONG)
            return
        cookie = f"{access.cookie}={access.session}; Path=/; HttpOnly; SameSite=Strict"
        # Redirects to the page itself, so that the token disappears from the address bar and the history.
        await answer(send, 303, "text/plain", b"", {"Location": "/", "Set-Cookie": cookie})


def header(scope: Scope, name: bytes) -> str:
    """The value of a header; empty where it is missing or occurs twice."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _given_token(scope: Scope) -> str | None:
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=None)
    return query["token"][0] if "token" in query else None


def _cookie(scope: Scope, name: str) -> str:
    # Not joined: only HTTP/2 allows several such headers.
    try:
        found = SimpleCookie(header(scope, b"cookie")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


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


async def _send_login(send: Send, status: int, message: str) -> None:
    await answer(send, status, "text/html; charset=utf-8", LOGIN.format(message=escape(message)).encode(), {})


async def answer(send: Send, status: int, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a whole answer."""
    all_headers = {"Content-Type": kind, "Content-Length": str(len(body)), **headers}
    pairs = [(key.lower().encode(), value.encode()) for key, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
