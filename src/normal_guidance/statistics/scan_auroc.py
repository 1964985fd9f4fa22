"""How well scores tell positive scans from negative ones, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.show.text_tables import digits, interval
from normal_guidance.statistics.differences import delong, separated_low
from normal_guidance.statistics.split_results import MethodResults, SplitResults


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; NaN where there is none."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{digits(self.value)} {interval(self.low, self.high)}"

    @property
    def known(self) -> bool:
        return all(map(math.isfinite, (self.value, self.low, self.high)))


class ScanAuroc(Estimate):
    """A scan AUROC with its interval (DeLong, patients as units), NaN where one class has a single patient."""

    @property
    def shown(self) -> bool:
        """Whether it is above chance by its whole interval."""
        return self.low > 0.5


def hanley_mcneil(auroc: float, positive: int, negative: int) -> float:
    """The standard error to expect of an AUROC (Hanley and McNeil, 1982), before any score is known."""
    two_positive, two_negative = auroc / (2 - auroc), 2 * auroc**2 / (1 + auroc)  # both above, both below the other
    variance = (positive - 1) * (two_positive - auroc**2) + (negative - 1) * (two_negative - auroc**2)
    return math.sqrt((auroc * (1 - auroc) + variance) / (positive * negative))


def scan_auroc(labels: Int[Tensor, "scans"], patient_ids: Sequence[str], scores: Float[Tensor, "scans"]) -> ScanAuroc:
    """The AUROC and its interval, as the difference from scores that are all the same."""
    nothing = np.full(len(labels), np.nan)
    each = {"own": scores.double().numpy(), "chance": np.zeros(len(labels))}
    results = {name: MethodResults(nothing, nothing, values) for name, values in each.items()}
    names = tuple(str(number) for number in range(len(labels)))
    split = SplitResults(names, tuple(patient_ids), labels.numpy().astype(np.int64), results)
    difference = delong([split], "own", "chance")
    value, (low, high) = 0.5 + difference.difference, difference.interval()
    if difference.standard_error == 0 and value in (0.0, 1.0):
        pairs = {*zip(labels.tolist(), patient_ids, strict=True)}
        end = separated_low(*(sum(label == wanted for label, _ in pairs) for wanted in (1, 0)))
        return ScanAuroc(value, end if value else 0.0, 1.0 if value else 1 - end)
    return ScanAuroc(value, max(0.5 + low, 0.0), min(0.5 + high, 1.0))
