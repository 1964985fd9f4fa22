"""docs/replication: its tables are what its script measures, and its form is the same for every item."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PARTS = ("Paper", "Scripts", "Here", "Worth")
STAGES = {
    "data-to-guidance": ("data", "features", "model", "guidance"),
    "training-to-ceilings": ("training", "selection", "evaluation", "ceilings"),
}
QUICK = ("order", "repairs", "variance", "uniform", "ceilings", "blocks")
"""Tables that take less than a second each."""

NUMBER = re.compile(r"[+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?")


@pytest.fixture(scope="module")
def pages():
    """Name -> text of every page of the folder."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((DOCS / "replication").glob("*.md"))}


@pytest.fixture(scope="module")
def whole(pages):
    return "\n".join(pages.values())


def unit(number: str) -> float:
    """One step of a printed number's last digit."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def why_different(ours: str, theirs: str) -> str | None:
    """The first place where two tables differ by more than one step of a number's last digit."""
    if NUMBER.sub("#", ours) != NUMBER.sub("#", theirs):
        return "the words differ"
    for a, b in zip(NUMBER.findall(ours), NUMBER.findall(theirs), strict=True):
        if abs(float(a.replace(",", "")) - float(b.replace(",", ""))) > 1.01 * max(unit(a), unit(b)):
            return f"{a} is not {b}"
    return None


@pytest.mark.parametrize("name", QUICK)
def test_the_pages_show_what_is_measured(name, studies, whole):
    assert why_different(studies.page_replication.SECTIONS[name](), studies.make_page.written(whole)[name]) is None


def test_the_comparison_can_fail():
    assert why_different("| S | .546 | 73% |", "| S | .547 | 73% |") is None
    assert why_different("| S | .546 | 73% |", "| S | .548 | 73% |") == ".546 is not .548"
    assert why_different("| 1,083 | 8.46e-05 |", "| 1,083 | 8.49e-05 |") == "8.46e-05 is not 8.49e-05"
    assert why_different("| mean | 1 |", "| max | 1 |") == "the words differ"
    assert why_different("| 1 | 2 |", "| 1 |") == "the words differ"


def test_every_measurement_has_its_place_once(studies, whole):
    names = [name for name, _ in studies.make_page.BLOCK.findall(whole)]
    assert sorted(names) == sorted(studies.page_replication.SECTIONS)
    assert whole.count("<!-- measured:") == len(names)


def parts(page: str, level: int) -> dict[str, str]:
    """Title -> text of every heading of this level, up to the next of this level or above."""
    mark = "#" * level
    return dict(re.findall(rf"^{mark} ([^\n]+)\n(.*?)(?=^#{{1,{level}}} |\Z)", page, re.MULTILINE | re.DOTALL))


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_every_item_has_its_four_parts_and_every_stage_a_verdict_in_the_index(pages):
    assert sorted(pages) == sorted([*STAGES, "index"])
    assert sum(len(parts(pages[name], 3)) for name in STAGES) > 20
    for name, stages in STAGES.items():
        assert tuple(map(anchor, parts(pages[name], 2))) == stages
        for title, text in parts(pages[name], 3).items():
            assert tuple(re.findall(r"^- \*\*([\w ]+):\*\* \S", text, re.MULTILINE)) == PARTS, title
    verdicts = re.findall(r"^\| \[(\w+)\]\(([\w-]+)\.md#\1\) \| \S", pages["index"], re.MULTILINE)
    assert verdicts == [(stage, name) for name, stages in STAGES.items() for stage in stages]
