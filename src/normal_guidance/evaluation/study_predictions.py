"""Predictions of a study's methods for the test scans, read from its folder and put side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.methods import CEILING, SCAN_REFERENCE, SLICE_REFERENCE
from normal_guidance.core.prediction import Prediction
from normal_guidance.errors import UserError
from normal_guidance.evaluation.predictions import packed_prediction, read_predictions
from normal_guidance.evaluation.runs import Data
from normal_guidance.evaluation.study import StudyData
from normal_guidance.evaluation.study_folder import REFERENCES, StudyResult, find_results
from normal_guidance.statistics.localization import LocalizationMeasures, localization_measures
from normal_guidance.statistics.skill import PatientSpecific, PositionDensity, Skill, measure_skill, patient_specific
from normal_guidance.statistics.split_results import SplitResults, split_results
from normal_guidance.training.run_folder import PREDICTION_TABLE


@dataclass(frozen=True, eq=False)
class StudyPredictions:
    """The test scans of one seed, and each method's prediction for them, the ceiling's included."""

    seed: int
    scans: Data
    predictions: Mapping[str, Prediction]
    left_out: int = 0
    """Scans without a score from the scan reference; with any, it is not compared at scan level."""

    def outcomes(self, methods: Sequence[str]) -> SplitResults:
        """Make what the statistics compare."""
        chosen = {method: self.predictions[method] for method in methods}
        return split_results(
            self.scans,
            {method: prediction.slice_scores for method, prediction in chosen.items()},
            {method: prediction.logit for method, prediction in chosen.items()},
        )

    def measures(self, method: str, positions: Float[Tensor, "slices"] | None = None) -> LocalizationMeasures:
        """Hits, errors and overlaps of one method; `positions` are those of the slices in mm."""
        labels, prediction = self.scans.slice_labels, self.predictions[method]
        if labels is None:
            raise UserError(f"the test scans of seed {self.seed} have no slice labels; nothing can be localized")
        return localization_measures(
            prediction.attention, labels, self.scans.lengths, scores=prediction.slice_scores, positions=positions
        )

    def beyond_position(self, method: str, density: PositionDensity | None) -> tuple[Skill, PatientSpecific]:
        """What a guess by position cannot reach; `density` is that of the findings in labelled training scans."""
        labels, scores = self.scans.slice_labels, self.predictions[method].slice_scores
        if labels is None:
            raise UserError(f"the test scans of seed {self.seed} have no slice labels; nothing can be localized")
        own, patients = (scores, labels, self.scans.lengths), self.scans.patient_ids
        return measure_skill(*own, density=density, patient_ids=patients), patient_specific(*own, patient_ids=patients)


def read_study_predictions(folder: Path, dataset: StudyData) -> list[StudyPredictions]:
    """Read every seed with complete methods in a study's folder, with those methods."""
    by_seed: dict[int, list[StudyResult]] = {}
    for one in find_results(folder, dataset.name):
        if one.scores is not None and one.seed in dataset.seeds:
            by_seed.setdefault(one.seed, []).append(one)
    read = [_read_seed(dataset.draw(seed, "test"), seed, by_seed[seed]) for seed in sorted(by_seed)]
    seeds = [one for one in read if one.predictions]  # one of the two references alone says nothing
    return [_without_ceiling_scores(one) for one in seeds] if any(one.left_out for one in seeds) else seeds


def _read_seed(scans: Data, seed: int, found: Sequence[StudyResult]) -> StudyPredictions:
    folders = {one.method: one.folder for one in found}
    predictions = {
        method: read_prediction(folder, scans) for method, folder in folders.items() if method not in REFERENCES
    }
    left_out = 0
    if set(REFERENCES) <= set(folders):
        slices = read_prediction(folders[SLICE_REFERENCE], scans)
        logit = _scan_logits(folders[SCAN_REFERENCE], scans)
        left_out = int(logit.isnan().sum())
        predictions[CEILING] = slices._replace(logit=logit, attention=_shares(slices.slice_scores, scans))
    return StudyPredictions(seed, scans, predictions, left_out)


def _without_ceiling_scores(seed: StudyPredictions) -> StudyPredictions:
    """Blank the ceiling's scan scores: statistics compare the same methods in every split."""
    if CEILING not in seed.predictions:
        return seed
    ceiling = seed.predictions[CEILING]
    blank = ceiling._replace(logit=torch.full_like(ceiling.logit, torch.nan))
    return replace(seed, predictions={**seed.predictions, CEILING: blank})


def _shares(logit: Float[Tensor, "slices"], scans: Data) -> Float[Tensor, "slices"]:
    """The slices' probabilities divided by the highest of their scan, in logs: all of them may underflow to 0."""
    logs = torch.nn.functional.logsigmoid(logit).split(scans.lengths.tolist())
    return torch.cat([(one - one.max()).exp() for one in logs])


def read_prediction(folder: Path, scans: Data) -> Prediction:
    """Read a run's prediction for its test scans, in the order of `scans`; a run on other scans is refused."""
    table = read_predictions(folder / PREDICTION_TABLE, part="test")
    number_of = {scan: number for number, scan in enumerate(table["scan_id"].to_pylist())}
    if set(number_of) != set(scans.scan_ids):
        raise UserError(f"{folder} was tested on other scans; delete it and start the experiment again")
    table = table.take([number_of[scan] for scan in scans.scan_ids])
    if table["slices"].to_pylist() != scans.lengths.tolist():
        raise UserError(f"{folder} was tested on scans of other lengths; delete it and start the experiment again")
    return packed_prediction(table)


def _scan_logits(folder: Path, scans: Data) -> Float[Tensor, "scans"]:
    """Read the logit of every scan; NaN for scans that the run left out."""
    table = read_predictions(folder / PREDICTION_TABLE, ("scan_id", "logit"), part="test")
    logit_of = dict(zip(table["scan_id"].to_pylist(), table["logit"].to_pylist(), strict=True))
    if not set(logit_of) <= set(scans.scan_ids):
        raise UserError(f"{folder} was tested on other scans; delete it and start the experiment again")
    return torch.tensor([logit_of.get(scan, torch.nan) for scan in scans.scan_ids])
