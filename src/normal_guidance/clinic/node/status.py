"""The status of a node: a page, JSON, and an address for monitoring.  None of them holds patients' data.

/               the page, which loads itself again
/status.json    the same for programs
/health         200 if the node works, 503 with the reasons if not: curl -f ends with 0 or not
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.base.system import size_text
from normal_guidance.clinic.node.node import Node
from normal_guidance.clinic.node.partners import is_loopback
from normal_guidance.clinic.node.series_queue import FAILED, REFUSED
from normal_guidance.clinic.viewer import server as web
from normal_guidance.show import html

LISTED = 50  # failures that are shown
HOUR, DAY = 60 * 60, 24 * 60 * 60
RELOAD_SECONDS = 10


def status_json(node: Node) -> dict[str, Any]:
    """Everything that the page shows."""
    queue, now = node.queue, time.time()
    problems = node.problems()
    hour, day = queue.latencies(now - HOUR), queue.latencies(now - DAY)
    listening = node.settings.listening
    return {
        "ok": not problems,
        "problems": problems,
        "normal_guidance": __version__,
        "aet": None if listening is None else listening.aet,
        "method": node.predictor.bundle.method,
        "uptime_seconds": round(now - node.started),
        "queue": queue.by_state(),
        "held_bytes": queue.held_bytes(),
        "limits": {"series": queue.limits.series, "bytes": queue.limits.bytes},
        "associations": node.receiver.associations,
        "counts": dict(node.receiver.counts),
        "sent_last_hour": len(hour),
        "sent_last_day": len(day),
        "seconds_from_last_slice_to_sent": {"median": _quantile(day, 0.5), "p95": _quantile(day, 0.95)},
        "memory_bytes": memory_bytes(),
        "destinations": [
            {"name": late.destination, "series": late.series, "attempts": late.attempts, "reason": late.reason}
            for late in queue.late_dispatches()[:LISTED]
        ],
        "failures": [
            {
                **{"series": series.key, "state": series.state, "reason": series.reason, "files": series.files},
                "time": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(series.changed)),
            }
            for series in queue.recent((FAILED, REFUSED), LISTED)
        ],
    }


def _quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile, in seconds; None of nothing."""
    if len(values) < 2:
        return round(values[0], 2) if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1], 2)


def memory_bytes() -> int | None:
    """The memory that this process holds now; None where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def status_page(about: dict[str, Any]) -> str:
    wait = about["seconds_from_last_slice_to_sent"]
    facts = [
        ("Version, method", f"{about['normal_guidance']}, {about['method']}"),
        ("Running for", f"{about['uptime_seconds'] // 3600} h {about['uptime_seconds'] // 60 % 60} min"),
        ("Results sent", f"{about['sent_last_hour']} in the last hour, {about['sent_last_day']} in the last day"),
        ("Last slice to result sent", f"median {_seconds(wait['median'])}, 95 % within {_seconds(wait['p95'])}"),
        ("Waiting", f"{size_text(about['held_bytes'])} of {size_text(about['limits']['bytes'])}"),
        ("Associations now", str(about["associations"])),
        ("Memory", "unknown" if about["memory_bytes"] is None else size_text(about["memory_bytes"])),
        *((name.capitalize(), str(value)) for name, value in about["counts"].items()),
    ]
    late = [(row["name"], row["series"][:12], str(row["attempts"]), row["reason"]) for row in about["destinations"]]
    failures = [(row["time"], row["series"][:12], row["state"], row["reason"]) for row in about["failures"]]
    tables: dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = {
        "Series": (tuple(about["queue"]), [[str(count) for count in about["queue"].values()]]),
        "Now": (("what", "value"), facts),
        "Results that wait for a destination": (("destination", "series", "attempts", "reason"), late),
        "Series without a result": (("time", "series", "state", "reason"), failures),
    }
    none = [html.paragraph("None.", note=True)]
    health = html.paragraph("It works.") if about["ok"] else html.caution("It needs attention", about["problems"])
    return html.page(
        f"nguide node {about['aet'] or ''}",
        [health, html.paragraph("Research software, not a medical device.", note=True)],
        [
            html.Section(title, [html.table(header, rows, words=True)] if rows else none)
            for title, (header, rows) in tables.items()
        ],
        reload=RELOAD_SECONDS,
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def make_status_app(node: Node, hosts: Sequence[str]) -> web.App:
    """Make the application; `hosts` are the Host headers that it answers to, all of them if empty."""

    async def app(scope: web.Scope, receive: web.Receive, send: web.Send) -> None:
        if scope["type"] != "http":  # the server begins or ends
            return
        send, as_json = web.with_headers(send), "application/json"
        if hosts and web.header(scope, b"host").lower() not in hosts:
            await web.refuse(send, 403, f"Open http://{hosts[0]}/; this server has no other name.")
        elif scope["method"] not in web.METHODS:
            await web.refuse(send, 405, "This server can only be read.", {"Allow": ", ".join(web.METHODS)})
        elif scope["path"] == "/":
            await web.answer(send, 200, "text/html; charset=utf-8", status_page(status_json(node)).encode(), {})
        elif scope["path"] == "/status.json":
            await web.answer(send, 200, as_json, json.dumps(status_json(node)).encode(), {})
        elif scope["path"] == "/health":
            problems = node.problems()
            body = json.dumps({"ok": not problems, "problems": problems}).encode()
            await web.answer(send, 503 if problems else 200, as_json, body, {})
        else:
            await web.refuse(send, 404, "there is nothing at this address")

    return app


@contextmanager
def serving_status(node: Node, host: str, port: int) -> Iterator[str]:
    """Serve the status in the background of a block; yields its address."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--status {host}:{port} cannot be opened ({error.strerror}); choose another port") from error
    number = listening.getsockname()[1]
    hosts = (f"{host}:{number}", f"127.0.0.1:{number}", f"localhost:{number}") if is_loopback(host) else ()
    server = web.make_server(make_status_app(node, hosts))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="status", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{number}/"
    finally:
        server.should_exit = True
        thread.join(5)
        listening.close()
