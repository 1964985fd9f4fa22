"""`SliceFinder`: what `nguide fit` does, as an estimator with scikit-learn's habits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Num, Shaped
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.core.arrays import as_tensor, check_device, checked_whole
from normal_guidance.core.bags import Bag, Bags, checked_ids
from normal_guidance.core.prediction import Prediction
from normal_guidance.fit.fit_ensemble import LEAST, make_plan
from normal_guidance.fit.measured import fit_and_measure
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.sweep.loop import predict_bags

Features: TypeAlias = Num[Tensor, "_ features"] | Num[np.ndarray, "_ features"]  # one scan without its label
GIVE = "give Bags, a list of Bag, or a list of arrays (slices, features)"
ScansLike: TypeAlias = Bags | FeatureStore | Iterable[Bag | Features]
Labels: TypeAlias = Sequence[int] | Shaped[np.ndarray, "scans"] | Shaped[Tensor, "scans"]
TwoLabels: TypeAlias = Labels | Sequence[str]


class SliceFinder(ClassifierMixin, BaseEstimator):
    """Classifies scans and finds the slices that matter, from scan labels alone, with nothing to choose.

    Scans are `Bags`, a feature store, or a list: of `Bag`, or of arrays `(slices, features)`.  Labels and patients are
    those of the bags or the store; where bags name no patients, each scan is its own.  Labels of slices measure the
    result and calibrate intervals; they never train.  Numbers of scans are numpy arrays, as scikit-learn's are; those
    of slices are packed tensors, as this library's are.

    `fit` changes neither its scans nor any global state, and fitting again gives the same result.

    Args:
        folds: parts into which patients are divided; without it, 5, or fewer where a label has fewer patients.
        seed: of the division, of initial weights and of the order of scans.
        sensitivity: least sensitivity of the threshold, out of fold; without it, Youden's J chooses.
        coverage: the probability with which `find_intervals` shall contain the finding; refused if too few scans have
            slice labels. Without it, .9 if there are enough.
        device: where it is fitted, such as "cuda"; a fitted finder is on the CPU.

    Attributes:
        classes_: the two labels, the negative one first.
        n_features_in_: features per slice.
        ensemble_: the fitted `Ensemble`, a torch module.
        plan_: the folds that were used.
        operation_: calibration and threshold, and notes about what is doubtful.
        threshold_: the probability from which on a scan is positive.
        out_of_fold_logits_: one number per training scan, by members that were not trained on it.
        out_of_fold_attention_: the same for the slices, packed.
        out_of_fold_: scan AUROC and, where slice labels are known, localization AUROC, its gain over position
            and the patient-specific measure, with intervals.
        interval_calibration_: what `find_intervals` promises, an `IntervalCalibration` with its `coverage`; None where
            too few patients have a positive scan with slice labels.
        sentences_: whether it tells scans apart, whether it finds the slices, and whether to trust it.

    Example:
        >>> from normal_guidance.study.drawn import shifted_mean
        >>> train, new = (shifted_mean(60, seed, features=4, shift=2.0) for seed in (1, 2))
        >>> finder = SliceFinder(folds=3).fit(train)
        >>> finder.predict_proba(new).shape, finder.find_slices(new).shape == new.slice_labels.shape
        ((60, 2), True)
        >>> finder.sentences_[0]
        'It finds the slices better than position does: ...'
    """

    def __init__(
        self,
        folds: int | None = None,
        seed: int = 0,
        sensitivity: float | None = None,
        coverage: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.folds = folds
        self.seed = seed
        self.sensitivity = sensitivity
        self.coverage = coverage
        self.device = device

    def fit(self, bags: ScansLike, y: TwoLabels | None = None, *, groups: Sequence[str] | None = None) -> SliceFinder:
        """Fit an ensemble, its calibration and its threshold.

        Args:
            bags: the training scans.
            y: scan labels in place of those of the bags; arrays have no others.  Any two values, such as 0 and 1 or
                "healthy" and "sick"; the one that sorts last is the positive one.
            groups: the patient of each scan, in place of those of the bags; a patient's scans share a fold.
        """
        check_device(self.device)
        self.classes_, labels = (np.array([0, 1]), None) if y is None else two_classes(y)
        scans = with_labels(bags, labels, groups)
        plan = make_plan(scans.labels.tolist(), scans.patient_ids, seed=self.seed)
        if self.folds is not None:
            plan = replace(plan, folds=checked_whole("folds", self.folds, LEAST))
        result = fit_and_measure(scans, plan, sensitivity=self.sensitivity, coverage=self.coverage, device=self.device)
        assert result.operation.point is not None  # both classes are there
        self.n_features_in_ = scans.width
        self.ensemble_, self.plan_ = result.fit.ensemble, result.fit.plan
        self.operation_, self.threshold_ = result.operation, result.operation.point.threshold
        self.out_of_fold_logits_, self.out_of_fold_attention_ = result.fit.logits.numpy(), result.fit.attention
        self.interval_calibration_, self._intervals = result.intervals.calibration, result.intervals
        self.out_of_fold_, self.sentences_ = result.out_of_fold, tuple(result.sentences())
        return self

    def decision_function(self, bags: ScansLike) -> Float64[np.ndarray, "scans"]:
        """The ensemble's log-odds, before calibration; `predict` compares probabilities with `threshold_`."""
        return self._predict(bags).logit.double().numpy()

    def predict_proba(self, bags: ScansLike) -> Float64[np.ndarray, "scans 2"]:
        """Calibrated probabilities of a negative and of a positive scan."""
        logits = self.decision_function(bags)
        positive = np.array([self.operation_.calibration.probability(logit) for logit in logits.tolist()])
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, bags: ScansLike) -> Shaped[np.ndarray, "scans"]:
        """The label of each scan: the positive one if its probability is `threshold_` or above."""
        positive = self.predict_proba(bags)[:, 1] >= self.threshold_
        return np.asarray(self.classes_[positive.astype(np.int64)])

    def find_slices(self, bags: ScansLike) -> Float[Tensor, "slices"]:
        """The attention of every slice, packed: a scan's adds up to 1.

        `localization(finder.find_slices(bags), bags.slice_labels, bags.lengths)` measures it, and
        `.split(bags.lengths.tolist())` makes a list of scans of it.
        """
        return self._predict(bags).attention

    def find_intervals(self, bags: ScansLike) -> tuple[Int64[Tensor, "scans"], Int64[Tensor, "scans"]]:
        """First and last position of each scan, counted from 0, both included: slices that promise to hold the finding.

        `interval_calibration_` says with what probability they contain all of it, if the scan is positive. A finder
        that was fitted to too few scans with slice labels has no such intervals and refuses.
        """
        check_is_fitted(self)
        if self.interval_calibration_ is None:
            raise UserError(f"{self._intervals.sentences()[0].removesuffix('.')}; fit the finder to more such scans")
        scans = as_scans(bags)
        return self.interval_calibration_.interval(self._predict(scans).attention, scans.lengths)

    def score(self, bags: ScansLike, y: TwoLabels | None = None) -> float:
        """Accuracy, as scikit-learn's classifiers have it; scan AUROC is `roc_auc_score` of `decision_function`."""
        check_is_fitted(self)
        wanted = self.classes_[as_scans(bags, labelled=True).labels.numpy()] if y is None else np.asarray(y)
        made = self.predict(bags)
        if wanted.shape != made.shape:
            raise UserError(f"labels of shape {wanted.shape} for {len(made)} scans; give one label per scan")
        return float((made == wanted).mean())

    def _predict(self, bags: ScansLike) -> Prediction:
        check_is_fitted(self)
        scans = as_scans(bags)
        if not len(scans):
            raise UserError(f"{scans}: there is nothing to predict; give at least one scan")
        if scans.width != self.n_features_in_:
            raise UserError(
                f"the scans have {scans.width} features per slice, but the finder was fitted to {self.n_features_in_}; "
                "give features that were made as those of the training scans"
            )
        return predict_bags(self.ensemble_, scans)


def two_classes(y: TwoLabels) -> tuple[Shaped[np.ndarray, "two"], Int64[np.ndarray, "scans"]]:
    """The two values of labels, in their order, and for each scan which of them it has."""
    try:
        values = np.asarray(y.cpu() if isinstance(y, Tensor) else y)
    except ValueError as error:  # lists of different lengths
        raise UserError("labels: got lists of different lengths; give one label per scan") from error
    if values.ndim != 1:
        raise UserError(f"labels of shape {values.shape}; give one label per scan")
    classes, numbers = np.unique(values, return_inverse=True)
    if len(classes) != 2 or (values.dtype.kind == "f" and not np.isfinite(values).all()):
        shown = ", ".join(repr(value) for value in classes[:5].tolist())
        raise UserError(
            f"labels have {len(classes)} different values ({shown}); a SliceFinder tells two apart: give two"
        )
    return classes, numbers.astype(np.int64)


def as_scans(bags: ScansLike, *, labelled: bool = False, name: str = "scans") -> Bags | FeatureStore:
    """The scans in a form with packed features, on the CPU; arrays get the label 0, or are refused."""
    if isinstance(bags, FeatureStore):
        return bags
    if isinstance(bags, Bags):
        return bags.to("cpu")
    if isinstance(bags, str) or not isinstance(bags, Iterable):
        raise UserError(f"{name}: got {type(bags).__name__} {shorten(repr(bags))}; {GIVE}, or open_store(FOLDER)")
    if isinstance(bags, Tensor | np.ndarray) and bags.ndim != 3:
        raise UserError(f"{name}: got one array of shape {tuple(bags.shape)}; {GIVE}, one for each scan")
    scans = list(bags)
    if not scans:
        raise UserError(f"{name}: the list is empty; {GIVE}")
    named = [scan for scan in scans if isinstance(scan, Bag)]
    if len(named) == len(scans):
        return Bags.pack(named).to("cpu")
    if labelled:
        raise UserError(
            f"{name}: {len(scans)} arrays without labels; give Bags.from_arrays(arrays, labels), or the labels beside "
            "the arrays: SliceFinder().fit(arrays, [0, 1, ...]), fit(arrays, [0, 1, ...])"
        )
    in_one = isinstance(bags, Tensor | np.ndarray)
    arrays = cast(Iterable[Features], bags if in_one else scans)  # a Bag among arrays is refused there
    return Bags.from_arrays(arrays, [0] * len(scans)).to("cpu")


def with_labels(bags: ScansLike, y: Labels | None, patient_ids: Sequence[str] | None = None) -> Bags | FeatureStore:
    """The scans with their labels, or with other labels and patients."""
    scans = as_scans(bags, labelled=y is None)
    if y is None and patient_ids is None:
        return scans
    packed = scans.bags() if isinstance(scans, FeatureStore) else scans
    labels = packed.labels
    if y is not None:
        values = as_tensor(y, "labels").cpu()
        if values.shape != (len(packed),):
            raise UserError(f"labels of shape {tuple(values.shape)} for {len(packed)} scans; give one label per scan")
        wrong = ((values != 0) & (values != 1)).nonzero().flatten().tolist()
        if wrong:
            value = values[wrong[0]].item()
            raise UserError(f"scan {wrong[0]} has label {value!r} ({len(wrong)} such scans); labels are 0 or 1")
        labels = values.long()
    # Slice labels may contradict other scan labels, and no training needs them.
    return replace(
        packed,
        labels=labels,
        slice_labels=packed.slice_labels if torch.equal(labels, packed.labels) else None,
        patient_ids=packed.patient_ids if patient_ids is None else checked_ids(patient_ids, "patient_ids"),
    )
