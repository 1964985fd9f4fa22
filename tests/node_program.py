"""`nguide` with the tiny encoder of the tests, for tests and benchmarks that kill it or let it wait.

NODE_DIE=module:Class.method:number:before kills the process right before that call, and with `after` right after it.
NODE_GATE=folder makes `began` there before a predicted scan is written, and waits until there is `go`.
"""

import importlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def wait_at(gate: Path) -> None:
    """Let the command wait before it writes a scan."""
    from normal_guidance.clinic.results import result_folder

    write = result_folder.write_scan

    def write_when_told(*arguments: object) -> object:
        (gate / "began").touch()
        while not (gate / "go").exists():
            time.sleep(0.05)
        return write(*arguments)

    result_folder.write_scan = write_when_told


def main() -> None:
    from killing import die_at
    from normal_guidance.cli.__main__ import main as nguide
    from normal_guidance.fit import bundle
    from small_bundle import tiny

    bundle.load_encoder = lambda name, **_: tiny()
    if place := os.environ.get("NODE_DIE"):
        module, method, number, when = place.split(":")
        owner = importlib.import_module(module)
        *classes, name = method.split(".")
        for inner in classes:
            owner = getattr(owner, inner)
        die_at(owner, name, int(number), after=when == "after")
    if gate := os.environ.get("NODE_GATE"):
        wait_at(Path(gate))
    nguide()


if __name__ == "__main__":
    main()
