"""The report of an experiment: tables (`study_tables.py`), comparisons, figures, and one page with all of them.

DIR/tables.md .tex .csv .json         the paper's tables
DIR/sensitivity/METHOD.md ...         the same of a guided method, at each divergence and λ
DIR/differences.md ...                which differences are real
DIR/measures.md ...                   hits, errors and overlaps
DIR/figures/*.png, DIR/report.html    the figures; and all of these, findings first, in one file that needs no network
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.files import make_folder, write_atomically
from normal_guidance.core.methods import CEILING, COMPARED, ENSEMBLE, EVERY_METHOD, method_title
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.scans.features.windows import Percentiles, Window, read_windowed, window_from_json
from normal_guidance.scans.index.indexing import SOURCES, Description, describe_scans
from normal_guidance.scans.index.manifest import PARTS, Manifest
from normal_guidance.show import html
from normal_guidance.show.html import Section
from normal_guidance.show.text_tables import Grid
from normal_guidance.statistics.differences import Claim, Difference, claims, differences
from normal_guidance.statistics.localization import Summary
from normal_guidance.statistics.skill import position_density
from normal_guidance.statistics.split_results import METRICS
from normal_guidance.study import figures
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
from normal_guidance.study.figures.attention import PANELS, random_scans
from normal_guidance.study.study_tables import (
    METHOD,
    SHOWN_METRICS,
    TITLES,
    Differences,
    Measures,
    StudyTables,
    collect,
    collect_sensitivity,
    description_tables,
)
from normal_guidance.sweep.run import HISTORY_TABLE, NOT_OURS, Data, read_history

COUNT = 5  # pictures per scan, evenly spread along it
SIDE = 128  # approximate side of a picture in pixels
COLLAPSED = 1e-6  # attention up to this counts as 0


def thumbnails(manifest: Manifest, scans: Data, scan: str) -> list[tuple[int, np.ndarray]]:
    """Up to `COUNT` slices of a scan, windowed as the encoder saw them, as (slice number from 1, image)."""
    row = manifest[list(manifest.scan_ids).index(scan)]
    positions = np.unique(np.linspace(0, len(row) - 1, COUNT + 2).round().astype(int)[1:-1]).tolist()
    try:
        images = read_windowed(row, manifest.root, positions, *first_window(scans), repair=True)
    except UnreadableError as error:
        raise UserError(
            f"scan {scan!r} cannot be shown ({error}); copy its files back to {manifest.root}, or leave out --index"
        ) from error
    step = max(1, max(images.shape[1:]) // SIDE)
    return [(position + 1, image[::step, ::step]) for position, image in zip(positions, images, strict=True)]


def first_window(scans: Data) -> tuple[Window | None, float | None]:
    """The window of the encoder's first channel, and the field, which counts where the window is of percentiles."""
    known: Any = scans.provenance.get("preprocessing") if isinstance(scans, FeatureStore) else None
    try:
        window = window_from_json(known["windows"][0])
    except (*NOT_OURS, IndexError):  # stores of other programs may have any provenance
        return None, None
    return window, known.get("field") if isinstance(window, Percentiles) else None


@dataclass(frozen=True)
class Experiment:
    """The results in a study's folder, as the page shows them."""

    study: Study
    complete: tuple[StudyResult, ...]
    results: StudyTables
    predictions: tuple[StudyPredictions, ...]  # one per split
    differences: Differences
    measures: Measures | None  # None where there are no slice labels
    sensitivity: Mapping[str, StudyTables]  # by guided method
    parts: Mapping[str, Description]  # of the first seed
    notes: tuple[str, ...]
    manifest: Manifest | None  # of the scans that were encoded, to show their slices, and whom to cite


def write_report(study: Study, *, manifest: Manifest | None = None) -> Path:
    """Write tables, statistics, figures and the page of all complete runs; return the page.

    With the manifest that the scans were encoded from, errors are also given in millimetres, and figures show slices.
    """
    experiment = evaluate(study, manifest)
    experiment.results.write(study.folder, "tables")
    experiment.differences.write(study.folder, "differences")
    if experiment.measures is not None:
        experiment.measures.write(study.folder, "measures")
    for method, tables in experiment.sensitivity.items():
        tables.write(study.folder / SENSITIVITY, method)
    path = study.folder / "report.html"
    write_atomically(path, experiment_page(experiment).encode())
    return path


def evaluate(study: Study, manifest: Manifest | None = None) -> Experiment:
    """Read the complete runs of a study's folder and compare their methods."""
    dataset, results = study.dataset, collect(study.folder, study.dataset.name)
    complete = tuple(find_results(study.folder, dataset.name))
    predictions = read_study_predictions(study.folder, dataset)
    if not predictions:
        known = {result.seed for result in complete}
        if known.isdisjoint(dataset.seeds):
            seeds = ", ".join(map(str, sorted(known)))
            raise UserError(
                f"{study.folder} holds runs of splits {seeds} only; give those splits, or run the experiment on these "
                "first"
            )
        why = results.notes[0] if results.notes else "no method is complete"
        raise UserError(
            f"{study.folder} has nothing to report: {why}; train more epochs (--epochs) in another folder, or let "
            "every epoch be selected (--no-train-above-val)"
        )
    compared = [method for method in (*COMPARED, CEILING) if all(method in split.predictions for split in predictions)]
    shown, notes = _compare(predictions, compared, dataset)
    return Experiment(
        study=study,
        complete=complete,
        results=results,
        predictions=tuple(predictions),
        differences=Differences(dataset.name, tuple(shown)),
        measures=_measure(predictions, dataset, manifest) if dataset.has_slice_labels else None,
        sensitivity={
            method: collect_sensitivity(study.folder, dataset.name, method)
            for method in COMPARED
            if any(find_results(study.folder / SENSITIVITY, dataset.name, (method,)))
        },
        parts={part: describe_scans(dataset.draw(predictions[0].seed, part)) for part in PARTS},
        notes=(*notes, *_notes_on_data(study, results, predictions)),
        manifest=manifest,
    )


def check_manifest(manifest: Manifest, dataset: StudyData) -> None:
    """Refuse, before anything is trained, a manifest that the test scans were not encoded from."""
    for seed in dataset.seeds:
        _positions(manifest, dataset.draw(seed, "test"))


def _notes_on_data(study: Study, results: StudyTables, predictions: Sequence[StudyPredictions]) -> Iterator[str]:
    dataset, seeds = study.dataset, {split.seed for split in predictions}
    others = sorted(set(results.table.seeds) - seeds) if results.table is not None else []
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
    notes = [
        f"{method_title(method, dataset.name)} is not complete on every split and is left out of the comparisons."
        for method in (*COMPARED, CEILING)
        if method not in compared and any(method in split.predictions for split in predictions)
    ]
    left_out = sum(split.left_out for split in predictions)
    if left_out:
        notes.append(
            f"The scan reference has no score for {left_out} test scan{'s' * (left_out > 1)} (positive without a "
            "positive slice), so methods are not compared with it at scan level."
        )
    if len(compared) < 2:
        return [], notes

    def is_usable(claim: Claim) -> bool:
        if claim.metric.startswith("localization"):
            return dataset.has_slice_labels
        return not (left_out and CEILING in claim)

    usable = [claim for claim in claims(compared, CEILING if CEILING in compared else None) if is_usable(claim)]
    return differences([split.outcomes(compared) for split in predictions], usable), notes


def _measure(predictions: Sequence[StudyPredictions], dataset: StudyData, manifest: Manifest | None) -> Measures:
    summaries: dict[tuple[str, int], dict[str, Summary]] = {}
    for split in predictions:
        train = dataset.draw(split.seed, "train")
        labels, density = train.slice_labels, None
        if labels is not None and (labels == 1).any():
            density = position_density(train.lengths, labels)
        positions = None if manifest is None else _positions(manifest, split.scans)
        for method in split.predictions:
            summaries[method, split.seed] = split.beyond_position(method, density) | split.measures(method, positions)
    order = (*COMPARED, CEILING)
    ordered = sorted(summaries, key=lambda key: (order.index(key[0]), key[1]))
    return Measures(dataset.name, {key: summaries[key] for key in ordered})


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


def experiment_page(experiment: Experiment) -> str:
    """Draw the figures into the study's folder and return the page as HTML."""
    folder, manifest = experiment.study.folder / "figures", experiment.manifest
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
    source = None if manifest is None else SOURCES.get(manifest.about.get("source", ""))
    if source is not None and source.attribution:
        lead.append(html.paragraph(" ".join(source.attribution), note=True))
    sections = [
        Section("Findings", list(_findings(experiment))),
        Section("Tables", list(_tables(experiment, folder))),
        Section("Differences", list(_differences(experiment, folder))),
        Section("Attention", list(_attention(experiment, folder))),
        Section("Sensitivity", list(_sensitivity(experiment, folder))),
        Section("Data", list(_data(experiment, folder))),
        Section("Training", list(_training(experiment, folder))),
        Section("Records", list(_records(experiment))),
    ]
    return html.page(f"Normal Guidance on {name}", lead, sections)


def _findings(experiment: Experiment) -> Iterator[str]:
    tested, study = experiment.differences, experiment.study
    guided = [ENSEMBLE, *(method for method, about in EVERY_METHOD.items() if about.guided)]
    for metric in SHOWN_METRICS:
        chosen = [row for row in tested.rows if row.metric == metric and row.method in guided]
        if chosen:
            yield f"<h3>{TITLES[metric]}</h3>"
            yield html.findings((row.words(tested.titles), row.shown) for row in chosen)
    if not tested.rows:
        yield html.paragraph(
            "Nothing is compared: a comparison needs two methods that are complete on every split and belong together, "
            "such as a guided method and the same model without guidance."
        )
    if experiment.notes:
        yield html.bullets(experiment.notes)
    complete = {(result.method, result.seed) for result in experiment.complete}
    wanted = [(method, seed) for seed in study.seeds for method in wanted_of(study)]
    missing = [f"{method.replace('_', ' ')}, seed {seed}" for method, seed in wanted if (method, seed) not in complete]
    if missing:
        yield html.paragraph(f"Not complete yet: {', '.join(missing)}. Run the same command again to continue.")


def _data(experiment: Experiment, folder: Path) -> Iterator[str]:
    parts, name = experiment.parts, experiment.study.dataset.name
    yield from (grid.html() for grid in description_tables(name, parts))
    if parts["train"].blocks is not None:
        title = _literal(f"{name}, training scans")
        path = figures.save(figures.plot_density({title: parts["train"].density}), folder / "density.png")
        yield html.figure(
            path, "Where the positive slices lie in a scan. Dotted: the density if all positions were equally likely."
        )


def _tables(experiment: Experiment, folder: Path) -> Iterator[str]:
    table = experiment.results.table
    if table is None:
        yield html.paragraph("No method has scores yet.")
        return
    for metric in SHOWN_METRICS:
        cells = [(row, row.cells[METRICS.index(metric)]) for row in table.rows]
        drawable = [
            figures.MethodValues(row.method, cell.values, cell.published, row.title)
            for row, cell in cells
            if cell.values and all(value == value for value in cell.values)
        ]
        if drawable:
            path = figures.save(figures.plot_methods(drawable, metric=TITLES[metric]), folder / f"{metric}.png")
            yield html.figure(path, f"{TITLES[metric]} of every method.")
    measured = [] if experiment.measures is None else experiment.measures.grids()
    yield from (grid.html() for grid in (*table.grids(), *measured))
    if experiment.results.notes:
        yield html.bullets(experiment.results.notes)


def _differences(experiment: Experiment, folder: Path) -> Iterator[str]:
    tested = experiment.differences
    if not tested.rows:
        return
    yield html.paragraph(METHOD, note=True)
    for metric in SHOWN_METRICS:
        if rows := tested.forest(metric):
            path = figures.save(
                figures.plot_differences(rows, metric=TITLES[metric]), folder / f"differences_{metric}.png"
            )
            yield html.figure(path, f"Differences in {TITLES[metric]} with 95 % confidence intervals.")
    for grid in tested.grids():
        yield html.details(grid.title, Grid("", "", grid.header, grid.rows).html())


def _attention(experiment: Experiment, folder: Path) -> Iterator[str]:
    first, manifest = experiment.predictions[0], experiment.manifest
    methods = [method for row in PANELS for method in row if method in first.predictions]
    lengths = first.scans.lengths.tolist()
    labels: Sequence[Tensor | None] = [None] * len(lengths)
    if first.scans.slice_labels is not None:
        labels = first.scans.slice_labels.split(lengths)
    positive = [
        number
        for number, (label, of_slices) in enumerate(zip(first.scans.labels.tolist(), labels, strict=True))
        if label and (of_slices is None or 0 < int((of_slices == 1).sum()) < lengths[number])
    ]
    if not methods or not positive:
        return
    chosen = random_scans(positive, seed=first.seed)
    attention = {method: first.predictions[method].attention.split(lengths) for method in methods}
    scans = [
        figures.AttendedScan(
            title=_literal(first.scans.scan_ids[number]),
            attention={method: of_scans[number] for method, of_scans in attention.items()},
            slice_labels=labels[number],
            thumbnails=None if manifest is None else thumbnails(manifest, first.scans, first.scans.scan_ids[number]),
        )
        for number in chosen
    ]
    path = figures.save(figures.plot_attention(scans), folder / "attention.png")
    yield html.figure(path, f"Attention on {len(scans)} random positive test scans of seed {first.seed}.")
    # One scan: where guidance would push unguided attention, and the attention of every head.
    number = chosen[0]
    scan = first.scans.scan_ids[number]
    if "abmil" in first.predictions:
        unguided = first.predictions["abmil"].log_attention[0].split(lengths)[number].double().softmax(0)
        # Attention on one slice alone equals its normal reference, so no divergence pushes it.
        if (unguided > COLLAPSED).sum() > 2:
            path = figures.save(
                figures.plot_divergences(unguided, slice_labels=labels[number]), folder / "divergences.png"
            )
            yield html.figure(path, f"Where each divergence would push ABMIL's attention on scan {scan}.")
    heads = {
        method_title(method): first.predictions[method].log_attention.split(lengths, dim=1)[number].softmax(-1)
        for method in ("transmil", "mhng")
        if method in first.predictions
    }
    if heads:
        path = figures.save(figures.plot_heads(heads, slice_labels=labels[number]), folder / "heads.png")
        yield html.figure(path, f"References and attention of every head on scan {scan}.")


def _literal(text: str) -> str:
    """Text for a figure's title, where a plain dollar sign would start mathematics."""
    return text.replace("$", r"\$")


def _sensitivity(experiment: Experiment, folder: Path) -> Iterator[str]:
    for method, results in experiment.sensitivity.items():
        if results.table is None:
            continue
        settings = [
            figures.SettingValues(TITLES[cell.metric], *row.setting, cell.values, cell.published)
            for row in results.table.rows
            for cell in row.cells
            if row.setting and cell.metric in SHOWN_METRICS and cell.values
        ]
        path = figures.save(figures.plot_sensitivity(settings), folder / f"sensitivity_{method}.png")
        yield html.figure(path, f"{method_title(method)}: sensitivity to divergence and λ.")
        yield from (grid.html() for grid in results.table.grids())


def _training(experiment: Experiment, folder: Path) -> Iterator[str]:
    yield experiment.results.chosen_grid().html()
    for result in experiment.complete:
        if result.run is None:
            continue
        history = read_history(result.folder / HISTORY_TABLE).to_pandas()
        name = f"{result.method}_{result.seed}"
        title = f"{method_title(result.method)}, seed {result.seed}"
        curves = figures.save(figures.plot_learning_curves(history, result.method), folder / f"curves_{name}.png")
        heat = figures.save(figures.plot_grid(history), folder / f"grid_{name}.png")
        yield html.details(
            f"{title}: learning curves and grid",
            html.figure(curves, f"{title}: every configuration by epoch.")
            + html.figure(heat, f"{title}: validation AUROC at each configuration's selected epoch."),
        )


def _records(experiment: Experiment) -> Iterator[str]:
    yield html.bullets(experiment.results.about_lines())
    for result in experiment.complete:
        if result.run is not None:
            text = json.dumps(dict(result.run.report), indent=1, ensure_ascii=False)
            title = f"{method_title(result.method)}, seed {result.seed}: report.json"
            yield html.details(title, html.preformatted(text))
