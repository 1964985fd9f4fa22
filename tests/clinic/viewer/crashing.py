"""Decoders that crash or hang; workers find them by their names, so they lie in a module of their own."""

import os
import signal

import numpy as np

from normal_guidance.clinic.viewer import images as slice_decoding


def crash_on_the_first(wanted: slice_decoding.SliceRequest) -> np.ndarray:
    """Dies as a decoder in C does, over the slice at position 0."""
    if wanted.row.positions[0] == wanted.row.positions[-1] == FATAL:
        os.kill(os.getpid(), signal.SIGSEGV)
    return slice_decoding.decode(wanted)


FATAL = 0.0
