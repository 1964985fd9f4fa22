"""Names and titles of the rows of a table: the methods, the ceiling and the two supervised references."""

from __future__ import annotations

from normal_guidance.core.models import EVERY_METHOD

CEILING = "ceiling"
"""The name of the tables' last row: the Bayes oracle or the supervised reference."""

SLICE_REFERENCE = "slice_reference"
"""The method name of the supervised reference for localization, in configurations and folders."""

SCAN_REFERENCE = "scan_reference"
"""The method name of the supervised reference for scan scores, in folders."""

COMMITTEE = "committee"
"""The method name of what `nguide fit` makes."""

REFERENCE_TITLES = {SLICE_REFERENCE: "Slice reference", SCAN_REFERENCE: "Scan reference"}
"""The titles of the two runs that make up the supervised reference."""


DRAWN = ("semi-synthetic", "lidc-positions")
"""Datasets that we draw, so that Bayes' rule gives their ceiling."""


def method_title(method: str, dataset: str = "") -> str:
    """A method's title; that of the ceiling depends on the dataset.

    Example:
        >>> method_title("ng"), method_title("ceiling", "semi-synthetic"), method_title("ceiling", "chest-ct")
        ('ABMIL + Normal Guidance', 'Bayes oracle', 'Supervised reference')
    """
    if method == CEILING:
        return "Bayes oracle" if dataset in DRAWN else "Supervised reference"
    if method == COMMITTEE:
        return "Committee"
    return REFERENCE_TITLES.get(method) or EVERY_METHOD[method].title
