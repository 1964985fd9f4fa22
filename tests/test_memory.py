"""Freed memory is kept: allocating it again clears no pages."""

import subprocess
import sys

SCRIPT = """
import resource, sys
import numpy as np
from normal_guidance.memory import keep_freed_memory

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
