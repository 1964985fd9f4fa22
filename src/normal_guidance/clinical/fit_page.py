"""report.html of `nguide fit`: what the model does on scans that it was not trained on, and how it was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from normal_guidance.clinical.bundle import Bundle
from normal_guidance.clinical.fit_figures import Example, PredictedScans, plot_examples, plot_positions, plot_scans
from normal_guidance.clinical.pages import CAUTION
from normal_guidance.clinical.strip import rounded
from normal_guidance.core.places import Places
from normal_guidance.presentation import html
from normal_guidance.presentation.figure_style import save
from normal_guidance.presentation.html import Section
from normal_guidance.presentation.text_tables import Grid
from normal_guidance.statistics.calibration import Calibration, describe
from normal_guidance.statistics.number_format import digits, interval, signed
from normal_guidance.training.batches import LabelledScans
from normal_guidance.training.fit_committee import CLEARLY, CommitteeFit, Kind, Setting
from normal_guidance.training.measured_fit import Measured, MeasuredFit
from normal_guidance.training.promised_intervals import ASSUMPTIONS

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
