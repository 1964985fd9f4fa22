"""docs/replication.md: its tables are what its script measures, and its form is the same for every item."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sklearn.metrics import roc_auc_score

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PARTS = ("Paper", "Scripts", "Ours", "Measured")
QUICK = (
    "order",
    "repairs",
    "gray",
    "clamp",
    "uniform",
    "smoothing",
    "parameters",
    "batches",
    "margin",
    "spreads",
    "seeds",
    "ceilings",
    "blocks",
)
"""Items that take less than a second each."""

FROM_HISTORIES = ("selection", "heads")
"""Tables that were computed from histories and heads of runs, which are not kept."""

NUMBER = re.compile(r"[+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?")


@pytest.fixture(scope="module")
def studies():
    """docs/studies is a folder of scripts and not a package, so it is on the path only here."""
    sys.path.insert(0, str(DOCS / "studies"))
    try:
        yield SimpleNamespace(make=import_module("make_page"), measured=import_module("page_replication"))
    finally:
        sys.path.remove(str(DOCS / "studies"))


@pytest.fixture(scope="module")
def page():
    return (DOCS / "replication.md").read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------
# The tables
# ----------------------------------------------------------------------------------------------------


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
def test_the_page_shows_what_is_measured(name, studies, page):
    assert why_different(studies.measured.SECTIONS[name](), studies.make.written(page)[name]) is None


def test_the_comparison_can_fail():
    assert why_different("| S | .546 | 73% |", "| S | .547 | 73% |") is None
    assert why_different("| S | .546 | 73% |", "| S | .548 | 73% |") == ".546 is not .548"
    assert why_different("| 1,083 | 8.46e-05 |", "| 1,083 | 8.49e-05 |") == "8.46e-05 is not 8.49e-05"
    assert why_different("| mean | 1 |", "| max | 1 |") == "the words differ"
    assert why_different("| 1 | 2 |", "| 1 |") == "the words differ"


def test_every_measurement_has_its_place_once(studies, page):
    names = [name for name, _ in studies.make.BLOCK.findall(page)]
    assert sorted(names) == sorted([*studies.measured.SECTIONS, *FROM_HISTORIES])
    assert page.count("<!-- measured:") == len(names)


# ----------------------------------------------------------------------------------------------------
# The page
# ----------------------------------------------------------------------------------------------------


def items(page: str) -> dict[str, str]:
    """Title -> text of every item, up to the next heading."""
    return dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_every_item_has_its_four_parts(page):
    assert len(items(page)) > 20
    for title, text in items(page).items():
        assert tuple(re.findall(r"^- \*\*(\w+):\*\* \S", text, re.MULTILINE)) == PARTS, title


def test_contents_and_links_name_the_items(page):
    contents = page[page.index("## Contents") : page.index("## Data")]
    anchors = [anchor(title) for title in items(page)]
    assert re.findall(r"\]\(#([\w-]+)\)", contents) == anchors
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= set(anchors)


# ----------------------------------------------------------------------------------------------------
# Selection
# ----------------------------------------------------------------------------------------------------


def test_the_page_shows_the_winners_of_the_runs(studies, page):
    """The rule's column, beside the runs that the results page is made of."""
    runs, seen = import_module("page_semi_synthetic").runs("semi-synthetic"), 0
    for line in studies.make.written(page)["selection"].splitlines()[2:]:
        method, seed, kept = (cell.strip() for cell in line.split("|")[1:4])
        if (method, int(seed)) not in runs:
            continue
        (winner,) = json.loads(runs[method, int(seed)]["report"])["winners"]
        chosen, _, area = kept.partition(": ")
        expected = [winner["config"]["l1"], winner["config"]["lr"], winner["epoch"]]
        assert [float(word) for word in chosen.split(", ")] == expected
        assert float(area) == pytest.approx(winner["val_auroc"], abs=6e-5)
        seen += 1
    assert seen >= 15


# ----------------------------------------------------------------------------------------------------
# Ties
# ----------------------------------------------------------------------------------------------------


def test_ties_are_broken_by_index(studies):
    broken = studies.measured.broken_ties
    scores, lengths = torch.tensor([1.0, 0.0, 1.0, 2.0, 2.0]), torch.tensor([3, 2])
    later, earlier = (broken(scores, lengths, descending=down).split([3, 2]) for down in (False, True))
    assert [part.argsort().tolist() for part in later] == [[1, 0, 2], [0, 1]]
    assert [part.argsort().tolist() for part in earlier] == [[1, 2, 0], [1, 0]]
    labels = [0, 0, 1]
    assert roc_auc_score(labels, scores[:3]) == 0.75
    assert [roc_auc_score(labels, way[0]) for way in (later, earlier)] == [1.0, 0.5]
