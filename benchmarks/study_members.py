"""What `nguide fit` and each kind of its members find on several sets, out of fold; a table of all scans for each.

    python benchmarks/study_members.py SETS --sets ct-ich,prostatex --seeds 0,1,2 --device cuda --out ensemble.parquet

SETS is a folder with one feature store for each set.  Each seed divides a set into five folds anew, as
`nguide fit SETS/SET -o MODEL --seed SEED` does; every scan is predicted by models that did not see its patient.  A row
is a method on one division of a set: localization AUROC and rank of every scan, from which intervals are computed.
Methods are the ensemble, each kind by its name, `without KIND`, and `middle`, the distance from the middle.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from normal_guidance.core.bags import LabelledScans
from normal_guidance.core.metrics import localization
from normal_guidance.fit.ensemble import prior_attention
from normal_guidance.fit.fit_ensemble import KINDS, MemberKind, OutOfFold, fit_ensemble, make_plan, together
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.splits import fold_scans
from normal_guidance.statistics.skill import MIDDLE
from report import machine

SCHEMA = pa.schema(
    {
        "set": pa.string(),
        "repeat": pa.int8(),  # the seed of the division
        "method": pa.string(),
        "patients": pa.list_(pa.uint16()),
        "labels": pa.list_(pa.bool_()),
        "auroc": pa.list_(pa.float32()),  # of every scan; NaN where a scan has no slices of both classes
        "scan_rank": pa.list_(pa.uint16()),  # by the scan's score; empty for the middle
    }
)


def rows_of(name: str, seed: int, scans: LabelledScans, own: Sequence[OutOfFold]) -> Iterator[dict[str, Any]]:
    """The rows of a set by what its kinds of members say out of fold."""
    labels, patients = scans.labels.tolist(), scans.patient_ids
    folds = torch.tensor(fold_scans(patients, labels, make_plan(labels, patients).folds, seed))

    def of(chosen: Sequence[MemberKind]) -> OutOfFold:
        kept = [found for kind, found in zip(KINDS, own, strict=True) if kind in chosen]
        return OutOfFold(*together(chosen, kept, folds, scans, patients))

    found = {"ensemble": of(KINDS), **{kind.method: own[number] for number, kind in enumerate(KINDS)}}
    found |= {f"without {kind.method}": of([other for other in KINDS if other != kind]) for kind in KINDS}
    for method, one in found.items():
        yield row(name, seed, method, scans, one.attention, one.logits)
    yield row(name, seed, MIDDLE, scans, prior_attention(scans.lengths), None)


def row(
    name: str, seed: int, method: str, scans: LabelledScans, attention: Tensor, logits: Tensor | None
) -> dict[str, Any]:
    assert scans.slice_labels is not None
    located = localization(attention, scans.slice_labels, scans.lengths)
    auroc = torch.full((len(scans),), torch.nan, dtype=torch.float64)
    auroc[located.kept] = located.auroc
    number = {patient: place for place, patient in enumerate(dict.fromkeys(scans.patient_ids))}
    return {
        "set": name,
        "repeat": seed,
        "method": method,
        "patients": [number[patient] for patient in scans.patient_ids],
        "labels": scans.labels.bool().tolist(),
        "auroc": auroc.tolist(),
        "scan_rank": [] if logits is None else logits.unique(return_inverse=True)[1].tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="SETS", type=Path)
    parser.add_argument("--sets", type=lambda text: text.split(","), required=True)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.sets:
        scans = open_store(options.folder / name).bags()
        for seed in options.seeds:
            begin = time.perf_counter()
            plan = make_plan(scans.labels.tolist(), scans.patient_ids, seed=seed)
            fit = fit_ensemble(scans, scans.patient_ids, plan, device=options.device)
            rows += rows_of(name, seed, scans, fit.kinds)
            located = torch.tensor(
                next(one for one in reversed(rows) if one["method"] == "ensemble")["auroc"]
            ).nanmean()
            print(f"{name:12} {seed}  {located:.3f}  {time.perf_counter() - begin:.0f} s  {fit.choice}", flush=True)
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), options.out, compression="zstd")
    about = machine(options.device, options.commit)
    print(json.dumps({"benchmark": "study_members", "machine": about, "rows": len(rows)}))


if __name__ == "__main__":
    main()
