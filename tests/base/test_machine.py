"""A container's cores and memory are known; freed memory is kept: allocating it again clears no pages."""

import subprocess
import sys

from normal_guidance.base import system as machine

SCRIPT = """
import resource, sys
import numpy as np
from normal_guidance.base.system import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory():
    print("no glibc")
    raise SystemExit
for turn in range(20):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(100_000_000, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> str:
    run = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_pages_are_cleared_once_not_every_time() -> None:
    kept = faults("keep")
    if kept != "no glibc":
        assert int(kept) < int(faults("default")) / 5


def test_a_container_has_less_than_its_machine(monkeypatch):
    files = {
        "/sys/fs/cgroup/cpu.max": "50000 100000",
        "/sys/fs/cgroup/memory.max": str(2**30),
        "/sys/fs/cgroup/memory.current": str(2**28),
        "/proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0",
    }
    monkeypatch.setattr(machine, "_read", files.get)
    assert machine.usable_cores() == 0.5
    assert machine.machine_memory() == (2**30, 2**30 - 2**28)
    del files["/sys/fs/cgroup/memory.max"]
    assert machine.machine_memory() == (2**34, 2**33)
    del files["/proc/meminfo"]
    monkeypatch.delattr(machine.os, "sysconf")
    assert machine.machine_memory() == (None, None)
