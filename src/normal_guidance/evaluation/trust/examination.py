"""All four tests of one model on one set of scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normal_guidance.core.bags import Bags
from normal_guidance.errors import UserError
from normal_guidance.evaluation.trust.changed_scans import Model, predict_scans
from normal_guidance.evaluation.trust.deletion import judge_alarm, judge_deletion, without_scan_score
from normal_guidance.evaluation.trust.deletion_curves import By, Curves, Kind, draw_curves, make_orders
from normal_guidance.evaluation.trust.intervals import Bootstrap, Estimate
from normal_guidance.evaluation.trust.random_weights import (
    COMPARED,
    UNTRAINED,
    Untrained,
    judge_randomizing,
    untrained_copies,
    without_untrained,
)
from normal_guidance.evaluation.trust.shuffled_slices import judge_shuffling, shuffle
from normal_guidance.evaluation.trust.verdicts import TrustResult
from normal_guidance.features.store import FeatureStore

FIRST_SEED = 2**31
"""Seeds of untrained weights start here: no model was trained from these."""

BY: tuple[By, ...] = ("slices", "attention")


@dataclass(frozen=True, eq=False)
class Trust:
    """The results of the tests; `findings` are in the order shuffle, randomize, deletion, inverted."""

    findings: tuple[TrustResult, ...]
    curves: Mapping[Kind, Curves] | None
    """None for a model without scan scores."""
    scans: int
    positive: int
    by: By
    bootstrap: Bootstrap
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> TrustResult:
        return next(finding for finding in self.findings if finding.name == name)

    @property
    def scan_auroc(self) -> Estimate | None:
        return None if self.curves is None else self.bootstrap.estimate(self.curves["deletion"].whole_auroc)

    def as_json(self) -> dict[str, Any]:
        """All results as plain values, with NaN where there is no number."""
        whole = self.scan_auroc
        return {
            "scans": self.scans,
            "positive": self.positive,
            "by": self.by,
            "scan_auroc": None if whole is None else whole.as_json(),
            "notes": list(self.notes),
            "findings": [finding.as_json() for finding in self.findings],
            "curves": {kind: self._points(one) for kind, one in (self.curves or {}).items()},
        }

    def _points(self, curves: Curves) -> dict[str, Any]:
        def values(by_order: Mapping[str, Any]) -> dict[str, list[float]]:
            return {order: [point.value for point in points] for order, points in by_order.items()}

        return {"shares": list(curves.shares), "auroc": values(curves.auroc), "logit": values(curves.logit)}


def examine(
    model: Model,
    scans: Bags | FeatureStore,
    *,
    untrained: Untrained | None = None,
    by: By = "slices",
    seed: int = 0,
    watch: Callable[[float], None] | None = None,
) -> Trust:
    """Runs the four tests on a model of your own.

    Args:
        model: takes packed features and lengths, and returns logits and attention (see `Model`).
        scans: scans with labels, preferably not those that the model was trained on.  Slice labels are not needed;
            where there are some, they confirm the alarm, and the second test reports localization AUROC.
        untrained: makes the same model with untrained weights from a seed.  If left out, a module is copied and its
            layers are reset; for any other model the second test is undecided.
        by: remove by share of slices or of attention.
        seed: seed of the random orders.
        watch: receives the share done of the curves, which take longest.
    """
    if by not in BY:
        raise UserError(f"by is {by!r}; choose one of {', '.join(BY)}")
    bootstrap = Bootstrap(scans)
    generator = torch.Generator().manual_seed(seed)
    own = predict_scans(model, scans)
    if untrained is None and isinstance(model, nn.Module):
        untrained = untrained_copies(model)
    others = []
    if untrained is not None:
        others = [predict_scans(untrained(FIRST_SEED + seed + number), scans) for number in range(UNTRAINED)]
    curves = None
    if own.scores_scans:
        orders = make_orders(own, scans.lengths.cpu(), others[:COMPARED], generator)
        curves = draw_curves(model, scans, own, orders, bootstrap, by=by, watch=watch)
    return Trust(
        findings=(
            judge_shuffling(shuffle(model, scans, own, generator), own, bootstrap),
            judge_randomizing(own, others, scans, curves, bootstrap) if others else without_untrained(),
            without_scan_score() if curves is None else judge_deletion(curves, bootstrap),
            judge_alarm(curves, own, scans, bootstrap),
        ),
        curves=curves,
        scans=len(scans),
        positive=int(scans.labels.sum()),
        by=by,
        bootstrap=bootstrap,
    )
