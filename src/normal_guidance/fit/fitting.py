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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import folder_atomically, write_atomically, write_json
from normal_guidance.base.records import valid_json
from normal_guidance.core.arrays import check_device
from normal_guidance.fit.bundle import Bundle, fill_folder, load_bundle, make_bundle, training_record
from normal_guidance.fit.fit_ensemble import make_plan
from normal_guidance.fit.fit_page import PAGE, findings_page, fit_page
from normal_guidance.fit.measured import OUT_OF_FOLD, MeasuredFit, fit_and_measure
from normal_guidance.fit.slice_finder import Labels, ScansLike, as_scans, with_labels
from normal_guidance.scans.features.store import FeatureStore, open_store, write_store
from normal_guidance.scans.index.manifest import choose_finding, write_findings
from normal_guidance.statistics.calibration import check_sensitivity
from normal_guidance.statistics.conformal import check_coverage
from normal_guidance.sweep.config import Execution
from normal_guidance.sweep.predictions import prediction_table, write_predictions_table
from normal_guidance.sweep.run import PREDICTION_TABLE, environment, features_of

LEADERBOARD = "leaderboard.json"
FEWEST = 30  # test scans that are kept aside without being asked for


@dataclass(frozen=True, eq=False)
class FittedModel(MeasuredFit):
    """What `fit_model` has made."""

    bundle: Bundle


def fit_model(
    scans: FeatureStore,
    out: str | Path,
    *,
    test: FeatureStore | None = None,
    resume: Path | None = None,
    **options: Any,
) -> FittedModel:
    """Fit an ensemble (`fit_and_measure` has the options) and write its folder, which must be new or empty."""
    features = features_of(scans)
    assert features is not None
    with folder_atomically(out) as draft:
        result = fit_and_measure(scans, test=test, resume=resume or _unfinished(out), **options)
        training, calibrated = _training(scans, test, result), result.intervals.calibration
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
    return FittedModel(**vars(result), bundle=bundle)


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


ScansToFit = ScansLike | str | Path  # scans in memory, in a feature store, or the folder of one


def fit(
    scans: ScansToFit,
    out: str | Path,
    *,
    labels: Labels | None = None,
    patient_ids: Sequence[str] | None = None,
    test: ScansToFit | None = None,
    keep_test: bool = False,
    finding: str | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> FittedModel:
    """Fit a model to features and scan labels, with nothing to choose, and write its folder, as `nguide fit` does.

    `predict` and `nguide predict` take the folder; `report.html` in it says what the model can do.  Labels of slices
    measure the result and calibrate intervals; they never train.

    Args:
        scans: `Bags`, a list of `Bag`, a list of arrays `(slices, features)` with `labels`, a store from `open_store`,
            or the folder of one.  The scans of a store's part "test" are kept for testing, if they are 30 or more.
        out: the folder for the model; it must be new or empty.
        labels: one 0 or 1 per scan, for arrays, or in place of the labels of bags.
        patient_ids: one per scan, for arrays, or in place of those of the bags; a patient's scans share a fold.
            Without it, each array is a patient of its own.
        test: other patients' scans, to measure the model on; arrays as `Bags.from_arrays(arrays, labels)`.
        keep_test: keep the scans of a store's part "test" aside even if they are fewer than 30.
        finding: which finding of a store with several is fitted.
        sensitivity: least sensitivity of the threshold, out of fold; without it, Youden's J chooses.
        coverage: the probability with which intervals shall contain the finding; refused if too few scans have slice
            labels.  Without it, .9 if there are enough.
        seed: of the folds.
        device: where it is fitted, such as "cuda".
        watch: called with the share that is done.

    Example:
        >>> from normal_guidance import predict
        >>> from normal_guidance.study.drawn import shifted_mean
        >>> train, new = (shifted_mean(20, seed, features=4, shift=2.0) for seed in (1, 2))
        >>> arrays = [bag.features.numpy() for bag in train]
        >>> with TemporaryDirectory() as folder:
        ...     made = fit(arrays, f"{folder}/model", labels=train.labels)
        ...     probabilities = [scan.probability for scan in predict(new, f"{folder}/model")]
        ...     again = [scan.probability for scan in predict(arrays[:3], f"{folder}/model")]
        >>> len(probabilities), len(again), made.sentences()[1]
        (20, 3, 'It tells scans apart: AUROC ...')
    """
    if not isinstance(out, str | Path):
        raise UserError(
            f'out: got {type(out).__name__}; it is the folder for the model; labels have a name: fit(scans, "model", '
            "labels=[0, 1, ...])"
        )
    check_device(device)
    with TemporaryDirectory() as folder:
        if finding is not None and not isinstance(scans, FeatureStore | str | Path):
            raise UserError(f"finding is {finding!r}, but scans in memory have one label without a name; leave it out")
        store = _as_store("scans", scans, Path(folder) / "scans", labels, patient_ids)
        train, own_test = training_scans(_of_finding(store, finding), keep_test=keep_test)
        if test is not None and own_test is not None:
            raise UserError(f"store {store.folder} has {len(own_test)} test scans of its own; leave test= out")
        tested = own_test if test is None else _of_finding(_as_store("test", test, Path(folder) / "test"), finding)
        return fit_model(
            train,
            out,
            test=tested,
            plan=make_plan(train.labels.tolist(), train.patient_ids, seed=seed),
            sensitivity=sensitivity,
            coverage=coverage,
            device=device,
            watch=watch,
        )


def _as_store(
    name: str,
    scans: ScansToFit,
    folder: Path,
    labels: Labels | None = None,
    patient_ids: Sequence[str] | None = None,
) -> FeatureStore:
    for what, given in (("labels", labels), ("patient_ids", patient_ids)):
        if given is not None and isinstance(scans, FeatureStore | str | Path):
            where = scans.folder if isinstance(scans, FeatureStore) else scans
            raise UserError(f"{what}: the feature store {where} has its own; leave {what}= out")
    if isinstance(scans, str | Path):
        return open_store(scans)
    bags = as_scans(scans, labelled=labels is None, name=name)
    if labels is not None or patient_ids is not None:
        bags = with_labels(bags, labels, patient_ids)
    return bags if isinstance(bags, FeatureStore) else write_store(folder, bags, provenance={})


def _of_finding(store: FeatureStore, finding: str | None) -> FeatureStore:
    if finding is not None:
        return store.of_finding(finding)
    if len(store.findings) > 1:
        names = ", ".join(finding.name for finding in store.findings)
        raise UserError(
            f"store {store.folder} has the findings {names}; choose one: finding={store.findings[0].name!r}, or fit "
            "all of them with the command nguide fit"
        )
    return store


@dataclass(frozen=True, eq=False)
class FittedFindings:
    """What `fit_findings` has made; models, reasons and notes are by the findings' names."""

    bundle: Bundle  # the model of the first finding, with the others
    models: Mapping[str, FittedModel]
    skipped: Mapping[str, str]  # why a finding has no model
    notes: Mapping[str, str]  # what is to be said of a finding that was fitted


def fit_findings(
    store: FeatureStore,
    out: str | Path,
    names: Sequence[str] = (),
    *,
    seed: int = 0,
    keep_test: bool = False,
    watch: Callable[[str, float], None] | None = None,
    **options: Any,
) -> FittedFindings:
    """Fit and write a model of each finding, or of those named; those with too few scans are skipped, but not all."""
    check_sensitivity(options.get("sensitivity"))  # a mistake of the command is not one of a finding
    if options.get("coverage") is not None:
        check_coverage(options["coverage"])
    chosen = [choose_finding(store.findings, name, f"store {store.folder}") for name in names] or store.findings
    models: dict[str, FittedModel] = {}
    skipped: dict[str, str] = {}
    notes: dict[str, str] = {}

    def report(name: str, number: int, share: float) -> None:
        if watch is not None:
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
