"""`nguide` with the small encoder of the tests, in a process of its own that waits before it writes a scan.

The first argument is a folder: the process makes `began` there, and waits until there is `go`.
"""

import sys
import time
from pathlib import Path

from normal_guidance.cli.__main__ import main
from normal_guidance.clinic.results import result_folder
from normal_guidance.fit import bundle
from small_bundle import tiny

WRITE = result_folder.write_scan


def write_when_told(*arguments: object) -> object:
    (GATE / "began").touch()
    while not (GATE / "go").exists():
        time.sleep(0.05)
    return WRITE(*arguments)


if __name__ == "__main__":
    GATE = Path(sys.argv.pop(1))
    bundle.load_encoder = lambda name, **_: tiny()
    result_folder.write_scan = write_when_told
    main()
