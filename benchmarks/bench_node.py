"""`nguide node` under kills, hostile senders and load, with a real archive (Orthanc).

    python benchmarks/bench_node.py                      # all but the load: about ten minutes on two cores
    python benchmarks/bench_node.py --parts latency      # one part
    python benchmarks/bench_node.py --parts load --hours 8

    kills     200 series from four senders, while the node is killed ten times and the archive is down for a minute:
              at the end the archive has exactly one result of each series
    hostile   truncated, unknown and wrong messages and 10,000 associations, while a good series goes through
    latency   seconds from the last slice to the result in the archive, beside the bare prediction in one process
    load      memory, queue and latency over hours

Scans are drawn (12 slices of 32 x 32), and the encoder is a small random projection, so the node's own work is measured
and not the encoder's.  It prints tables and, last, one JSON line; the exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from pydicom import Dataset, dcmread

from normal_guidance.clinic.predict.new_scans import find_scans
from normal_guidance.clinic.predict.predicting import PredictOptions, Predictor
from normal_guidance.clinic.results.result_folder import write_scan
from normal_guidance.fit import bundle as bundles
from normal_guidance.fit.bundle import load_bundle, write_bundle
from orthanc import ORTHANC, Orthanc, free_port, make_orthanc
from report import machine
from small_bundle import make_run, tiny
from small_node import RESULTS, always_positive, associate, read_status, start_program

ROOT = "1.2.826.0.1.3680043.9.7"
SENDERS = 4
SETTLE = 1.0
HANGS = 3600
PARTS = ("kills", "hostile", "latency", "load")


@dataclass
class Bench:
    """The folder of a benchmark: a model, scans to draw series from, an archive and a node."""

    folder: Path
    archive: Orthanc = field(init=False)
    process: subprocess.Popen[str] | None = None
    starts: int = 0

    def __post_init__(self) -> None:
        bundles.load_encoder = lambda name, **_: tiny()
        made = make_run(self.folder / "trained")
        self.bundle = always_positive(load_bundle(made.run))
        write_bundle(self.bundle, self.folder / "bundle")
        self.scans = [[made.manifest.root / file for file in row.files] for row in made.manifest]
        self.dicom_port, self.status_port = free_port(), free_port()
        self.archive = make_orthanc(self.folder / "archive", {"NGUIDE": ["127.0.0.1", self.dicom_port]})
        self.archive.start()

    def series(self, number: int) -> list[Dataset]:
        """A series that nobody else has: the slices of a drawn scan with UIDs of its own."""
        slices = [dcmread(file) for file in self.scans[number % len(self.scans)]]
        for place, one in enumerate(slices, start=1):
            one.StudyInstanceUID, one.SeriesInstanceUID = f"{ROOT}.{number}", f"{ROOT}.{number}.1"
            one.SOPInstanceUID = one.file_meta.MediaStorageSOPInstanceUID = f"{ROOT}.{number}.1.{place}"
        return slices

    def start_node(self, state: str, *more: object) -> None:
        """Start the node and wait until it answers."""
        self.starts += 1
        words: list[object] = [self.folder / state, "--model", self.folder / "bundle", "--port", self.dicom_port]
        words += ["--from", "SENDER@127.0.0.1", "--to", self.archive.to, "--settle", SETTLE, "--workers", 1]
        words += ["--status", f"127.0.0.1:{self.status_port}", *more]
        self.process = start_program(words, log=self.folder / "node.log")
        wait_for(lambda: read_status(self.status_port) or self._ended(), "the node starts")

    def _ended(self) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the node ended by itself: {(self.folder / 'node.log').read_text()[-2000:]}")

    def kill_node(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop_node(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(HANGS)

    def results(self) -> Counter[str]:
        """Objects in the archive, by the study that they belong to."""
        studies = {one["ID"]: one["MainDicomTags"]["StudyInstanceUID"] for one in self.archive.get("/studies?expand")}
        found: Counter[str] = Counter()
        for one in self.archive.get("/series?expand"):
            found[studies[one["ParentStudy"]]] += len(one["Instances"])
        return found


def wait_for(true: Callable[[], Any], what: str, pause: float = 0.1) -> Any:
    begin = time.monotonic()
    while not (found := true()):
        if time.monotonic() - begin > HANGS:
            raise TimeoutError(what)
        time.sleep(pause)
    return found


def send_series(bench: Bench, slices: Sequence[Dataset]) -> int:
    """Send a series until all of it is accepted in one association; returns the number of attempts."""
    for attempt in range(1, 10_000):
        try:
            association = associate(bench.dicom_port)
            if association.is_established:
                good = all(association.send_c_store(one).get("Status") == 0 for one in slices)
                released = association.is_established
                association.release()
                if good and released:
                    return attempt
        except (OSError, RuntimeError, ValueError):
            pass  # the node was killed within a message
        time.sleep(0.5)
    raise TimeoutError("a series was never accepted")


# ----------------------------------------------------------------------------------------------------
# Kills
# ----------------------------------------------------------------------------------------------------


def measure_kills(bench: Bench, series: int, kills: int, down_seconds: float, seed: int) -> dict[str, Any]:
    """Send series while the node is killed and the archive is down; count what the archive has at the end."""
    chance, begin = random.Random(seed), time.monotonic()
    numbers: queue.Queue[int] = queue.Queue()
    for number in range(1, series + 1):
        numbers.put(number)
    attempts: list[int] = []

    def sender() -> None:
        while True:
            try:
                number = numbers.get_nowait()
            except queue.Empty:
                return
            attempts.append(send_series(bench, bench.series(number)))

    before = set(bench.results())
    bench.start_node("kills")
    threads = [threading.Thread(target=sender, daemon=True) for _ in range(SENDERS)]
    for thread in threads:
        thread.start()

    def archive_down() -> None:
        time.sleep(20)
        bench.archive.stop()
        time.sleep(down_seconds)
        bench.archive.start()

    archive_thread = threading.Thread(target=archive_down, daemon=True)
    archive_thread.start()
    for kill in range(1, kills + 1):
        time.sleep(chance.uniform(2, 8))
        known = (read_status(bench.status_port) or {}).get("queue")
        bench.kill_node()
        print(f"  kill {kill:2d} after {time.monotonic() - begin:5.0f} s; queue {known}", flush=True)
        bench.start_node("kills")
    for thread in [*threads, archive_thread]:
        thread.join(HANGS)
    sent = time.monotonic() - begin

    def settled() -> Any:
        status = read_status(bench.status_port)
        counts = status and status["queue"]
        return counts and counts["done"] == series and counts

    states = wait_for(settled, "all series are done", pause=1.0)
    found = bench.results()
    wanted = {f"{ROOT}.{number}" for number in range(1, series + 1)}
    once = sum(found[study] == RESULTS for study in wanted)
    seconds = time.monotonic() - begin
    code = bench.stop_node()
    result = {
        "series": series,
        "kills": kills,
        "archive_down_s": down_seconds,
        "exactly_one_result": once,
        "without": sum(found[study] < RESULTS for study in wanted),
        "more_than_one": sum(found[study] > RESULTS for study in wanted),
        "foreign": len(set(found) - wanted - before),
        "resent_series": sum(one > 1 for one in attempts),
        "attempts": sum(attempts),
        "sent_after_s": round(sent, 1),
        "done_after_s": round(seconds, 1),
        "states": states,
        "exit_code": code,
    }
    print(f"kills: {once} of {series} series have exactly one result; {result['resent_series']} were sent again")
    result["goals"] = {"every series has exactly one result": once == series and not result["foreign"] and code == 0}
    return result


# ----------------------------------------------------------------------------------------------------
# Hostile senders
# ----------------------------------------------------------------------------------------------------


def association_request(calling: str) -> bytes:
    """The bytes with which a sender asks for an association."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        got: list[bytes] = []

        def accept() -> None:
            connection, _ = listening.accept()
            got.append(connection.recv(65536))
            connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        associate(listening.getsockname()[1], calling=calling)
        thread.join()
        return got[0]


def attacks(bench: Bench, associations: int) -> dict[str, Callable[[], None]]:
    """What each hostile sender does, over and over."""
    known, unknown = association_request("SENDER"), association_request("NOBODY")

    def speak(content: bytes, patience: float = 5.0) -> None:
        try:
            with socket.create_connection(("127.0.0.1", bench.dicom_port), timeout=patience) as one:
                one.settimeout(patience)
                one.sendall(content)
                one.recv(4096)
        except OSError:
            pass

    def wrong_class() -> None:
        association = associate(bench.dicom_port, classes=["1.2.840.10008.5.1.4.1.1.104.1"])  # an encapsulated PDF
        if association.is_established:
            association.release()

    noise = random.Random(1)
    return {
        "unknown AE": lambda: speak(unknown),
        "truncated PDU": lambda: speak(known[: len(known) // 2], 0.05),
        "stated length of 4 GB": lambda: speak(b"\x04\x00\xff\xff\xff\xff" + bytes(64)),
        "garbage": lambda: speak(noise.randbytes(300)),
        "accepted and left": lambda: speak(known),
        "wrong SOP class": wrong_class,
    }


def measure_hostile(bench: Bench, associations: int) -> dict[str, Any]:
    """Attack the node while good series go through."""
    bench.start_node("hostile")
    before = read_status(bench.status_port)
    done: Counter[str] = Counter()
    ended = threading.Event()
    each = attacks(bench, associations)
    todo = queue.SimpleQueue[str]()
    for number in range(associations):
        todo.put(list(each)[number % (len(each) - 1)])  # wrong SOP classes, which are slow to ask for, run beside

    def attacker() -> None:
        while not ended.is_set():
            try:
                name = todo.get_nowait()
            except queue.Empty:
                return
            each[name]()
            done[name] += 1

    def slow_attacker() -> None:
        while not ended.is_set():
            each["wrong SOP class"]()
            done["wrong SOP class"] += 1

    threads = [threading.Thread(target=attacker, daemon=True) for _ in range(8)]
    slow = threading.Thread(target=slow_attacker, daemon=True)
    begin = time.monotonic()
    for thread in [*threads, slow]:
        thread.start()
    good = []
    number = 10_000
    while any(thread.is_alive() for thread in threads):
        number += 1
        start = time.monotonic()
        send_series(bench, bench.series(number))
        wait_for(lambda: bench.results()[f"{ROOT}.{number}"] == RESULTS, "a good series", pause=0.2)  # noqa: B023
        good.append(time.monotonic() - start)
    seconds = time.monotonic() - begin
    ended.set()
    slow.join()
    time.sleep(12)  # connections that say nothing end after ten seconds
    after = read_status(bench.status_port)
    code = bench.stop_node()
    result = {
        "associations": sum(done.values()),
        "by_kind": dict(done),
        "seconds": round(seconds, 1),
        "good_series": len(good),
        "good_series_s": {"median": round(statistics.median(good), 2), "longest": round(max(good), 2)},
        "memory_mb": {name: round(one["memory_bytes"] / 1e6) for name, one in (("before", before), ("after", after))},
        "associations_after": after["associations"],
        "exit_code": code,
    }
    print(f"hostile: {result['associations']} in {seconds:.0f} s; {len(good)} good series went through meanwhile")
    for name, count in done.most_common():
        print(f"  {name:24} {count:6d}")
    result["goals"] = {
        "good series go through under attack": len(good) > 0,
        "nothing is left of the attack": after["associations"] == 0 and after["ok"] and code == 0,
    }
    return result


# ----------------------------------------------------------------------------------------------------
# Latency
# ----------------------------------------------------------------------------------------------------


def measure_latency(bench: Bench, repeats: int) -> dict[str, Any]:
    """The time from the last slice to the result in the archive, in turn with the bare prediction of the same scan."""
    bench.start_node("latency")
    through, bare = [], []
    with Predictor(bench.bundle, options=PredictOptions(workers=1)) as predictor:
        for number in range(20_000, 20_000 + repeats + 1):
            send_series(bench, bench.series(number))
            begin = time.monotonic()
            wait_for(lambda: _has_results(bench, f"{ROOT}.{number}"), "a result", pause=0.02)  # noqa: B023
            through.append(time.monotonic() - begin)
            bare.append(_bare_seconds(bench, predictor, number))
    bench.stop_node()
    node, alone = statistics.median(through[1:]), statistics.median(bare[1:])  # the first ones start the workers
    result = {
        "repeats": repeats,
        "settle_s": SETTLE,
        "last_slice_to_archive_s": {"median": round(node, 3), "longest": round(max(through[1:]), 3)},
        "bare_prediction_s": {"median": round(alone, 3), "longest": round(max(bare[1:]), 3)},
        "beyond_settling_and_predicting_s": round(node - SETTLE - alone, 3),
        "goals": {},
    }
    print(f"latency: {node:.2f} s from the last slice to the archive, of which {SETTLE:g} s waiting for more slices")
    print(f"         {alone:.2f} s for the bare prediction with its DICOM results in one process")
    return result


def _has_results(bench: Bench, study: str) -> bool:
    """Whether the archive has the result of a study: asked by its UID, so that a full archive answers as fast."""
    query = {"Level": "Instance", "Query": {"StudyInstanceUID": study}}
    return len(bench.archive.post("/tools/find", query)) >= RESULTS


def _bare_seconds(bench: Bench, predictor: Predictor, number: int) -> float:
    folder = bench.folder / "bare" / str(number)
    folder.mkdir(parents=True)
    for one in bench.series(number):
        one.save_as(folder / f"{one.InstanceNumber}.dcm")
    begin = time.monotonic()
    (outcome,) = predictor.predict(find_scans([folder]))
    write_scan(outcome, bench.bundle, bench.folder / "bare-results", dicom=True)
    return time.monotonic() - begin


# ----------------------------------------------------------------------------------------------------
# Load
# ----------------------------------------------------------------------------------------------------


def measure_load(bench: Bench, hours: float, pause: float) -> dict[str, Any]:
    """Send series for hours, and record memory, queue and latency ten times."""
    bench.start_node("load", "--keep", 0)
    end, number = time.monotonic() + hours * 3600, 100_000
    steps: list[dict[str, Any]] = []
    print("  hours  memory MB  waiting   done  median s    p95 s")
    while time.monotonic() < end:
        due = time.monotonic() + hours * 360
        while time.monotonic() < min(due, end):
            number += 1
            send_series(bench, bench.series(number))
            time.sleep(pause)
        status = read_status(bench.status_port)
        counts, wait = status["queue"], status["seconds_from_last_slice_to_sent"]
        step = {
            "hours": round(hours - (end - time.monotonic()) / 3600, 2),
            "memory_mb": round(status["memory_bytes"] / 1e6),
            "waiting": sum(counts[state] for state in ("receiving", "ready", "predicted", "sent")),
            "done": counts["done"],
            **wait,
        }
        steps.append(step)
        print(
            f"  {step['hours']:5.2f}  {step['memory_mb']:9d}  {step['waiting']:7d}  {step['done']:5d}  "
            f"{step['median'] or 0:8.1f}  {step['p95'] or 0:7.1f}",
            flush=True,
        )
    bench.stop_node()
    half = len(steps) // 2
    grown = max(one["memory_mb"] for one in steps[half:]) / max(one["memory_mb"] for one in steps[: max(1, half)])
    return {"hours": hours, "steps": steps, "goals": {"memory stops growing": grown <= 1.1}}


# ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default="kills,hostile,latency", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--series", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--down", type=float, default=60.0, help="seconds for which the archive is down")
    parser.add_argument("--associations", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two series of the load")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))} unknown; choose from {', '.join(PARTS)}")
    if ORTHANC is None:
        parser.error("Orthanc is not installed; apt install orthanc orthanc-dicomweb")
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            if "latency" in parts:
                measured["latency"] = measure_latency(bench, options.repeats)
            if "kills" in parts:
                measured["kills"] = measure_kills(bench, options.series, options.kills, options.down, options.seed)
            if "hostile" in parts:
                measured["hostile"] = measure_hostile(bench, options.associations)
            if "load" in parts:
                measured["load"] = measure_load(bench, options.hours, options.pause)
        finally:
            if bench.process is not None and bench.process.poll() is None:
                bench.kill_node()
            bench.archive.stop()
    goals = {goal: met for one in measured.values() for goal, met in one["goals"].items()}
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    print(json.dumps({"benchmark": "node", "machine": machine("cpu"), **measured, "goals": goals}))
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
