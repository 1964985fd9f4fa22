"""`nguide fit`: a committee for a store, with calibration and threshold, in a folder that is a bundle.

    bundle.json, model.safetensors    the model (`bundle.py`)
    predictions.parquet               out-of-fold predictions for the training scans, and those for test scans
    report.html                       what it does on scans that it was not trained on (`fit_page.py`)

Out of fold means: by the members of the committee that were not trained on the scan.  Several findings have a model
each, on the same features, in a folder of its name; beside them are findings.json and a report about all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import folder_atomically, write_atomically
from normal_guidance.fit.bundle import Bundle, fill_folder, load_bundle, make_bundle
from normal_guidance.fit.fit_committee import CommitteeFit, FoldPlan, make_plan
from normal_guidance.fit.fit_page import PAGE, findings_page, fit_page
from normal_guidance.fit.measured import OUT_OF_FOLD, Measured, MeasuredFit, fit_and_measure
from normal_guidance.scans.features.preprocessing import scans_behind
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.scans.index.manifest import choose_finding, write_findings
from normal_guidance.statistics.calibration import check_sensitivity
from normal_guidance.statistics.conformal import check_coverage
from normal_guidance.sweep.execution import Execution
from normal_guidance.sweep.predictions import prediction_table, write_predictions_table
from normal_guidance.sweep.run import PREDICTION_TABLE, environment, features_of


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
    plan: FoldPlan | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    device: torch.device | str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> FittedModel:
    """Fit a committee (`fit_and_measure` has the options) and write its folder, which must be new or empty."""
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
        tables = []
        for part, store, prediction in ((OUT_OF_FOLD, scans, found.predicted), ("test", test, found.tested)):
            if store is not None and prediction is not None:
                odds = [found.operation.calibration.probability(logit) for logit in prediction.logit.tolist()]
                tables.append(prediction_table(store, prediction, part=part, probability=torch.tensor(odds)))
        write_predictions_table(draft / PREDICTION_TABLE, tables)
        write_atomically(draft / PAGE, fit_page(bundle, found, scans, test).encode())
        fill_folder(bundle, draft)
    return FittedModel(bundle, found)


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


class TrainingScans(NamedTuple):
    """The scans to train on and, if there are any, those to test on."""

    train: FeatureStore
    test: FeatureStore | None


@dataclass(frozen=True, eq=False)
class FittedFindings:
    """What `fit_findings` has made; models, reasons and notes are by the findings' names."""

    bundle: Bundle  # the model of the first finding, with the others
    models: Mapping[str, FittedModel]
    skipped: Mapping[str, str]  # why a finding has no model
    notes: Mapping[str, str]  # what is to be said of a finding that was fitted


def training_scans(store: FeatureStore) -> TrainingScans:
    """All scans but those of the part test, and those."""
    tested = (store.scans["part"] == "test").to_numpy()
    if not tested.any():
        return TrainingScans(store, None)
    return TrainingScans(store.select(~tested), store.part("test"))


def fit_findings(
    store: FeatureStore,
    out: str | Path,
    names: Sequence[str] = (),
    *,
    sensitivity: float | None = None,
    coverage: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    watch: Callable[[str, float], None] | None = None,
) -> FittedFindings:
    """Fit a model of each finding of a store, or of those named, and write them to a new or empty folder.

    A finding with too few scans is skipped; if no finding is left, nothing is written.  `watch` is called with the
    finding's name and the share of all findings that is done.
    """
    check_sensitivity(sensitivity)  # a mistake of the command is not one of a finding
    if coverage is not None:
        check_coverage(coverage)
    chosen = [choose_finding(store.findings, name, f"store {store.folder}") for name in names] or store.findings
    models: dict[str, FittedModel] = {}
    skipped: dict[str, str] = {}
    notes: dict[str, str] = {}
    with folder_atomically(out) as draft:
        for number, finding in enumerate(chosen):

            def report(share: float, name: str = finding.name, number: int = number) -> None:
                if watch is not None:
                    watch(name, (number + share) / len(chosen))

            name = finding.name
            report(0.0)
            try:
                train, test = training_scans(store.of_finding(name))
                plan = make_plan(train.labels.tolist(), train.patient_ids, seed=seed)
                if test is not None and len(test.labels.unique()) == 1:
                    alike = "positive" if test.labels.any() else "negative"
                    notes[name] = f"All {len(test)} test scans are {alike}, so it was not tested."
                    test = None
                models[name] = fit_model(
                    train,
                    draft / name,
                    test=test,
                    plan=plan,
                    sensitivity=sensitivity,
                    coverage=coverage,
                    device=device,
                    watch=report,
                )
            except UserError as error:
                skipped[name] = str(error)
                notes.pop(name, None)
        if not models:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            raise UserError(f"no finding of store {store.folder} can be fitted: {reasons}")
        made = {finding: models[finding.name].measured for finding in chosen if finding.name in models}
        write_findings(draft, list(made), skipped)
        write_atomically(draft / PAGE, findings_page(made, skipped, notes).encode())
    return FittedFindings(load_bundle(out), models, skipped, notes)
