"""The report of an experiment: tables, comparisons and figures of a trained study, and one page with all of them.

DIR/<method>/<seed>/              runs (`normal_guidance.evaluation.study_folder`)
DIR/tables.md .tex .csv .json     the paper's four tables, our numbers beside the published ones
DIR/differences.md ...            which differences are real
DIR/measures.md ...               hits, errors and overlaps
DIR/figures/*.png
DIR/report.html                   all of these, in one file that needs no network
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.methods import CEILING, COMPARED, method_title
from normal_guidance.data.dataset_statistics import describe_scans
from normal_guidance.data.manifest import PARTS, Manifest
from normal_guidance.errors import UserError
from normal_guidance.evaluation.runs import Data
from normal_guidance.evaluation.study import Study, StudyData
from normal_guidance.evaluation.study_folder import SENSITIVITY, find_results
from normal_guidance.evaluation.study_predictions import StudyPredictions, read_study_predictions
from normal_guidance.files import write_atomically
from normal_guidance.reports.difference_tables import Differences
from normal_guidance.reports.experiment_page import Experiment, experiment_page
from normal_guidance.reports.localization_table import Measures
from normal_guidance.reports.study_tables import Results, collect, collect_sensitivity
from normal_guidance.reports.thumbnails import Images
from normal_guidance.statistics.differences import Claim, Difference, claims, differences
from normal_guidance.statistics.localization import LocalizationMeasures
from normal_guidance.statistics.skill import PatientSpecific, PositionDensity, Skill, position_density

REPORT_PAGE = "report.html"


def write_report(study: Study, *, manifest: Manifest | None = None) -> Path:
    """Writes tables, statistics, figures and the page of all complete runs in a study's folder.  Returns the page.

    With the manifest that the scans were encoded from, errors are also given in millimetres, and figures show slices.
    """
    experiment = evaluate(study, manifest)
    experiment.results.write(study.folder, "tables")
    experiment.differences.write(study.folder, "differences")
    if experiment.measures is not None:
        experiment.measures.write(study.folder, "measures")
    for method, one in experiment.sensitivity.items():
        one.write(study.folder / SENSITIVITY, method)
    images = None if manifest is None else Images(manifest, experiment.predictions[0].scans)
    path = study.folder / REPORT_PAGE
    write_atomically(path, experiment_page(experiment, images).encode())
    return path


def evaluate(study: Study, manifest: Manifest | None = None) -> Experiment:
    """Reads the complete runs of a study's folder and compares their methods."""
    dataset, results = study.dataset, collect(study.folder, study.dataset.name)
    predictions = read_study_predictions(study.folder, dataset)
    if not predictions:
        raise UserError(_why_nothing(study, results))
    compared = [method for method in (*COMPARED, CEILING) if all(method in one.predictions for one in predictions)]
    found, notes = _compare(predictions, compared, dataset)
    positions = None if manifest is None else {one.seed: _positions(manifest, one.scans) for one in predictions}
    sensitivity = {
        method: collect_sensitivity(study.folder, dataset.name, method)
        for method in COMPARED
        if any(find_results(study.folder / SENSITIVITY, dataset.name, (method,)))
    }
    return Experiment(
        study=study,
        results=results,
        predictions=tuple(predictions),
        differences=Differences(dataset.name, tuple(found)),
        measures=_measure(predictions, dataset, positions) if dataset.has_slice_labels else None,
        sensitivity=sensitivity,
        parts={part: describe_scans(dataset.draw(predictions[0].seed, part)) for part in PARTS},
        notes=(*notes, *_notes_on_data(study, results, predictions)),
        attribution=_attribution(manifest),
    )


def _attribution(manifest: Manifest | None) -> tuple[str, ...]:
    """Whom to cite for the scans, where their source says so."""
    from normal_guidance.data.sources import SOURCES

    source = None if manifest is None else SOURCES.get(manifest.about.get("source", ""))
    return () if source is None else source.attribution


def check_manifest(manifest: Manifest, dataset: StudyData) -> None:
    """Refuses, before anything is trained, a manifest that the test scans were not encoded from."""
    for seed in dataset.seeds:
        _positions(manifest, dataset.draw(seed, "test"))


def _why_nothing(study: Study, results: Results) -> str:
    """The error for a folder without predictions of these splits."""
    known = {one.seed for one in find_results(study.folder, study.dataset.name)}
    if known.isdisjoint(study.dataset.seeds):
        seeds = ", ".join(map(str, sorted(known)))
        return (
            f"{study.folder} holds runs of splits {seeds} only; give those splits, or run the experiment on these first"
        )
    why = results.notes[0] if results.notes else "no method is complete"
    return (
        f"{study.folder} has nothing to report: {why}; train more epochs (--epochs) in another folder, "
        "or let every epoch be selected (--no-train-above-val)"
    )


def _notes_on_data(study: Study, results: Results, predictions: Sequence[StudyPredictions]) -> Iterator[str]:
    dataset, seeds = study.dataset, {one.seed for one in predictions}
    table = results.table
    others = sorted(set(table.seeds) - seeds) if table is not None else []
    if others:
        yield (
            f"The tables include seeds {', '.join(map(str, others))}, whose splits were not given this time. The "
            "comparisons, measures and attention leave these seeds out."
        )
    if not dataset.has_slice_labels:
        yield "Test scans have no slice labelled positive: localization is not compared, and there is no ceiling."
    elif dataset.oracle is None and not dataset.has_supervision:
        yield "Training or validation scans have no slice labelled positive: there is no supervised reference."


def _compare(
    predictions: Sequence[StudyPredictions], compared: Sequence[str], dataset: StudyData
) -> tuple[list[Difference], list[str]]:
    everyone = {method for one in predictions for method in one.predictions}
    notes = [
        f"{method_title(method, dataset.name)} is not complete on every split and is left out of the comparisons."
        for method in (*COMPARED, CEILING)
        if method in everyone and method not in compared
    ]
    left_out = sum(one.left_out for one in predictions)
    if left_out:
        notes.append(
            f"The scan reference has no score for {left_out} test scan{'s' * (left_out > 1)} (positive without a "
            "positive slice), so methods are not compared with it at scan level."
        )
    if len(compared) < 2:
        return [], notes
    wanted = claims(compared, CEILING if CEILING in compared else None)
    usable = [claim for claim in wanted if _is_usable(claim, dataset, bool(left_out))]
    return differences([one.outcomes(compared) for one in predictions], usable), notes


def _is_usable(claim: Claim, dataset: StudyData, left_out: bool) -> bool:
    if claim.metric.startswith("localization"):
        return dataset.has_slice_labels
    return not (left_out and CEILING in claim)


def _measure(
    predictions: Sequence[StudyPredictions], dataset: StudyData, positions: Mapping[int, Float[Tensor, "slices"]] | None
) -> Measures:
    methods = [method for method in (*COMPARED, CEILING) if any(method in one.predictions for one in predictions)]
    found: dict[str, dict[int, LocalizationMeasures]] = {method: {} for method in methods}
    beyond: dict[str, dict[int, tuple[Skill, PatientSpecific]]] = {method: {} for method in methods}
    for one in predictions:
        density = _density(dataset, one.seed)
        for method in one.predictions:
            if method in found:
                found[method][one.seed] = one.measures(method, None if positions is None else positions[one.seed])
                beyond[method][one.seed] = one.beyond_position(method, density)
    return Measures(dataset.name, found, beyond)


def _density(dataset: StudyData, seed: int) -> PositionDensity | None:
    """Where the findings of the training scans lie; None where their slices have no labels."""
    scans = dataset.draw(seed, "train")
    labels = scans.slice_labels
    return None if labels is None or not (labels == 1).any() else position_density(scans.lengths, labels)


def _positions(manifest: Manifest, scans: Data) -> Float[Tensor, "slices"]:
    """The position of every slice in mm; NaN for scans whose geometry is unknown."""
    number_of = {scan: number for number, scan in enumerate(manifest.scan_ids)}
    if unknown := [scan for scan in scans.scan_ids if scan not in number_of]:
        raise UserError(
            f"scan {unknown[0]!r} is not in the manifest; give the folder that it was encoded from (--index)"
        )
    parts = []
    for scan, length in zip(scans.scan_ids, scans.lengths.tolist(), strict=True):
        row = manifest[number_of[scan]]
        if len(row) != length:
            raise UserError(
                f"scan {scan!r} has {length} slices in the store, but {len(row)} in the manifest; encode it again"
            )
        known = row.slice_spacing is not None
        parts.append(torch.tensor(row.positions if known else [torch.nan] * length, dtype=torch.float64))
    return torch.cat(parts)
