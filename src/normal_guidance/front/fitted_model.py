"""`ng.fit`, and the model that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import check_device
from normal_guidance.fit.fit_ensemble import make_plan
from normal_guidance.fit.fitting import ModelFit, fit_model, training_scans
from normal_guidance.fit.slice_finder import Labels, ScansLike, as_scans, with_labels
from normal_guidance.scans.features.store import FeatureStore, open_store, write_store
from normal_guidance.show.progress_bar import show_share

ScansToFit: TypeAlias = ScansLike | str | Path  # scans in memory, in a feature store, or the folder of one


@dataclass(frozen=True, eq=False, repr=False)
class FittedModel:
    """A fitted model and what it can do.

    Args:
        folder: where it lies; `predict` and the command `nguide predict` take it.
        measured: what it does on scans that it was not trained on.
    """

    folder: Path
    measured: ModelFit

    def __repr__(self) -> str:
        return f"FittedModel({str(self.folder)!r})"


def fit(
    scans: ScansToFit,
    labels: Labels | str | Path | None = None,
    *,
    out: str | Path = "model",
    patient_ids: Sequence[str] | None = None,
    test: ScansToFit | None = None,
    keep_test: bool = False,
    finding: str | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> FittedModel:
    """Fit a model to scans and their labels, with nothing to choose, and write its folder, as `nguide fit` does.

    `predict` and `nguide predict` take the folder; `report.html` in it says what the model can do.  Labels of slices
    measure the result and calibrate intervals; they never train.

    Args:
        scans: `Bags`, a list of `Bag`, a list of arrays `(slices, features)` with `labels`, a store from `open_store`,
            or the folder of one.  The scans of a store's part "test" are kept for testing, if they are 30 or more.
        labels: one 0 or 1 per scan, for arrays, or in place of the labels of bags.
        out: the folder for the model; it must be new or empty.
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
        progress: show a bar, on a terminal and in a notebook.

    Example:
        >>> from normal_guidance import predict
        >>> from normal_guidance.study.drawn import shifted_mean
        >>> train, new = (shifted_mean(20, seed, features=4, shift=2.0) for seed in (1, 2))
        >>> arrays = [bag.features.numpy() for bag in train]
        >>> with TemporaryDirectory() as folder:
        ...     model = fit(arrays, train.labels, out=f"{folder}/model")
        ...     probabilities = [scan.probability for scan in predict(new, f"{folder}/model")]
        >>> len(probabilities), model.measured.sentences()[1]
        (20, 'It tells scans apart: AUROC ...')
    """
    if not isinstance(out, str | Path):
        raise UserError(f"out: got {type(out).__name__}; it is the folder for the model, such as out='model'")
    if isinstance(labels, str | Path):  # a table: the scans are a folder of images
        raise UserError(
            f"labels: {labels} is a table for a folder of scans; encode the scans first, and give the store"
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
        plan = make_plan(train.labels.tolist(), train.patient_ids, seed=seed)
        with show_share("fit", progress=progress) as watch:
            made = fit_model(
                train,
                out,
                test=tested,
                plan=plan,
                sensitivity=sensitivity,
                coverage=coverage,
                device=device,
                watch=watch,
            )
    return FittedModel(Path(out), made)


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
