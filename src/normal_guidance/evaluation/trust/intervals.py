"""Numbers over scans with their intervals: bootstrap over patients, positive and negative ones separately."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64
from torch import Tensor

from normal_guidance.errors import UserError
from normal_guidance.statistics.bootstrap import measure, multiplicities, resample
from normal_guidance.statistics.differences import LEVEL, MIN_DEFINED, ROUNDING, student_quantile
from normal_guidance.statistics.number_format import digits, interval
from normal_guidance.statistics.split_results import MethodResults, NamedScans, Patients, SplitResults, patients_of

DRAWS = 500
"""Resampled sets of scans; the standard error from 500 of them is itself off by about 3 %."""

SEED = 0

LEAST_PATIENTS = 5
"""Patients with positive scans, and with negative ones, that an interval needs to mean anything."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; NaN where there is none."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{digits(self.value)} {interval(self.low, self.high)}"

    def as_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}

    @property
    def known(self) -> bool:
        return all(map(math.isfinite, (self.value, self.low, self.high)))


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)
"""Stands for a number that could not be measured."""


@dataclass(frozen=True, eq=False)
class Varied:
    """A number on the scans as they are, and on every resampled set of them."""

    value: float
    drawn: Float64[np.ndarray, "draws"]

    def __sub__(self, other: Varied) -> Varied:
        return Varied(self.value - other.value, self.drawn - other.drawn)

    @classmethod
    def weighted(cls, parts: Mapping[Varied, float]) -> Varied:
        """The weighted sum of numbers; `parts` gives the weight of each."""
        drawn = np.sum([weight * one.drawn for one, weight in parts.items()], axis=0)
        return cls(math.fsum(weight * one.value for one, weight in parts.items()), drawn)


class Bootstrap:
    """Resamples one set of scans, with the same draws for every number, so that differences are paired."""

    def __init__(self, scans: NamedScans) -> None:
        self.labels = scans.labels.cpu().numpy()
        self.scan_ids, self.patient_ids = tuple(scans.scan_ids), tuple(scans.patient_ids)
        counts = [
            len({p for p, y in zip(self.patient_ids, self.labels, strict=True) if y == label}) for label in (0, 1)
        ]
        if min(counts) < LEAST_PATIENTS:
            raise UserError(
                f"{counts[1]} patients have positive scans and {counts[0]} have negative ones; the tests need "
                f"{LEAST_PATIENTS} of each; give more scans"
            )
        self.freedom = min(counts) - 1

    def aurocs(self, scores: Mapping[str, Float64[Tensor, "scans"]]) -> dict[str, Varied]:
        """Scan AUROC of every named score."""
        split = self._results({name: one.numpy() for name, one in scores.items()})
        values, drawn = measure([split])["scan_auroc"], resample([split], DRAWS, SEED)["scan_auroc"]
        return {name: Varied(values[name], drawn[name]) for name in scores}

    def mean(self, values: Float64[Tensor, "scans"]) -> Varied:
        """Mean over the scans that have a value (not NaN)."""
        return self.means({"it": values})["it"]

    def means(
        self, values: Mapping[str, Float64[Tensor, "scans"]], among: Bool[np.ndarray, "scans"] | None = None
    ) -> dict[str, Varied]:
        """Means of many numbers at once, each over the scans that have a value and are in `among`."""
        numbers = np.stack([one.numpy() for one in values.values()], axis=1)
        counted = np.isfinite(numbers) & (True if among is None else among[:, None])
        sums = np.zeros((2, len(self._patients.ids), len(values)))
        np.add.at(sums[0], self._patients.of_scans[0], np.where(counted, numbers, 0.0))
        np.add.at(sums[1], self._patients.of_scans[0], counted)
        with np.errstate(invalid="ignore"):
            once = sums[0].sum(0) / sums[1].sum(0)
            drawn = (self._weights @ sums[0]) / (self._weights @ sums[1])
        return {name: Varied(float(once[i]), drawn[:, i]) for i, name in enumerate(values)}

    def estimate(self, varied: Varied, level: float = LEVEL) -> Estimate:
        """The number with its interval, by Student's t times the bootstrap's standard error."""
        defined = varied.drawn[np.isfinite(varied.drawn)]
        if not math.isfinite(varied.value) or len(defined) < MIN_DEFINED * DRAWS:
            return Estimate(varied.value, math.nan, math.nan)
        value = 0.0 if abs(varied.value) < ROUNDING else varied.value
        reach = student_quantile(level, self.freedom) * float(defined.std(ddof=1))
        return Estimate(value, value - reach, value + reach)

    @cached_property
    def _patients(self) -> Patients:
        return patients_of([self._results({"none": None})])

    @cached_property
    def _weights(self) -> Float64[np.ndarray, "draws patients"]:
        (weights,) = multiplicities(self._patients.positive, DRAWS, SEED, DRAWS)
        return weights

    def _results(self, scores: Mapping[str, np.ndarray | None]) -> SplitResults:
        nowhere = np.full(len(self.labels), np.nan)
        measured = {name: MethodResults(nowhere, nowhere, one) for name, one in scores.items()}
        return SplitResults(self.scan_ids, self.patient_ids, self.labels.astype(np.int64), measured)
