"""The model card of a bundle: README.md as the Hugging Face Hub reads it, from the bundle's own numbers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from normal_guidance import __version__
from normal_guidance.clinical.bundle import Bundle
from normal_guidance.clinical.pages import CAUTION
from normal_guidance.core.methods import method_title
from normal_guidance.statistics.calibration import Counts
from normal_guidance.statistics.number_format import digits, interval
from normal_guidance.statistics.wilson import wilson
from normal_guidance.training.measured_fit import ScanAuroc

CARD = "README.md"
HOME = "https://github.com/normal-guidance/normal-guidance"

HEAD = """---
library_name: normal-guidance
pipeline_tag: image-classification
tags:
  - medical-imaging
  - multiple-instance-learning
  - localization
---
"""

Aurocs = Mapping[str, ScanAuroc]
"""Scan AUROC by finding and part, with intervals, where the predictions that they come from were at hand."""


def model_card(bundle: Bundle, repository: str, aurocs: Mapping[str, Aurocs] | None = None) -> str:
    """The card as Markdown.

    Args:
        bundle: the model.
        repository: OWNER/NAME.
        aurocs: scan AUROCs with intervals: by the name of the finding ("" where it has none), then by part.
    """
    sections = [
        f"# {repository.partition('/')[2]}",
        f"**{CAUTION}**",
        _what(bundle),
        "## What it was trained on",
        _list(_training(bundle)),
        "## Measured",
        *(_measured(one, (aurocs or {}).get(_name(one), {})) for one in bundle.each),
        "## Limits",
        _list(_limits(bundle)),
        "## Use",
        _use(bundle, repository),
    ]
    return HEAD + "\n" + "\n\n".join(sections) + "\n"


def _name(bundle: Bundle) -> str:
    return "" if bundle.finding is None else bundle.finding.name


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _what(bundle: Bundle) -> str:
    sought = ", ".join(str(one.finding) for one in bundle.each if one.finding)
    return (
        f"A {method_title(bundle.method)} of [Normal Guidance]({HOME}): from the slices of a scan to the probability "
        f"of a positive scan and the slices that matter. {f'It looks for: {sought}.' if sought else ''}".strip()
    )


def _training(bundle: Bundle) -> list[str]:
    scans = bundle.training.get("scans", {})
    dataset = bundle.identity.dataset
    encoder = "that are not made by `nguide encode`"
    if bundle.encoder is not None:
        encoder = f"of the encoder `{bundle.encoder.name}` (fingerprint `{bundle.encoder.fingerprint[:16]}`)"
    return [
        f"Scans: {', '.join(f'{count} ({part})' for part, count in scans.items()) or 'not recorded'}"
        f"{f', from {dataset}' if dataset else ''}.",
        f"Kind of scans: {bundle.expects}.",
        f"Features: {bundle.features} a slice {encoder}.",
        f"Trained with normal-guidance {bundle.identity.version or 'of an unknown version'}"
        f"{f' on {bundle.identity.date[:10]}' if bundle.identity.date else ''}; "
        f"model fingerprint `{bundle.identity.short}`.",
        "Labels of scans trained it. It holds no images, names, ids or predictions of its training scans.",
    ]


def _measured(bundle: Bundle, aurocs: Aurocs) -> str:
    """A table of what the bundle knows; a number without an interval says so."""
    rows = [(f"scan AUROC, {part}", str(found)) for part, found in aurocs.items()]
    known = {
        "out-of-fold": bundle.training.get("out_of_fold_auroc"),
        "validation": bundle.training.get("validation_auroc"),
        "test": (bundle.training.get("test") or {}).get("scan_auroc"),
    }
    rows += [
        (f"scan AUROC, {part}", f"{digits(value)} (interval not recorded)")
        for part, value in known.items()
        if value is not None and part not in aurocs
    ]
    localized = (bundle.training.get("test") or {}).get("localization_auroc")
    if localized is not None and math.isfinite(localized):
        rows.append(("localization AUROC, test (chance: .5)", f"{digits(localized)} (interval not recorded)"))
    point = bundle.operation.point
    if point is not None:
        for part, counts in ((bundle.operation.scans, point.validation), ("test", point.test)):
            rows += [] if counts is None else _shares(part, counts, point.threshold)
    title = [] if bundle.finding is None else [f"### {bundle.finding.name}", ""]
    table = ["| | value [95 % interval] |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    note = "Numbers of the scans that chose the threshold flatter; those of test scans do not."
    return "\n".join([*title, *(table if rows else ["Nothing was measured."]), "", note])


def _shares(part: str, counts: Counts, threshold: float) -> list[tuple[str, str]]:
    """Sensitivity and specificity with the intervals of Wilson, 1927."""
    pairs = (("sensitivity", counts.found, counts.positive), ("specificity", counts.spared, counts.negative))
    return [
        (f"{name} at {threshold:.3f}, {part}", f"{share_with_interval(found, of)} ({found} of {of})")
        for name, found, of in pairs
        if of
    ]


def share_with_interval(found: int, of: int) -> str:
    """A share with Wilson's interval."""
    return f"{digits(found / of)} {interval(*wilson(found, of))}"


def _limits(bundle: Bundle) -> list[str]:
    notes = [f"{note[:1].upper()}{note[1:]}." for one in bundle.each for note in one.operation.notes]
    return [
        "It may not have been tested on scans of other hospitals: test it on your own before use.",
        "Scans of another kind than those above are refused by `nguide predict`; other programs do not check.",
        *dict.fromkeys((*(text for one in bundle.each for text in one.cautions), *notes)),
    ]


def _use(bundle: Bundle, repository: str) -> str:
    given = "SCAN" if bundle.encoder else "FEATURES"
    return (
        f"```bash\npip install 'normal-guidance[all]'  # version {__version__} or later\n"
        f"nguide hub pull {repository} -o model\nnguide predict {given} --model model -o out\n```\n\n"
        "`model.safetensors` holds numbers and `bundle.json` text: there is no code and no pickle in this repository."
    )
