"""The tables in docs/results/tables: one parquet file a study, with what its page needs and nothing else.

    .venv/bin/python docs/studies/keep.py SET=FOLDER ... docs/results/tables/semi-synthetic.parquet

puts finished runs into a table: a row for each run METHOD/SEED below each FOLDER, named SET, and one for the guess by
position of each seed.  Rows of the same set, method and seed are replaced, others stay.  A row holds the run's report
(scores, chosen configuration, environment, commit), and per scan what intervals and tests are computed from:
localization of the positive test scans, and the rank of every test scan by its score.  Ranks decide AUROC and its
tests, and take a quarter of the room of scores.  Attention itself, weights and histories stay behind.

`keep_fit` makes fit.parquet.  The two other tables, beyond.parquet and phantoms.parquet, were made once from the
results in docs/results/runs of commit 6493fd7; `page_beyond` and `page_phantoms` say what their rows are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from normal_guidance.base.files import write_atomically
from normal_guidance.core.bags import Bags
from normal_guidance.core.prediction import Prediction
from normal_guidance.statistics.skill import POSITION_DENSITY, position_density
from normal_guidance.statistics.split_results import MethodResults, score
from normal_guidance.study.experiment import DATASETS, FORMS, SCORES, StudyPredictions, read_prediction
from normal_guidance.sweep.run import PREDICTION_TABLE, REPORT

Row = Mapping[str, Any]

PER_SCAN = {
    "labels": pa.list_(pa.bool_()),
    "auroc": pa.list_(pa.float64()),  # of the positive scans, in order
    "auprc": pa.list_(pa.float64()),
    "scan_rank": pa.list_(pa.uint16()),
}

RUNS = pa.schema(
    {
        "set": pa.string(),
        "method": pa.string(),
        "seed": pa.int32(),
        "report": pa.string(),  # report.json or scores.json as it was
        **PER_SCAN,
        "measures": pa.map_(pa.string(), pa.float64()),  # as the report's table of hits and overlaps
        "patients": pa.list_(pa.string()),  # of every scan; None where each scan has one of its own
    }
)


def per_scan(labels: np.ndarray, found: MethodResults) -> dict[str, Any]:
    """The columns `PER_SCAN` of one method on the test scans."""
    positive, scores = labels.astype(bool), found.scan_scores
    ranks = None if scores is None else np.unique(scores, return_inverse=True)[1]  # of equal scores the same
    return {"labels": positive, "auroc": found.auroc[positive], "auprc": found.auprc[positive], "scan_rank": ranks}


def results_of(row: Row) -> tuple[np.ndarray, MethodResults]:
    """Labels and results, as `per_scan` took them; where a table has no AUPRC, AUROC stands in its place."""
    labels = np.array(row["labels"], dtype=np.int64)
    both = {name: np.full(len(labels), np.nan) for name in ("auroc", "auprc")}
    for name, values in both.items():
        values[labels == 1] = row.get(name) or row["auroc"]
    ranks = row["scan_rank"]
    return labels, MethodResults(**both, scan_scores=None if ranks is None else np.array(ranks, dtype=np.float64))


def write(rows: Iterable[Row], schema: pa.Schema, path: Path) -> None:
    """A table, or one part of it: `read` takes a file as well as a folder of files."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema), sink, compression="zstd", compression_level=19)
    write_atomically(path, sink.getvalue().to_pybytes())


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a table."""
    return pq.read_table(path).to_pylist(maps_as_pydicts="strict")


def run_row(name: str, run: Path) -> Row:
    """The row of the run METHOD/SEED; the report alone where nothing was predicted: sensitivity, nothing selected."""
    method, seed = run.parent.name, int(run.name)
    report = (run / (SCORES if method in FORMS else REPORT)).read_text(encoding="utf-8")
    row, content = {"set": name, "method": method, "seed": seed, "report": report}, json.loads(report)
    if not (run / PREDICTION_TABLE).exists() or not content.get("winners", True):
        return row
    scans = drawn(content["options"]["dataset"], seed, "test")
    return row | per_run(method, seed, scans, read_prediction(run, scans))


@lru_cache(maxsize=1)
def drawn(dataset: str, seed: int, part: str) -> Bags:
    """The scans of a part; one is remembered, because many runs have the same."""
    return DATASETS[dataset].draw(seed, part)


def per_run(method: str, seed: int, scans: Bags, prediction: Prediction) -> Row:
    """The columns that rest on the scans."""
    found = StudyPredictions(seed, scans, {method: prediction})
    measures = {measure: one.value for measure, one in found.measures(method).items()}
    results = found.outcomes([method])
    patients = None if len(set(scans.patient_ids)) == len(scans) else list(scans.patient_ids)
    return {**per_scan(results.labels, results.methods[method]), "measures": measures, "patients": patients}


def guess_row(name: str, dataset: str, seed: int) -> Row:
    """The row of the best guess by position alone: where the findings of the training scans are."""
    train = drawn(dataset, seed, "train")
    density = position_density(train.lengths, train.slice_labels)
    test = drawn(dataset, seed, "test")
    guess = density.scores(test.lengths)
    prediction = Prediction(torch.full((len(test),), torch.nan), guess.exp(), guess[None])
    reached = asdict(score(test, guess, None))
    report = {"options": {"dataset": dataset}, "scores": {POSITION_DENSITY: reached}}
    row = {"set": name, "method": POSITION_DENSITY, "seed": seed, "report": json.dumps(report)}
    return row | per_run(POSITION_DENSITY, seed, test, prediction)


def main() -> None:
    *sets, last = sys.argv[1:] or sys.exit("give SET=FOLDER, at least once, and the table")
    out = Path(last)
    rows = {key_of(row): row for row in (read(out) if out.exists() else [])}
    for name, folder in (one.split("=") for one in sets):
        found = sorted([*Path(folder).glob(f"**/{REPORT}"), *Path(folder).glob(f"**/{SCORES}")])
        for path in sorted(found, key=lambda path: int(path.parent.name)):  # seed by seed: drawing takes longest
            row = run_row(name, path.parent)
            rows[key_of(row)] = row
            print(name, *path.parts[-3:-1])
        seeds = {
            (json.loads(row["report"])["options"]["dataset"], row["seed"])
            for row in rows.values()
            if row["set"] == name and row.get("auroc") is not None
        }
        for dataset, seed in sorted(seeds):
            guess = guess_row(name, dataset, seed)
            rows[key_of(guess)] = guess
    write(rows.values(), RUNS, out)


def key_of(row: Row) -> tuple[str, str, int]:
    return row["set"], row["method"], row["seed"]


if __name__ == "__main__":
    main()
