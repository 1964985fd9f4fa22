"""The page of an experiment: findings first, then tables, differences, attention, sensitivity, data and records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from normal_guidance.core.methods import COMMITTEE, EVERY_METHOD, method_title
from normal_guidance.data.dataset_statistics import Description
from normal_guidance.evaluation.study import Study, wanted_of
from normal_guidance.evaluation.study_folder import StudyResult, find_results
from normal_guidance.evaluation.study_predictions import StudyPredictions
from normal_guidance.files import make_folder
from normal_guidance.presentation import html
from normal_guidance.presentation.html import Section
from normal_guidance.presentation.text_tables import Grid
from normal_guidance.reports.dataset_tables import description_tables
from normal_guidance.reports.difference_tables import METHOD, Differences
from normal_guidance.reports.figures.attention import PANELS, AttendedScan, draw_attention, random_scans
from normal_guidance.reports.figures.comparisons import (
    MethodValues,
    SettingValues,
    draw_differences,
    draw_methods,
    draw_sensitivity,
)
from normal_guidance.reports.figures.datasets import draw_density
from normal_guidance.reports.figures.divergences import draw_divergences, draw_heads
from normal_guidance.reports.figures.training import draw_grid, draw_learning_curves
from normal_guidance.reports.localization_table import Measures
from normal_guidance.reports.paper_tables import TITLES, PaperTables, SensitivityTable
from normal_guidance.reports.study_tables import Results
from normal_guidance.reports.thumbnails import Images
from normal_guidance.statistics.scores import METRICS, Metric
from normal_guidance.training.run_folder import HISTORY_TABLE
from normal_guidance.training.winners import read_history

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
