"""`nguide fit`: a committee for a store, with calibration and threshold, in a folder that is a bundle.

    bundle.json, model.safetensors    the model (`clinical.bundle`)
    predictions.parquet               out-of-fold predictions for the training scans, and those for test scans
    report.html                       what it does on scans that it was not trained on (`clinical.fit_page`)

Out of fold means: by the members of the committee that were not trained on the scan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import torch

from normal_guidance.clinical.bundle import Bundle, fill_folder, make_bundle
from normal_guidance.clinical.fit_page import PAGE, fit_page
from normal_guidance.core.prediction import Prediction
from normal_guidance.evaluation.predictions import prediction_table, write_predictions_table
from normal_guidance.evaluation.runs import environment, features_of
from normal_guidance.features.scan_kind import scans_behind
from normal_guidance.features.store import FeatureStore
from normal_guidance.files import folder_atomically, write_atomically
from normal_guidance.training.execution import Execution
from normal_guidance.training.fit_committee import CommitteeFit, Plan
from normal_guidance.training.measured_fit import OUT_OF_FOLD, Measured, MeasuredFit, fit_and_measure
from normal_guidance.training.run_folder import PREDICTION_TABLE


@dataclass(frozen=True, eq=False)
class FittedModel:
    """What `fit_model` has made."""

    bundle: Bundle
    measured: MeasuredFit

    @property
    def fit(self) -> CommitteeFit:
        return self.measured.fit

    @property
    def out_of_fold(self) -> Measured:
        return self.measured.out_of_fold

    @property
    def test(self) -> Measured | None:
        return self.measured.test

    def sentences(self) -> list[str]:
        """Three sentences: does it tell scans apart, does it find the slices, can it be trusted."""
        return self.measured.sentences()


def fit_model(
    scans: FeatureStore,
    out: str | Path,
    *,
    test: FeatureStore | None = None,
    plan: Plan | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    device: torch.device | str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> FittedModel:
    """Fit a committee and write its folder, which must be new or empty.

    Args:
        scans: the training scans; labels of slices are used to measure and to calibrate intervals, not for training.
        test: other patients' scans, to measure the model on.
        plan: how; without it, the scans decide.
        sensitivity: least sensitivity of the threshold, out of fold; without it, Youden's J chooses.
        coverage: the probability with which intervals shall contain the finding; see `fit_and_measure`.
        device: where it is fitted.
        watch: called with the share that is done.
    """
    features = features_of(scans)
    assert features is not None
    with folder_atomically(out) as draft:
        found = fit_and_measure(
            scans, plan, test=test, sensitivity=sensitivity, coverage=coverage, device=device, watch=watch
        )
        training = _training(scans, test, found)
        calibrated = found.intervals.calibration
        bundle = make_bundle(None, found.fit.committee, features, found.operation, training, calibrated)
        named = "" if bundle.finding is None else bundle.finding.name
        bundle = replace(bundle, cautions=found.cautions(named))
        tables = [
            _table(some, prediction, found, part)
            for part, some, prediction in ((OUT_OF_FOLD, scans, found.predicted), ("test", test, found.tested))
            if some is not None and prediction is not None
        ]
        write_predictions_table(draft / PREDICTION_TABLE, tables)
        write_atomically(draft / PAGE, fit_page(bundle, found, scans, test).encode())
        fill_folder(bundle, draft)
    return FittedModel(bundle, found)


def _table(scans: FeatureStore, prediction: Prediction, found: MeasuredFit, part: str) -> pa.Table:
    calibration = found.operation.calibration
    odds = torch.tensor([calibration.probability(logit) for logit in prediction.logit.tolist()])
    return prediction_table(scans, prediction, part=part, probability=odds)


def _training(scans: FeatureStore, test: FeatureStore | None, found: MeasuredFit) -> dict[str, object]:
    """How the model was trained, for people to read; numbers of scans, never their names."""
    made, plan, scores = environment(Execution()), found.fit.plan, None
    if found.test is not None:
        localized = found.test.localization
        scores = {
            "scan_auroc": found.test.scans.value,
            "localization_auroc": None if localized is None else localized.auroc,
            "intervals": found.intervals.as_json()["test"],
        }
    return {
        "dataset": summary.source if (summary := scans_behind(scans.provenance)) else None,
        "scans": {"train": len(scans), **({} if test is None else {"test": len(test)})},
        "out_of_fold_auroc": found.out_of_fold.scans.value,
        "test": scores,
        "members": len(found.fit.committee),
        "folds": plan.folds,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "commit": (made.get("commit") or {}).get("id"),
        "date": made.get("date"),
        "normal_guidance": made.get("normal_guidance"),
    }
