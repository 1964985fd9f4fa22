"""report.html of `nguide fit`: what the model does on scans that it was not trained on, and how it was chosen.

The page names training scans, for those who have them.  A model of several findings has a page for each, and one
about all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve
from torch import Tensor

from normal_guidance.base.errors import shorten
from normal_guidance.core.bags import LabelledScans
from normal_guidance.fit.bundle import Bundle
from normal_guidance.fit.ensemble import prior_attention
from normal_guidance.fit.fit_ensemble import KEPT, SURELY, EnsembleFit
from normal_guidance.fit.measured import ASSUMPTIONS, COLUMNS, Measured, MeasuredFit
from normal_guidance.scans.index.manifest import Finding
from normal_guidance.show import html
from normal_guidance.show.figure_style import (
    BLUE,
    GREEN,
    ORANGE,
    WIDTH,
    fill_truth,
    label_slices,
    rounded,
    save,
    styled,
)
from normal_guidance.show.html import CAUTION, Section
from normal_guidance.show.text_tables import Grid, digits, interval, signed
from normal_guidance.statistics.calibration import Calibration, Operation, describe, wilson
from normal_guidance.statistics.differences import student_quantile
from normal_guidance.statistics.localization import key_positions

PAGE = "report.html"
ALONG = (np.arange(50) + 0.5) / 50  # relative positions at which mean attention is drawn
BINS, IN_A_BIN = 8, 10  # the most points of the calibration curve, and the fewest scans of each
ACROSS = 3  # examples in a row
NO_LABELS = "no slice labels"
GUESS = "0.25"  # the colour of what knows nothing of the scan: chance, and the prior


class ScoredScans(NamedTuple):
    logits: Float[Tensor, "scans"]
    labels: Int[Tensor, "scans"]
    auroc: str


@styled
def plot_scans(parts: Mapping[str, ScoredScans], operation: Operation) -> Figure:
    """ROC curves with the threshold, and calibration with Wilson's intervals; the first part chose the threshold."""
    figure = Figure(figsize=(WIDTH, 4.1), layout="constrained")
    curves, calibrated = figure.subplots(1, 2)
    for color, (name, scans) in zip((BLUE, ORANGE), parts.items(), strict=False):
        labels = scans.labels.numpy()
        false, true, _ = roc_curve(labels, scans.logits.numpy(), drop_intermediate=False)
        curves.plot(false, true, color=color, lw=1.6, label=f"{name}: AUROC {scans.auroc}")
        probability = np.array([operation.calibration.probability(logit) for logit in scans.logits.tolist()])
        bins = max(1, min(BINS, len(labels) // IN_A_BIN))
        groups = np.array_split(np.argsort(probability, kind="stable"), bins)
        said = np.array([probability[group].mean() for group in groups])
        share = np.array([labels[group].mean() for group in groups])
        low, high = np.transpose([wilson(int(labels[group].sum()), len(group)) for group in groups])
        calibrated.vlines(said, low, high, color=color, lw=1.1)
        label = f"{name}: about {round(len(labels) / bins)} scans a point"
        calibrated.plot(said, share, ls="", marker="o", ms=4.5, color=color, label=label)
    if operation.point is not None:
        counts = operation.point.validation
        at_threshold = (1 - counts.specificity, counts.sensitivity)
        curves.plot(*at_threshold, ls="", marker="o", ms=6, color="0.1", label="threshold, out of fold")
    curves.set(xlabel="1 - specificity", ylabel="sensitivity", title="Positive scans found, by false alarms")
    calibrated.set(xlabel="probability", ylabel="share of positive scans", title="Does 0.7 mean 7 of 10 scans?")
    for panel, name in ((curves, "chance"), (calibrated, "as it says")):
        panel.plot([0, 1], [0, 1], color=GUESS, lw=0.9, ls="--", label=name)
        panel.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


@styled
def plot_positions(
    attention: Float[Tensor, "slices"],
    prior: Float[Tensor, "slices"],
    labels: Int[Tensor, "scans"],
    lengths: Int[Tensor, "scans"],
) -> Figure:
    """Mean attention of positive and of negative scans by relative position, beside the prior."""
    shown, expected = (by_position(values, lengths) for values in (attention, prior))
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    panel = figure.subplots()
    for label, name, color in ((1, "positive scans", GREEN), (0, "negative scans", BLUE)):
        chosen = shown[(labels == label).numpy()]
        mean = chosen.mean(0)
        if len(chosen) > 1:
            reach = student_quantile(0.95, len(chosen) - 1) * chosen.std(0, ddof=1) / np.sqrt(len(chosen))
            panel.fill_between(ALONG, mean - reach, mean + reach, color=color, alpha=0.2, lw=0)
        panel.plot(ALONG, mean, color=color, lw=1.7, label=f"mean of {len(chosen)} {name}")
    panel.plot(ALONG, expected.mean(0), color=GUESS, lw=1.2, ls="--", label="the prior: before it looks at a scan")
    panel.axhline(1, color="0.75", lw=0.8, ls=":")
    panel.set(xlim=(0, 1), xlabel="position in the scan: 0 is its first slice, 1 its last")
    panel.set_ylabel("attention (1: even)")
    panel.set_ylim(bottom=0)
    panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def by_position(attention: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"]) -> Float64[np.ndarray, "scans _"]:
    """Each scan's attention at relative positions, times its number of slices: even attention is 1 everywhere."""
    scans = [scan.double().numpy() for scan in attention.split(lengths.tolist())]
    return np.stack([np.interp(ALONG, (np.arange(len(scan)) + 0.5) / len(scan), len(scan) * scan) for scan in scans])


@styled
def plot_examples(examples: Sequence[tuple[str, Tensor, Tensor, Tensor | None]]) -> Figure:
    """Titles, attention, prior and labels, where they are known, of the slices of a few scans, in rows of `ACROSS`."""
    rows = -(-len(examples) // ACROSS)
    figure = Figure(figsize=(WIDTH, 1.75 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, ACROSS, squeeze=False).flatten()
    entries: dict[str, Artist] = {}
    for panel, (title, attention, prior, slice_labels) in zip(panels, examples, strict=False):
        slices = np.arange(1, len(attention) + 1)
        fill_truth(panel, slice_labels)
        panel.plot(slices, attention, color=GREEN, lw=1.6, label="attention, out of fold")
        panel.plot(slices, prior, color=GUESS, lw=1.1, ls="--", label="prior")
        panel.set(xlim=(0.5, len(slices) + 0.5), title=title)
        panel.set_ylim(bottom=0)
        label_slices(panel)
        handles, names = panel.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
    for panel in panels[len(examples) :]:
        panel.set_axis_off()
    for panel in panels[::ACROSS]:
        panel.set_ylabel("attention")
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=len(entries))
    return figure


NOT_SHOWN = "The score is not shown to tell scans apart, so attention is the prior: where findings usually lie."

EXAMPLES = 6
MOST_LETTERS = 24  # of a scan's name over its example


def fit_page(bundle: Bundle, result: MeasuredFit, scans: LabelledScans, test: LabelledScans | None = None) -> str:
    """The page, in one file.  `scans` are the training scans."""
    measured = result.out_of_fold
    shown = (measured.finds, measured.scans.shown, False, False)[: len(result.sentences())]
    lead = [html.findings(zip(result.sentences(), shown, strict=True)), html.paragraph(CAUTION, note=True)]
    prior = prior_attention(scans.lengths)
    promised = [html.bullets(result.intervals.sentences())]
    if result.intervals.calibration is not None:
        promised.append(html.paragraph(ASSUMPTIONS, note=True))
    sections = [
        Section("Results", [_results(result), _meanings(measured)]),
        Section("Members", [leaderboard(result).html()]),
        Section("Scans", [_scans(result, scans, test), *map(html.paragraph, describe(bundle.operation))]),
        Section("Called wrongly", _mistakes(result, scans)),
        Section("Slices", [_positions(result, scans, prior), _examples(result, scans, prior)]),
        Section("Intervals", promised),
        Section("Choices", _choices(result.fit, scans)),
        Section("Record", [_record(bundle)]),
    ]
    named = "" if bundle.finding is None else f": {bundle.finding}"
    return html.page(f"What the fitted model does{named}", lead, sections)


def _results(result: MeasuredFit) -> str:
    columns = {"Out of fold": result.out_of_fold, **({"Test": result.test} if result.test else {})}
    measures = [_column(measured) for measured in columns.values()]
    rows = [[name, *(column.get(name, NO_LABELS) for column in measures)] for name in max(measures, key=len)]
    caption = (
        "Numbers in brackets are 95 % intervals, with patients as units. Out of fold: each training scan, predicted by "
        "models that did not see its patient"
        f"{'. Test: scans of other patients, kept aside.' if result.test else '; no scans were kept aside for a test.'}"
    )
    return Grid("", caption, ["Measure", *columns], rows).html()


def _column(measured: Measured) -> dict[str, str]:
    gain, specific = measured.gain, measured.specific
    column = {
        "Positive and negative scans": f"{measured.positive} and {measured.negative}",
        "Scan AUROC (chance: .5)": str(measured.scans),
    }
    if gain is None or measured.localization is None or specific is None:
        return {**column, "Localization AUROC": NO_LABELS}
    return {
        **column,
        "Localization AUROC": str(measured.localization),
        "Position: the middle of the scan": digits(gain.position),
        "Gain over position": str(gain),
        "Localization AUROC by other patients' attention": digits(specific.others),
        "Patient-specific: own minus others'": f"{signed(specific.difference)} {interval(specific.low, specific.high)}",
        "Scans with labels for both kinds of slices": str(gain.scans),
    }


def _meanings(measured: Measured) -> str:
    lines = [
        "Scan AUROC: how often a positive scan gets a higher probability than a negative one.",
        "Localization AUROC: how often, within a positive scan, a slice with the finding gets more attention than one "
        "without.",
    ]
    if measured.gain is not None:
        lines += [
            "Gain over position: localization AUROC beyond that of a bell in the middle of every scan.",
            "Patient-specific: how much better a scan's own attention is than that of other patients' scans, laid over "
            "it. What is left is about this patient; 0 means that attention knows where findings lie in general, "
            "and nothing more.",
        ]
    return html.bullets(lines)


def _embed(drawn: Figure, caption: str) -> str:
    with TemporaryDirectory() as folder:
        return html.figure(save(drawn, Path(folder) / "figure.png"), caption)


def _scans(result: MeasuredFit, scans: LabelledScans, test: LabelledScans | None) -> str:
    parts = {"out of fold": ScoredScans(result.fit.logits, scans.labels, str(result.out_of_fold.scans))}
    if test is not None and result.tested is not None and result.test is not None:
        parts["test"] = ScoredScans(result.tested.logit.double(), test.labels, str(result.test.scans))
    caption = (
        "Left: the ROC curve. Right: the share of positive scans among scans of similar probability, with 95 % "
        "intervals. Calibration and threshold were chosen on the out-of-fold scans, which flatters them a little."
    )
    if result.operation.calibration == Calibration():
        caption += " No calibration could be fitted: take these probabilities for nothing but an order of scans."
    return _embed(plot_scans(parts, result.operation), caption)


HINT = "<p class='note hint'>nguide view MODEL opens this page with a link to each scan.</p>"  # which leaves this out
MISTAKES = 20  # a list has at most so many scans


def _mistakes(result: MeasuredFit, scans: LabelledScans) -> list[str]:
    """The scans on the wrong side of the threshold, out of fold, the farthest first."""
    point, calibration = result.operation.point, result.operation.calibration
    if point is None:
        return []
    odds = [calibration.probability(logit) for logit in result.fit.logits.tolist()]
    attention = result.predicted.attention.split(scans.lengths.tolist())
    missed = sorted((odd, scan) for scan, odd in enumerate(odds) if scans.labels[scan] and odd < point.threshold)
    alarms = sorted((-odd, scan) for scan, odd in enumerate(odds) if not scans.labels[scan] and odd >= point.threshold)
    how = f"Out of fold, at the threshold {rounded(point.threshold)}; the farthest from it come first."
    blocks = [html.paragraph(how), HINT]
    for title, found in (("Missed", missed), ("False alarms", alarms)):
        rows = []
        for _, scan in found[:MISTAKES]:
            (key,) = key_positions(attention[scan], 1)
            name = html.scan_link(scans.scan_ids[scan], key + 1)
            rows.append((name, str(int(scans.labels[scan])), rounded(odds[scan]), str(key + 1)))
        more = f", of which {MISTAKES} are listed" if len(found) > MISTAKES else ""
        blocks.append(html.paragraph(f"{title}: {len(found)}{more}."))
        blocks += [html.raw_table(("scan", "label", "probability", "key slice"), rows)] if rows else []
    return blocks


def _positions(result: MeasuredFit, scans: LabelledScans, prior: Float[Tensor, "slices"]) -> str:
    caption = (
        "Mean attention along the scan, out of fold, with 95 % intervals of the mean. Where both curves follow the "
        "prior, attention says where findings usually lie, and little about a scan."
    )
    if not result.out_of_fold.scans.shown:
        caption += " This model is not shown to tell scans apart: differences between the curves may be chance."
    return _embed(plot_positions(result.predicted.attention, prior, scans.labels, scans.lengths), caption)


def _examples(result: MeasuredFit, scans: LabelledScans, prior: Float[Tensor, "slices"]) -> str:
    lengths = scans.lengths.tolist()
    attention, expected = result.predicted.attention.split(lengths), prior.split(lengths)
    labels = None if scans.slice_labels is None else scans.slice_labels.split(lengths)
    positive = (scans.labels == 1).nonzero().flatten().tolist()
    marked = [scan for scan in positive if labels is not None and int((labels[scan] == 1).sum())]
    candidates = marked or positive
    chosen = sorted(np.random.default_rng(0).permutation(len(candidates))[:EXAMPLES].tolist())
    uncalibrated = "uncalibrated " if result.operation.calibration == Calibration() else ""
    examples = []
    for scan in (candidates[number] for number in chosen):
        odds = result.operation.calibration.probability(result.fit.logits[scan].item())
        title = f"{shorten(scans.scan_ids[scan], MOST_LETTERS)}: {uncalibrated}probability {rounded(odds)}"
        truth = None if labels is None or not marked else labels[scan]
        examples.append((title, attention[scan], expected[scan], truth))
    known = "slices labelled positive are filled" if marked else "which slices are positive is not known"
    caption = f"{len(examples)} positive scans, drawn at random and not by how well they did; {known}."
    if marked and not result.out_of_fold.finds:
        caption += " Attention is not shown to be better than position: where it fits, that may be chance."
    return _embed(plot_examples(examples), caption)


def leaderboard(result: MeasuredFit) -> Grid:
    """The ensemble beside its kinds of members and position, out of fold."""
    caption = (
        "All out of fold, the best score first. Attention and score are the means of the kinds that count in them. A "
        "guided kind is trained toward attention in one bell; mean pooling and the kinds without guidance show what "
        "that is worth. Less log loss is better."
    )
    return Grid("", caption, list(COLUMNS), [row.cells() for row in result.leaderboard])


def _choices(fit: EnsembleFit, scans: LabelledScans) -> list[str]:
    folds = fit.plan.folds
    lines = [
        f"{len(scans)} scans of {len({*scans.patient_ids})} patients were divided into {folds} folds by patient (seed "
        f"{fit.plan.seed}). Models were trained on all folds but two, and chosen on one of them to predict the other.",
        f"Of the models with different learning rates and penalties the best {KEPT} by validation loss stayed.",
        "Guided kinds attend: none without guidance predicts unseen scans clearly better."
        if fit.choice.usual
        else "Kinds without guidance attend: they predict unseen scans clearly better (by more than "
        f"{SURELY:g} standard errors) than every guided one, so attention in one bell may have the wrong shape.",
        *([] if fit.choice.shown else [NOT_SHOWN]),
        f"The ensemble is the mean of {len(fit.ensemble)} models.",
    ]
    return [html.bullets(lines)]


def _record(bundle: Bundle) -> str:
    training = bundle.training
    facts = {
        "features": f"{bundle.features} per slice, {bundle.dtype}",
        "encoder": bundle.encoder and bundle.encoder.name,
        "dataset": training["dataset"],
        "scans": ", ".join(f"{count} {part}" for part, count in training["scans"].items()),
        "date": training["date"],
        "commit": training["commit"],
        "normal-guidance": training["normal_guidance"],
    }
    return html.bullets(f"{name}: {value}" for name, value in facts.items() if value)


HEADER = (
    *("finding", "SNOMED CT", "positive and negative scans"),
    *("scan AUROC (chance: .5)", "localization AUROC", "gain over position"),
)


def findings_page(models: Mapping[Finding, MeasuredFit], skipped: Mapping[str, str], notes: Mapping[str, str]) -> str:
    fitted = "1 finding was fitted" if len(models) == 1 else f"{len(models)} findings were fitted to the same features"
    left_out = f"; {len(skipped)} of {len(skipped) + len(models)} skipped" if skipped else ""
    lead = f"{fitted}, each with a model of its own{left_out}. Every name leads to its report."
    several = (
        "Numbers in brackets are 95 % intervals, with patients as units, for each finding by itself: the more findings "
        "there are, the likelier one of them looks better than chance by chance."
    )
    rows = []
    for finding, result in models.items():
        measured = result.out_of_fold
        gain, localized = measured.gain, measured.localization
        cells = [
            finding.code or "",
            f"{measured.positive} and {measured.negative}",
            str(measured.scans),
            NO_LABELS if gain is None else str(localized),
            "" if gain is None else str(gain),
        ]
        rows.append([f"<a href='{finding.name}/{PAGE}'>{escape(finding.name)}</a>", *map(escape, cells)])
    reasons = [*((name, f"skipped: {reason}") for name, reason in skipped.items()), *notes.items()]
    sections = [
        Section("Findings", [html.raw_table(HEADER, rows), html.paragraph(several, note=True)]),
        Section("Notes", [html.table(("finding", "note"), reasons, words=True)] if reasons else []),
    ]
    return html.page("What the fitted models do", [html.paragraph(lead), html.paragraph(CAUTION, note=True)], sections)
