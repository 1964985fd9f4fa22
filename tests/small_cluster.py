"""A real Ray cluster of small nodes on this machine, for the tests of what runs on one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

IGNORES = (
    # Ray's own: sockets and files that it leaves to the garbage collector, and names that Python will drop.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::DeprecationWarning:ray.*",
    "ignore::FutureWarning:ray.*",
    "ignore::DeprecationWarning:google.*",
)

quiet = pytest.mark.filterwarnings(*IGNORES)


@contextmanager
def started(nodes: int, cpus: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """The cluster, and its nodes but the head; their processes import what the tests in `tests` and beside share."""
    from ray.cluster_utils import Cluster

    here = [str(HERE), str(HERE / "scans" / "features")]
    light = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_METRICS_COLLECTION": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
        "PYTHONPATH": os.pathsep.join(filter(None, [*here, os.environ.get("PYTHONPATH")])),
    }
    before = {name: os.environ.get(name) for name in light}
    os.environ |= light
    small = {"num_cpus": cpus, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        others = [cluster.add_node(**small) for _ in range(nodes - 1)]
        cluster.wait_for_nodes()
        yield cluster, others
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
