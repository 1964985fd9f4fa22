"""`ng.fit` and `ng.predict`: what the commands `nguide fit` and `nguide predict` do, from Python.

`fit` writes the folder of a model, `predict` takes it.  For a model that stays in memory there is `SliceFinder`; to
train one configuration of one method, `train_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch

from normal_guidance.clinical.bundle import Bundle, load_bundle
from normal_guidance.clinical.fit_findings import training_scans
from normal_guidance.clinical.fitting import FittedModel, fit_model
from normal_guidance.clinical.new_features import Source, is_features, predict_features
from normal_guidance.clinical.new_scans import find_scans
from normal_guidance.clinical.predicting import DEFAULTS, Outcome, PredictOptions, predict_found
from normal_guidance.core.checks import check_device
from normal_guidance.errors import UserError
from normal_guidance.features.encoders import Encoder
from normal_guidance.features.store import FeatureStore, open_store, write_store
from normal_guidance.training.fit_committee import make_plan
from normal_guidance.training.slice_finder import Labels, ScansLike, as_scans, with_labels

TrainingScans = ScansLike | str | Path
"""Scans to train on: in memory, in a feature store, or the folder of one."""

NewScans = ScansLike | str | Path | Sequence[str | Path]
"""Scans to predict: files and folders, or features in memory or in a store."""


def fit(
    scans: TrainingScans,
    out: str | Path,
    *,
    labels: Labels | None = None,
    patient_ids: Sequence[str] | None = None,
    test: TrainingScans | None = None,
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
            or the folder of one.  The scans of a store's part "test" are kept for testing.
        out: the folder for the model; it must be new or empty.
        labels: one 0 or 1 per scan, for arrays, or in place of the labels of bags.
        patient_ids: one per scan, for arrays, or in place of those of the bags; a patient's scans share a fold.
            Without it, each array is a patient of its own.
        test: other patients' scans, to measure the model on; arrays as `Bags.from_arrays(arrays, labels)`.
        finding: which finding of a store with several is fitted.
        sensitivity: least sensitivity of the threshold, out of fold; without it, Youden's J chooses.
        coverage: the probability with which intervals shall contain the finding; refused if too few scans have slice
            labels.  Without it, .9 if there are enough.
        seed: of the folds.
        device: where it is fitted, such as "cuda".
        watch: called with the share that is done.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> train, new = (shifted_mean(20, seed, features=4, shift=2.0) for seed in (1, 2))
        >>> arrays = [bag.features.numpy() for bag in train]
        >>> with TemporaryDirectory() as folder:
        ...     made = fit(arrays, f"{folder}/model", labels=train.labels)
        ...     probabilities = [one.probability for one in predict(new, f"{folder}/model")]
        ...     again = [one.probability for one in predict(arrays[:3], f"{folder}/model")]
        >>> len(probabilities), len(again), made.sentences()[0]
        (20, 3, 'It tells scans apart with an AUROC of ...')
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
        train, own_test = training_scans(_of_finding(store, finding))
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
    scans: TrainingScans,
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
    found = as_scans(scans, labelled=labels is None, name=name)
    if labels is not None or patient_ids is not None:
        found = with_labels(found, labels, patient_ids)
    return found if isinstance(found, FeatureStore) else write_store(folder, found, provenance={})


def _of_finding(store: FeatureStore, finding: str | None) -> FeatureStore:
    if finding is not None:
        return store.of_finding(finding)
    if len(store.findings) > 1:
        names = ", ".join(one.name for one in store.findings)
        raise UserError(
            f"store {store.folder} has the findings {names}; choose one: finding={store.findings[0].name!r}, or fit "
            "all of them with the command nguide fit"
        )
    return store


def predict(
    scans: NewScans,
    model: Bundle | str | Path,
    *,
    encoder: Encoder | None = None,
    options: PredictOptions = DEFAULTS,
) -> Iterator[Outcome]:
    """Predict each scan, one after the other, as `nguide predict` does; scans that cannot be used come first.

    Each result is a `ScanPrediction` (probability, attention, key slices, interval) or, with the reason, a
    `NotPredicted`.  Nothing is written; `normal_guidance.clinical.write_predictions` makes pages and DICOM of them.

    Args:
        scans: DICOM folders, zip archives, NIfTI files, or folders of such; for a model of your own features, `Bags`,
            a list of arrays `(slices, features)`, a feature store, or what `nguide store import` takes.
        model: the folder that `fit`, `nguide fit` or `nguide bundle` wrote, or that of a run; or the `Bundle` of one,
            loaded once for several calls.
        encoder: from `Bundle.load_encoder`, to load it once for several calls.
        options: how scans are predicted.

    Example:
        >>> predict("new-scans", "nowhere")
        Traceback (most recent call last):
        normal_guidance.errors.UserError: nowhere is neither a bundle (no bundle.json) nor a complete run (no
        report.json); give the folder of one
    """
    if not isinstance(options, PredictOptions):
        raise UserError(f"options: got {type(options).__name__}; give PredictOptions(), or leave it out")
    bundle = _bundle(model)
    several = _sources(scans)
    in_memory = [one for one in several if not isinstance(one, str | Path)]
    places = [Path(one) for one in several if isinstance(one, str | Path)]
    if in_memory or bundle.encoder is None or any(map(is_features, places)):
        return predict_features(several, bundle, options)
    found = find_scans(
        places,
        workers=options.workers,
        any_modality=options.force,
        modalities=bundle.expects.modalities,
        anonymize=options.anonymize,
    )
    return predict_found(found, bundle, encoder, options)


def _bundle(model: object) -> Bundle:
    if isinstance(model, Bundle):
        return model
    if isinstance(model, str | Path):
        return load_bundle(model)
    raise UserError(
        f"model: got {type(model).__name__}; give the folder that fit or nguide fit wrote. A SliceFinder predicts by "
        "itself, finder.predict(scans), and a torch module by predict_bags(model, bags)"
    )


def _sources(scans: NewScans) -> list[Source]:
    """Paths as they are, scans in memory as bags."""
    if isinstance(scans, str | Path):
        return [scans]
    if isinstance(scans, Sequence) and scans and all(isinstance(one, str | Path) for one in scans):
        return list(scans)
    try:
        return [as_scans(cast(ScansLike, scans))]
    except UserError as error:
        raise UserError(f"{error}; scans that are files are given by their paths") from error
