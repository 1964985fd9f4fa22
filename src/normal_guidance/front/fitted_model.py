"""`ng.fit`, and the model that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.clinic.predict.predicting import DEFAULTS, PredictOptions
from normal_guidance.core.arrays import check_device
from normal_guidance.core.bags import number_of_scan
from normal_guidance.fit.fit_ensemble import make_plan
from normal_guidance.fit.fit_page import PAGE
from normal_guidance.fit.fitting import ModelFit, fit_model, training_scans
from normal_guidance.fit.measured import COLUMNS, Measured, Ranked, check_shares
from normal_guidance.fit.slice_finder import Labels, ScansLike, as_scans, with_labels
from normal_guidance.front.predicted import NewScans, Predictions, predict
from normal_guidance.front.scan_figure import Images, plot_scan, slices_under
from normal_guidance.scans.features.store import FeatureStore, open_store, write_store
from normal_guidance.scans.index.manifest import MANIFEST, beside, read_manifest
from normal_guidance.show.figure_style import METHOD_COLORS, WIDTH, Picture, styled
from normal_guidance.show.html import notebook_html
from normal_guidance.show.progress_bar import Shown, show_job
from normal_guidance.statistics.skill import MeanAuroc

ScansToFit: TypeAlias = ScansLike | str | Path  # scans in memory, in a feature store, or the folder of one


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """What a model does on scans that it was not trained on: does it find the slices, does it tell scans apart.

    Args:
        sentences: in words; the last one says whether to trust it.
        out_of_fold: every training scan, by models that did not see its patient: the gain over position, scan AUROC.
        test: the same of scans that no model has seen; None without such.
        leaderboard: the model beside its kinds of members, mean pooling and position.
    """

    sentences: tuple[str, ...]
    out_of_fold: Measured
    test: Measured | None
    leaderboard: tuple[Ranked, ...]

    def __repr__(self) -> str:
        return f"Verdict({self.sentences[0]} Scan AUROC {self.out_of_fold.scans}.)"

    def to_pandas(self) -> pd.DataFrame:
        """The leaderboard: one row for each kind of members, with the measures and their intervals as text."""
        return pd.DataFrame([row.cells() for row in self.leaderboard], columns=list(COLUMNS))

    def _repr_html_(self) -> str:
        return notebook_html(self.sentences, self.to_pandas())

    @styled
    def plot(self) -> Figure:
        """Draw the leaderboard, with intervals; dashed is position, dotted is chance."""
        rows = self.leaderboard
        figure = Picture(figsize=(WIDTH, 0.9 + 0.27 * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.set_yticks(range(len(rows)), [row.title for row in rows])
        left.invert_yaxis()
        for panel, column in ((left, "localization AUROC"), (right, "scan AUROC")):
            panel.set_title(column)
            panel.axvline(0.5, color="0.75", lw=0.8, ls=":")
            for place, row in enumerate(rows):
                known = row.localization if panel is left else row.scans
                if known is not None:
                    value = known.auroc if isinstance(known, MeanAuroc) else known.value
                    reach = [[value - known.low], [known.high - value]]
                    panel.errorbar(value, place, xerr=reach, marker="o", ms=5, color=METHOD_COLORS.get(row.name, "0.4"))
        if self.out_of_fold.gain is not None:
            left.axvline(self.out_of_fold.gain.position, color="0.4", lw=0.9, ls="--")
        return figure


@dataclass(frozen=True, eq=False, repr=False)
class FittedModel:
    """A fitted model and what it can do.

    Args:
        folder: where it lies; `predict` and the command `nguide predict` take it, `report` in it is for people.
        measured: the model, and every measure of it.
        scans: the training scans, one row each, as a store lists them.
    """

    folder: Path
    measured: ModelFit
    scans: pd.DataFrame

    @property
    def verdict(self) -> Verdict:
        """What it does on scans that it was not trained on."""
        made = self.measured
        return Verdict(tuple(made.sentences()), made.out_of_fold, made.test, made.leaderboard)

    @property
    def report(self) -> Path:
        """The page about the model."""
        return self.folder / PAGE

    def predict(self, scans: NewScans, *, options: PredictOptions = DEFAULTS, progress: bool = True) -> Predictions:
        """Predict new scans, as the function `predict` does."""
        return predict(scans, self.folder, options=options, progress=progress)

    def to_pandas(self) -> pd.DataFrame:
        """One row for each training scan, out of fold: ids, label, slices, probability, positive, key slice from 1."""
        made, table = self.measured, self.scans[["scan_id", "patient_id", "label", "slices"]].copy()
        threshold = made.bundle.threshold
        table["probability"] = [made.operation.calibration.probability(logit) for logit in made.fit.logits.tolist()]
        table["positive"] = None if threshold is None else table["probability"] >= threshold
        table["key_slice"] = [int(attention.argmax()) + 1 for attention in self._attention]
        return table

    def plot(self, scan: int | str | None = None) -> Figure:
        """Draw the verdict, or one training scan: attention out of fold, labelled slices, and images if they are near.

        Images are read by the index beside the model, `MODEL.index` or `index`.
        """
        if scan is None:
            return self.verdict.plot()
        number = number_of_scan(scan, tuple(self.scans["scan_id"]), f"model {self.folder}")
        row, attention = self.to_pandas().iloc[number], self._attention[number]
        known: Any = self.scans["slice_labels"].iat[number]
        side = "positive" if row["label"] else "negative"
        title = f"{row['scan_id']}: labelled {side}, probability {row['probability']:.2f} (out of fold)"
        truth = None if known is None else torch.tensor(known.tolist())
        return plot_scan(title, attention, self._images(str(row["scan_id"]), attention), truth=truth)

    def _images(self, scan: str, attention: Tensor) -> Images:
        for place in (beside(self.folder, "index"), self.folder.with_name("index")):
            if self.measured.bundle.encoder and (place / MANIFEST).is_file():
                manifest = read_manifest(place)
                if scan in (ids := manifest.scan_ids):
                    with suppress(UnreadableError):  # the curve is there without them
                        row = manifest[ids.index(scan)]
                        return slices_under(row, manifest.root, attention, self.measured.bundle)
        return []

    @property
    def _attention(self) -> Sequence[Tensor]:
        return self.measured.predicted.attention.split(self.scans["slices"].tolist())

    def __repr__(self) -> str:
        return f"FittedModel({str(self.folder)!r}, {len(self.scans)} scans: {self.measured.sentences()[0]})"

    def _repr_html_(self) -> str:
        where = f"Model: {self.folder}. Report: {self.report}."
        return notebook_html([*self.verdict.sentences, where], self.verdict.to_pandas())


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
        scans: a folder of scans (DICOM, NIfTI) with a table of `labels`, a store from `open_store` or its folder,
            `Bags`, a list of `Bag`, or a list of arrays `(slices, features)` with `labels`.  The scans of a store's
            part "test" are kept for testing, if they are 30 or more.
        labels: the table of a folder of scans (.csv, .parquet), or one 0 or 1 per scan.
        out: the folder for the model, new or empty; an index and a store of the scans are kept beside it.
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
        >>> from normal_guidance.study.drawn import shifted_mean
        >>> train, new = (shifted_mean(20, seed, features=4, shift=2.0) for seed in (1, 2))
        >>> arrays = [bag.features.numpy() for bag in train]
        >>> with TemporaryDirectory() as folder:
        ...     model = fit(arrays, train.labels, out=f"{folder}/model")
        ...     new_scans = model.predict(new)
        >>> model.verdict.sentences[1], new_scans
        ('It tells scans apart: AUROC ...', Predictions(20 scans, ... positive))
    """
    if not isinstance(out, str | Path):
        raise UserError(f"out: got {type(out).__name__}; it is the folder for the model, such as out='model'")
    check_device(device)
    check_shares(sensitivity, coverage)  # before the scans are encoded
    with TemporaryDirectory() as folder, show_job("fit", progress=progress) as (say, watch):
        if isinstance(labels, str | Path):
            if not isinstance(scans, str | Path):
                raise UserError(
                    f"labels: {labels} is a table for a folder of scans; give the folder, or one label a scan"
                )
            from normal_guidance.front.scans_to_store import ScanFolder, scans_to_store  # needs the extra dicom

            of_images = ScanFolder(Path(scans), Path(labels), device=str(device))
            scans, labels = scans_to_store(of_images, Path(out), say, watch), None
        if finding is not None and not isinstance(scans, FeatureStore | str | Path):
            raise UserError(f"finding is {finding!r}, but scans in memory have one label without a name; leave it out")
        store = _as_store("scans", scans, Path(folder) / "scans", labels, patient_ids)
        train, own_test = training_scans(_of_finding(store, finding), keep_test=keep_test)
        if test is not None and own_test is not None:
            raise UserError(f"store {store.folder} has {len(own_test)} test scans of its own; leave test= out")
        tested = own_test if test is None else _of_finding(_as_store("test", test, Path(folder) / "test"), finding)
        plan = make_plan(train.labels.tolist(), train.patient_ids, seed=seed)
        made = fit_model(
            train,
            out,
            test=tested,
            plan=plan,
            sensitivity=sensitivity,
            coverage=coverage,
            device=device,
            watch=lambda share: watch(Shown("fitting", share, f"{share:.0%}")),
        )
    return FittedModel(Path(out), made, train.scans)


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
            raise UserError(
                f"{what}: store {where} has its own; leave {what}= out (a folder of scans: labels=TABLE.csv)"
            )
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
