"""A test of attention and its result, in numbers and in words: what was measured, what it means and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from normal_guidance.evaluation.trust.intervals import Estimate

Verdict = Literal["passes", "fails", "cannot be told"]

PASSES: Verdict = "passes"
FAILS: Verdict = "fails"
UNDECIDED: Verdict = "cannot be told"

TRACE = 0.03
"""Scan AUROC: where attention is worth less than this, by its whole interval, it fails, significant or not."""


@dataclass(frozen=True)
class TrustResult:
    """The result of one test: its main number with interval and reference, the verdict, and further numbers."""

    name: str
    title: str
    verdict: Verdict
    measured: str
    """The quantity that the number measures, in words."""
    number: Estimate
    reference: float
    """The number expected by chance, or from a random model."""
    reference_words: str
    """The control that the number is a difference from, in words."""
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


@dataclass(frozen=True)
class TrustTest:
    """One of the four tests: its name, what it measures, and the meaning and next action of each verdict.

    Every test's number is a difference from a control, so its reference is 0.
    """

    name: str
    title: str
    measured: str
    words: Mapping[Verdict, tuple[str, str]]

    def result(
        self,
        verdict: Verdict,
        number: Estimate,
        control: str,
        *,
        meaning: str | None = None,
        action: str | None = None,
        more: Mapping[str, Estimate | float] | None = None,
    ) -> TrustResult:
        """The test's result; meaning and action are those of the verdict, unless others are given."""
        usual_meaning, usual_action = self.words[verdict]
        return TrustResult(
            name=self.name,
            title=self.title,
            verdict=verdict,
            measured=self.measured,
            number=number,
            reference=0.0,
            reference_words=control,
            meaning=usual_meaning if meaning is None else meaning,
            action=usual_action if action is None else action,
            more={} if more is None else more,
        )


def decide(number: Estimate, *, trace: float = TRACE) -> Verdict:
    """Whether a number is above 0 and more than a trace, by its whole interval."""
    if not number.known:
        return UNDECIDED
    if number.high < trace:
        return FAILS
    return PASSES if number.low > 0 else UNDECIDED


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """'fails' if any verdict is, else 'cannot be told' if any is, else 'passes'."""
    return next((one for one in (FAILS, UNDECIDED) if one in verdicts), PASSES)
