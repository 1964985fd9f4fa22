"""`nguide fit`: an ensemble for a store, with calibration and threshold, in a folder that is a bundle.

    bundle.json, model.safetensors    the model (`bundle.py`)
    predictions.parquet               out-of-fold predictions for the training scans, and those for test scans
    report.html                       what it does on scans that it was not trained on (`fit_page.py`)
    leaderboard.json                  its kinds of members beside it, with position and mean pooling

Out of fold means: by the members of the ensemble that were not trained on the scan.  Several findings have a model
each, on the same features, in a folder of its name; beside them are findings.json and a report about all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import folder_atomically, write_atomically, write_json
from normal_guidance.base.records import valid_json
from normal_guidance.fit.bundle import BUNDLE, Bundle, fill_folder, load_bundle, make_bundle, training_record
from normal_guidance.fit.fit_ensemble import FoldPlan, make_plan
from normal_guidance.fit.fit_page import PAGE, findings_page, fit_page
from normal_guidance.fit.measured import OUT_OF_FOLD, MeasuredFit, check_shares, fit_and_measure
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.scans.index.manifest import choose_finding, write_findings
from normal_guidance.sweep.config import Execution
from normal_guidance.sweep.predictions import prediction_table, write_predictions_table
from normal_guidance.sweep.run import PREDICTION_TABLE, environment, features_of

LEADERBOARD = "leaderboard.json"
FEWEST = 30  # test scans that are kept aside without being asked for


@dataclass(frozen=True, eq=False)
class ModelFit(MeasuredFit):
    """What `fit_model` has made."""

    bundle: Bundle


def fit_model(
    scans: FeatureStore,
    out: str | Path,
    *,
    test: FeatureStore | None = None,
    resume: Path | None = None,
    **options: Any,
) -> ModelFit:
    """Fit an ensemble (`fit_and_measure` has the options) and write its folder, which must be new or empty."""
    features = features_of(scans)
    assert features is not None
    with folder_atomically(out) as draft:
        result = fit_and_measure(scans, test=test, resume=resume or _unfinished(out), **options)
        asked = (options.get("sensitivity"), options.get("coverage"))
        training = {**_training(scans, test, result), "inputs": inputs_of(scans, test, result.fit.plan, *asked)}
        calibrated = result.intervals.calibration
        bundle = make_bundle(None, result.fit.ensemble, features, result.operation, training, calibrated)
        bundle = replace(bundle, cautions=result.cautions(bundle.finding.name if bundle.finding else ""))
        tables = []
        for part, store, prediction in ((OUT_OF_FOLD, scans, result.predicted), ("test", test, result.tested)):
            if store is not None and prediction is not None:
                odds = [result.operation.calibration.probability(logit) for logit in prediction.logit.tolist()]
                tables.append(prediction_table(store, prediction, part=part, probability=torch.tensor(odds)))
        write_predictions_table(draft / PREDICTION_TABLE, tables)
        write_atomically(draft / PAGE, fit_page(bundle, result, scans, test).encode())
        write_json(draft / LEADERBOARD, {"leaderboard": valid_json([asdict(row) for row in result.leaderboard])})
        fill_folder(bundle, draft)
    shutil.rmtree(_unfinished(out), ignore_errors=True)
    return ModelFit(**vars(result), bundle=bundle)


def finished_before(out: Path, inputs: str) -> bool:
    """Whether a folder is the complete model of these inputs (`inputs_of`)."""
    if not all((out / name).is_file() for name in (BUNDLE, PAGE)):
        return False
    return load_bundle(out).training.get("inputs") == inputs


def inputs_of(
    scans: FeatureStore,
    test: FeatureStore | None,
    plan: FoldPlan,
    sensitivity: float | None = None,
    coverage: float | None = None,
) -> str:
    """A hash of what a model is fitted to and asked for."""
    of_test = None if test is None else test.fingerprint
    return sha256(repr((scans.fingerprint, of_test, plan, sensitivity, coverage)).encode()).hexdigest()


def _unfinished(out: str | Path) -> Path:
    """The folder of finished kinds, from which a killed fit goes on."""
    out = Path(out).absolute()
    return out.with_name(f".{out.name}.kinds")


def _training(scans: FeatureStore, test: FeatureStore | None, result: MeasuredFit) -> dict[str, object]:
    plan, scores = result.fit.plan, None
    if result.test is not None:
        localized = result.test.localization
        scores = {
            "scan_auroc": result.test.scans.value,
            "localization_auroc": None if localized is None else localized.auroc,
            "intervals": result.intervals.as_json()["test"],
        }
    return training_record(
        scans.provenance,
        environment(Execution()),
        scans={"train": len(scans), **({} if test is None else {"test": len(test)})},
        out_of_fold_auroc=result.out_of_fold.scans.value,
        test=scores,
        members=len(result.fit.ensemble),
        folds=plan.folds,
        seed=plan.seed,
    )


def training_scans(store: FeatureStore, *, keep_test: bool = False) -> tuple[FeatureStore, FeatureStore | None]:
    """All scans but those of the part test, and those; fewer than `FEWEST` are trained on, unless they shall be kept.

    All scans are predicted by models that did not see their patient: a few test scans would say less than that.
    """
    tested = (store.scans["part"] == "test").to_numpy()
    kept = tested.sum() >= FEWEST or (keep_test and tested.any())
    return (store.select(~tested), store.part("test")) if kept else (store, None)


@dataclass(frozen=True, eq=False)
class FittedFindings:
    """What `fit_findings` has made; models, reasons and notes are by the findings' names."""

    bundle: Bundle  # the model of the first finding, with the others
    models: Mapping[str, ModelFit]
    skipped: Mapping[str, str]  # why a finding has no model
    notes: Mapping[str, str]  # what is to be said of a finding that was fitted


def fit_findings(
    store: FeatureStore,
    out: str | Path,
    names: Sequence[str] = (),
    *,
    seed: int = 0,
    keep_test: bool = False,
    watch: Callable[[str, float], object] = lambda name, share: None,
    **options: Any,
) -> FittedFindings:
    """Fit and write a model of each finding, or of those named; those with too few scans are skipped, but not all."""
    check_shares(options.get("sensitivity"), options.get("coverage"))  # a mistake of the command, not of a finding
    chosen = [choose_finding(store.findings, name, f"store {store.folder}") for name in names] or store.findings
    models: dict[str, ModelFit] = {}
    skipped: dict[str, str] = {}
    notes: dict[str, str] = {}

    def report(name: str, number: int, share: float) -> None:
        watch(name, (number + share) / len(chosen))

    with folder_atomically(out) as draft:
        for number, name in enumerate(finding.name for finding in chosen):
            report(name, number, 0.0)
            try:
                train, test = training_scans(store.of_finding(name), keep_test=keep_test)
                plan = make_plan(train.labels.tolist(), train.patient_ids, seed=seed)
                if test is not None and len(test.labels.unique()) == 1:
                    alike = "positive" if test.labels.any() else "negative"
                    notes[name] = f"All {len(test)} test scans are {alike}, so it was not tested."
                    test = None
                told = partial(report, name, number)
                kinds = _unfinished(out) / name  # the draft, and what is beside a model in it, goes with a killed fit
                models[name] = fit_model(train, draft / name, test=test, plan=plan, watch=told, resume=kinds, **options)
            except UserError as error:
                skipped[name] = str(error)
                notes.pop(name, None)
        if not models:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            raise UserError(f"no finding of store {store.folder} can be fitted: {reasons}")
        made = {finding: models[finding.name] for finding in chosen if finding.name in models}
        write_findings(draft, list(made), skipped)
        write_atomically(draft / PAGE, findings_page(made, skipped, notes).encode())
    shutil.rmtree(_unfinished(out), ignore_errors=True)
    return FittedFindings(load_bundle(out), models, skipped, notes)
