"""A decoder that crashes; workers find it by its name, so it lies in a module of its own."""

import os
import signal

import numpy as np

from normal_guidance.clinic.viewer import images


def crash_on_the_first(wanted: images.SliceRequest) -> np.ndarray:
    """Dies as a decoder in C does, over the slice at position 0."""
    if wanted.row.positions[0] == wanted.row.positions[-1] == 0.0:
        os.kill(os.getpid(), signal.SIGSEGV)
    return images.decode(wanted)
