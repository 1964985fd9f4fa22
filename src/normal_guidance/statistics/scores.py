"""The four numbers of the paper's tables for one method on one set of scans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.metrics import localization, scan_level
from normal_guidance.errors import UserError

Metric = Literal["localization_auroc", "localization_auprc", "scan_auroc", "scan_auprc"]

METRICS: tuple[Metric, ...] = get_args(Metric)
"""The paper's four result tables, each named after its field of `Scores`."""


@runtime_checkable
class Labelled(Protocol):
    """A set of labelled scans, such as `Bags` or a feature store."""

    @property
    def lengths(self) -> Int[Tensor, "scans"]: ...
    @property
    def labels(self) -> Int[Tensor, "scans"]: ...
    @property
    def slice_labels(self) -> Int[Tensor, "slices"] | None: ...


@dataclass(frozen=True)
class Scores:
    """Localization over the positive scans with slices of both classes, and classification over all scans."""

    localization_auroc: float
    localization_auprc: float
    scan_auroc: float | None
    scan_auprc: float | None
    localized: int
    """The number of scans on which localization was measured."""
    left_out: int
    """The number of positive scans without localization: slice labels missing, or all of one class."""


def score(
    bags: Labelled, slice_scores: Float[Tensor, "slices"], scan_scores: Float[Tensor, "scans"] | None = None
) -> Scores:
    """The scores of one method; `scan_scores` is None for a method without scan scores."""
    if bags.slice_labels is None:
        raise UserError(f"{bags} have no slice labels, so localization cannot be measured; use scan_level alone")
    # Negative scans have no positive slice, so `localization` leaves them out by itself.
    found = localization(slice_scores, bags.slice_labels, bags.lengths)
    scans = None if scan_scores is None else scan_level(scan_scores, bags.labels)
    return Scores(
        localization_auroc=found.mean_auroc.item(),
        localization_auprc=found.mean_auprc.item(),
        scan_auroc=None if scans is None else scans.auroc.item(),
        scan_auprc=None if scans is None else scans.auprc.item(),
        localized=len(found.kept),
        left_out=int(bags.labels.sum()) - len(found.kept),
    )
