"""What tests of `nguide node` share: a node in this process or in one of its own, senders, and waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydicom import Dataset, dcmread
from pydicom.uid import ExplicitVRLittleEndian
from pynetdicom import AE, evt
from pynetdicom.sop_class import CTImageStorage, Verification

from killing import signals_of_a_terminal
from normal_guidance.clinic.node import node as nodes
from normal_guidance.clinic.node.destination import Identity
from normal_guidance.clinic.node.node import Node, NodeSettings, run_node
from normal_guidance.clinic.node.partners import parse_peer
from normal_guidance.clinic.node.receiver import Listening
from normal_guidance.clinic.node.sending import parse_destination
from normal_guidance.clinic.node.series_queue import UNFINISHED
from normal_guidance.clinic.node.serving import Taking
from normal_guidance.clinic.predict.predicting import PredictOptions, Predictor
from normal_guidance.fit.bundle import Bundle
from working import HANGS, wait_until

PROGRAM = Path(__file__).parent / "node_program.py"

RESULTS = 3
"""Objects of a result: key objects, structured report, picture."""


@dataclass
class Running:
    """A node in this process."""

    node: Node
    port: int | None
    aet: str = "NGUIDE"

    def wait(self, state: str, count: int = 1) -> list[Any]:
        """Wait until so many series are in a state, and return them."""
        return wait_until(lambda: len(found := self.node.queue.in_state(state)) >= count and found, state)

    def wait_finished(self) -> dict[str, int]:
        """Wait until nothing waits, and return the number of series in each state."""

        def states() -> dict[str, int] | None:
            found = self.node.queue.by_state()
            return None if sum(found[state] for state in UNFINISHED) else {k: v for k, v in found.items() if v}

        return wait_until(states, "finished")

    def take(self, files: Sequence[Path | Dataset]) -> dict[str, int]:
        """Send files, all of which are accepted, and wait until nothing waits."""
        assert self.port is not None
        assert set(send(self.port, files)) == {0}
        return self.wait_finished()


@contextmanager
def running_node(
    state: Path,
    bundle: Any,
    *,
    senders: Sequence[str] = ("SENDER@127.0.0.1",),
    to: Sequence[str] = (),
    settle: float = 0.2,
    rules: Sequence[Any] = (),
    tls: tuple[Any, Any] = (None, None),
    commit: bool = False,
    port: int = 0,
    **more: Any,
) -> Iterator[Running]:
    """A node in this process for the time of a block."""
    identity = Identity("NGUIDE", commit, tls[1])
    settings = NodeSettings(
        state=state,
        listening=Listening("NGUIDE", "127.0.0.1", port, tls[0]) if senders else None,
        senders=tuple(map(parse_peer, senders)),
        destinations=tuple(parse_destination(one, identity) for one in to),
        taking=Taking(tuple(rules), float(settle)),
        tls=tls[1],
        **more,
    )
    with run_node(settings, Predictor(bundle, options=PredictOptions(workers=0))) as (node, port):
        yield Running(node, port)


def always_positive(bundle: Bundle) -> Bundle:
    """A model that calls every scan positive, so that each has key objects."""
    operation = bundle.operation
    return replace(bundle, operation=replace(operation, point=replace(operation.point, threshold=1e-6)))


def quick_loops(monkeypatch) -> None:
    """Threads look for work more often, and pauses between attempts are short."""
    monkeypatch.setattr(nodes, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(nodes, "STOP_SECONDS", 5.0)
    monkeypatch.setattr("normal_guidance.clinic.node.sending.FIRST_PAUSE", 0.05)
    monkeypatch.setattr("normal_guidance.clinic.node.sending.LONGEST_PAUSE", 0.2)


def associate(port: int, *, calling: str = "SENDER", called: str = "NGUIDE", classes: Sequence[Any] = (), **more: Any):
    """An association with a node, established or not."""
    entity = AE(calling)
    entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = HANGS
    entity.connection_timeout = 30
    for one in classes or (Verification, CTImageStorage):
        entity.add_requested_context(one, [ExplicitVRLittleEndian])
    return entity.associate("127.0.0.1", port, ae_title=called, **more)


def send(port: int, files: Sequence[Path | Dataset], **more: Any) -> list[int | None]:
    """Send files in one association, and return the status of each."""
    association = associate(port, **more)
    assert association.is_established
    statuses = []
    for file in files:
        dataset = file if isinstance(file, Dataset) else dcmread(file)
        statuses.append(association.send_c_store(dataset).get("Status"))
    association.release()
    return statuses


@contextmanager
def small_archive(
    status: Callable[[Dataset], int] = lambda dataset: 0, port: int = 0, tls: Any = None
) -> Iterator[Any]:
    """A Storage SCP that keeps what it gets: yields (port, list of data sets)."""
    entity, got = AE("ARCHIVE"), []
    from pynetdicom import StoragePresentationContexts

    entity.supported_contexts = StoragePresentationContexts

    def store(event: Any) -> int:
        dataset = event.dataset
        answer = status(dataset)
        if answer == 0:
            got.append(dataset)
        return answer

    server = entity.start_server(
        ("127.0.0.1", port), block=False, evt_handlers=[(evt.EVT_C_STORE, store)], ssl_context=tls
    )
    try:
        yield server.server_address[1], got
    finally:
        server.shutdown()


def start_program(words: Sequence[object], die: str = "", log: Path | None = None) -> subprocess.Popen[str]:
    """Start `nguide node` with the tiny encoder; `die` names the call at which it is killed (`node_program`)."""
    command = [sys.executable, str(PROGRAM), "node", *map(str, words)]
    environment = os.environ | {"NODE_DIE": die, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"text": True, "env": environment, "preexec_fn": signals_of_a_terminal}
    if log is None:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, **options)


def read_status(port: int) -> Any:
    """The status of a node, or None if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=30) as answer:
            return json.loads(answer.read())
    except OSError:
        return None
