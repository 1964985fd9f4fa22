"""`ng.predict`, and the predictions that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import pandas as pd
from matplotlib.figure import Figure

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import count_text
from normal_guidance.clinic.predict.new_scans import NotPredicted, find_scans
from normal_guidance.clinic.predict.predicting import (
    DEFAULTS,
    Outcome,
    PredictOptions,
    Source,
    is_features,
    predict_features,
    predict_found,
)
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.clinic.results.result_folder import Written, summary_lines
from normal_guidance.clinic.results.scan_pages import SIDES
from normal_guidance.core.bags import number_of_scan
from normal_guidance.fit.bundle import Bundle, load_bundle
from normal_guidance.fit.slice_finder import ScansLike, as_scans
from normal_guidance.front.scan_figure import plot_scan, slices_under
from normal_guidance.scans.features.encoders import Encoder
from normal_guidance.show.figure_style import rounded
from normal_guidance.show.html import notebook_html
from normal_guidance.show.progress_bar import Shown, show_job
from normal_guidance.statistics.calibration import describe

NewScans: TypeAlias = ScansLike | str | Path | Sequence[str | Path]  # files and folders, or features

SHOWN = ("scan_id", "finding", "state", "probability", "positive", "key_slices", "slices", "cautions", "reason")
"""The columns that a notebook shows."""


class Predictions(Sequence[Outcome]):
    """What a model says of new scans: a `ScanPrediction` each, or a `NotPredicted` with the reason.

    `predictions[0]` and `predictions["scan-7"]` are scans, `predictions[:5]` has fewer of them.
    """

    def __init__(self, outcomes: Iterable[Outcome], bundle: Bundle) -> None:
        self.outcomes, self.bundle = tuple(outcomes), bundle

    def __len__(self) -> int:
        return len(self.outcomes)

    def __getitem__(self, scan: Any) -> Any:
        if isinstance(scan, slice):
            return Predictions(self.outcomes[scan], self.bundle)
        return self.outcomes[number_of_scan(scan, self.scan_ids, "the predictions")]

    @property
    def scan_ids(self) -> tuple[str, ...]:
        """The names of the scans, in their order."""
        return tuple(one.scan_id if isinstance(one, NotPredicted) else one.row.scan_id for one in self.outcomes)

    def to_pandas(self) -> pd.DataFrame:
        """One row a scan, or a scan and finding, with the columns of the summary.csv of `nguide predict`."""
        return pd.DataFrame([line for one in self.outcomes for line in summary_lines(Written(one), self.bundle)])

    def slices(self) -> pd.DataFrame:
        """One row a slice: `slice` counts from 1, `position` from 0, and `instance_number` is DICOM's."""
        rows = [
            {
                "scan_id": each.row.scan_id,
                **({} if each.finding is None else {"finding": each.finding.name}),
                "slice": position + 1,
                "instance_number": each.instance_numbers[position],
                "position": position,
                "attention": attention,
            }
            for one in self._predicted
            for each in one.each
            for position, attention in enumerate(each.attention.tolist())
        ]
        return pd.DataFrame(rows).astype({"instance_number": "Int64"} if rows else {})

    def plot(self, scan: int | str = 0) -> Figure:
        """Draw one scan: attention along its slices, and slices, unless the scan is given by its features."""
        one = self[scan]
        if isinstance(one, NotPredicted):
            raise UserError(f"scan {one.scan_id!r} was not predicted: {one.reason.detail}; choose another")
        images = slices_under(one.row, one.root, one.attention, self.bundle) if one.has_images else []
        side = SIDES[one.is_positive]
        title = f"{one.row.scan_id}: probability {rounded(one.probability)}, {side}; research only, not for diagnosis."
        return plot_scan(
            " ".join((title, *one.cautions)), one.attention, images, keys=one.key_slices, interval=one.interval
        )

    def __repr__(self) -> str:
        positive = sum(one.is_positive is True for one in self._predicted)
        scans, lacking = count_text(len(self), "scan"), len(self) - len(self._predicted)
        return f"Predictions({scans}, {positive} positive{f', {lacking} not predicted' if lacking else ''})"

    def _repr_html_(self) -> str:
        table = self.to_pandas()
        shown = [name for name in SHOWN if name in table and table[name].notna().any()]
        return notebook_html([repr(self), *describe(self.bundle.operation), *self.bundle.cautions], table[shown])

    @property
    def _predicted(self) -> list[ScanPrediction]:
        return [one for one in self.outcomes if isinstance(one, ScanPrediction)]


def predict(
    scans: NewScans,
    model: Bundle | str | Path,
    *,
    encoder: Encoder | None = None,
    options: PredictOptions = DEFAULTS,
    progress: bool = True,
) -> Predictions:
    """Predict new scans, as `nguide predict` does; those that cannot be used come first, with the reason.

    Nothing is written; `normal_guidance.clinic.write_predictions` makes pages and DICOM of the predictions.

    Args:
        scans: DICOM folders, zip archives, NIfTI files, or folders of such; for a model of your own features, `Bags`,
            a list of arrays `(slices, features)`, a feature store, or what `nguide store import` takes.
        model: the folder that `fit`, `nguide fit` or `nguide bundle` wrote, or that of a run; or the `Bundle` of one,
            loaded once for several calls.
        encoder: from `Bundle.load_encoder`, to load it once for several calls.
        options: how scans are predicted.
        progress: show a bar, on a terminal and in a notebook.

    Example:
        >>> predict("new-scans", "nowhere")
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: nowhere is neither a bundle (no bundle.json) nor a complete run (no
        report.json); give the folder of one
    """
    if not isinstance(options, PredictOptions):
        raise UserError(f"options: got {type(options).__name__}; give PredictOptions(), or leave it out")
    if isinstance(model, str | Path):
        model = load_bundle(model)
    elif not isinstance(model, Bundle):
        raise UserError(
            f"model: got {type(model).__name__}; give the folder that fit or nguide fit wrote. What fit returns, and a "
            "SliceFinder, predict by themselves, model.predict(scans), and a torch module by predict_bags(model, bags)"
        )
    sources = _sources(scans)
    paths = [Path(source) for source in sources if isinstance(source, str | Path)]
    if len(paths) < len(sources) or model.encoder is None or any(map(is_features, paths)):
        return Predictions(predict_features(sources, model, options), model)  # so fast that nobody waits
    found = find_scans(
        paths,
        workers=options.workers,
        any_modality=options.force,
        modalities=model.expects.modalities,
        anonymize=options.anonymize,
    )
    total, outcomes = len(found.rows) + len(found.unusable), []
    with show_job("predict", progress=progress) as (_, watch):
        for outcome in predict_found(found, model, encoder, options):
            outcomes.append(outcome)
            watch(Shown("predict", len(outcomes) / total, f"{len(outcomes)} of {total} scans"))
    return Predictions(outcomes, model)


def _sources(scans: NewScans) -> list[Source]:
    """Paths as they are, scans in memory as bags."""
    if isinstance(scans, str | Path):
        return [scans]
    if isinstance(scans, Sequence) and scans and all(isinstance(scan, str | Path) for scan in scans):
        return list(scans)
    try:
        return [as_scans(cast(ScansLike, scans))]
    except UserError as error:
        raise UserError(f"{error}; scans that are files are given by their paths") from error
