"""The cores and the disk that a program may use; in a container, less than the machine has."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from normal_guidance.memory import read_line

GIB = 2**30


def usable_cores() -> float:
    """Return the cores that this process may use, by its affinity and the quota of its control group.

    Example:
        >>> 0 < usable_cores() <= os.cpu_count()
        True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (read_line("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return float(cores) if quota == "max" else min(float(cores), int(quota) / int(period))


def disk(folder: Path) -> tuple[Path, int, bool]:
    """Return the folder or its first existing parent, its free bytes, and whether it can be written to.

    Example:
        >>> disk(Path("/no/such/folder"))[0]
        PosixPath('/')
    """
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    return there, shutil.disk_usage(there).free, os.access(there, os.W_OK)
