"""Titles and colours of methods that result pages show and the library no longer has.

Heads (docs/decisions/README.md), and the committee: what `nguide fit` made until 0.3.0.dev0 of 2026-11-19.
"""

from __future__ import annotations

from normal_guidance.core.methods import CEILING, DISTINCT, ENSEMBLE, METHODS, method_title
from normal_guidance.show.figure_style import method_color
from normal_guidance.statistics.skill import POSITION_DENSITY

COMMITTEE = "committee"

REMOVED = {
    "bells": ("Mixture of Bells", "#DB5CA7"),
    "bells_ng": ("Mixture of Bells + Normal Guidance", "#900876"),
    "posterior_bells": ("Posterior Bells", "#F01E5A"),
    "posterior_bells_ng": ("Posterior Bells + Normal Guidance", "#000096"),
    "abmil_bells": ("ABMIL + Bells", "#5FC9E6"),
    "abmil_bells_ng": ("ABMIL + Bells + Normal Guidance", "#ADDCC7"),
    COMMITTEE: ("Committee", "#AA0044"),
}

_HEADS = (
    *("evidence", "evidence_ng", "bells", "bells_ng", "whole_bells", "whole_bells_ng"),
    *("posterior_bells", "posterior_bells_ng", "abmil_bells", "abmil_bells_ng"),
)

SHOWN = (
    POSITION_DENSITY,
    *METHODS,
    *_HEADS,
    *(name for name in DISTINCT if name not in METHODS and name not in _HEADS),
    COMMITTEE,
    ENSEMBLE,
    CEILING,
)
"""Every row that a page may have, in the order of its tables."""

GUIDED = {name: name.removesuffix("_ng") for name in SHOWN if name.endswith("_ng")}
"""A guided head and the same without."""


def title_of(method: str, dataset: str = "") -> str:
    return REMOVED[method][0] if method in REMOVED else method_title(method, dataset)


def color_of(method: str) -> str:
    return REMOVED[method][1] if method in REMOVED else method_color(method)
