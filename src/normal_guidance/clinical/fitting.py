"""`nguide fit`: a committee for a store, with calibration and threshold, in a folder that is a bundle.

    bundle.json, model.safetensors    the model (`clinical.bundle`)
    predictions.parquet               out-of-fold predictions for the training scans, and those for test scans

Out of fold means: by the members of the committee that were not trained on the scan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.clinical.bundle import Bundle, fill_folder, make_bundle
from normal_guidance.clinical.calibration import FEW, check_sensitivity, choose_operation
from normal_guidance.core.method_names import COMMITTEE
from normal_guidance.core.models import Prediction
from normal_guidance.errors import UserError
from normal_guidance.evaluation.predictions import prediction_table, write_predictions_table
from normal_guidance.evaluation.runs import environment, features_of
from normal_guidance.features.store import FeatureStore
from normal_guidance.files import folder_atomically
from normal_guidance.statistics.delong import delong
from normal_guidance.statistics.scores import score
from normal_guidance.statistics.skill import Skill, measure_skill
from normal_guidance.statistics.split_results import MethodResults, SplitResults
from normal_guidance.training.execution import Execution
from normal_guidance.training.fit import predict
from normal_guidance.training.fit_committee import CommitteeFit, Plan, fit_committee
from normal_guidance.training.run_folder import PREDICTION_TABLE

OUT_OF_FOLD = "out-of-fold"
"""The part of the training scans in predictions.parquet."""


@dataclass(frozen=True)
class ScanAuroc:
    """A scan AUROC with its interval (DeLong, patients as units)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, eq=False)
class Measured:
    """What a model does on scans that it was not trained on."""

    positive: int
    negative: int
    scans: ScanAuroc
    skill: Skill | None
    """None where no positive scan has slice labels."""


@dataclass(frozen=True, eq=False)
class FittedModel:
    """What `fit_model` has made."""

    bundle: Bundle
    fit: CommitteeFit
    out_of_fold: Measured
    test: Measured | None

    def sentences(self) -> list[str]:
        """Three sentences: does it tell scans apart, does it find the slices, can it be trusted."""
        own = self.test or self.out_of_fold
        where = "test scans" if self.test else "scans, each by members that were not trained on it"
        return [
            _tells_apart(own, where),
            _finds_slices(own),
            _trusted(self.out_of_fold, self.fit),
        ]


def fit_model(
    scans: FeatureStore,
    out: str | Path,
    *,
    test: FeatureStore | None = None,
    plan: Plan | None = None,
    sensitivity: float | None = None,
    watch: Callable[[float], None] | None = None,
) -> FittedModel:
    """Fit a committee and write its folder, which must be new or empty.

    Args:
        scans: the training scans; labels of slices are not used for training.
        test: other patients' scans, to measure the model on.
        plan: how; without it, the scans decide.
        sensitivity: least sensitivity of the threshold, out of fold; without it, Youden's J chooses.
        watch: called with the share that is done.
    """
    check_sensitivity(sensitivity)  # before the work
    features = features_of(scans)
    assert features is not None
    if test is not None and (shared := {*scans.patient_ids} & {*test.patient_ids}):
        raise UserError(f"patient {min(shared)!r} has training and test scans ({len(shared)} such); split again")
    with folder_atomically(out) as draft:
        fit = fit_committee(scans, scans.patient_ids, plan, watch=watch)
        own = Prediction(fit.logits.float(), fit.attention, fit.attention.clamp_min(1e-38).log()[None])
        tested = None if test is None else predict(fit.committee, test)
        operation = choose_operation(
            fit.logits,
            scans.labels,
            sensitivity=sensitivity,
            test=None if test is None or tested is None else (tested.logit, test.labels),
            scans=OUT_OF_FOLD,
        )
        found = measure(scans, own)
        measured = None if test is None or tested is None else measure(test, tested)
        bundle = make_bundle(None, fit.committee, features, operation, _training(scans, test, tested, fit, found))
        probability = operation.calibration
        tables = []
        for part, some, prediction in ((OUT_OF_FOLD, scans, own), ("test", test, tested)):
            if some is not None and prediction is not None:
                odds = torch.tensor([probability.probability(logit) for logit in prediction.logit.tolist()])
                tables.append(prediction_table(some, prediction, part=part, probability=odds))
        write_predictions_table(draft / PREDICTION_TABLE, tables)
        fill_folder(bundle, draft)
    return FittedModel(bundle, fit, found, measured)


def measure(scans: FeatureStore, prediction: Prediction) -> Measured:
    """Scan AUROC, and the skill in finding slices where their labels are known."""
    labels = scans.labels
    positive, slices = int(labels.sum()), scans.slice_labels
    finds = None
    if slices is not None and _localizable(slices, scans.lengths):
        finds = measure_skill(prediction.slice_scores, slices, scans.lengths, patient_ids=scans.patient_ids)
    return Measured(positive, len(labels) - positive, scan_auroc(scans, prediction.logit), finds)


def _localizable(slices: Int[Tensor, "slices"], lengths: Int[Tensor, "scans"]) -> bool:
    """Whether any scan has positive and negative slices."""
    return any(0 < int((own == 1).sum()) < len(own) for own in slices.split(lengths.tolist()))


def scan_auroc(scans: FeatureStore, logits: Float[Tensor, "scans"]) -> ScanAuroc:
    """The AUROC and its interval, as the difference from scores that are all the same."""
    nothing = np.full(len(scans), np.nan)
    scores = {COMMITTEE: logits.double().numpy(), "chance": np.zeros(len(scans))}
    results = {name: MethodResults(nothing, nothing, values) for name, values in scores.items()}
    split = SplitResults(scans.scan_ids, scans.patient_ids, scans.labels.numpy().astype(np.int64), results)
    found = delong([split], COMMITTEE, "chance")
    low, high = found.interval()
    return ScanAuroc(0.5 + found.difference, max(0.0, 0.5 + low), min(1.0, 0.5 + high))


def _training(
    scans: FeatureStore, test: FeatureStore | None, tested: Prediction | None, fit: CommitteeFit, found: Measured
) -> dict[str, object]:
    """How the model was trained, for people to read; numbers of scans, never their names."""
    made = environment(Execution())
    scores = None
    if test is not None and tested is not None:
        localized = None
        if test.slice_labels is not None and _localizable(test.slice_labels, test.lengths):
            localized = score(test, tested.slice_scores, tested.logit).localization_auroc
        scores = {"scan_auroc": scan_auroc(test, tested.logit).value, "localization_auroc": localized}
    return {
        "dataset": (scans.provenance.get("inputs") or {}).get("source"),
        "scans": {"train": len(scans), **({} if test is None else {"test": len(test)})},
        "out_of_fold_auroc": found.scans.value,
        "test": scores,
        "members": len(fit.committee),
        "folds": fit.plan.folds,
        "repeats": fit.plan.repeats,
        "seed": fit.plan.seed,
        "commit": (made.get("commit") or {}).get("id"),
        "date": made.get("date"),
        "normal_guidance": made.get("normal_guidance"),
    }


def _tells_apart(own: Measured, where: str) -> str:
    counts = f"{own.positive} positive and {own.negative} negative {where}"
    if own.scans.low <= 0.5:
        return f"It is not shown to tell scans apart: scan AUROC {own.scans}, which may be chance ({counts})."
    return f"It tells scans apart with an AUROC of {own.scans} ({counts})."


def _finds_slices(own: Measured) -> str:
    if own.skill is None:
        return "Whether it finds the slices is unknown: no scan has labels for some of its slices; label 30 to know."
    found = own.skill
    text = f"localization AUROC {found.auroc:.3f}, by position alone {found.prior_auroc:.3f}"
    interval = f"skill {found.skill:.3f} [{found.low:.3f}, {found.high:.3f}], {found.scans} scans"
    if math.isfinite(found.low) and found.low > 0:
        return f"It finds slices better than their position in the scan does: {text} ({interval})."
    return f"It is not shown to find slices better than their position in the scan does: {text} ({interval})."


def _trusted(own: Measured, fit: CommitteeFit) -> str:
    if min(own.positive, own.negative) < FEW:
        return f"Take all of it as rough: {own.positive} positive and {own.negative} negative scans are few."
    if own.scans.low <= 0.5:
        return "Do not use it: attention then shows where findings usually lie, and nothing about the patient."
    places = "anywhere in the scan" if fit.unusual else "around the middle of the scan, as usual"
    return f"Its members look for findings {places}; try it on scans from elsewhere before you rely on it."
