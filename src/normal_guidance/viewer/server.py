"""The server of `nguide view`: a few addresses to read from, and the page itself.

    /api/gallery                      splits, methods, windows
    /api/splits/SPLIT/scans           the list of scans
    /api/splits/SPLIT/scans/SCAN      one scan with its curves
    /api/scans/SCAN/slices/PLACE      pixels: rows from the top, 16 bits each, the lower byte first

Words in capitals are numbers.  `normal_guidance.viewer.security` checks every request first.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from normal_guidance.errors import UserError
from normal_guidance.extras import install_command
from normal_guidance.viewer.gallery import Gallery, NotHereError
from normal_guidance.viewer.security import LOOPBACK, Access, App, Guard
from normal_guidance.viewer.slice_images import CACHE_BYTES, SliceImages, UnreadableSliceError

try:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    from normal_guidance.viewer.connections import BoundedProtocol
except ImportError as error:
    raise UserError(f"the viewer needs fastapi and uvicorn; {install_command('viewer')}") from error

STATIC = Path(__file__).parent / "static"
"""Built from frontend/ by `make viewer`."""

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The files of the page by address; no other file can be requested."""

PORT = 8765
"""The port, unless it is taken or the user chooses another."""

BACKLOG = 2048
"""Connections that may wait; uvicorn's default."""

READ = ["GET", "HEAD"]


def make_app(gallery: Gallery, access: Access, static: Path = STATIC, cache_bytes: int = CACHE_BYTES) -> App:
    """Make the whole application, behind its guard."""
    page = read_page(static)
    images = SliceImages(gallery.row, gallery.manifest.root, limit=cache_bytes) if gallery.manifest else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if images is not None and gallery.manifest:
            images.prepare(gallery.manifest[0].kind)
        yield
        if images is not None:
            images.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_errors(app)

    @app.api_route("/api/gallery", methods=READ)
    async def about() -> Response:
        return JSONResponse(gallery.about())

    @app.api_route("/api/splits/{split}/scans", methods=READ)
    async def scans(split: int) -> Response:
        return JSONResponse(await run_in_threadpool(gallery.scans, split))

    @app.api_route("/api/splits/{split}/scans/{scan}", methods=READ)
    async def scan(split: int, scan: int) -> Response:
        return JSONResponse(await run_in_threadpool(gallery.scan, split, scan))

    @app.api_route("/api/scans/{scan}/slices/{place}", methods=READ)
    async def pixels(scan: int, place: int) -> Response:
        if images is None:
            raise NotHereError("Images need the index of the scans: nguide view DIR --index INDEX")
        return Response(await images.read(scan, place), media_type="application/octet-stream")

    for path, (content, kind) in page.items():
        app.add_api_route(path, _sends(content, kind), methods=READ)
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

    def answer(status: int, sentence: str) -> Response:
        return JSONResponse({"error": sentence}, status_code=status)

    @app.exception_handler(NotHereError)
    async def not_here(_: Request, error: NotHereError) -> Response:
        return answer(404, str(error))

    @app.exception_handler(UnreadableSliceError)
    async def unreadable(_: Request, error: UnreadableSliceError) -> Response:
        return answer(422, str(error))

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> Response:
        return answer(500, str(error))

    @app.exception_handler(RequestValidationError)
    async def no_number(_: Request, error: RequestValidationError) -> Response:
        return answer(404, "there is nothing at this address")

    @app.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> Response:
        return answer(error.status_code, "there is nothing at this address")

    @app.exception_handler(Exception)
    async def our_mistake(_: Request, error: Exception) -> Response:
        return answer(500, "The viewer failed; the terminal in which nguide view runs shows the error.")


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
    return uvicorn.Server(
        uvicorn.Config(
            app,
            access_log=False,
            http=BoundedProtocol,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=2,
            ws="none",
        )
    )


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
