"""Names and titles of everything that a table compares: the methods, the ceiling and the two supervised references."""

from __future__ import annotations

from normal_guidance.core.models import EVERY_METHOD

CEILING = "ceiling"
"""The tables' last row, in place of a method's name: the Bayes oracle or the supervised reference."""

SLICE_REFERENCE = "slice_reference"
"""The supervised reference for localization, where configurations and folders name a method."""

SCAN_REFERENCE = "scan_reference"
"""The supervised reference for scan scores, where folders name a method."""

REFERENCE_TITLES = {SLICE_REFERENCE: "Slice reference", SCAN_REFERENCE: "Scan reference"}
"""The two runs that the supervised reference is made of."""


def method_title(method: str, dataset: str = "") -> str:
    """A method's name for readers; what the ceiling is depends on the dataset.

    Example:
        >>> method_title("ng"), method_title("ceiling", "semi-synthetic"), method_title("ceiling", "chest-ct")
        ('ABMIL + Normal Guidance', 'Bayes oracle', 'Supervised reference')
    """
    if method == CEILING:
        return "Bayes oracle" if dataset == "semi-synthetic" else "Supervised reference"
    return REFERENCE_TITLES.get(method) or EVERY_METHOD[method].title
