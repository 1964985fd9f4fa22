"""All four tests of one model on one set of scans: a model of your own, or one that was saved; and their page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.fit.bundle import BUNDLE, load_bundle
from normal_guidance.fit.ensemble import Ensemble
from normal_guidance.scans.features.store import FeatureStore, open_store
from normal_guidance.show.text_tables import Grid, digits
from normal_guidance.statistics.differences import Estimate
from normal_guidance.study.experiment import DATASETS
from normal_guidance.study.trust.attention_tests import (
    COMPARED,
    UNTRAINED,
    Bootstrap,
    By,
    Curves,
    Kind,
    Model,
    TrustResult,
    Untrained,
    draw_curves,
    judge_alarm,
    judge_deletion,
    judge_randomizing,
    judge_shuffling,
    make_orders,
    predict_scans,
    untrained_copies,
)
from normal_guidance.sweep.run import about_winner, fingerprints_of, load_run, load_winner
from normal_guidance.sweep.stack import initial_model

FIRST_SEED = 2**31  # seeds of untrained weights start here: no model was trained from these

BY: tuple[By, ...] = ("slices", "attention")


@dataclass(frozen=True, eq=False)
class Trust:
    """The results of the tests; `findings` are in the order shuffle, randomize, deletion, inverted."""

    findings: tuple[TrustResult, ...]
    curves: Mapping[Kind, Curves] | None  # None for a model without scan scores
    scans: int
    positive: int
    by: By
    bootstrap: Bootstrap
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> TrustResult:
        return next(finding for finding in self.findings if finding.name == name)

    @property
    def scan_auroc(self) -> Estimate | None:
        return None if self.curves is None else self.bootstrap.estimate(self.curves["deletion"].whole_auroc)

    def as_json(self) -> dict[str, Any]:
        whole, curves = self.scan_auroc, {}
        for kind, of_kind in (self.curves or {}).items():
            points: dict[str, Any] = {"shares": list(of_kind.shares)}
            for score, lines in (("auroc", of_kind.auroc), ("logit", of_kind.logit)):
                points[score] = {order: [point.value for point in line] for order, line in lines.items()}
            curves[kind] = points
        return {
            "scans": self.scans,
            "positive": self.positive,
            "by": self.by,
            "scan_auroc": None if whole is None else asdict(whole),
            "notes": list(self.notes),
            "findings": [finding.as_json() for finding in self.findings],
            "curves": curves,
        }


def examine(
    model: Model,
    scans: Bags | FeatureStore,
    *,
    untrained: Untrained | None = None,
    by: By = "slices",
    seed: int = 0,
    watch: Callable[[float], None] | None = None,
) -> Trust:
    """Run the four tests on a model of your own, on labelled scans that it was not trained on.

    Slice labels confirm the alarm.  `untrained` makes the same model with untrained weights from a seed: by default a
    module's layers are reset; for any other model the second test is undecided.  `watch` receives the share done.
    """
    if by not in BY:
        raise UserError(f"by is {by!r}; choose one of {', '.join(BY)}")
    bootstrap = Bootstrap(scans)
    generator = torch.Generator().manual_seed(seed)
    whole = predict_scans(model, scans)
    if untrained is None and isinstance(model, nn.Module):
        untrained = untrained_copies(model)
    others = []
    if untrained is not None:
        others = [predict_scans(untrained(FIRST_SEED + seed + number), scans) for number in range(UNTRAINED)]
    curves = None
    if whole.scores_scans:
        orders = make_orders(whole, scans.lengths.cpu(), others[:COMPARED], generator)
        curves = draw_curves(model, scans, whole, orders, bootstrap, by=by, watch=watch)
    return Trust(
        findings=(
            judge_shuffling(model, scans, whole, generator, bootstrap),
            judge_randomizing(whole, others, scans, curves, bootstrap),
            judge_deletion(curves, bootstrap),
            judge_alarm(curves, whole, scans, bootstrap),
        ),
        curves=curves,
        scans=len(scans),
        positive=int(scans.labels.sum()),
        by=by,
        bootstrap=bootstrap,
    )


TESTED = ("val", "test")  # parts on which no weights of a run were fitted


Saved = tuple[nn.Module, int, Bags | FeatureStore, Untrained | None, str | None]
"""What a run or a bundle brings to the tests: its model, features, scans, untrained models and a note."""


def examine_saved(
    folder: str | Path,
    *,
    store: str | Path | None = None,
    split: str | Path | None = None,
    part: str = "test",
    group: str = "",
    by: By = "slices",
    device: str = "cpu",
    seed: int = 0,
    watch: Callable[[float], None] | None = None,
) -> Trust:
    """Run the four tests on a run's winner, or on a bundle; by default on the store and split that the run recorded."""
    folder = Path(folder)
    is_bundle = (folder / BUNDLE).is_file()
    saved = _of_bundle(folder, store, split, part) if is_bundle else _of_run(folder, store, split, part, group)
    model, features, scans, untrained, note = saved
    if scans.width != features:
        raise UserError(f"{folder} takes {features} features a slice, but the store has {scans.width}; give its store")
    trust = examine(model.to(device), scans, untrained=untrained, by=by, seed=seed, watch=watch)
    return replace(trust, notes=() if note is None else (note,))


def _of_run(folder: Path, store: str | Path | None, split: str | Path | None, part: str, group: str) -> Saved:
    if part not in TESTED:
        raise UserError(f"models are not tested on part {part!r}; choose one of {', '.join(TESTED)}")
    run = load_run(folder)
    winner = run.winner(group)
    if winner.config.on_slices:
        raise UserError(f"{folder} was trained on slice labels and has no attention to test; give another run")
    options = run.report.get("options", {})
    scans: Bags | FeatureStore
    if store is None and options.get("dataset") in DATASETS:
        scans = DATASETS[options["dataset"]].draw(winner.config.seed, part)
    else:
        where, table = (_recorded(name, given, options, folder) for name, given in (("store", store), ("split", split)))
        if where is None:
            raise UserError(f"{folder} does not say where its features are; give them: --store STORE")
        opened = open_store(where)
        scans = (opened if table is None else opened.with_parts(table)).part(part)
    model, features = load_winner(folder, group), about_winner(folder, group).features
    known, note = run.report["data"].get(part), None
    if known is None:
        note = f"The run had no {part} part: make sure that no patient of these scans was trained on."
    elif fingerprints_of(part, scans)["fingerprint"] != known["fingerprint"]:
        note = f"These are not the run's own {part} scans: make sure that no patient of them was trained on."

    def untrained(fresh: int) -> nn.Module:
        return initial_model(replace(winner.config, seed=fresh), features).to(next(model.parameters()))

    return model, features, scans, untrained, note


def _recorded(name: str, given: str | Path | None, options: Mapping[str, Any], folder: Path) -> Path | None:
    """The given path, or the one that the run recorded, if it still exists."""
    if given is not None or options.get(name) is None:
        return None if given is None else Path(given)
    remembered = Path(options[name])
    if not remembered.exists():
        raise UserError(f"{folder} was trained with {remembered}, which no longer exists; give --{name} {name.upper()}")
    return remembered


def _of_bundle(folder: Path, store: str | Path | None, split: str | Path | None, part: str) -> Saved:
    if store is None:
        raise UserError(f"{folder} does not say where its features are; give some: --store STORE")
    if part != "test":
        raise UserError(
            f"a model is not tested on part {part!r}: nguide fit trains on all parts but test; leave --part out"
        )
    bundle, opened = load_bundle(folder), open_store(store)
    if split is not None:
        opened = opened.with_parts(split)
    if bundle.finding is not None and opened.findings:
        opened = opened.of_finding(bundle.finding.name)
    untrained = bundle.model.untrained if isinstance(bundle.model, Ensemble) else None
    note = "Make sure that no patient of these scans was trained on; a model cannot tell."
    return bundle.model, bundle.features, opened.part(part), untrained, note


def verdict_table(trust: Trust) -> Grid:
    """Make a table with one row per test."""
    auroc = "unknown" if trust.scan_auroc is None else str(trust.scan_auroc)
    caption = (
        f"{trust.scans} scans, {trust.positive} of them positive; scan AUROC {auroc}. A test passes or fails by its "
        "whole interval (bootstrap over patients); otherwise it cannot be told. Verdicts do not use slice labels, "
        "unless the alarm says so."
    )
    header = ["Test", "Verdict", "Number [95 %]", "Chance", "Control"]
    rows = [[test.title, test.verdict, str(test.number), digits(0.0), test.control] for test in trust.findings]
    return Grid("Can this attention be trusted?", " ".join([caption, *trust.notes]), header, rows)


def trust_page(trust: Trust, *, picture: str | None = None) -> str:
    """Make the page as Markdown; `picture` is the file name of the figure with the curves."""
    page = [verdict_table(trust).markdown(level=1)]
    if picture:
        page += [f"![Scan scores by share of slices removed and kept]({picture})", ""]
    for finding in trust.findings:
        numbers = [
            f"- {name}: {number if isinstance(number, Estimate) else digits(number)}"
            for name, number in finding.more.items()
        ]
        paragraphs = [
            f"## {finding.title}: {finding.verdict}",
            finding.meaning,
            f"What to do: {finding.action}",
            f"The number: {finding.measured}. Chance gives {digits(0.0)}.",
            f"Control: {finding.control}.",
            *(["\n".join(numbers)] if numbers else []),
        ]
        page.append("\n\n".join(paragraphs) + "\n")
    return "\n".join(page)
