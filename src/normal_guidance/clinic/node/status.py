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
from html import escape
from typing import Any

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.base.system import size_text
from normal_guidance.clinic.node.node import Node
from normal_guidance.clinic.node.partners import is_loopback
from normal_guidance.clinic.node.series_queue import FAILED, REFUSED
from normal_guidance.clinic.viewer import server as web
from normal_guidance.show.html import table

LISTED = 50  # failures that are shown
HOUR, DAY = 60 * 60, 24 * 60 * 60
RELOAD_SECONDS = 10

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1d2b36; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
.ok { color: #1a7f4b; } .bad { color: #b3261e; } .quiet { color: #5f6f7a; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .8rem .3rem 0;
border-bottom: 1px solid #dde4e9; vertical-align: top; } th { font-weight: 600; color: #5f6f7a; }
.states { display: flex; flex-wrap: wrap; gap: .6rem; } .states div { border: 1px solid #dde4e9; border-radius: .5rem;
padding: .5rem .9rem; min-width: 5.2rem; } .states b { display: block; font-size: 1.4rem; }
"""


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
    health = '<span class="ok">works</span>' if about["ok"] else '<span class="bad">needs attention</span>'
    problems = "".join(f'<p class="bad">{escape(problem)}</p>' for problem in about["problems"])
    states = "".join(f"<div><b>{count}</b>{escape(state)}</div>" for state, count in about["queue"].items())
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
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>nguide node</title>'
        f'<meta http-equiv="refresh" content="{RELOAD_SECONDS}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>nguide node {escape(about['aet'] or '')} {health}</h1>"
        f'<p class="quiet">Research software, not a medical device.</p>{problems}'
        f'<h2>Series</h2><div class="states">{states}</div>'
        f"<h2>Now</h2>{_table(('what', 'value'), facts)}"
        f"<h2>Results that wait for a destination</h2>"
        f"{_table(('destination', 'series', 'attempts', 'reason'), late)}"
        f"<h2>Series without a result</h2>{_table(('time', 'series', 'state', 'reason'), failures)}</body></html>"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(names, rows, words=True) if rows else '<p class="quiet">None.</p>'


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
