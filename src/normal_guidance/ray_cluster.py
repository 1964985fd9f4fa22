"""Connects to a running Ray cluster; its errors become UserErrors that name the next step."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from normal_guidance.errors import UserError
from normal_guidance.extras import install_command

ANSWER_SECONDS = 10.0
"""Longest wait for an answer of the cluster; Ray itself would try for minutes."""

RETRIES = 5
"""How often Ray repeats a task whose machine or process died."""


@dataclass(frozen=True)
class Connection:
    """A connected cluster."""

    address: str

    def room(self, needs: Mapping[str, float], hint: str) -> int:
        """The number of tasks with these needs (CPU, GPU) that run at a time; a UserError with `hint` if it is 0."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(fits(node, needs) for node in nodes)
        if not room:
            wanted = ", ".join(f"{count:g} {name}" for name, count in needs.items())
            raise UserError(
                f"--ray {self.address}: none of the cluster's {len(nodes)} machines has {wanted}; {hint}, or add "
                "machines"
            )
        return room

    def result(self, task: Any) -> Any:
        """The result of a task."""
        import ray

        try:
            return ray.get(task)
        except UserError as error:
            raise UserError(str(getattr(error, "cause", error))) from error
        except ray.exceptions.RayError as error:
            raise UserError(
                f"--ray {self.address}: a task failed ({error}); run the same command again to continue"
            ) from error


@contextmanager
def connected(address: str) -> Iterator[Connection]:
    """Connects to the cluster at this address for a block."""
    try:
        import ray
    except ImportError as error:
        raise UserError(f"ray is not installed; {install_command('ray')}, or leave out --ray") from error
    _check_answers(address)
    ending = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"--ray {address}: no cluster answers ({error}); start one: ray start --head") from error
    if ending is not None and threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, ending
        )  # Ray's own would end the process with code 15 and skip the command line's
    try:
        yield Connection(address)
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuses HOST:PORT if no server listens there; Ray checks other forms ('auto', 'ray://...') itself."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--ray {address}: no cluster answers ({error}); start one: ray start --head") from error


def fits(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """The number of tasks that a machine can run at a time."""
    return int(min(node.get(name, 0.0) // count for name, count in needs.items()))
