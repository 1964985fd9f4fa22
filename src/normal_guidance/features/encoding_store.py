"""From the units of a job to its store, and back from a store that lacks scans to units.

A store lacks the scans of its index that could not be read or encoded.  Its report.json lists them with the reasons
(`lacks`), its store.json counts them (`FeatureStore.lacking`), and the next start of the same command tries them again:
`Earlier` gives the scans that the store holds, so that only the others are read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from normal_guidance import __version__
from normal_guidance.core.bags import Bag, Bags
from normal_guidance.data.manifest import Manifest, ScanRow
from normal_guidance.data.problems import Problem, read_problems, summarize, write_problems
from normal_guidance.data.values import Values
from normal_guidance.errors import UserError, shorten
from normal_guidance.features.encoding_folder import (
    REPORT,
    STATISTICS,
    VALUES,
    Encoded,
    EncodingJob,
    KnownValues,
    statistics_lines,
    values_json,
)
from normal_guidance.features.encoding_machine import LEFT_OUT, EncodingOptions
from normal_guidance.features.preprocessing import Preprocessing
from normal_guidance.features.scan_kind import describe_inputs
from normal_guidance.features.store import FeatureStore, write_store
from normal_guidance.features.store_files import AGAIN, LACKING, dtype_name
from normal_guidance.files import read_json_as, sealed_json

PROBLEMS = "problems.csv"


@dataclass(frozen=True)
class EncodingProgress:
    """How far a job is: slices of finished units and, on this machine, of finished batches."""

    stage: str
    slices: int
    of: int
    begun_with: int
    """Slices that an earlier start of the job had done."""


Watch = Callable[[EncodingProgress], object]


@dataclass(frozen=True, eq=False)
class EncodingPlan:
    """The arguments of `encode` that every step of a job needs."""

    manifest: Manifest
    parts: Mapping[str, str] | None
    options: EncodingOptions
    dtype: torch.dtype
    out: Path
    identity: Mapping[str, Any]
    watch: Watch

    @cached_property
    def units(self) -> list[range]:
        """The scans' numbers in each unit."""
        return plan_units(self.manifest.lengths, self.options.unit)

    def rows(self, unit: int) -> list[ScanRow]:
        """The scans of a unit."""
        numbers = self.units[unit]
        return list(Manifest(self.manifest.table.slice(numbers.start, len(numbers)), self.manifest.about))

    def recipe(self, preprocessing: Preprocessing) -> str:
        """The recipe of the store's features."""
        return recipe_of(self.identity["encoder"]["fingerprint"], preprocessing, repair=self.options.repair)


def plan_units(lengths: Sequence[int] | np.ndarray, at_least: int) -> list[range]:
    """Packs consecutive scans into units of at least `at_least` slices; the last one may have fewer."""
    units, start, slices = [], 0, 0
    for number, length in enumerate(lengths):
        slices += int(length)
        if slices >= at_least or number == len(lengths) - 1:
            units.append(range(start, number + 1))
            start, slices = number + 1, 0
    return units


def recipe_of(encoder: str, preprocessing: Preprocessing, *, repair: bool) -> str:
    """A hash of everything that turns scans into features: the encoder's fingerprint, preprocessing and repairs."""
    return hashlib.sha256(json.dumps([encoder, preprocessing.fingerprint, repair]).encode()).hexdigest()


def scans_of(rows: Sequence[ScanRow], unit: Encoded) -> Iterator[tuple[ScanRow, torch.Tensor]]:
    """The scans of a unit that could be encoded."""
    failed, start = set(unit.failed), 0
    for row in rows:
        if row.scan_id not in failed:
            yield row, unit.features[start : start + len(row)]
            start += len(row)


def merge(rows: Sequence[ScanRow], before: Encoded, now: Encoded) -> Encoded:
    """A unit with the scans that were encoded before and those that are new, and what is odd about either."""
    features = {row.scan_id: one for unit in (now, before) for row, one in scans_of(rows, unit)}
    good = [features[row.scan_id] for row in rows if row.scan_id in features]
    tried = set(before.failed)
    problems = [one for one in before.problems if one.scan_id not in tried]
    return Encoded(
        torch.cat(good) if good else now.features[:0],
        [row.scan_id for row in rows if row.scan_id not in features],
        problems + [one for one in now.problems if one.scan_id in tried],
        {**before.values, **now.values},
    )


def _reasons(unit: Encoded) -> set[tuple[str, str]]:
    return {(problem.scan_id, problem.kind) for problem in unit.problems}


class Earlier:
    """The units of a store that lacks scans."""

    def __init__(self, plan: EncodingPlan, store: FeatureStore) -> None:
        self.plan, self.store = plan, store
        self._number = {scan: number for number, scan in enumerate(store.scan_ids)}
        self._problems: dict[str, list[Problem]] = defaultdict(list)
        for problem in read_problems(store.folder / PROBLEMS):
            self._problems[problem.scan_id].append(problem)
        path = store.folder / VALUES
        self._values = read_json_as(path, KnownValues, AGAIN).values if path.exists() else {}

    def unit(self, number: int) -> Encoded:
        """The scans of a unit that the store holds; the others failed."""
        rows = self.plan.rows(number)
        held = [self._number[row.scan_id] for row in rows if row.scan_id in self._number]
        failed = [row.scan_id for row in rows if row.scan_id not in self._number]
        problems = [problem for row in rows for problem in self._problems[row.scan_id]]
        values = {row.scan_id: self._values[row.scan_id] for row in rows if row.scan_id in self._values}
        return Encoded(self.store.rows(torch.tensor(held, dtype=torch.int64)).float(), failed, problems, values)

    def fails_like(self, unit: Encoded, number: int) -> bool:
        """Whether a new unit lacks the same scans for the same kinds of reasons."""
        before = self.unit(number)
        return _reasons(unit) == _reasons(before) and unit.failed == before.failed


class Assembled(NamedTuple):
    """A store, and how many of the index's scans it lacks by kind of problem."""

    store: FeatureStore
    failed: dict[str, int]
    problems: dict[str, int]


def assemble(
    plan: EncodingPlan,
    job: EncodingJob,
    preprocessing: Preprocessing,
    unit: Callable[[int], Encoded],
    instead_of: Path | None = None,
) -> Assembled:
    """Writes the store from units; an earlier one is moved to `instead_of` first."""
    problems: list[Problem] = []
    without: set[str] = set()
    values: dict[str, Values] = {}
    slices = 0
    for number in range(len(plan.units)):
        one = unit(number)
        slices += len(one.features)
        without.update(one.failed)
        problems += one.problems
        values |= one.values
    left_out = [problem for problem in problems if problem.action == LEFT_OUT]
    failed = dict(sorted(Counter(problem.kind for problem in left_out).items()))
    write_problems(job.path / PROBLEMS, problems)
    if len(without) == len(plan.manifest):
        job.forget()
        raise UserError(
            f"none of the {len(plan.manifest)} scans could be encoded; read {job.path / PROBLEMS}, correct the causes "
            "and encode again"
        )

    def stream() -> Iterator[tuple[str | None, Bags]]:
        for number in range(len(plan.units)):
            pairs = scans_of(plan.rows(number), unit(number))
            for part, scans in groupby(pairs, lambda pair: plan.parts[pair[0].scan_id] if plan.parts else None):
                yield part, Bags.pack([_bag(row, features) for row, features in scans])

    recipe, scans = plan.recipe(preprocessing), len(plan.manifest)
    lacks = {one.scan_id: f"{one.kind}: {shorten(one.detail)}" for one in left_out}
    report = {
        "normal_guidance": __version__,
        "recipe": recipe,
        "preprocessing": preprocessing.to_dict(),
        "inputs": describe_inputs(plan.manifest, without, list(values.values())),
        "dtype": dtype_name(plan.dtype),
        "scans": {"manifest": scans, "encoded": scans - len(without), "failed": len(without)},
        "slices": {"manifest": int(plan.manifest.lengths.sum()), "encoded": slices},
        "failed": failed,
        **({"lacks": lacks} if lacks else {}),
        "problems": dict(sorted(summarize(problems).items())),
        "identity": plan.identity,
    }
    files = {PROBLEMS: (job.path / PROBLEMS).read_bytes(), REPORT: sealed_json(report)}
    if without and plan.identity["normalized_by"] == "training scans":
        # So that the next start measures only what is missing.
        files[STATISTICS] = statistics_lines(dict(sorted(job.statistics(preprocessing.channels).items())))
    if without:
        files[VALUES] = sealed_json({"values": values_json(values)})
    findings = plan.manifest.findings
    provenance = {name: report[name] for name in ("normal_guidance", "preprocessing", "inputs", "identity")}
    store = write_store(
        plan.out,
        stream(),
        findings=findings,
        further={row.scan_id: row.further for row in plan.manifest} if findings else None,
        provenance={**provenance, **({LACKING: len(without)} if without else {})},
        recipe=recipe,
        dtype=plan.dtype,
        files=files,
        instead_of=instead_of,
    )
    return Assembled(store, failed, summarize(problems))


def _bag(row: ScanRow, features: torch.Tensor) -> Bag:
    labels = None if row.slice_labels is None else torch.from_numpy(row.slice_labels.astype(np.int64))
    return Bag(features, row.label, labels, row.scan_id, row.patient_id)
