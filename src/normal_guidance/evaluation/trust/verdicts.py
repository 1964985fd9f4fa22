"""A test's outcome in numbers and in words: what was measured, beside what, what it means and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from normal_guidance.evaluation.trust.intervals import Estimate

Verdict = Literal["passes", "fails", "cannot be told"]

PASSES: Verdict = "passes"
FAILS: Verdict = "fails"
UNTOLD: Verdict = "cannot be told"

TRACE = 0.03
"""Scan AUROC: where attention is worth less than this, by its whole interval, it fails, significant or not."""


@dataclass(frozen=True)
class TrustResult:
    """One test: its main number with interval and reference, the verdict, and everything else that was measured.

    Example:
        >>> number = Estimate(0.09, 0.06, 0.12)
        >>> TrustResult("deletion", "Delete", "passes", "AUROC", number, 0.0, "random", "It matters.", "-").verdict
        'passes'
    """

    name: str
    title: str
    verdict: Verdict
    measured: str
    """What the number is, in words."""
    number: Estimate
    reference: float
    """What chance, or a random model, would give."""
    reference_words: str
    meaning: str
    action: str
    more: Mapping[str, Estimate | float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain numbers and texts; NaN where there is no number."""
        return {
            "name": self.name,
            "title": self.title,
            "verdict": self.verdict,
            "measured": self.measured,
            **self.number.as_json(),
            "reference": self.reference,
            "reference_words": self.reference_words,
            "meaning": self.meaning,
            "action": self.action,
            "more": {name: one.as_json() if isinstance(one, Estimate) else one for name, one in self.more.items()},
        }


def decide(number: Estimate, *, trace: float = TRACE) -> Verdict:
    """Whether a number is above 0, and more than a trace: by its interval, not by chance.

    Example:
        >>> [decide(Estimate(0.05, low, high)) for low, high in ((0.01, 0.09), (-0.01, 0.11))]
        ['passes', 'cannot be told']
        >>> decide(Estimate(0.005, 0.001, 0.009))
        'fails'
    """
    if not number.known:
        return UNTOLD
    if number.high < trace:
        return FAILS
    return PASSES if number.low > 0 else UNTOLD


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """One that fails decides; else one that cannot tell.

    Example:
        >>> worst(["passes", "cannot be told"]), worst(["fails", "cannot be told", "passes"])
        ('cannot be told', 'fails')
    """
    return next((one for one in (FAILS, UNTOLD) if one in verdicts), PASSES)
