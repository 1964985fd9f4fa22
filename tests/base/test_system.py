"""What the package runs on: cores and memory of a container, memory kept when freed, and the package's own commit."""

import subprocess
import sys
from pathlib import Path

import pytest

from normal_guidance.base import system
from normal_guidance.base.system import source_version

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


def test_pages_are_cleared_once_not_every_time() -> None:
    """Allocating freed memory again clears no pages."""
    runs = [[sys.executable, "-c", SCRIPT, mode] for mode in ("keep", "default")]
    kept, default = (subprocess.run(run, capture_output=True, text=True, check=True).stdout for run in runs)
    assert kept == "no glibc\n" or int(kept) < int(default) / 5


def test_a_container_has_less_than_its_machine(monkeypatch):
    files = {
        "/sys/fs/cgroup/cpu.max": "50000 100000",
        "/sys/fs/cgroup/memory.max": str(2**30),
        "/sys/fs/cgroup/memory.current": str(2**28),
        "/proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0",
    }
    monkeypatch.setattr(system, "_read", files.get)
    assert system.usable_cores() == 0.5
    assert system.machine_memory() == (2**30, 2**30 - 2**28)
    del files["/sys/fs/cgroup/memory.max"]
    assert system.machine_memory() == (2**34, 2**33)
    del files["/proc/meminfo"]
    monkeypatch.delattr(system.os, "sysconf")
    assert system.machine_memory() == (None, None)


def test_a_checkout_is_the_package_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NGUIDE_COMMIT", raising=False)

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    ours, theirs = tmp_path / "src" / "ours", tmp_path / ".venv" / "theirs"
    for package in (ours, theirs):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    assert source_version(ours) is None
    git("init", "-q")
    git("add", "src")
    git("commit", "-q", "-m", "one")
    assert source_version(ours) == {"id": git("rev-parse", "HEAD"), "dirty": False}
    assert source_version(theirs) is None  # installed inside a checkout that is not its own
    (ours / "new.py").write_text("")
    assert source_version(ours) == {"id": git("rev-parse", "HEAD"), "dirty": True}


def test_a_commit_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGUIDE_COMMIT", "abc123")
    assert source_version(tmp_path) == {"id": "abc123", "dirty": None, "told": True}
    # It wins over git, which may tell of a stale repository beside a copied tree.
    assert source_version() == {"id": "abc123", "dirty": None, "told": True}
