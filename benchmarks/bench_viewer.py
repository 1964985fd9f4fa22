"""The viewer under load: many readers at once, one who browses many scans, and the page; a table, then one JSON line.

    python benchmarks/bench_viewer.py [--readers 50] [--seconds 60] [--scans 200]

The server is `nguide view` itself, in a process of its own.  Its scans are phantoms of 512 x 512 pixels, a few of them
on the disk under many names, each of which the server reads and keeps as a scan of its own.  A reader does what the
page does: opens a scan, reads its curves, then slice after slice.  The step `page` is a real Chromium without a
graphics card that goes through the slices of one scan, which it has already fetched: a "request" there is a slice on
the screen.  It is left out where playwright or Chromium is missing.  Memory is the resident memory of the server and
its workers together.  Goals: no error, and no more memory over the second half of the scans than over the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import Manifest, write_manifest
from normal_guidance.scans.phantom.phantom_files import write_phantom
from normal_guidance.sweep.predictions import PREDICTIONS
from report import machine

ORIGINALS = 4
"""Phantoms on the disk."""

SLICES_OF_A_VISIT = 12
"""That a reader of the crowd looks at before he opens another scan."""

SLICES_ON_SCREEN = 12
"""That the page draws, at most."""

GROWTH = 1.05
"""Of memory, over the second half of the scans, that is chance."""

COLUMNS = {
    "requests": ("requests", 9),
    "per_second": ("/s", 8),
    "mib_per_second": ("MiB/s", 8),
    "median_ms": ("median ms", 11),
    "p99_ms": ("p99 ms", 8),
    "peak_mib": ("peak MiB", 10),
    "errors": ("errors", 8),
}
"""Of the table: heading and width."""

COMMAND = ("-m", "normal_guidance.cli", "view")


# ----------------------------------------------------------------------------------------------------
# Something to view
# ----------------------------------------------------------------------------------------------------


def make_study(folder: Path, scans: int, size: int, slices: int) -> Manifest:
    """FOLDER/study with two methods, and FOLDER/index with every phantom under many names."""
    write_phantom("folder", folder / "scans", scans=min(ORIGINALS, scans), seed=1, size=size, slices=slices)
    made = index("folder", folder / "scans", folder / "original", table=folder / "scans" / "labels.csv", workers=0)
    originals = list(made.manifest)
    rows = [
        replace(originals[number % len(originals)], scan_id=f"scan-{number:04}", patient_id=f"patient-{number:04}")
        for number in range(scans)
    ]
    (folder / "index").mkdir()
    manifest = write_manifest(folder / "index" / "manifest.parquet", rows, made.manifest.about)
    for method in ("abmil", "ng"):
        (folder / "study" / method / "1").mkdir(parents=True)
        pq.write_table(predictions(manifest), folder / "study" / method / "1" / "predictions.parquet")
    return manifest


def predictions(manifest: Manifest) -> pa.Table:
    generator = np.random.default_rng(1)
    rows = []
    for row in manifest:
        logits = generator.standard_normal(len(row))
        attention = np.exp(logits) / np.exp(logits).sum()
        rows.append(
            {
                "group": "",
                "part": "test",
                "scan_id": row.scan_id,
                "patient_id": row.patient_id,
                "label": row.label,
                "logit": 0.0,
                "probability": 0.5,
                "slices": len(row),
                "attention": attention,
                "log_attention": [np.log(attention)],
            }
        )
    return pa.Table.from_pylist(rows, schema=PREDICTIONS)


@dataclass
class Server:
    """A running `nguide view`."""

    url: str
    pid: int

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def mib(self) -> float:
        """Resident memory of the server and its workers."""
        return sum(_resident(pid) for pid in [self.pid, *_children(self.pid)]) / 2**20


def _children(pid: int) -> list[int]:
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for found in lists for child in found]


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    words = [sys.executable, *COMMAND, str(folder / "study"), "--index", str(folder / "index"), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = next(line.split()[1] for line in process.stdout if line.startswith("Open "))
            yield Server(url, process.pid)
        finally:
            process.terminate()


# ----------------------------------------------------------------------------------------------------
# Readers
# ----------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What readers saw."""

    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    errors: list[str] = field(default_factory=list)


class Reader:
    """A connection that stays open, as a browser's; a whole HTTP client would be slower than the server."""

    def __init__(self, server: Server, tally: Tally) -> None:
        self._server, self._tally = server, tally
        self._token = server.url.partition("#token=")[2]

    async def __aenter__(self) -> Reader:
        self._input, self._output = await asyncio.open_connection("127.0.0.1", self._server.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._output.close()

    async def get(self, path: str) -> bytes:
        start = time.perf_counter()
        try:
            status, body = await self._ask(path)
        except (OSError, EOFError, ValueError) as error:
            self._tally.errors.append(f"{path}: {error!r}")
            raise
        self._tally.seconds.append(time.perf_counter() - start)
        self._tally.bytes += len(body)
        if status != 200:
            self._tally.errors.append(f"{path}: {status} {body[:200]!r}")
        return body

    async def _ask(self, path: str) -> tuple[int, bytes]:
        host = f"127.0.0.1:{self._server.port}"
        words = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {self._token}\r\n\r\n"
        self._output.write(words.encode())
        head = (await self._input.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        return int(head[0].split()[1]), await self._input.readexactly(int(headers["content-length"]))


async def crowd(server: Server, tally: Tally, readers: int, seconds: float, scans: int) -> None:
    """Everybody opens scans at random until the time is over."""
    end = time.perf_counter() + seconds

    async def read(seed: int) -> None:
        chance = random.Random(seed)
        async with Reader(server, tally) as reader:
            await reader.get("/api/gallery")
            await reader.get("/api/splits/0/scans")
            while time.perf_counter() < end:
                scan = chance.randrange(scans)
                told = json.loads(await reader.get(f"/api/splits/0/scans/{scan}"))
                first = chance.randrange(told["slices"])
                for place in range(first, min(first + SLICES_OF_A_VISIT, told["slices"])):
                    await reader.get(f"/api/scans/{scan}/pixels/{place}")
                    if time.perf_counter() > end:
                        break

    found = await asyncio.gather(*(read(seed) for seed in range(readers)), return_exceptions=True)
    tally.errors += [repr(one) for one in found if isinstance(one, Exception) and repr(one) not in tally.errors]


async def browse(server: Server, tally: Tally, scans: int) -> list[float]:
    """One reader looks at every slice of every scan; MiB after each scan."""
    memory = []
    async with Reader(server, tally) as reader:
        for scan in range(scans):
            told = json.loads(await reader.get(f"/api/splits/0/scans/{scan}"))
            for place in range(told["slices"]):
                await reader.get(f"/api/scans/{scan}/pixels/{place}")
            memory.append(server.mib())
    return memory


DRAW = """async (steps) => {
  const panel = document.querySelector(".panel")
  const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }))
  const frame = () => new Promise((done) => requestAnimationFrame(done))
  const drawn = async (place) => { while (panel.dataset.drawn.split("/")[1] !== String(place)) await frame() }
  press("Home")
  await drawn(0)
  for (let place = 1; place <= steps; place++) {
    press("ArrowDown")
    await drawn(place) // fetches
  }
  const milliseconds = []
  for (let place = steps - 1; place >= 0; place--) {
    const start = performance.now()
    press("ArrowUp")
    await drawn(place)
    await frame()
    milliseconds.push(performance.now() - start)
  }
  return milliseconds
}"""
"""Goes through the slices of a scan, then back: milliseconds from each key to the frame after the slice."""


def look(server: Server, tally: Tally, slices: int) -> None:
    """Draw slices in a browser; without a browser the `Tally` stays empty."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        browser = None
    if not browser:
        return
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer", "--disable-3d-apis"]
        chromium = playwright.chromium.launch(executable_path=browser, args=options)
        page = chromium.new_page(viewport={"width": 1366, "height": 768})
        page.set_default_timeout(300_000)
        page.goto(server.url)
        page.wait_for_selector(".panel[data-drawn]")
        tally.seconds += [one / 1000 for one in page.evaluate(DRAW, min(slices, SLICES_ON_SCREEN) - 1)]
        chromium.close()


@contextmanager
def watched(server: Server) -> Iterator[list[float]]:
    """Memory, four times a second."""
    seen, stop = [server.mib()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.25):
            seen.append(server.mib())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


# ----------------------------------------------------------------------------------------------------
# Both
# ----------------------------------------------------------------------------------------------------


def summary(name: str, tally: Tally, seconds: float, memory: list[float]) -> dict[str, object]:
    times = 1000 * np.array(tally.seconds)
    return {
        "step": name,
        "requests": len(times),
        "per_second": round(len(times) / seconds, 1),
        "mib_per_second": round(tally.bytes / 2**20 / seconds, 1),
        "median_ms": round(float(np.median(times)), 1),
        "p99_ms": round(float(np.quantile(times, 0.99)), 1),
        "peak_mib": round(max(memory)),
        "errors": len(tally.errors),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="The viewer with many readers, and with many scans.")
    parser.add_argument("--readers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--scans", type=int, default=200)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--slices", type=int, default=40)
    options = parser.parse_args(arguments)
    steps, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        manifest = make_study(Path(folder), options.scans, options.size, options.slices)
        mib_of_all = float((manifest.lengths * options.size**2 * 2).sum()) / 2**20
        print(f"{options.scans} scans, {manifest.lengths.sum():,} slices, {mib_of_all:,.0f} MiB as the page reads them")
        print(f"{'step':<9}" + "".join(f"{title:>{width}}" for title, width in COLUMNS.values()))
        with started(Path(folder)) as server:
            for name in ("crowd", "browse", "page"):
                tally, start = Tally(), time.perf_counter()
                with watched(server) as memory:
                    if name == "crowd":
                        asyncio.run(crowd(server, tally, options.readers, options.seconds, options.scans))
                    elif name == "page":
                        look(server, tally, int(manifest.lengths.min()))
                    else:
                        after_scans = asyncio.run(browse(server, tally, options.scans))
                if not tally.seconds:
                    print(f"{name:<9} left out: it needs playwright and Chromium")
                    continue
                step = summary(name, tally, time.perf_counter() - start, memory)
                cells = "".join(f"{step[column]:>{width}}" for column, (_, width) in COLUMNS.items())
                print(f"{name:<9}{cells}", flush=True)
                steps.append(step)
                errors += tally.errors
    for error in errors[:5]:
        print(error)
    half = max(1, len(after_scans) // 2)
    goals = {
        f"no error: {options.readers} readers for {options.seconds:g} s, {options.scans} scans": not errors,
        "memory stops growing": max(after_scans[half:] or [0.0]) <= GROWTH * max(after_scans[:half]),
    }
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    chosen = {name: getattr(options, name) for name in ("readers", "seconds", "scans", "size", "slices")}
    print(json.dumps({"benchmark": "viewer", "machine": machine("cpu"), **chosen, "steps": steps, "goals": goals}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
