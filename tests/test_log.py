"""LOG.md: one finding an entry, the verdict in its heading, newest first; what other files quote is there."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOG = (ROOT / "LOG.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^## (\d{4}-\d\d-\d\d)  (\S.*)$", re.MULTILINE)
CITATION = re.compile(r"LOG\.md(?:\]\([^)]*\))?(?:,\s+(\d{4}-\d\d-\d\d))?,\s+\"([^\"]+)\"")


def entries() -> list[tuple[str, str]]:
    return HEADING.findall(LOG)


def citations(text: str) -> list[tuple[str, str]]:
    """Date, or nothing, and beginning of the heading of every entry that a text quotes."""
    return [(date, " ".join(title.split())) for date, title in CITATION.findall(text)]


def test_the_log_is_short_and_every_heading_a_date_and_a_verdict_newest_first():
    assert len(entries()) == len(re.findall(r"^## ", LOG, re.MULTILINE)) > 40
    assert all(later >= earlier for (later, _), (earlier, _) in pairwise(entries()))
    assert len({verdict for _, verdict in entries()}) == len(entries())
    assert len(LOG.split()) <= 6000, "what no longer decides anything is in the history"
    for _, verdict in entries():
        assert len(verdict.split()) >= 4, verdict
        assert len(verdict) <= 135, verdict


def test_a_citation_is_found():
    assert citations('(LOG.md, 2026-11-18, "Scans of\n20,000 slices")') == [("2026-11-18", "Scans of 20,000 slices")]
    assert citations('[LOG.md](../../LOG.md), "A coin"') == [("", "A coin")]
    assert citations("LOG.md, 2026-11-16, has the count") == []


@pytest.mark.parametrize("folder", ["docs", "src", "benchmarks", "tests"])
def test_entries_that_are_quoted_exist(folder):
    for path in sorted(path for kind in ("md", "py") for path in (ROOT / folder).rglob(f"*.{kind}")):
        for date, title in citations(path.read_text(encoding="utf-8")) if path != Path(__file__) else []:
            found = [day for day, verdict in entries() if verdict.startswith(title)]
            assert found, f'{path.relative_to(ROOT)} quotes "{title}", which is no heading of LOG.md'
            assert date in ("", *found), f'{path.relative_to(ROOT)}: "{title}" is not of {date}'
