"""The page of an experiment: findings first, then tables, differences, attention, sensitivity, data and records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.files import make_folder, write_atomically
from normal_guidance.core.methods import CEILING, COMMITTEE, COMPARED, EVERY_METHOD, method_title
from normal_guidance.scans.features.preprocessing import (
    Percentiles,
    Window,
    apply_windows,
    in_field,
    range_of,
    window_from_json,
)
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.scans.index.indexing import Description, describe_scans
from normal_guidance.scans.index.manifest import PARTS, Manifest
from normal_guidance.show import html
from normal_guidance.show.html import Section
from normal_guidance.show.text_tables import Grid
from normal_guidance.statistics.differences import (
    Claim,
    Difference,
    claims,
    differences,
)
from normal_guidance.statistics.localization import LocalizationMeasures
from normal_guidance.statistics.skill import PatientSpecific, PositionDensity, Skill, position_density
from normal_guidance.statistics.split_results import METRICS, Metric
from normal_guidance.study.experiment import (
    SENSITIVITY,
    Study,
    StudyData,
    StudyPredictions,
    StudyResult,
    find_results,
    read_study_predictions,
    wanted_of,
)
from normal_guidance.study.figures.attention import (
    PANELS,
    AttendedScan,
    draw_attention,
    random_scans,
)
from normal_guidance.study.figures.comparisons import (
    MethodValues,
    SettingValues,
    draw_differences,
    draw_methods,
    draw_sensitivity,
)
from normal_guidance.study.figures.datasets import draw_density
from normal_guidance.study.figures.divergences import draw_divergences, draw_heads
from normal_guidance.study.figures.training import draw_grid, draw_learning_curves
from normal_guidance.study.study_tables import (
    METHOD,
    TITLES,
    Differences,
    Measures,
    PaperTables,
    Results,
    SensitivityTable,
    collect,
    collect_sensitivity,
    description_tables,
)
from normal_guidance.sweep.run import HISTORY_TABLE, NOT_OURS, Data, read_history

# Small pictures of a scan's slices, windowed as the encoder saw them.


COUNT = 5
"""Pictures per scan, evenly spread along it."""

SIDE = 128
"""Approximate side of a picture in pixels."""


@dataclass(frozen=True)
class Images:
    """The images behind encoded scans."""

    manifest: Manifest
    scans: Data

    def thumbnails(self, scan: str) -> list[tuple[int, np.ndarray]]:
        """Up to `COUNT` slices of a scan as (slice number from 1, image)."""
        from normal_guidance.scans.index.volumes import read_volume

        row = self.manifest[self._number_of[scan]]
        try:
            volume, _ = read_volume(row, self.manifest.root)
        except UnreadableError as error:
            raise UserError(
                f"scan {scan!r} cannot be shown ({error}); copy its files back to {self.manifest.root}, or leave out "
                "--index"
            ) from error
        step = max(1, max(volume.shape[1:]) // SIDE)
        places = np.unique(np.linspace(0, len(volume) - 1, COUNT + 2).round().astype(int)[1:-1])
        window = [range_of(self.window, in_field(volume, row.pixel_spacing, self._field))]
        return [(int(place) + 1, apply_windows(volume[place, ::step, ::step], window)[0]) for place in places]

    @property
    def window(self) -> Window | None:
        """The window of the encoder's first channel."""
        try:
            return window_from_json(self._preprocessing["windows"][0])
        except (*NOT_OURS, IndexError):  # stores of other programs may have any provenance
            return None

    @property
    def _field(self) -> float | None:
        """The field, where the window is of its percentiles."""
        return self._preprocessing.get("field") if isinstance(self.window, Percentiles) else None

    @property
    def _preprocessing(self) -> Any:
        return self.scans.provenance.get("preprocessing") if isinstance(self.scans, FeatureStore) else None

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {scan: number for number, scan in enumerate(self.manifest.scan_ids)}


FIGURES = "figures"

COLLAPSED = 1e-6
"""Attention up to this counts as 0."""

SHOWN_METRICS: tuple[Metric, ...] = ("localization_auroc", "scan_auroc")
"""Metrics that get figures and sentences; the tables have all four."""


@dataclass(frozen=True)
class Experiment:
    """The results in a study's folder, as the page shows them."""

    study: Study
    results: Results
    predictions: tuple[StudyPredictions, ...]
    """One entry per split."""
    differences: Differences
    measures: Measures | None
    """None where there are no slice labels."""
    sensitivity: Mapping[str, Results]
    """By guided method."""
    parts: Mapping[str, Description]
    """Descriptions of train, val and test of the first seed."""
    notes: tuple[str, ...]
    attribution: tuple[str, ...] = ()
    """Sentences about the origin of the scans, with whom to cite."""


def experiment_page(experiment: Experiment, images: Images | None = None) -> str:
    """Draws the figures into the study's folder and returns the page as HTML."""
    folder = experiment.study.folder / FIGURES
    make_folder(folder)
    name = experiment.study.dataset.name
    splits = len(experiment.predictions)
    lead = [
        html.paragraph(
            f"{splits} split{'s' * (splits > 1)} of {name}. Every method was trained over its grid with scan labels "
            "only, selected by validation scan AUROC, and tested once."
        ),
        html.paragraph("; ".join(experiment.results.about_lines()[:3]), note=True),
    ]
    if experiment.attribution:
        lead.append(html.paragraph(" ".join(experiment.attribution), note=True))
    sections = [
        Section("Findings", list(_findings(experiment))),
        Section("Tables", list(_tables(experiment, folder))),
        Section("Differences", list(_differences(experiment, folder))),
        Section("Attention", list(_attention(experiment, folder, images))),
        Section("Sensitivity", list(_sensitivity(experiment, folder))),
        Section("Data", list(_data(experiment, folder))),
        Section("Training", list(_training(experiment, folder))),
        Section("Records", list(_records(experiment))),
    ]
    return html.page(f"Normal Guidance on {name}", lead, sections)


def _findings(experiment: Experiment) -> Iterator[str]:
    found = experiment.differences
    guided = [COMMITTEE, *(method for method, about in EVERY_METHOD.items() if about.guided)]
    for metric in SHOWN_METRICS:
        chosen = [one for one in found.found if one.metric == metric and one.method in guided]
        if chosen:
            yield f"<h3>{TITLES[metric]}</h3>"
            yield html.findings((one.words(found.titles), one.shown) for one in chosen)
    if not found.found:
        yield html.paragraph(
            "Nothing is compared: a comparison needs two methods that are complete on every split and belong together, "
            "such as a guided method and the same model without guidance."
        )
    if experiment.notes:
        yield html.bullets(experiment.notes)
    missing = _missing(experiment)
    if missing:
        yield html.paragraph(f"Not complete yet: {', '.join(missing)}. Run the same command again to continue.")


def _missing(experiment: Experiment) -> list[str]:
    study = experiment.study
    complete = {(one.method, one.seed) for one in _complete_runs(study)}
    wanted = [(method, seed) for seed in study.seeds for method in wanted_of(study)]
    return [f"{method.replace('_', ' ')}, seed {seed}" for method, seed in wanted if (method, seed) not in complete]


def _complete_runs(study: Study) -> list[StudyResult]:
    return list(find_results(study.folder, study.dataset.name))


def _data(experiment: Experiment, folder: Path) -> Iterator[str]:
    parts, name = experiment.parts, experiment.study.dataset.name
    for grid in description_tables(name, parts):
        yield grid.html()
    if parts["train"].blocks is not None:
        path = draw_density({_literal(f"{name}, training scans"): parts["train"].density}, folder / "density.png")
        yield html.figure(
            path, "Where the positive slices lie in a scan. Dotted: the density if all positions were equally likely."
        )


def _tables(experiment: Experiment, folder: Path) -> Iterator[str]:
    table = experiment.results.table
    if not isinstance(table, PaperTables):
        yield html.paragraph("No method has scores yet.")
        return
    for metric in SHOWN_METRICS:
        cells = [(row, row.cells[METRICS.index(metric)]) for row in table.rows]
        rows = [MethodValues(row.method, cell.values, cell.published, row.title) for row, cell in cells if cell.values]
        drawable = [row for row in rows if all(value == value for value in row.values)]
        if drawable:
            path = draw_methods(drawable, folder / f"{metric}.png", metric=TITLES[metric])
            yield html.figure(path, f"{TITLES[metric]} of every method.")
    for grid in table.grids():
        yield grid.html()
    if experiment.measures is not None:
        yield experiment.measures.grid().html()
    if experiment.results.notes:
        yield html.bullets(experiment.results.notes)


def _differences(experiment: Experiment, folder: Path) -> Iterator[str]:
    found = experiment.differences
    if not found.found:
        return
    yield html.paragraph(METHOD, note=True)
    for metric in SHOWN_METRICS:
        if rows := found.forest(metric):
            path = draw_differences(rows, folder / f"differences_{metric}.png", metric=TITLES[metric])
            yield html.figure(path, f"Differences in {TITLES[metric]} with 95 % confidence intervals.")
    for grid in found.grids():
        yield html.details(grid.title, Grid("", "", grid.header, grid.rows).html())


def _attention(experiment: Experiment, folder: Path, images: Images | None) -> Iterator[str]:
    if not experiment.predictions:
        return
    first = experiment.predictions[0]
    methods = [method for row in PANELS for method in row if method in first.predictions]
    labels = first.scans.slice_labels
    lengths = first.scans.lengths.tolist()
    positive = [number for number, label in enumerate(first.scans.labels.tolist()) if label]
    if labels is not None:
        own = labels.split(lengths)
        positive = [number for number in positive if 0 < int((own[number] == 1).sum()) < lengths[number]]
    if not methods or not positive:
        return
    chosen = random_scans(positive, seed=first.seed)
    starts = [sum(lengths[:number]) for number in chosen]
    scans = [
        AttendedScan(
            title=_literal(first.scans.scan_ids[number]),
            attention={
                method: first.predictions[method].attention[start : start + lengths[number]] for method in methods
            },
            slice_labels=None if labels is None else labels[start : start + lengths[number]],
            thumbnails=None if images is None else images.thumbnails(first.scans.scan_ids[number]),
        )
        for number, start in zip(chosen, starts, strict=True)
    ]
    path = draw_attention(scans, folder / "attention.png")
    yield html.figure(path, f"Attention on {len(scans)} random positive test scans of seed {first.seed}.")
    yield from _guidance_figures(first, chosen[0], starts[0], lengths[chosen[0]], folder)


def _literal(text: str) -> str:
    """Text for a figure's title, where a plain dollar sign would start mathematics."""
    return text.replace("$", r"\$")


def _guidance_figures(tested: StudyPredictions, number: int, start: int, length: int, folder: Path) -> Iterator[str]:
    """Figures of one scan: where guidance would push unguided attention, and the attention of every head."""
    labels = tested.scans.slice_labels
    own = None if labels is None else labels[start : start + length]
    scan = tested.scans.scan_ids[number]
    if "abmil" in tested.predictions:
        attention = tested.predictions["abmil"].log_attention[0, start : start + length].double().softmax(0)
        # Attention on one slice alone equals its normal reference, so no divergence pushes it.
        if (attention > COLLAPSED).sum() > 2:
            path = draw_divergences(attention, folder / "divergences.png", slice_labels=own)
            yield html.figure(path, f"Where each divergence would push ABMIL's attention on scan {scan}.")
    heads = {
        method_title(method): tested.predictions[method].log_attention[:, start : start + length].softmax(-1)
        for method in ("transmil", "mhng")
        if method in tested.predictions
    }
    if heads:
        path = draw_heads(heads, folder / "heads.png", slice_labels=own)
        yield html.figure(path, f"References and attention of every head on scan {scan}.")


def _sensitivity(experiment: Experiment, folder: Path) -> Iterator[str]:
    for method, results in experiment.sensitivity.items():
        table = results.table
        if not isinstance(table, SensitivityTable):
            continue
        settings = [
            SettingValues(TITLES[cell.metric], row.divergence, row.weight, cell.values, cell.published)
            for row in table.rows
            for cell in row.cells
            if cell.metric in SHOWN_METRICS and cell.values
        ]
        path = draw_sensitivity(settings, folder / f"sensitivity_{method}.png")
        yield html.figure(path, f"{method_title(method)}: sensitivity to divergence and λ.")
        yield table.grid().html()


def _training(experiment: Experiment, folder: Path) -> Iterator[str]:
    yield experiment.results.chosen_grid().html()
    for one in _complete_runs(experiment.study):
        if one.run is None:
            continue
        history = read_history(one.folder / HISTORY_TABLE).to_pandas()
        name = f"{one.method}_{one.seed}"
        title = f"{method_title(one.method)}, seed {one.seed}"
        curves = draw_learning_curves(history, one.method, folder / f"curves_{name}.png")
        heat = draw_grid(history, folder / f"grid_{name}.png")
        yield html.details(
            f"{title}: learning curves and grid",
            html.figure(curves, f"{title}: every configuration by epoch.")
            + html.figure(heat, f"{title}: validation AUROC at each configuration's selected epoch."),
        )


def _records(experiment: Experiment) -> Iterator[str]:
    yield html.bullets(experiment.results.about_lines())
    for one in _complete_runs(experiment.study):
        if one.run is not None:
            text = json.dumps(dict(one.run.report), indent=1, ensure_ascii=False)
            yield html.details(f"{method_title(one.method)}, seed {one.seed}: report.json", html.preformatted(text))


# The report of an experiment: tables, comparisons and figures of a trained study, and one page with all of them.
# DIR/<method>/<seed>/              runs (`normal_guidance.study.experiment`)
# DIR/tables.md .tex .csv .json     the paper's four tables, our numbers beside the published ones
# DIR/differences.md ...            which differences are real
# DIR/measures.md ...               hits, errors and overlaps
# DIR/figures/*.png
# DIR/report.html                   all of these, in one file that needs no network


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
    from normal_guidance.scans.index.indexing import SOURCES

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
