"""A table of labels and patients for features that do not name them.

    scan_id        as in the files of features
    label          0 or 1; may be empty where slice labels are given, and is then 1 if one of them is
    patient_id     optional
    part           optional: train, val or test; the column may be called split
    slice_labels   optional: '0 0 1 1', in the order of the slices
    slice_ranges   optional: positive slices, counted from 0, both ends included: '12-20;31-33'

With findings, each has a column of its name instead of `label`.  The first must be known; an empty cell of another one
is unknown.  `slice_labels` and `slice_ranges` are those of the first finding, `slice_labels_NAME` and
`slice_ranges_NAME` those of any.

It is the table of `normal_guidance.data.sources.folder` without paths.  Where a table has slice labels and a cell is
empty, all slices of a negative scan are negative, and those of a positive scan are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from normal_guidance.data.findings import Finding, Labels
from normal_guidance.data.label_tables import BINARY, further_labels, read_labels, slice_labels_in
from normal_guidance.errors import UserError, shorten
from normal_guidance.features.scan_layouts import LONGEST_TEXT, FoundScan

COLUMNS = ("scan_id", "label", "patient_id", "part", "split", "slice_labels", "slice_ranges")


class ScanTable:
    """The rows of a table, and which of them were used.

    Args:
        path: a .csv or .parquet file.
        findings: columns with a label each, in place of the column label.
    """

    def __init__(self, path: Path, findings: Sequence[Finding] = ()) -> None:
        self.path, self.findings = path, tuple(findings)
        columns = read_labels(path, "--labels", COLUMNS, ["scan_id"], findings)
        names = [name for name in columns if name != "scan_id"]
        if not names:
            raise UserError(f"--labels {path} has only the column scan_id; add {', '.join(COLUMNS[1:])}, or some")
        if {"part", "split"} <= set(names):
            raise UserError(f"--labels {path} has the columns part and split; leave one of them out")
        self.sliced = not {"slice_labels", "slice_ranges"}.isdisjoint(names)
        self.sliced_further = {
            one.name
            for one in self.findings[1:]
            if not {f"slice_labels_{one.name}", f"slice_ranges_{one.name}"}.isdisjoint(names)
        }
        self.rows: dict[str, dict[str, str]] = {}
        for number, scan in enumerate(columns["scan_id"]):
            if not scan or scan in self.rows or len(scan) > LONGEST_TEXT:
                problem = "is empty" if not scan else "occurs twice" if scan in self.rows else "is too long"
                raise UserError(
                    f"--labels {path}, row {number + 1}: scan_id {shorten(scan)!r} {problem}; correct the row"
                )
            self.rows[scan] = {name: columns[name][number] for name in names}
        self.used: set[str] = set()

    @property
    def _first(self) -> str:
        """The name of the label's column."""
        return self.findings[0].name if self.findings else "label"

    @property
    def unused(self) -> list[str]:
        """The scans without features so far."""
        return [scan for scan in self.rows if scan not in self.used]

    def fill(self, scan: FoundScan) -> FoundScan:
        """The scan with what its row says; a value that the file gives otherwise is an error."""
        row = self.rows.get(scan.scan_id)
        if row is None:
            first = next(iter(self.rows), None)
            raise UserError(
                f"{scan.found.where}: scan {scan.scan_id!r} has no row in --labels {self.path} (its first scan_id is "
                f"{first!r}); add the row, or leave the scan out"
            )
        self.used.add(scan.scan_id)
        changes: dict[str, Any] = {}
        for name, value in self._values(scan, row).items():
            have = getattr(scan, name)
            if value is None:
                continue
            if have is not None and not _same(have, value):
                raise UserError(
                    f"{scan.found.where}: scan {scan.scan_id!r} has another {name} than in --labels {self.path}"
                    f"{'' if name == 'slice_labels' else f' ({have} and {value})'}; correct one of them"
                )
            changes[name] = value
        return scan._replace(**changes)

    def further(self, scan: FoundScan) -> dict[str, Labels]:
        """The labels of a scan for all findings but the first."""
        row, found = self.rows[scan.scan_id], {}
        for one in self.findings[1:]:
            try:
                found[one.name] = further_labels(row, one, len(scan.features), sliced=one.name in self.sliced_further)
            except ValueError as error:
                raise UserError(
                    f"--labels {self.path}, scan {scan.scan_id!r}, finding {one.name}: {error}; correct the row"
                ) from error
        return found

    def _values(self, scan: FoundScan, row: dict[str, str]) -> dict[str, Any]:
        word = row.get("label", "").lower()
        try:
            if word and word not in BINARY:
                raise ValueError(f"{self._first} {shorten(word)!r} is neither 0 nor 1")
            label = BINARY.get(word)
            slices = self._slice_labels(row, label if word else scan.label, len(scan.features))
            if self.findings and label is None and slices is None and scan.label is None:
                raise ValueError(f"{self._first} is empty, but the first finding must be known for every scan")
        except ValueError as error:
            row_number = list(self.rows).index(scan.scan_id) + 1
            raise UserError(
                f"--labels {self.path}, row {row_number}, scan {scan.scan_id!r}: {error}; correct the row"
            ) from error
        part = row.get("part") or row.get("split") or None
        return {"label": label, "slice_labels": slices, "patient_id": row.get("patient_id") or None, "part": part}

    def _slice_labels(self, row: dict[str, str], label: int | None, count: int) -> Int[Tensor, "slices"] | None:
        found = slice_labels_in(row, count)
        if found is None and self.sliced and label == 0:
            found = np.zeros(count, np.int8)
        return None if found is None else torch.from_numpy(found.astype(np.int64))


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
