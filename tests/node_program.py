"""`nguide` with the tiny encoder of the tests, for tests and benchmarks that kill it.

NODE_DIE=module:Class.method:number:before kills the process right before that call, and with `after` right after it.
"""

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


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
        for one in classes:
            owner = getattr(owner, one)
        die_at(owner, name, int(number), after=when == "after")
    nguide()


if __name__ == "__main__":
    main()
