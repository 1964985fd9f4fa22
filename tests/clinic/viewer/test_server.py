"""Who may ask and what is answered: by a real server, asked with bytes that no polite client would send."""

import asyncio
import http.client
import json
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.viewer import server as module
from normal_guidance.clinic.viewer.gallery import open_gallery
from normal_guidance.clinic.viewer.images import SliceImages
from normal_guidance.clinic.viewer.server import FILES, Access, Guard, open_socket, read_page
from normal_guidance.scans.index.volumes import read_volume
from small_viewer import rows_of, write_predictions

API = ("/api/gallery", "/api/splits/0/scans", "/api/splits/0/scans/0", "/api/scans/0/pixels/0")


@pytest.fixture(scope="module")
def clients(served):
    """Without the token, and with it."""
    options = {"base_url": served.base}
    with httpx.Client(**options) as stranger, httpx.Client(**options, headers=session(served)) as client:
        yield stranger, client


def raw(served, target: str, *, method: str = "GET", host: str | None = "", headers: dict[str, str] | None = None):
    """Status, headers and body; the target goes out as it is, and so does the Host header, if any."""
    connection = http.client.HTTPConnection("127.0.0.1", served.access.port, timeout=600)
    connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    if host is not None:
        connection.putheader("Host", host or f"127.0.0.1:{served.access.port}")
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def session(served) -> dict[str, str]:
    return {"Authorization": served.access.authorization}


def ask(served, path: str) -> tuple[int, str]:
    status, _, body = raw(served, path, headers=session(served))
    return status, json.loads(body)["error"]


def test_tokens_are_long_and_never_the_same_and_behind_the_hash_which_browsers_do_not_send(served):
    tokens = {Access(8765).token for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43  # 256 bits
    assert Access(8765).token not in repr(Access(8765))
    address = urlsplit(served.access.url)
    assert served.access.token in address.fragment
    assert served.access.token not in address._replace(fragment="").geturl()


@pytest.mark.parametrize("path", [*API, "/nowhere"])
def test_everything_asks_for_the_token(served, clients, path):
    (stranger, _), token = clients, served.access.token
    assert stranger.get(path).status_code == 401
    assert stranger.get(path, params={"token": token}).status_code == 401  # an address may be logged
    bearers = (f"Bearer {token[:-1]}", f"Bearer {token}x", f"Bearer  {token}", "Bearer é")
    wrong = [{"Authorization": value} for value in ("", "x", token, f"Basic {token}", *bearers)]
    for given in (*wrong, {"Cookie": f"token={token}"}):
        status, _, body = raw(served, path, headers=given)
        assert status == 401, given
        assert "needs the token" in json.loads(body)["error"]


def test_the_page_is_its_files_which_hold_no_data_and_need_no_token(clients):
    for path, (name, kind) in FILES.items():
        for answer in (client.get(path) for client in clients):
            assert (answer.text, answer.headers["content-type"]) == (f"this is {name}", kind)


def connect(served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.access.port), timeout=30)


def is_closed(connection: socket.socket) -> bool:
    """Read what is left until the server closes it; the timeout of the connection is the patience."""
    try:
        while connection.recv(100_000):
            pass
        return True
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_connections_that_never_finish_a_request_or_read_no_answer_are_closed(serve, gallery, monkeypatch):
    """Drops of a request gain no time."""

    async def never(self, scan, place):
        await asyncio.sleep(600)

    def drip(connection: socket.socket) -> None:
        for _ in range(200):
            connection.sendall(b"G")
            time.sleep(0.1)

    monkeypatch.setattr(module, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(SliceImages, "read", never)
    server = serve(gallery)
    begin = "GET /api/scans/0/pixels/0 HTTP/1.1\r\nHost: "
    whole = f"{begin}127.0.0.1:{server.access.port}\r\nAuthorization: {server.access.authorization}\r\n\r\n"
    for sent in ("", begin, f"{begin}x\r\nContent-Length: 9\r\n\r\n12", whole):
        with connect(server) as connection:
            connection.sendall(sent.encode())
            assert is_closed(connection)
    with connect(server) as connection, pytest.raises(ConnectionError):
        drip(connection)
    assert raw(server, "/api/gallery", headers=session(server))[0] == 200


def test_one_connection_too_many_closes_the_one_that_waited_longest(serve, gallery, monkeypatch):
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 3)
    server = serve(gallery)
    with ExitStack() as stack:
        opened = []
        for _ in range(6):
            opened.append(stack.enter_context(connect(server)))
            time.sleep(0.05)  # so that the server sees them in this order
        assert all(is_closed(connection) for connection in opened[:3])
        for connection in opened[3:]:
            connection.settimeout(0.2)
            assert not is_closed(connection)
    assert raw(server, "/api/gallery", headers=session(server))[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", "[::1]:{port}",
     "127.0.0.1:{port}.evil.example", "127.0.0.1:{port},evil.example", "0.0.0.0:{port}"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/gallery"])
def test_a_foreign_host_is_refused_even_with_the_token(served, host, path):
    status, _, body = raw(served, path, host=host.format(port=served.access.port), headers=session(served))
    assert status == 403
    assert "no other name" in json.loads(body)["error"]


def test_our_own_names_are_accepted_but_not_no_host_two_hosts_or_two_tokens(served):
    for name in ("127.0.0.1", "localhost", "LOCALHOST"):
        assert raw(served, "/api/gallery", host=f"{name}:{served.access.port}", headers=session(served))[0] == 200
    assert raw(served, "/api/gallery", host=None, headers=session(served))[0] in (400, 403)
    for second in ("evil.example", f"127.0.0.1:{served.access.port}"):
        assert raw(served, "/api/gallery", headers={**session(served), "Host": second})[0] in (400, 403)
    assert raw(served, "/api/gallery", headers={**session(served), "authorization": "Bearer x"})[0] in (400, 401)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "MKCOL", "PROPFIND"])
@pytest.mark.parametrize("path", ["/", *API])
def test_nothing_can_be_written(served, method, path):
    status, headers, body = raw(served, path, method=method, headers=session(served))
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert "only be read" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "path",
    [
        *("/../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2f..%2fetc%2fpasswd"),
        *("/%252e%252e%252fetc%252fpasswd", "/..%5c..%5cetc%5cpasswd", "//etc/passwd", "/etc/passwd"),
        *("/static/index.html", "/index.html", "/app.js/../server.py", "/app.js%00.css", "/server.py", "/.git/config"),
        *("/api/scans/../../etc/passwd", "/api/scans/0/pixels/..%2f..%2fetc%2fpasswd", "/api/scans/0/pixels/%2e%2e"),
        *("/api/scans/%2fetc%2fpasswd/pixels/0", "/api/splits/..%2f0/scans", "/api/splits/0/scans/-1"),
        *("/api/splits/0/scans/99999999999999999999999", "/api/splits/0/scans/0.5", "/api/splits/nan/scans"),
        *("/api/scans/-1/pixels/0", "/api/gallery/", "/docs", "/redoc", "/openapi.json"),
    ],
)
def test_no_path_leads_anywhere_else(served, path):
    status, _, body = raw(served, path, headers=session(served))
    assert status == 404
    assert "root:" not in body.decode()
    assert json.loads(body)["error"]


def test_absolute_targets_garbage_and_web_sockets_are_no_way_in(served):
    target = f"http://evil.example:{served.access.port}/api/gallery"
    assert raw(served, target)[0] in (400, 401, 403, 404)  # our own Host, no token
    with connect(served) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in connection.recv(1000)
    sent = []

    async def run():
        async def send(message):
            sent.append(message)

        async def never(*_):
            raise AssertionError("it went through")

        await Guard(never, served.access)({"type": "websocket", "path": "/", "headers": []}, never, send)

    asyncio.run(run())
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize("path", [*FILES, *API, "/nowhere", "/?token=wrong", "/?token={token}"])
def test_every_answer_keeps_to_itself_and_head_is_get_without_a_body(served, clients, path):
    """No cookie either: browsers send those to all ports of a host, so other servers here would receive them."""
    for who in clients:
        answer, head = (ask(path.format(token=served.access.token)) for ask in (who.get, who.head))
        headers = answer.headers
        assert (head.status_code, head.content) == (answer.status_code, b"")
        assert int(head.headers["content-length"]) == len(answer.content)
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "http" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert not {"access-control-allow-origin", "server", "set-cookie"} & {*headers}


def test_slices_are_the_files_in_whole_hu(clients, manifest):
    _, client = clients
    scan = client.get("/api/splits/0/scans/3").json()
    row = manifest[manifest.scan_ids.index(scan["id"])]
    volume, _ = read_volume(row, manifest.root)
    answers = [client.get(f"/api/scans/3/pixels/{place}") for place in range(len(row))]
    assert {answer.headers["content-type"] for answer in answers} == {"application/octet-stream"}
    got = [np.frombuffer(answer.content, "<i2").reshape(row.rows, row.columns) for answer in answers]
    np.testing.assert_array_equal(got, np.rint(volume).astype(int))


def test_the_report_needs_the_token_and_is_never_a_document(serve, study, gallery, manifest, tmp_path):
    write_predictions(tmp_path, rows_of(manifest))
    (tmp_path / "bundle.json").write_text("{}")
    (tmp_path / "report.html").write_text("<h1>the report</h1>")
    served = serve(open_gallery(tmp_path))
    assert raw(served, "/api/page")[0] == 401
    status, headers, body = raw(served, "/api/page", headers=session(served))
    assert (status, body) == (200, b"<h1>the report</h1>")
    assert headers["content-type"].startswith("text/plain")
    assert headers["x-content-type-options"] == "nosniff"
    status, error = ask(serve(gallery), "/api/page")
    assert (status, "has no page of its own" in error) == (404, True)


def test_what_cannot_be_shown_is_a_sentence(served, serve, study, gallery, manifest, tmp_path, monkeypatch):
    """Never a traceback: neither for files, nor for our own mistakes, after which the server goes on."""
    status, error = ask(served, "/api/scans/0/pixels/500")
    assert (status, "there is no slice 501" in error) == (422, True)
    status, error = ask(serve(open_gallery(study)), "/api/scans/0/pixels/0")
    assert (status, "--index INDEX" in error) == (404, True)
    write_predictions(tmp_path, [rows_of(manifest)[0] | {"attention": [1.0]}])
    status, error = ask(serve(open_gallery(tmp_path)), "/api/splits/0/scans/0")
    assert (status, "damaged" in error) == (500, True)

    def fail():
        raise ZeroDivisionError("inner workings")

    broken = open_gallery(gallery.folder)
    monkeypatch.setattr(broken, "about", fail)
    server = serve(broken)
    status, error = ask(server, "/api/gallery")
    assert (status, "The viewer failed" in error, "inner workings" in error) == (500, True, False)
    assert raw(server, "/api/splits/0/scans", headers=session(server))[0] == 200


def test_it_listens_on_loopback_only_and_a_taken_port_or_a_page_that_is_not_built_is_told(served, blank_page, tmp_path):
    assert urlsplit(served.access.url).hostname == "127.0.0.1"
    with pytest.raises(UserError, match="choose another --port"):
        open_socket(served.access.port)
    with open_socket(None) as first, open_socket(None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
    assert set(read_page(blank_page)) == set(FILES)
    with pytest.raises(UserError, match="run make viewer"):
        read_page(tmp_path)
