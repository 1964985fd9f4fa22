"""Rules for the series that a node takes: --take "modality=CT body=HEAD description=*axial* thickness=2-6".

A rule fits if each of its conditions does; a series is taken if one rule fits, or if there are none.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from normal_guidance.errors import UserError, shorten

TEXTS = {
    "modality": 0x00080060,
    "body": 0x00180015,
    "description": 0x0008103E,
    "study": 0x00081030,
    "protocol": 0x00181030,
    "station": 0x00081010,
}
"""Conditions on text, with the tags of their values: Modality, BodyPartExamined, SeriesDescription, StudyDescription,
ProtocolName, StationName.  Upper and lower case are the same; * stands for anything."""

NUMBERS = {"thickness": 0x00180050}
"""Conditions on numbers, with the tags of their values: SliceThickness in mm."""

FILES = "files"
"""The condition on the number of files that arrived."""

_RANGE = re.compile(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Rule:
    """Conditions that a series fits all of: patterns for text, low and high for numbers."""

    texts: Mapping[str, str]
    ranges: Mapping[str, tuple[float, float]]

    def misfit(self, found: Mapping[str, str]) -> str | None:
        """Say which condition is not met, without the value, which may name a patient; None if all are."""
        for name, pattern in self.texts.items():
            if not fnmatchcase(found.get(name, "").casefold(), pattern.casefold()):
                return f"{name} does not fit {pattern}"
        for name, (low, high) in self.ranges.items():
            if not low <= _number(found.get(name, "")) <= high:
                return f"{name} is not {low:g} to {high:g}"
        return None


def _number(text: str) -> float:
    """The number in a text; NaN, which lies in no range, if there is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def parse_rule(text: str) -> Rule:
    """Read a rule."""
    texts, ranges = {}, {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--take {shorten(text)!r} has a quote without its end; close it") from error
    if not words:
        raise UserError("--take is empty; write for example modality=CT, or leave it out")
    for word in words:
        name, _, value = word.partition("=")
        if name in TEXTS and value:
            texts[name] = value
        elif name in (*NUMBERS, FILES) and (found := _RANGE.fullmatch(value)):
            ranges[name] = float(found[1]), float(found[2] or found[1])
        elif name in (*TEXTS, *NUMBERS, FILES):
            form = "a pattern such as *axial*" if name in TEXTS else "a number or a range such as 2-6"
            raise UserError(f"--take {shorten(text)!r}: {name}={shorten(value)} is not a condition; give {form}")
        else:
            known = ", ".join((*TEXTS, *NUMBERS, FILES))
            raise UserError(f"--take {shorten(text)!r}: there is no condition {name!r}; choose from {known}")
    return Rule(texts, ranges)


def why_ignored(rules: Sequence[Rule], found: Mapping[str, str]) -> str | None:
    """Say why no rule takes a series; None if one does, or if there are no rules."""
    misfits = [rule.misfit(found) for rule in rules]
    if not misfits or None in misfits:
        return None
    return "no rule takes it: " + "; ".join(filter(None, misfits))
