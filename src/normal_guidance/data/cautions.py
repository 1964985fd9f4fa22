"""What a reader must know before trusting a result: what was forced, left out, double or incomplete.

What a model was not shown to do is a caution too, of every scan (`clinical.bundle.Bundle.cautions`).  Pages, strips,
DICOM results, messages and the viewer all say these sentences.  They hold no names of files, ids or values of headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from normal_guidance.data.problems import KINDS, Problem

HARMLESS = frozenset({"header", "localizer", "multi_frame", "no_image", "no_patient", "secondary_capture", "tilt"})
"""Kinds that change nothing about a prediction, or occur in every good study."""

FORCED, INCOMPLETE, LEFT_OUT, DUPLICATED, DOUBTFUL = "forced", "incomplete", "left out", "duplicated", "doubtful"

FLAG_OF_KIND = {
    "unsuitable": FORCED,
    **dict.fromkeys(("gap", "unreadable", "failed", "incomplete_organ", "one_slice", "late_slices"), INCOMPLETE),
    **dict.fromkeys(("duplicate", "double_scan"), DUPLICATED),
}
"""The flag of a problem by its kind; others that cost slices have the flag `LEFT_OUT`, the rest `DOUBTFUL`."""

FLAGS = (FORCED, INCOMPLETE, LEFT_OUT, DUPLICATED, DOUBTFUL)
"""The gravest first."""


class Caution(NamedTuple):
    """A sentence, and one of `FLAGS`."""

    flag: str
    text: str


def cautions(problems: Iterable[Problem]) -> tuple[Caution, ...]:
    """The cautions of a scan, the gravest first."""
    every = list(problems)
    files = {problem.file for problem in every if problem.file}
    told = [problem for problem in every if problem.kind not in HARMLESS]
    forced = (_forced(problem.detail, files) for problem in told if flag_of(problem) == FORCED)
    counts = Counter((flag_of(one), one.kind, one.action) for one in told if flag_of(one) != FORCED)
    others = (Caution(flag, _sentence(kind, action, count)) for (flag, kind, action), count in counts.items())
    return tuple(sorted(dict.fromkeys((*forced, *others)), key=lambda one: FLAGS.index(one.flag)))


def flag_of(problem: Problem) -> str:
    """The flag of a problem that is not harmless."""
    lost = LEFT_OUT if problem.action.startswith("left out") else DOUBTFUL
    return FLAG_OF_KIND.get(problem.kind, lost)


def _forced(detail: str, files: Iterable[str]) -> Caution:
    for file in sorted(files, key=len, reverse=True):
        detail = detail.replace(file, "a file")
    return Caution(FORCED, f"Forced: {detail.rstrip('.')}.")


def _sentence(kind: str, action: str, count: int) -> str:
    parts = [*([f"{count} times"] if count > 1 else []), *([action] if action != "kept" else [])]
    return KINDS[kind].rstrip(".") + (f": {', '.join(parts)}." if parts else ".")
