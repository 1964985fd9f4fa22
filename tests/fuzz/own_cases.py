"""Cases of files that we wrote ourselves, with hostile content under a seal that fits.

Run them alone: python tests/fuzz/run.py --of tests/fuzz/own_cases.py --cases 3000
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

from guard import Probe, attempt
from own_folders import READERS, files_in, make_folders
from own_mutations import MUTATORS, seal_again
from samples import OWN, Samples

NEEDED = {name: () if name in ("index", "bundle") else ("index", "store") for name in READERS}
"""Folders that a reader needs beside its own."""


@cache
def _whole(folder: Path) -> Path:
    """The undamaged folders; made here where the samples lack them."""
    return folder / OWN if (folder / OWN).is_dir() else make_folders(Path(mkdtemp(prefix="own-")))


def of_folder(name: str) -> Callable[[Random, Samples, Probe], str]:
    """A folder of which one file, now and then two, say something else."""

    def case(random: Random, samples: Samples, probe: Probe) -> str:
        whole = _whole(samples.folder)
        for one in {name, "splits", *NEEDED[name]}:
            shutil.copytree(whole / one, probe.out / one)
        files = files_in(probe.out / name)
        for path in random.sample(files, random.choice((1, 1, 1, 2)) if len(files) > 1 else 1):
            content = path.read_bytes()
            path.write_bytes(seal_again(MUTATORS[path.suffix](random, content)))
        with probe.watched():
            return attempt(lambda: READERS[name](probe.out))

    return case


WEIGHTS = {"index": 30, "splits": 12, "store": 26, "job": 6, "run": 30, "study": 18, "bundle": 24}

KINDS = {f"own: {name}": (WEIGHTS[name], of_folder(name)) for name in READERS}
"""Kinds of cases, and how often each is run."""
