"""`nguide fit`: a committee for a store, with calibration and threshold, in a folder that is a bundle.

    bundle.json, model.safetensors    the model (`clinical.bundle`)
    predictions.parquet               out-of-fold predictions for the training scans, and those for test scans
    report.html                       what it does on scans that it was not trained on (`clinical.fit_page`)

Out of fold means: by the members of the committee that were not trained on the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import folder_atomically, write_atomically
from normal_guidance.core.prediction import Prediction
from normal_guidance.fit.bundle import Bundle, fill_folder, load_bundle, make_bundle
from normal_guidance.fit.fit_committee import CommitteeFit, Plan, make_plan
from normal_guidance.fit.fit_page import PAGE, fit_page
from normal_guidance.fit.measured import (
    OUT_OF_FOLD,
    Measured,
    MeasuredFit,
    fit_and_measure,
)
from normal_guidance.scans.features.preprocessing import scans_behind
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.scans.index.manifest import Finding, choose_finding, write_findings
from normal_guidance.show import html
from normal_guidance.show.html import CAUTION, Section, raw_table, table
from normal_guidance.show.text_tables import digits, interval, signed
from normal_guidance.statistics.calibration import check_sensitivity
from normal_guidance.statistics.conformal import check_coverage
from normal_guidance.sweep.config import Execution
from normal_guidance.sweep.predictions import prediction_table, write_predictions_table
from normal_guidance.sweep.run import PREDICTION_TABLE, environment, features_of


@dataclass(frozen=True, eq=False)
class FittedModel:
    """What `fit_model` has made."""

    bundle: Bundle
    measured: MeasuredFit

    @property
    def fit(self) -> CommitteeFit:
        return self.measured.fit

    @property
    def out_of_fold(self) -> Measured:
        return self.measured.out_of_fold

    @property
    def test(self) -> Measured | None:
        return self.measured.test

    def sentences(self) -> list[str]:
        """Three sentences: does it tell scans apart, does it find the slices, can it be trusted."""
        return self.measured.sentences()


def fit_model(
    scans: FeatureStore,
    out: str | Path,
    *,
    test: FeatureStore | None = None,
    plan: Plan | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    device: torch.device | str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> FittedModel:
    """Fit a committee and write its folder, which must be new or empty.

    Args:
        scans: the training scans; labels of slices are used to measure and to calibrate intervals, not for training.
        test: other patients' scans, to measure the model on.
        plan: how; without it, the scans decide.
        sensitivity: least sensitivity of the threshold, out of fold; without it, Youden's J chooses.
        coverage: the probability with which intervals shall contain the finding; see `fit_and_measure`.
        device: where it is fitted.
        watch: called with the share that is done.
    """
    features = features_of(scans)
    assert features is not None
    with folder_atomically(out) as draft:
        found = fit_and_measure(
            scans, plan, test=test, sensitivity=sensitivity, coverage=coverage, device=device, watch=watch
        )
        training = _training(scans, test, found)
        calibrated = found.intervals.calibration
        bundle = make_bundle(None, found.fit.committee, features, found.operation, training, calibrated)
        named = "" if bundle.finding is None else bundle.finding.name
        bundle = replace(bundle, cautions=found.cautions(named))
        tables = [
            _table(some, prediction, found, part)
            for part, some, prediction in ((OUT_OF_FOLD, scans, found.predicted), ("test", test, found.tested))
            if some is not None and prediction is not None
        ]
        write_predictions_table(draft / PREDICTION_TABLE, tables)
        write_atomically(draft / PAGE, fit_page(bundle, found, scans, test).encode())
        fill_folder(bundle, draft)
    return FittedModel(bundle, found)


def _table(scans: FeatureStore, prediction: Prediction, found: MeasuredFit, part: str) -> pa.Table:
    calibration = found.operation.calibration
    odds = torch.tensor([calibration.probability(logit) for logit in prediction.logit.tolist()])
    return prediction_table(scans, prediction, part=part, probability=odds)


def _training(scans: FeatureStore, test: FeatureStore | None, found: MeasuredFit) -> dict[str, object]:
    """How the model was trained, for people to read; numbers of scans, never their names."""
    made, plan, scores = environment(Execution()), found.fit.plan, None
    if found.test is not None:
        localized = found.test.localization
        scores = {
            "scan_auroc": found.test.scans.value,
            "localization_auroc": None if localized is None else localized.auroc,
            "intervals": found.intervals.as_json()["test"],
        }
    return {
        "dataset": summary.source if (summary := scans_behind(scans.provenance)) else None,
        "scans": {"train": len(scans), **({} if test is None else {"test": len(test)})},
        "out_of_fold_auroc": found.out_of_fold.scans.value,
        "test": scores,
        "members": len(found.fit.committee),
        "folds": plan.folds,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "commit": (made.get("commit") or {}).get("id"),
        "date": made.get("date"),
        "normal_guidance": made.get("normal_guidance"),
    }


# `nguide fit` of several findings: a model for each, on the same features, in a folder with a page about all.
# NAME/           a bundle for each finding, as `clinical.fitting` makes it
# findings.json   the findings in order, and those that were skipped (`data.findings`)
# report.html     a table of all findings, with links to their pages


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
