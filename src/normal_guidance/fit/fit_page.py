"""report.html of `nguide fit`: what the model does on scans that it was not trained on, and how it was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from jaxtyping import Float, Float64, Int
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve
from torch import Tensor

from normal_guidance.core.bags import LabelledScans
from normal_guidance.core.bells import Places
from normal_guidance.fit.bundle import Bundle
from normal_guidance.fit.fit_committee import (
    CLEARLY,
    CommitteeFit,
    Kind,
    Setting,
)
from normal_guidance.fit.measured import ASSUMPTIONS, Measured, MeasuredFit
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

# The figures of a fitted model's page: scans told apart, attention by position, and examples.
# All show scans that the model was not trained on, and none names a scan or a patient.


POINTS = 50
"""Relative positions at which mean attention is drawn."""

BINS, IN_A_BIN = 8, 10
"""The most points of the calibration curve, and the fewest scans of each."""

ACROSS = 3
"""Examples in a row."""

GUESS = "0.25"
"""The colour of what knows nothing of the scan: chance, and the prior."""


@dataclass(frozen=True, eq=False)
class PredictedScans:
    """Scans that the model was not trained on, and what it says of them."""

    logits: Float[Tensor, "scans"]
    labels: Int[Tensor, "scans"]
    auroc: str


@styled
def plot_scans(parts: Mapping[str, PredictedScans], operation: Operation) -> Figure:
    """ROC curves with the threshold, and calibration; the first part chose the threshold."""
    figure = Figure(figsize=(WIDTH, 4.1), layout="constrained")
    curves, calibrated = figure.subplots(1, 2)
    for color, (name, own) in zip((BLUE, ORANGE), parts.items(), strict=False):
        false, true, _ = roc_curve(own.labels.numpy(), own.logits.numpy(), drop_intermediate=False)
        curves.plot(false, true, color=color, lw=1.6, label=f"{name}: AUROC {own.auroc}")
        odds = np.array([operation.calibration.probability(logit) for logit in own.logits.tolist()])
        _draw_calibration(calibrated, odds, own.labels.numpy(), name, color)
    if operation.point is not None:
        counts = operation.point.validation
        place = (1 - counts.specificity, counts.sensitivity)
        curves.plot(*place, ls="", marker="o", ms=6, color="0.1", label="threshold, out of fold")
    curves.set(xlabel="1 - specificity", ylabel="sensitivity", title="Positive scans found, by false alarms")
    calibrated.set(xlabel="probability", ylabel="share of positive scans", title="Does 0.7 mean 7 of 10 scans?")
    for panel, name in ((curves, "chance"), (calibrated, "as it says")):
        panel.plot([0, 1], [0, 1], color=GUESS, lw=0.9, ls="--", label=name)
        panel.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


def _draw_calibration(panel: Axes, probability: np.ndarray, labels: np.ndarray, name: str, color: str) -> None:
    """Shares of positive scans among scans of similar probability, with Wilson's intervals."""
    bins = max(1, min(BINS, len(labels) // IN_A_BIN))
    groups = np.array_split(np.argsort(probability, kind="stable"), bins)
    said = np.array([probability[group].mean() for group in groups])
    true = np.array([labels[group].mean() for group in groups])
    low, high = np.transpose([wilson(int(labels[group].sum()), len(group)) for group in groups])
    panel.vlines(said, low, high, color=color, lw=1.1)
    label = f"{name}: about {round(len(labels) / bins)} scans a point"
    panel.plot(said, true, ls="", marker="o", ms=4.5, color=color, label=label)


@styled
def plot_positions(
    attention: Float[Tensor, "slices"],
    prior: Float[Tensor, "slices"],
    labels: Int[Tensor, "scans"],
    lengths: Int[Tensor, "scans"],
) -> Figure:
    """Mean attention of positive and of negative scans by relative position, beside the prior."""
    along = (np.arange(POINTS) + 0.5) / POINTS
    own, expected = (by_position(values, lengths) for values in (attention, prior))
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    panel = figure.subplots()
    for label, name, color in ((1, "positive scans", GREEN), (0, "negative scans", BLUE)):
        chosen = own[(labels == label).numpy()]
        mean = chosen.mean(0)
        if len(chosen) > 1:
            reach = student_quantile(0.95, len(chosen) - 1) * chosen.std(0, ddof=1) / np.sqrt(len(chosen))
            panel.fill_between(along, mean - reach, mean + reach, color=color, alpha=0.2, lw=0)
        panel.plot(along, mean, color=color, lw=1.7, label=f"mean of {len(chosen)} {name}")
    panel.plot(along, expected.mean(0), color=GUESS, lw=1.2, ls="--", label="the prior: before it looks at a scan")
    panel.axhline(1, color="0.75", lw=0.8, ls=":")
    panel.set(xlim=(0, 1), xlabel="position in the scan: 0 is its first slice, 1 its last")
    panel.set_ylabel("attention (1: even)")
    panel.set_ylim(bottom=0)
    panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def by_position(attention: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"]) -> Float64[np.ndarray, "scans _"]:
    """Each scan's attention at relative positions, times its number of slices: even attention is 1 everywhere."""
    along = (np.arange(POINTS) + 0.5) / POINTS
    scans = [own.double().numpy() for own in attention.split(lengths.tolist())]
    return np.stack([np.interp(along, (np.arange(len(own)) + 0.5) / len(own), len(own) * own) for own in scans])


@dataclass(frozen=True, eq=False)
class Example:
    """One scan's attention, the prior beside it, and its slice labels if they are known."""

    title: str
    attention: Float[Tensor, "slices"]
    prior: Float[Tensor, "slices"]
    slice_labels: Int[Tensor, "slices"] | None = None


@styled
def plot_examples(examples: Sequence[Example]) -> Figure:
    """Attention along the slices of a few scans, in rows of `ACROSS`."""
    rows = -(-len(examples) // ACROSS)
    figure = Figure(figsize=(WIDTH, 1.75 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, ACROSS, squeeze=False).flatten()
    entries: dict[str, Artist] = {}
    for panel, example in zip(panels, examples, strict=False):
        _draw_example(panel, example)
        handles, names = panel.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
    for panel in panels[len(examples) :]:
        panel.set_axis_off()
    for panel in panels[::ACROSS]:
        panel.set_ylabel("attention")
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=len(entries))
    return figure


def _draw_example(panel: Axes, example: Example) -> None:
    slices = np.arange(1, len(example.attention) + 1)
    if example.slice_labels is not None:
        fill_truth(panel, example.slice_labels)
    panel.plot(slices, example.attention, color=GREEN, lw=1.6, label="attention, out of fold")
    panel.plot(slices, example.prior, color=GUESS, lw=1.1, ls="--", label="prior")
    panel.set(xlim=(0.5, len(slices) + 0.5), title=example.title)
    panel.set_ylim(bottom=0)
    label_slices(panel)


PAGE = "report.html"

WHOLE = (
    "The mean of the whole scan tells scans apart no worse than attention does. Members that see only this mean have "
    "half of the log-odds, and no part in the attention."
)
NOT_SHOWN = (
    "No setting that looks for places clearly tells scans apart, so attention is the prior: where findings usually lie."
)

EXAMPLES = 6


def fit_page(bundle: Bundle, found: MeasuredFit, scans: LabelledScans, test: LabelledScans | None = None) -> str:
    """The page, in one file.  `scans` are the training scans, which it numbers and never names."""
    own = found.test or found.out_of_fold
    shown = (own.scans.shown, own.finds, False)
    lead = [html.findings(zip(found.sentences(), shown, strict=True)), html.paragraph(CAUTION, note=True)]
    prior = found.fit.committee.prior(scans.lengths)
    sections = [
        Section("Results", [_results(found), *_meanings(own)]),
        Section("Scans", [_scans(found, scans, test), *map(html.paragraph, describe(bundle.operation))]),
        Section("Slices", [_positions(found, scans, prior), _examples(found, scans, prior)]),
        Section("Intervals", _intervals(found)),
        Section("Choices", _choices(found.fit, scans)),
        Section("Record", [_record(bundle)]),
    ]
    named = "" if bundle.finding is None else f": {bundle.finding}"
    return html.page(f"What the fitted model does{named}", lead, sections)


def _results(found: MeasuredFit) -> str:
    columns = [("Out of fold", found.out_of_fold), *([("Test", found.test)] if found.test else [])]
    measures = [_column(measured) for _, measured in columns]
    rows = [[name, *(column[name] for column in measures)] for name in measures[0]]
    caption = (
        "Numbers in brackets are 95 % intervals, with patients as units. Out of fold: each training scan, predicted by "
        "members of the committee that were not trained on it"
        f"{'. Test: scans of other patients, kept aside.' if found.test else '; no scans were kept aside for a test.'}"
    )
    return Grid("", caption, ["Measure", *(title for title, _ in columns)], rows).html()


def _column(own: Measured) -> dict[str, str]:
    """The texts of the table's rows."""
    found = {
        "Positive and negative scans": f"{own.positive} and {own.negative}",
        "Scan AUROC (chance: .5)": _between(own.scans.value, own.scans.low, own.scans.high),
    }
    if own.skill is None or own.localization is None or own.specific is None:
        return {**found, **dict.fromkeys(("Localization AUROC", "Skill", "Patient-specific"), "no slice labels")}
    skill, specific = own.skill, own.specific
    return {
        **found,
        "Localization AUROC": str(own.localization),
        "The best guess by position alone": digits(skill.prior_auroc),
        "Skill (0: as good as that guess, 1: perfect)": _between(skill.skill, skill.low, skill.high, sign=True),
        "Localization AUROC by other patients' attention": digits(specific.others),
        "Patient-specific: own minus others'": _between(specific.difference, specific.low, specific.high, sign=True),
        "Scans with labels for both kinds of slices": str(skill.scans),
    }


def _between(value: float, low: float, high: float, *, sign: bool = False) -> str:
    return f"{signed(value) if sign else digits(value)} {interval(low, high)}"


def _meanings(own: Measured) -> list[str]:
    lines = [
        "Scan AUROC: how often a positive scan gets a higher probability than a negative one.",
        "Localization AUROC: how often, within a positive scan, a slice with the finding gets more attention than one "
        "without.",
    ]
    if own.skill is not None:
        lines += [
            "Skill: how far attention gets from the best guess by position alone to perfect localization.",
            "Patient-specific: how much better a scan's own attention is than that of other patients' scans, laid over "
            "it. What is left is about this patient; 0 means that attention knows where findings lie in general, "
            "and nothing more.",
        ]
    return [html.bullets(lines)]


def _embed(drawn: Figure, caption: str) -> str:
    with TemporaryDirectory() as folder:
        return html.figure(save(drawn, Path(folder) / "figure.png"), caption)


def _scans(found: MeasuredFit, scans: LabelledScans, test: LabelledScans | None) -> str:
    parts = {"out of fold": PredictedScans(found.fit.logits, scans.labels, str(found.out_of_fold.scans))}
    if test is not None and found.tested is not None and found.test is not None:
        parts["test"] = PredictedScans(found.tested.logit.double(), test.labels, str(found.test.scans))
    caption = (
        "Left: the ROC curve. Right: the share of positive scans among scans of similar probability, with 95 % "
        "intervals. Calibration and threshold were chosen on the out-of-fold scans, which flatters them a little."
    )
    if not _calibrated(found):
        caption += " No calibration could be fitted: take these probabilities for nothing but an order of scans."
    return _embed(plot_scans(parts, found.operation), caption)


def _calibrated(found: MeasuredFit) -> bool:
    return found.operation.calibration != Calibration()


def _positions(found: MeasuredFit, scans: LabelledScans, prior: Float[Tensor, "slices"]) -> str:
    caption = (
        "Mean attention along the scan, out of fold, with 95 % intervals of the mean. Where both curves follow the "
        "prior, attention says where findings usually lie, and little about a scan."
    )
    if not found.out_of_fold.scans.shown:
        caption += " This model is not shown to tell scans apart: differences between the curves may be chance."
    return _embed(plot_positions(found.predicted.attention, prior, scans.labels, scans.lengths), caption)


def _examples(found: MeasuredFit, scans: LabelledScans, prior: Float[Tensor, "slices"]) -> str:
    lengths = scans.lengths.tolist()
    attention, expected = found.predicted.attention.split(lengths), prior.split(lengths)
    labels = None if scans.slice_labels is None else scans.slice_labels.split(lengths)
    positive = (scans.labels == 1).nonzero().flatten().tolist()
    marked = [scan for scan in positive if labels is not None and int((labels[scan] == 1).sum())]
    candidates = marked or positive
    chosen = sorted(np.random.default_rng(0).permutation(len(candidates))[:EXAMPLES].tolist())
    uncalibrated = "" if _calibrated(found) else "uncalibrated "
    examples = []
    for scan in (candidates[number] for number in chosen):
        odds = found.operation.calibration.probability(found.fit.logits[scan].item())
        truth = None if labels is None or not marked else labels[scan]
        examples.append(
            Example(
                f"scan {scan + 1}: {uncalibrated}probability {rounded(odds)}", attention[scan], expected[scan], truth
            )
        )
    known = "slices labelled positive are filled" if marked else "which slices are positive is not known"
    caption = (
        f"{len(examples)} positive scans, drawn at random and not by how well they did; {known}. Numbers count the "
        "training scans in the order of predictions.parquet."
    )
    if marked and not found.out_of_fold.finds:
        caption += " Attention is not shown to be better than position: where it fits, that may be chance."
    return _embed(plot_examples(examples), caption)


def _intervals(found: MeasuredFit) -> list[str]:
    lines = [html.bullets(found.intervals.sentences())]
    return lines if found.intervals.calibration is None else [*lines, html.paragraph(ASSUMPTIONS, note=True)]


def _choices(fit: CommitteeFit, scans: LabelledScans) -> list[str]:
    plan, kept = fit.plan, [fit.settings[number] for number in fit.choice.kept]
    usual, looking = (sum(chosen) for chosen in zip(*((one.usual, not one.whole) for one in fit.settings), strict=True))
    candidates = looking if fit.choice.unusual else usual
    whole = sum(setting.whole for setting in kept)
    folds = f"{len(scans)} scans of {len({*scans.patient_ids})} patients were divided into {plan.folds} folds"
    again = "once" if plan.repeats == 1 else f"{plan.repeats} times, with other folds each time"
    better = f"predict scans clearly better (by more than {CLEARLY:g} standard errors) than blocks around the middle "
    better += "and than the mean of the whole scan"
    others = "Places anywhere in the scan, single slices or several places"
    lines = [
        f"{folds} by patient, {again} (seed {plan.seed}). Members were trained on all folds but one.",
        _inputs(fit),
        f"{len(fit.settings)} settings were compared by their log loss out of fold.",
        f"Unusual places were needed. {others} {better}."
        if fit.choice.unusual
        else f"Unusual places were not needed. {others} do not {better}, so their {looking - usual} settings were "
        "left out.",
        f"Of {candidates} settings, {len(kept) - whole} were kept. The others were clearly worse than the best one.",
        *([WHOLE] if whole else []),
        *([] if fit.choice.shown else [NOT_SHOWN]),
        f"Kept: {_penalties(kept)}; {_turns(kept)}.",
        f"The committee is the mean of {len(fit.committee)} members: {len(kept)} settings x {plan.folds} folds x "
        f"{plan.repeats} {'repeat' if plan.repeats == 1 else 'repeats'}.",
    ]
    return [html.bullets(lines), html.details("All kinds of places", _settings(fit, scans).html())]


def _inputs(fit: CommitteeFit) -> str:
    scaling = fit.committee.scaling
    if scaling.rotation is None:
        return f"The {scaling.features} features of a slice were scaled to one size."
    return (
        f"The {scaling.features} features of a slice repeat each other and became {scaling.inputs} principal "
        "components of one size."
    )


def _penalties(kept: Sequence[Setting]) -> str:
    found: dict[str, set[float]] = {}
    for setting in kept:
        found.setdefault(setting.penalty.kind, set()).add(setting.penalty.strength)
    return " and ".join(
        f"{kind} of strength {', '.join(f'{one:g}' for one in sorted(strengths))}"
        for kind, strengths in sorted(found.items(), reverse=True)
    )


def _turns(kept: Sequence[Setting]) -> str:
    words = {1: "one turn", 2: "two turns"}
    turns = " or ".join(words.get(turn, f"{turn} turns") for turn in sorted({setting.turn for setting in kept}))
    return f"{turns} of weights and attention"


@dataclass(frozen=True)
class _Kind:
    """The settings that look for the same kind of places."""

    words: str
    usual: bool
    numbers: tuple[int, ...]


def _settings(fit: CommitteeFit, scans: LabelledScans) -> Grid:
    """One row for each kind of places, the best first."""
    groups: dict[Kind, list[int]] = {}
    for number, setting in enumerate(fit.settings):
        groups.setdefault((setting.places, setting.power), []).append(number)
    kinds = [
        _Kind(place_words(places, power), fit.settings[own[0]].usual, tuple(own))
        for (places, power), own in groups.items()
    ]
    kinds.sort(key=lambda kind: fit.choice.losses[list(kind.numbers)].min().item())
    rows = []
    for kind in kinds:
        kept = len({*kind.numbers} & {*fit.choice.kept})
        state = (
            f"{kept} of {len(kind.numbers)}" if kept else "none" if kind.usual or fit.choice.unusual else "not needed"
        )
        rows.append([kind.words, digits(fit.choice.losses[list(kind.numbers)].min().item()), state])
    share = scans.labels.double().mean().item()
    nothing = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    caption = (
        "Log loss out of fold, the best of each kind's penalties and turns; less is better. Knowing only how frequent "
        f"positive scans are gives {digits(nothing)}."
    )
    return Grid("", caption, ["Where a finding may lie", "Log loss", "Settings kept"], rows)


def place_words(places: Places, power: float = 1.0) -> str:
    """A kind of places in words."""
    if places.reach is None:
        return "the whole scan at once"
    one, many = "single slice", "single slices"
    if places.reach > 0.0:
        one, many = (f"{word} of about {round(2 * places.reach) + 1} slices" for word in ("block", "blocks"))
    what = f"a {one}" if power == 1.0 else f"several {many}" if power > 1.0 else f"the clearest {one}"
    return f"{what} {'around the middle' if places.central else 'anywhere'}"


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
