"""Makes docs/results/tables/fit.parquet, the table of the study behind `nguide fit`.

    .venv/bin/python docs/studies/keep_fit.py SETS RESULTS ... docs/results/tables/fit.parquet

RESULTS are files results.jsonl of benchmarks/study_default.py, and SETS is the folder of its sets.  A row is one
predicted fold: localization AUROC and rank of every scan, from which intervals and tests are computed.  Guesses by
position are rows, too: `middle`, and `position_density` of the fold's training scans.  Rows of the same set, method,
division, fold and seed are replaced, others stay.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from keep import read, write
from torch import Tensor
from variants import semi_synthetic_part

from normal_guidance.core.arrays import bag_of_rows, place_in_bag
from normal_guidance.core.methods import NAMED
from normal_guidance.core.metrics import localization
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.splits import fold_scans
from normal_guidance.statistics.skill import MIDDLE, POSITION_DENSITY, position_density

FOLDS, SEMI = 5, "semi/"

SCHEMA = pa.schema(
    {
        "set": pa.string(),
        "method": pa.string(),
        "repeat": pa.int8(),
        "fold": pa.int8(),
        "seed": pa.int8(),
        "seconds": pa.float32(),
        "scans": pa.list_(pa.uint16()),  # numbers of the set's scans
        "patients": pa.list_(pa.uint16()),
        "labels": pa.list_(pa.bool_()),
        "auroc": pa.list_(pa.float32()),  # of every scan; NaN where a scan has no slices of both classes
        "scan_rank": pa.list_(pa.uint16()),  # by the scan's score; empty for guesses by position
    }
)


@cache
def whole_set(folder: str, name: str) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Lengths, labels, slice labels and patients."""
    if name.startswith(SEMI):
        _, variant, seed = name.split("/")
        test = semi_synthetic_part(int(seed), "test", variant)
        return test.lengths, test.labels, test.slice_labels, [str(number) for number in range(len(test))]
    kept = open_store(Path(folder) / name).bags()
    assert kept.slice_labels is not None
    return kept.lengths, kept.labels, kept.slice_labels, list(kept.patient_ids)


def slices_of(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Which slices belong to the chosen scans."""
    mask = torch.zeros(len(lengths), dtype=torch.bool)
    mask[chosen] = True
    return mask[bag_of_rows(lengths)]


def row(folder: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of one line of results.jsonl."""
    _, labels, _, patients = whole_set(folder, found["set"])
    number = {patient: place for place, patient in enumerate(dict.fromkeys(patients))}
    scans, logits = found["scans"], torch.tensor(found["logits"])
    located = iter(found["localization"])
    return {
        **{name: found[name] for name in ("set", "repeat", "fold", "seed", "seconds")},
        "method": kept_name(found),
        "scans": scans,
        "patients": [number[patients[scan]] for scan in scans],
        "labels": [bool(labels[scan]) for scan in scans],
        "auroc": [_each(folder, found["set"], scan, located) for scan in scans],
        "scan_rank": logits.unique(return_inverse=True)[1].tolist(),
    }


def kept_name(found: Mapping[str, Any]) -> str:
    """The method; where validation chose the lambda of a method that also has a fixed one, this says so."""
    method = str(found["method"])
    return f"{method} chosen" if found.get("weights", "1") != "1" and method in NAMED else method


def _each(folder: str, name: str, scan: int, located: Iterator[float]) -> float:
    lengths, _, labels, _ = whole_set(folder, name)
    own = labels[slices_of(lengths, torch.tensor([scan]))]
    return next(located) if (own == 1).any() and (own == 0).any() else math.nan


def guesses(folder: str, name: str, repeat: int, fold: int) -> Iterator[dict[str, Any]]:
    """Guesses by position for the scans of a fold."""
    lengths, labels, slice_labels, patients = whole_set(folder, name)
    number = {patient: place for place, patient in enumerate(dict.fromkeys(patients))}
    drawn = name.startswith(SEMI)
    folds = torch.zeros(len(lengths)) if drawn else torch.tensor(fold_scans(patients, labels.tolist(), FOLDS, repeat))
    test, train = ((folds == fold).nonzero().flatten(), (folds != fold).nonzero().flatten())
    own = lengths[test]
    scores = {MIDDLE: -(2 * place_in_bag(own) + 1 - own[bag_of_rows(own)]).abs().double()}
    if not drawn:
        density = position_density(lengths[train], slice_labels[slices_of(lengths, train)])
        scores[POSITION_DENSITY] = density.scores(own)
    for method, guess in scores.items():
        found = localization(guess, slice_labels[slices_of(lengths, test)], own)
        auroc = torch.full((len(test),), torch.nan, dtype=torch.float64)
        auroc[found.kept] = found.auroc
        yield {
            **{"set": name, "method": method, "repeat": repeat, "fold": fold, "seed": 0, "seconds": 0.0},
            "scans": test.tolist(),
            "patients": [number[patients[scan]] for scan in test.tolist()],
            "labels": labels[test].bool().tolist(),
            "auroc": auroc.tolist(),
            "scan_rank": [],
        }


def main(arguments: Sequence[str]) -> None:
    folder, *results, last = arguments
    out = Path(last)
    lines = [json.loads(line) for file in results for line in Path(file).read_text().splitlines()]
    new = [row(folder, line) for line in lines if "failed" not in line]
    for part in sorted({(one["set"], one["repeat"], one["fold"]) for one in new}):
        new += guesses(folder, *part)
    rows = {key_of(one): one for one in [*(read(out) if out.exists() else []), *new]}
    write(rows.values(), SCHEMA, out)
    print(f"{len(new)} rows for {len(rows)}, {out.stat().st_size / 1e6:.2f} MB: {out}")


def key_of(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(one[name] for name in ("set", "method", "repeat", "fold", "seed"))


if __name__ == "__main__":
    main(sys.argv[1:])
