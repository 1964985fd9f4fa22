"""All four tests of one model on one set of scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.fit.bundle import load_bundle
from normal_guidance.fit.committee import Committee
from normal_guidance.scans.features.store import FeatureStore, fingerprint_of, open_store
from normal_guidance.show.text_tables import Grid, digits
from normal_guidance.study.experiment import DATASETS
from normal_guidance.study.trust.attention_tests import (
    COMPARED,
    UNTRAINED,
    Bootstrap,
    By,
    Curves,
    Estimate,
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
    shuffle,
    untrained_copies,
    without_scan_score,
    without_untrained,
)
from normal_guidance.sweep.run import Run, Selected, about_winner, load_run, load_winner
from normal_guidance.sweep.stack import initial_model

FIRST_SEED = 2**31
"""Seeds of untrained weights start here: no model was trained from these."""

BY: tuple[By, ...] = ("slices", "attention")


@dataclass(frozen=True, eq=False)
class Trust:
    """The results of the tests; `findings` are in the order shuffle, randomize, deletion, inverted."""

    findings: tuple[TrustResult, ...]
    curves: Mapping[Kind, Curves] | None
    """None for a model without scan scores."""
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
        """All results as plain values, with NaN where there is no number."""
        whole = self.scan_auroc
        return {
            "scans": self.scans,
            "positive": self.positive,
            "by": self.by,
            "scan_auroc": None if whole is None else whole.as_json(),
            "notes": list(self.notes),
            "findings": [finding.as_json() for finding in self.findings],
            "curves": {kind: self._points(one) for kind, one in (self.curves or {}).items()},
        }

    def _points(self, curves: Curves) -> dict[str, Any]:
        def values(by_order: Mapping[str, Any]) -> dict[str, list[float]]:
            return {order: [point.value for point in points] for order, points in by_order.items()}

        return {"shares": list(curves.shares), "auroc": values(curves.auroc), "logit": values(curves.logit)}


def examine(
    model: Model,
    scans: Bags | FeatureStore,
    *,
    untrained: Untrained | None = None,
    by: By = "slices",
    seed: int = 0,
    watch: Callable[[float], None] | None = None,
) -> Trust:
    """Runs the four tests on a model of your own.

    Args:
        model: takes packed features and lengths, and returns logits and attention (see `Model`).
        scans: scans with labels, preferably not those that the model was trained on.  Slice labels are not needed;
            where there are some, they confirm the alarm, and the second test reports localization AUROC.
        untrained: makes the same model with untrained weights from a seed.  If left out, a module is copied and its
            layers are reset; for any other model the second test is undecided.
        by: remove by share of slices or of attention.
        seed: seed of the random orders.
        watch: receives the share done of the curves, which take longest.
    """
    if by not in BY:
        raise UserError(f"by is {by!r}; choose one of {', '.join(BY)}")
    bootstrap = Bootstrap(scans)
    generator = torch.Generator().manual_seed(seed)
    own = predict_scans(model, scans)
    if untrained is None and isinstance(model, nn.Module):
        untrained = untrained_copies(model)
    others = []
    if untrained is not None:
        others = [predict_scans(untrained(FIRST_SEED + seed + number), scans) for number in range(UNTRAINED)]
    curves = None
    if own.scores_scans:
        orders = make_orders(own, scans.lengths.cpu(), others[:COMPARED], generator)
        curves = draw_curves(model, scans, own, orders, bootstrap, by=by, watch=watch)
    return Trust(
        findings=(
            judge_shuffling(shuffle(model, scans, own, generator), own, bootstrap),
            judge_randomizing(own, others, scans, curves, bootstrap) if others else without_untrained(),
            without_scan_score() if curves is None else judge_deletion(curves, bootstrap),
            judge_alarm(curves, own, scans, bootstrap),
        ),
        curves=curves,
        scans=len(scans),
        positive=int(scans.labels.sum()),
        by=by,
        bootstrap=bootstrap,
    )


# The trust tests for a run: its winner, on scans that it was not trained on.


TESTED = ("val", "test")
"""Parts on which no weights were fitted."""


def examine_run(
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
    """Run the four tests on a run's winner.

    Args:
        folder: folder of the run.
        store: folder of the features; without it, the one that the run recorded, or drawn again if they were drawn.
        split: table of parts, if they are not the store's own; without it, the one that the run recorded.
        part: 'test' or 'val'.
        group: which winner, where the run has several.
    """
    if part not in TESTED:
        raise UserError(f"models are not tested on part {part!r}; choose one of {', '.join(TESTED)}")
    run = load_run(folder)
    winner = run.winner(group)
    if winner.config.on_slices:
        raise UserError(f"{run.folder} was trained on slice labels and has no attention to test; give another run")
    scans = _scans(run, winner, store, split, part)
    model = load_winner(folder, group).to(device)
    width = about_winner(run.folder, group).features
    if scans.width != width:
        raise UserError(f"{run.folder} takes {width} features a slice, but the store has {scans.width}; give its store")

    def untrained(fresh: int) -> nn.Module:
        return initial_model(replace(winner.config, seed=fresh), width).to(next(model.parameters()))

    found = examine(model, scans, untrained=untrained, by=by, seed=seed, watch=watch)
    return replace(found, notes=_notes(run, scans, part))


def _scans(
    run: Run, winner: Selected, store: str | Path | None, split: str | Path | None, part: str
) -> Bags | FeatureStore:
    options = run.report.get("options", {})
    if store is None and options.get("dataset") in DATASETS:
        drawn = DATASETS[options["dataset"]].draw(winner.config.seed, part)
        assert isinstance(drawn, Bags)
        return drawn
    place, table = _place("store", store, options, run), _place("split", split, options, run)
    if place is None:
        raise UserError(f"{run.folder} does not say where its features are; give them: --store STORE")
    opened = open_store(place)
    return (opened if table is None else opened.with_parts(table)).part(part)


def _place(name: str, given: str | Path | None, options: Mapping[str, Any], run: Run) -> Path | None:
    """The given path, or the one that the run recorded, if it still exists."""
    if given is not None or options.get(name) is None:
        return None if given is None else Path(given)
    remembered = Path(options[name])
    if not remembered.exists():
        raise UserError(
            f"{run.folder} was trained with {remembered}, which no longer exists; give --{name} {name.upper()}"
        )
    return remembered


def _notes(run: Run, scans: Bags | FeatureStore, part: str) -> tuple[str, ...]:
    known = run.report["data"].get(part)
    if known is None:
        return (f"The run had no {part} part: make sure that no patient of these scans was trained on.",)
    own = scans.fingerprint if isinstance(scans, FeatureStore) else fingerprint_of({part: scans})
    if own == known["fingerprint"]:
        return ()
    return (f"These are not the run's own {part} scans: make sure that no patient of them was trained on.",)


# The trust tests for a bundle, such as `nguide fit` makes, on scans that it was not trained on.


def examine_bundle(
    folder: str | Path,
    *,
    store: str | Path | None,
    split: str | Path | None = None,
    part: str = "test",
    by: By = "slices",
    device: str = "cpu",
    seed: int = 0,
    watch: Callable[[float], None] | None = None,
) -> Trust:
    """Run the four tests on a bundle's model.

    Args:
        folder: folder of the bundle.
        store: folder of features; a bundle does not know where those of its training were.
        split: table of parts, if they are not the store's own.
        part: 'test'; `nguide fit` trains on all others.
    """
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
    scans = opened.part(part)
    if scans.width != bundle.features:
        raise UserError(
            f"{folder} takes {bundle.features} features a slice, but {store} has {scans.width}; give its store"
        )
    model = bundle.model.to(device)

    def untrained(fresh: int) -> nn.Module:
        assert isinstance(model, Committee)
        return model.untrained(fresh)

    found = examine(
        model, scans, untrained=untrained if isinstance(model, Committee) else None, by=by, seed=seed, watch=watch
    )
    return replace(found, notes=("Make sure that no patient of these scans was trained on; a model cannot tell.",))


# The page on a model's attention: a table of verdicts, then each test in words and numbers.


HEADER = ("Test", "Verdict", "Number [95 %]", "Chance", "Control")

CAPTION = (
    "{scans} scans, {positive} of them positive; scan AUROC {auroc}. A test passes or fails by its whole interval "
    "(bootstrap over patients); otherwise it cannot be told. Verdicts do not use slice labels, unless the alarm says "
    "so."
)


def verdict_table(found: Trust, title: str = "Can this attention be trusted?") -> Grid:
    """One row per test."""
    whole = found.scan_auroc
    caption = CAPTION.format(
        scans=found.scans, positive=found.positive, auroc="unknown" if whole is None else str(whole)
    )
    rows = [
        [one.title, one.verdict, str(one.number), digits(one.reference), one.reference_words] for one in found.findings
    ]
    return Grid(title, " ".join([caption, *found.notes]), HEADER, rows)


def trust_page(found: Trust, *, picture: str | None = None, title: str = "Can this attention be trusted?") -> str:
    """The page as Markdown; `picture` is the file name of the figure with the curves."""
    shown = [f"![Scan scores by share of slices removed and kept]({picture})", ""] if picture else []
    return "\n".join([verdict_table(found, title).markdown(level=1), *shown, *map(_section, found.findings)])


def _section(finding: TrustResult) -> str:
    lines = [
        f"## {finding.title}: {finding.verdict}",
        "",
        f"{finding.meaning}",
        "",
        f"What to do: {finding.action}",
        "",
        f"The number: {finding.measured}. Chance gives {digits(finding.reference)}.",
        "",
        f"Control: {finding.reference_words}.",
        "",
    ]
    return "\n".join([*lines, *_numbers(finding.more)])


def _numbers(more: Mapping[str, Estimate | float]) -> list[str]:
    lines = [f"- {name}: {one if isinstance(one, Estimate) else digits(one)}" for name, one in more.items()]
    return [*lines, ""] if lines else []
