"""Cores, memory and disk that a program may use (in a container, less than the machine has), and what this one took."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
_LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Makes glibc keep large freed blocks, for the whole process; returns whether this worked.

    By default glibc returns a freed block of more than 32 MB to the system, which clears its pages before they are used
    again.  A network on the CPU frees and allocates such blocks in every layer: EfficientNet-Lite0 spends half of its
    time on clearing them (LOG.md).  The price: the process never shrinks.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it followed from, says that memory ran out, in torch's or a library's words."""
    if error is None:
        return False
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    found = isinstance(error, MemoryError) or any(word in str(error) for word in words)
    return found or type(error).__name__ == "OutOfMemoryError" or is_out_of_memory(error.__context__)


def peak_bytes(device: str) -> int:
    """Return the most memory that was taken so far: on CUDA of the card, else by this process."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_reserved(device)
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def usable_cores() -> float:
    """Return the cores that this process may use, by its affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return float(cores) if quota == "max" else min(float(cores), int(quota) / int(period))


def machine_memory() -> tuple[int | None, int | None]:
    """Return the bytes that a program may use, and those that are free or reclaimable; None if the system hides them."""
    lines = (line.split() for line in (_read("/proc/meminfo") or "").splitlines())
    known = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) > 1}
    total, free = known.get("MemTotal"), known.get("MemAvailable")
    if total is None and hasattr(os, "sysconf"):  # Windows has neither
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max") or "max"
    if limit != "max" and (total is None or int(limit) < total):
        total = int(limit)
        used = int(_read("/sys/fs/cgroup/memory.current") or 0)
        free = max(0, total - used) if free is None else min(free, max(0, total - used))
    return total, free


def limit_memory(size: int) -> None:
    """Let this process take so many bytes more than it has; where the system knows no such limit, nothing happens."""
    pages = (_read("/proc/self/statm") or "").split()
    if not pages:  # not Linux
        return
    import resource

    limit, (_, hard) = int(pages[0]) * resource.getpagesize() + size, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def disk(folder: Path) -> tuple[Path, int, bool]:
    """Return the folder or its first existing parent, its free bytes, and whether it can be written to."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    return there, shutil.disk_usage(there).free, os.access(there, os.W_OK)


def _read(file: str) -> str | None:
    """Return the text of one of the system's own files, or None where there is none."""
    try:
        return Path(file).read_text().strip()
    except OSError:
        return None
