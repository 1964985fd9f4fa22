"""The page on a model's attention: a table of verdicts, then each test in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping

from normal_guidance.evaluation.trust.examination import Trust
from normal_guidance.evaluation.trust.intervals import Estimate
from normal_guidance.evaluation.trust.verdicts import TrustResult
from normal_guidance.presentation.text_tables import Grid
from normal_guidance.statistics.number_format import digits

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
