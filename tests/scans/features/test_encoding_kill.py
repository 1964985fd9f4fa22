"""An encoding killed with SIGKILL, at every rename and with workers, ends as if nothing had happened.

A program (`python test_encoding_kill.py FOLDER KIND`) forks jobs and kills them (see `killing`); the test judges what
it saw.  tests/kill_commands.py kills jobs without workers at random moments.
"""

import json
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from killing import die_at, fork, run_program

pytestmark = pytest.mark.slow

SEED = 20261115
KILLS_WITH_WORKERS = 2
RENAMES = 16
"""More than a job has."""
LENGTHS = [3, 5, 4, 2, 6, 4, 1, 7] * 4


class Killer:
    """Jobs that are killed, in folders of one folder."""

    def __init__(self, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)  # a forked child must not wait for threads that only its parent has
        import fake_scans

        from normal_guidance.scans.features import encoding

        self.fake, self.encoding, self.folder, self.random = fake_scans, encoding, folder, Random(SEED)
        self.manifest = fake_scans.make_manifest(folder / "data", LENGTHS, {5: "unreadable", 20: "strange"})

    def job(self, name: str, *, slow: bool = False, workers: int = 0) -> None:
        fake, options = self.fake, self.encoding.EncodingOptions(batch_size=4, unit=24, threads=1)
        task = self.encoding.EncodingTask(
            self.manifest,
            fake.load,
            fake.PREPROCESSING,
            fake.read_slowly if slow else fake.read,
            parts=fake.make_parts(self.manifest),
            options=options,
            workers=workers,
        )
        self.encoding.encode(task, self.folder / "stores" / name)

    def judge(self, name: str) -> bool:
        """Whether the store is the same as one that was never interrupted, and nothing else is left."""
        stores = self.folder / "stores"
        same = self.fake.contents(stores / name) == self.whole
        left = sorted(file.name for file in stores.iterdir())
        shutil.rmtree(stores)
        return same and left == [name]

    def run(self, kind: str) -> dict[str, Any]:
        fork(lambda: self.job("whole", slow=True))
        self.whole = self.fake.contents(self.folder / "stores" / "whole")
        seen = {"files": sorted(self.whole), "itself": self.judge("whole")}
        if kind == "workers":
            return {**seen, "workers": [self.with_workers() for _ in range(KILLS_WITH_WORKERS)]}
        moments = [(number, before) for before in (True, False) for number in range(1, RENAMES + 1)]
        return {**seen, "renames": [self.at_rename(*moment) for moment in moments]}

    def with_workers(self) -> tuple[bool, bool]:
        """The same two answers, after a kill while a worker process was busy, or still starting."""
        killed = fork(lambda: self.job("workers", slow=True, workers=1), self.random.uniform(0.5, 3))
        fork(lambda: self.job("workers", workers=1))
        return killed, self.judge("workers")

    def at_rename(self, number: int, before: bool) -> tuple[bool, bool]:
        """Whether the job was killed, and whether the next start ended well."""

        def job() -> None:
            die_at(Path, "replace", number, after=not before)
            self.job("renamed")

        killed = fork(job)
        fork(lambda: self.job("renamed"))
        return killed, self.judge("renamed")


def test_jobs_with_workers_killed_at_random_moments_end_the_same(tmp_path):
    seen = run_program(__file__, tmp_path, "workers")["workers"]
    assert any(killed for killed, _ in seen)
    assert all(same for _, same in seen)


def test_jobs_killed_at_every_rename_end_the_same(tmp_path):
    seen = run_program(__file__, tmp_path, "renames")
    assert seen["itself"], "two whole jobs are the same: the control"
    whole = ["features-00000.safetensors", "index.parquet", "problems.csv", "report.json", "store.json"]
    assert seen["files"] == sorted([*whole, "statistics.jsonl", "values.json"]), "two scans are lacking"
    assert all(same for _, same in seen["renames"])
    kills = [killed for killed, _ in seen["renames"]]
    half = len(kills) // 2
    for moments in (kills[:half], kills[half:]):  # before, after
        assert 10 <= sum(moments) < half, "all of them were met, and then there were no more"
        assert moments == sorted(moments, reverse=True)


if __name__ == "__main__":
    print(json.dumps(Killer(Path(sys.argv[1])).run(sys.argv[2])))
