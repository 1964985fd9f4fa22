"""DeLong's test of a difference between two scan AUROCs, for patients with several scans and for several splits.

An AUROC is a mean of placement values: the share of negative scans that a positive scan outranks, and the share of
positive scans that outrank a negative one; ties count one half.  DeLong takes the variance from their spread.  With
several scans per patient the placement values of a patient are summed before squaring (Obuchowski), and with several
splits they are summed over the splits too, so that a patient tested in two splits counts once.

Reference: DeLong, DeLong, Clarke-Pearson, "Comparing the areas under two or more correlated receiver operating
characteristic curves", 1988; Obuchowski, "Nonparametric analysis of clustered ROC curve data", 1997; counting by
sorting instead of by pairs: Sun and Xu, "Fast implementation of DeLong's algorithm", 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float64, Int64

from normal_guidance.errors import UserError
from normal_guidance.statistics.split_results import SplitResults, patients_of


@dataclass(frozen=True)
class DeLong:
    """A difference in scan AUROC with its standard error, and the resulting normal test and interval."""

    difference: float
    standard_error: float

    @property
    def z(self) -> float:
        """The difference divided by its standard error."""
        return in_standard_errors(self.difference, self.standard_error)

    @property
    def p(self) -> float:
        """The two-sided p-value."""
        return math.erfc(abs(self.z) / math.sqrt(2))

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval at this level."""
        reach = NormalDist().inv_cdf((1 + level) / 2) * self.standard_error
        return self.difference - reach, self.difference + reach


def separated_low(positive: int, negative: int, level: float = 0.95) -> float:
    r"""The lower end of the interval of an AUROC of 1, where DeLong's variance is 0 however few scans there are.

    $\theta$ with $1 - \theta = z \sqrt{V(\theta)}$ and
    $V(\theta) = \frac{\theta (1 - \theta)}{m n} \big( 1 + (\tfrac{m + n}{2} - 1) (\tfrac{1 - \theta}{2 - \theta}
    + \tfrac{\theta}{1 + \theta}) \big)$ for m positive and n negative patients.

    Reference: Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic. Part 2",
    2006, method 5.
    """
    z, low, high = NormalDist().inv_cdf((1 + level) / 2), 0.0, 1.0
    for _ in range(60):  # bisection: the difference of both sides, divided by 1 - theta, falls with theta
        middle = (low + high) / 2
        spread = 1 + ((positive + negative) / 2 - 1) * ((1 - middle) / (2 - middle) + middle / (1 + middle))
        below = (1 - middle) > z * z * middle * spread / (positive * negative)
        low, high = (middle, high) if below else (low, middle)
    return low


def in_standard_errors(difference: float, standard_error: float) -> float:
    """The difference divided by its standard error; with an error of 0, a difference of 0 gives 0, others infinity."""
    if standard_error == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / standard_error


def delong(splits: Sequence[SplitResults], method: str, against: str) -> DeLong:
    r"""The difference in scan AUROC, method minus against, averaged over the splits.

    $\mathrm{var} = \sum_c u_c^2 + \sum_c v_c^2 + 2 \sum_c \tilde u_c \tilde v_c$ over patients c, with $u_c$ and $v_c$
    the patient's centred placement values of positive and of negative scans, summed over the splits and scaled by
    $\sqrt{I/(I-1)}$, I being the patients of a split who have such scans (in $\tilde u, \tilde v$: any scans).
    One split with one scan per patient is DeLong's test exactly; one split with several is Obuchowski's.
    """
    patients = patients_of(splits)
    # Rows: positive scans' and negative scans' values scaled by their own patients, then both by all patients.
    sums, difference = np.zeros((4, len(patients.ids))), 0.0
    for i, (split, of) in enumerate(zip(splits, patients.of_scans, strict=True)):
        positive = split.labels == 1
        if positive.all() or not positive.any():
            raise UserError(
                f"split {i + 1} has only positive or only negative test scans, so no scan AUROC; leave it out"
            )
        first, second = (_placements(_scores(split, name), positive) for name in (method, against))
        delta = first - second
        for kind, rows in ((positive, (0, 2)), (~positive, (1, 3))):
            mean = delta[kind].mean()
            centred = np.bincount(of[kind], (delta[kind] - mean) / kind.sum(), minlength=len(patients.ids))
            sums[rows[0]] += _unbiased(of[kind]) * centred
            sums[rows[1]] += _unbiased(of) * centred
        difference += delta[positive].mean() / len(splits)
    sums /= len(splits)
    variance = (sums[0] ** 2).sum() + (sums[1] ** 2).sum() + 2 * (sums[2] * sums[3]).sum()
    return DeLong(float(difference), float(np.sqrt(np.maximum(variance, 0.0))))


def _scores(split: SplitResults, method: str) -> Float64[np.ndarray, "scans"]:
    if method not in split.methods:
        raise UserError(f"method {method!r} was not tested; choose one of {', '.join(split.methods)}")
    scores = split.methods[method].scan_scores
    if scores is None:
        raise UserError(f"{method!r} has no scan scores, so no scan AUROC; compare its localization")
    return scores


def _placements(scores: Float64[np.ndarray, "scans"], positive: Bool[np.ndarray, "scans"]) -> np.ndarray:
    """Placement values: the share of negatives below each positive scan, or of positives above each negative scan."""
    values = np.empty(len(scores))
    for kind, sign in ((positive, 1.0), (~positive, -1.0)):
        others = np.sort(sign * scores[~kind])
        own = sign * scores[kind]
        twice = np.searchsorted(others, own, side="left") + np.searchsorted(others, own, side="right")
        values[kind] = twice / (2 * len(others))
    return values


def _unbiased(patients: Int64[np.ndarray, "_"]) -> float:
    """sqrt(I / (I - 1)) for I patients; NaN for one patient, whose spread is unknown."""
    count = len(np.unique(patients))
    return math.sqrt(count / (count - 1)) if count > 1 else math.nan
