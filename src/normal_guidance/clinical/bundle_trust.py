"""The trust tests for a bundle, such as `nguide fit` makes, on scans that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from normal_guidance.clinical.bundle import load_bundle
from normal_guidance.errors import UserError
from normal_guidance.evaluation.trust.deletion_curves import By
from normal_guidance.evaluation.trust.examination import Trust, examine
from normal_guidance.features.store import open_store
from normal_guidance.training.committee import Committee


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
