"""The runs of a study of drawn data, as `keep` keeps them: reports, scores, and results of every test scan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keep import read, results_of
from make_page import TABLES
from removed_heads import SHOWN

from normal_guidance.base.records import read_as
from normal_guidance.statistics.split_results import Scores, SplitResults
from normal_guidance.study.experiment import FORMS, SCORES
from normal_guidance.sweep.run import REPORT


@cache
def _rows(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(read(TABLES / f"{name}.parquet"))


@dataclass(frozen=True)
class KeptRuns:
    """The table of one dataset, whose partitions have these seeds."""

    name: str
    seeds: tuple[int, ...]

    def runs(self, *sets: str) -> dict[tuple[str, int], dict[str, Any]]:
        """Method and seed -> row of the table, of these sets."""
        return {(row["method"], row["seed"]): row for row in _rows(self.name) if row["set"] in sets}

    @contextmanager
    def run_folders(self, *sets: str) -> Iterator[Path]:
        """The reports of sets as the run folders that they come from, so that the library reads them.

        Of several sets, each has a folder of its name.
        """
        with TemporaryDirectory() as folder:
            for name in sets:
                for (method, seed), row in self.runs(name).items():
                    run = Path(folder, *([name] if len(sets) > 1 else []), method, str(seed))
                    run.mkdir(parents=True)
                    (run / (SCORES if method in FORMS else REPORT)).write_text(row["report"], encoding="utf-8")
            yield Path(folder)

    def scores(self, *sets: str) -> dict[tuple[str, int], Scores]:
        """Method and seed -> what each run of the sets reached on the test scans."""
        found = {}
        for method, seed in sorted(self.runs(*sets), key=lambda key: SHOWN.index(key[0])):
            report = json.loads(self.runs(*sets)[method, seed]["report"])
            if "scores" in report:
                found[method, seed] = Scores(**next(iter(report["scores"].values())))
            elif report["winners"]:
                found[method, seed] = read_as(Scores, report["winners"][0]["test"])
        return found

    def splits(self, *sets: str) -> list[SplitResults]:
        """Per-scan results of each seed, of methods that have them for every seed."""
        own = {key: row for key, row in self.runs(*sets).items() if row["auroc"] is not None}
        methods = [method for method in SHOWN if all((method, seed) in own for seed in self.seeds)]
        made = []
        for seed in self.seeds:
            results = {method: results_of(own[method, seed]) for method in methods}
            labels = results[methods[0]][0]
            ids = tuple(f"{seed}-{number:06}" for number in range(len(labels)))  # in this order they are resampled
            patients = own[methods[0], seed]["patients"]
            made.append(
                SplitResults(ids, tuple(patients or ids), labels, {method: one for method, (_, one) in results.items()})
            )
        return made
