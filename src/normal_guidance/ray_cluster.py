"""A Ray cluster that runs already, lent for some work; what goes wrong there is told as the user's next step."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from normal_guidance.errors import UserError

ANSWER_SECONDS = 10.0
"""How long a cluster's machine may take to answer; Ray itself would try for minutes."""

RETRIES = 5
"""How often Ray runs a task again whose machine or process died."""


@dataclass(frozen=True)
class Connection:
    """A cluster, connected."""

    address: str

    def room(self, needs: Mapping[str, float], hint: str) -> int:
        """How many tasks with these needs (CPU, GPU) it can run at a time; refused, with a hint, if none."""
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
        """What came of a task."""
        import ray

        try:
            return ray.get(task)
        except UserError as error:
            raise UserError(str(getattr(error, "cause", error))) from error
        except ray.exceptions.RayError as error:
            raise UserError(
                f"--ray {self.address}: a task failed ({error}); the same command goes on where it was"
            ) from error


@contextmanager
def connected(address: str) -> Iterator[Connection]:
    """Lends the cluster at this address."""
    try:
        import ray
    except ImportError as error:
        raise UserError("ray is not installed; pip install 'normal-guidance[ray]', or leave out --ray") from error
    _check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"--ray {address}: no cluster answers ({error}); start one: ray start --head") from error
    try:
        yield Connection(address)
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuses HOST:PORT where nobody listens; other forms ('auto', 'ray://...') are Ray's to judge."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--ray {address}: no cluster answers ({error}); start one: ray start --head") from error


def fits(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many tasks a machine can run at a time.

    Example:
        >>> fits({"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}), fits({"CPU": 8.0}, {"GPU": 1.0})
        (2, 0)
    """
    return int(min(node.get(name, 0.0) // count for name, count in needs.items()))
