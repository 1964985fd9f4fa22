"""The server of `nguide view`: a few addresses to read from, and the page itself.

    /api/gallery                      splits, methods, windows
    /api/splits/SPLIT/scans           the list of scans
    /api/splits/SPLIT/scans/SCAN      one scan with its curves
    /api/scans/SCAN/pixels/POSITION   rows from the top, 16 bits each, the lower byte first; positions count from 0
    /api/page                         the report of a model, or the index of predictions

Words in capitals are numbers.

Scans are patients' data, and the loopback interface can be reached by other users of the machine and by every web page
in the user's browser.  So `Guard` checks four rules before anything else sees a request:

1. The Host header names this server.  A foreign web page can make its own name lead to 127.0.0.1 (DNS rebinding), but
   the browser then sends that name.
2. The method is GET or HEAD: no client can write anything.
3. Everything but the files of the page, which hold no data, needs the token in the Authorization header: browsers send
   cookies to every port of a host.  The token stands behind the # of the printed address, which browsers do not send;
   the page keeps it in the tab's session storage, which pages of other ports cannot read.
4. Headers keep browsers from storing, framing or sniffing answers, and the page from running text as code.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import importing
from normal_guidance.clinic.viewer.gallery import Gallery, NotHereError
from normal_guidance.clinic.viewer.images import SliceImages, UnreadableSliceError

with importing("viewer", "the viewer needs fastapi and uvicorn"):
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK = "127.0.0.1"

METHODS = ("GET", "HEAD")
SCHEME = "Bearer"  # the word before the token in the Authorization header

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # widths that scripts set
        "img-src 'self' data:",  # in a report
        "frame-src blob:",  # a report, in a frame without scripts
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
    """The port of one start of the server, and its secret, which is never written to a file."""

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
    """An ASGI application before another, for requests that obey the rules; `open_paths` (no data) need no token."""

    def __init__(self, app: App, access: Access, open_paths: Collection[str] = ()) -> None:
        self._app, self._access, self._open = app, access, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access = self._access
        if scope["type"] == "http":
            send = with_headers(send)
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif header(scope, b"host").lower() not in access.hosts:
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
            added = [(key.lower().encode(), value.encode()) for key, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *added]}
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


STATIC = Path(__file__).parent / "static"  # built from frontend/ by `make viewer`

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The files of the page by address; no other file can be requested."""

PORT = 8765  # the port, unless it is taken or the user chooses another
BACKLOG = 2048  # connections that may wait; uvicorn's default


def make_app(gallery: Gallery, access: Access, static: Path = STATIC) -> App:
    """Make the whole application, behind its guard."""
    page = read_page(static)
    images = SliceImages(gallery.row, gallery.manifest.root) if gallery.manifest else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if images is not None:
            images.prepare()
        yield
        if images is not None:
            images.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_errors(app)

    @app.api_route("/api/gallery", methods=list(METHODS))
    async def about() -> Response:
        return JSONResponse(gallery.about())

    @app.api_route("/api/splits/{split}/scans", methods=list(METHODS))
    async def scans(split: int) -> Response:
        return JSONResponse(await run_in_threadpool(gallery.scans, split))

    @app.api_route("/api/splits/{split}/scans/{scan}", methods=list(METHODS))
    async def scan(split: int, scan: int) -> Response:
        return JSONResponse(await run_in_threadpool(gallery.scan, split, scan))

    @app.api_route("/api/page", methods=list(METHODS))
    async def shown() -> Response:
        if gallery.page is None:
            raise NotHereError(f"{gallery.folder} has no page of its own")
        return Response(await run_in_threadpool(gallery.page.read_bytes), media_type="text/plain")  # never a document

    @app.api_route("/api/scans/{scan}/pixels/{position}", methods=list(METHODS))
    async def pixels(scan: int, position: int) -> Response:
        if images is None:
            raise NotHereError("Images need the index of the scans: nguide view DIR --index INDEX")
        return Response(await images.read(scan, position), media_type="application/octet-stream")

    for path, (content, kind) in page.items():
        app.add_api_route(path, _sends(content, kind), methods=list(METHODS))
    return Guard(app, access, open_paths=page)


def read_page(static: Path) -> dict[str, tuple[bytes, str]]:
    """Read every file of the page, by address: all are held in memory, so no file is opened for a client."""
    for name, _ in FILES.values():
        if not (static / name).is_file():
            raise UserError(
                f"the page is not built: {static / name} does not exist; run make viewer in the repository (it needs "
                "node 18 or newer)"
            )
    return {path: ((static / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}


def _sends(content: bytes, kind: str) -> Callable[[], Any]:
    async def send() -> Response:
        return Response(content, media_type=kind)

    return send


def _add_errors(app: FastAPI) -> None:
    """Answer every error with a sentence in JSON, never with a traceback."""
    nothing = "there is nothing at this address"
    ours = "The viewer failed; the terminal in which nguide view runs shows the error."

    def add(kind: type[Exception], status: int | None, sentence: str | None = None) -> None:
        async def answer_error(_: Request, error: Exception) -> Response:
            code = error.status_code if isinstance(error, HTTPException) else status
            return JSONResponse({"error": sentence or str(error)}, status_code=code or 500)

        app.add_exception_handler(kind, answer_error)

    add(NotHereError, 404)
    add(UnreadableSliceError, 422)
    add(UserError, 500)
    add(RequestValidationError, 404, nothing)
    add(HTTPException, None, nothing)
    add(Exception, 500, ours)


def open_socket(port: int | None) -> socket.socket:
    """Listen on the loopback interface; without `port`, on the usual port or, if that is taken, on a free one."""
    # With the protocol named, asyncio sends small pieces at once; otherwise every answer is 40 ms late (Nagle).
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for number in (PORT, 0) if port is None else (port,):
        with suppress(OSError):
            listening.bind((LOOPBACK, number))
            listening.listen(BACKLOG)  # at once: until then another process could take the same port
            return listening
    listening.close()
    raise UserError(f"port {port} is taken or not allowed; choose another --port, or leave it out for a free one")


def make_server(app: App) -> uvicorn.Server:
    """Make the server; its `run` receives the sockets."""
    silent: dict[str, Any] = {"access_log": False, "log_level": "warning", "server_header": False}
    return uvicorn.Server(uvicorn.Config(app, **silent, ws="none", http=BoundedProtocol, timeout_graceful_shutdown=2))


def serve(gallery: Gallery, port: int | None, announce: Callable[[str], object]) -> None:
    """Serve until a signal comes, which uvicorn raises again at the end; `announce` receives the address to open."""
    with closing(open_socket(port)) as listening:
        access = Access(listening.getsockname()[1])
        server = make_server(make_app(gallery, access))
        announce(access.url)
        with _ends_when_hung_up(server):
            server.run(sockets=[listening])


@contextmanager
def _ends_when_hung_up(server: uvicorn.Server) -> Iterator[None]:
    """Let SIGHUP end the server as SIGINT and SIGTERM do; uvicorn does not know it and would end with a traceback."""
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:  # nohup
        yield
        return
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        server.should_exit = True

    before = signal.signal(hangup, end)
    try:
        yield
    finally:
        signal.signal(hangup, before)
    if came:
        signal.raise_signal(hangup)


# uvicorn closes only connections that have been answered, and a client may never ask.

IDLE_SECONDS = 30.0  # a connection is closed if no request has come so long after it was opened or answered
ANSWER_SECONDS = 300.0  # it is closed if an answer takes longer: its client does not read; decoders have 120 s
MOST_CONNECTIONS = 256  # a browser makes six for a page; one more closes the one that has waited longest


class BoundedProtocol(H11Protocol):
    """HTTP with a limit to the time that a connection may wait, and to the number of connections."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._give(IDLE_SECONDS)
        protocols = [protocol for protocol in self.connections if isinstance(protocol, BoundedProtocol)]
        opened = [protocol for protocol in protocols if not protocol.transport.is_closing()]
        if len(opened) > MOST_CONNECTIONS:
            waiting = [protocol for protocol in opened if not protocol._is_answering()]
            min(waiting, key=BoundedProtocol._end).transport.abort()  # this one waits, too

    def data_received(self, data: bytes) -> None:
        was_answering = self._is_answering()
        super().data_received(data)
        if self._is_answering() and not was_answering:  # half a request gains no time
            self._give(ANSWER_SECONDS)

    def on_response_complete(self) -> None:
        self._give(IDLE_SECONDS)  # first: a request that already waits begins in the next line
        super().on_response_complete()
        if self._is_answering():
            self._give(ANSWER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _give(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _end(self) -> float:
        return self._deadline.when() if self._deadline is not None else 0.0
