"""`nguide fit` of several findings: a model for each, on the same features, in a folder with a page about all.

NAME/           a bundle for each finding, as `clinical.fitting` makes it
findings.json   the findings in order, and those that were skipped (`data.findings`)
report.html     a table of all findings, with links to their pages
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

from normal_guidance.clinical.bundle import Bundle, load_bundle
from normal_guidance.clinical.fit_page import PAGE
from normal_guidance.clinical.fitting import FittedModel, fit_model
from normal_guidance.clinical.pages import CAUTION, raw_table, table
from normal_guidance.data.findings import Finding, choose_finding, write_findings
from normal_guidance.errors import UserError
from normal_guidance.features.store import FeatureStore
from normal_guidance.files import folder_atomically, write_atomically
from normal_guidance.presentation import html
from normal_guidance.presentation.html import Section
from normal_guidance.statistics.calibration import check_sensitivity
from normal_guidance.statistics.conformal import check_coverage
from normal_guidance.statistics.number_format import digits, interval, signed
from normal_guidance.training.fit_committee import make_plan
from normal_guidance.training.measured_fit import Measured


class TrainingScans(NamedTuple):
    """The scans to train on and, if there are any, those to test on."""

    train: FeatureStore
    test: FeatureStore | None


@dataclass(frozen=True, eq=False)
class FittedFindings:
    """What `fit_findings` has made.

    Args:
        bundle: the model of the first finding, with the others.
        models: by the findings' names, in order.
        skipped: the reason, by the name of each finding that has no model.
        notes: what is to be said of a finding that was fitted, by its name.
    """

    bundle: Bundle
    models: Mapping[str, FittedModel]
    skipped: Mapping[str, str]
    notes: Mapping[str, str]


def training_scans(store: FeatureStore) -> TrainingScans:
    """All scans but those of the part test, and those."""
    tested = (store.scans["part"] == "test").to_numpy()
    if not tested.any():
        return TrainingScans(store, None)
    return TrainingScans(store.select(~tested), store.part("test"))


def fit_findings(
    store: FeatureStore,
    out: str | Path,
    names: Sequence[str] = (),
    *,
    sensitivity: float | None = None,
    coverage: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    watch: Callable[[str, float], None] | None = None,
) -> FittedFindings:
    """Fit a model of each finding of a store, and write them to a folder, which must be new or empty.

    A finding with too few scans is skipped; if no finding is left, nothing is written.

    Args:
        store: the scans; those of the part test are kept aside.
        names: of the findings; without any, all.
        sensitivity: least sensitivity of each threshold, out of fold; without it, Youden's J chooses.
        coverage: the probability with which intervals shall contain the finding; see `fit_and_measure`.
        seed: of the folds.
        device: where they are fitted.
        watch: called with the finding's name and the share of all findings that is done.
    """
    check_sensitivity(sensitivity)  # a mistake of the command is not one of a finding
    if coverage is not None:
        check_coverage(coverage)
    chosen = [choose_finding(store.findings, name, f"store {store.folder}") for name in names] or store.findings
    models: dict[str, FittedModel] = {}
    skipped: dict[str, str] = {}
    notes: dict[str, str] = {}
    with folder_atomically(out) as draft:
        for number, finding in enumerate(chosen):

            def tell(share: float, name: str = finding.name, number: int = number) -> None:
                if watch is not None:
                    watch(name, (number + share) / len(chosen))

            options: dict[str, Any] = {
                "sensitivity": sensitivity,
                "coverage": coverage,
                "device": device,
                "watch": tell,
            }
            name = finding.name
            tell(0.0)
            try:
                train, test = training_scans(store.of_finding(name))
                plan = make_plan(train.labels.tolist(), train.patient_ids, seed=seed)
                note = _why_untested(test)
                if note:
                    notes[name], test = note, None
                models[name] = fit_model(train, draft / name, test=test, plan=plan, **options)
            except UserError as error:
                skipped[name] = str(error)
                notes.pop(name, None)
        if not models:
            raise UserError(f"no finding of store {store.folder} can be fitted: {_sentences(skipped)}")
        made = [finding for finding in chosen if finding.name in models]
        write_findings(draft, made, skipped)
        write_atomically(draft / PAGE, findings_page(made, models, skipped, notes).encode())
    return FittedFindings(load_bundle(out), models, skipped, notes)


def _why_untested(test: FeatureStore | None) -> str:
    """Say why test scans cannot measure a finding; empty if they can, or if there are none."""
    if test is None or len(test.labels.unique()) > 1:
        return ""
    return f"All {len(test)} test scans are {'positive' if test.labels.any() else 'negative'}, so it was not tested."


def _sentences(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def findings_page(
    findings: Sequence[Finding],
    models: Mapping[str, FittedModel],
    skipped: Mapping[str, str],
    notes: Mapping[str, str],
) -> str:
    """The page about all findings, in one file; it links to the page of each."""
    fitted = "1 finding was fitted" if len(models) == 1 else f"{len(models)} findings were fitted to the same features"
    left_out = f"; {len(skipped)} of {len(skipped) + len(models)} skipped" if skipped else ""
    lead = f"{fitted}, each with a model of its own{left_out}. Every name leads to its report."
    several = (
        "Numbers in brackets are 95 % intervals, with patients as units, for each finding by itself: the more findings "
        "there are, the likelier one of them looks better than chance by chance."
    )
    rows = [_row(one, models[one.name]) for one in findings]
    reasons = [(name, f"skipped: {reason}") for name, reason in skipped.items()]
    reasons += [(name, note) for name, note in notes.items()]
    sections = [
        Section("Findings", [raw_table(HEADER, rows), html.paragraph(several, note=True)]),
        Section("Notes", [table(("finding", "note"), reasons, words=True)] if reasons else []),
    ]
    return html.page("What the fitted models do", [html.paragraph(lead), html.paragraph(CAUTION, note=True)], sections)


HEADER = (
    *("finding", "SNOMED CT", "measured on", "positive and negative scans"),
    *("scan AUROC (chance: .5)", "localization AUROC", "skill (0: as good as position)"),
)


def _row(finding: Finding, model: FittedModel) -> list[str]:
    own = model.test or model.out_of_fold
    shown = [
        finding.code or "",
        "test scans" if model.test else "scans out of fold",
        f"{own.positive} and {own.negative}",
        f"{digits(own.scans.value)} {interval(own.scans.low, own.scans.high)}",
        *_slices(own),
    ]
    link = f"<a href='{finding.name}/{PAGE}'>{escape(finding.name)}</a>"
    return [link, *map(escape, shown)]


def _slices(own: Measured) -> tuple[str, str]:
    if own.skill is None or own.localization is None:
        return "no slice labels", ""
    found = own.skill
    return str(own.localization), f"{signed(found.skill)} {interval(found.low, found.high)}"
