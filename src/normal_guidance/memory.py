"""Keeps freed memory in the process for its next use."""

from __future__ import annotations

import ctypes

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
