"""How freed memory is kept for the next use."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
_LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Tells glibc to keep large blocks that are freed, for the whole process; returns whether it could.

    By default glibc gives a freed block of more than 32 MB back to the system, which clears its pages when they are
    next asked for.  A network on the CPU frees and asks for such blocks in every layer: EfficientNet-Lite0 spends half
    of its time on clearing them (LOG.md).  The price: a process stays as large as it once was.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # no glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
