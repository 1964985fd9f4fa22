"""docs/replication: its tables are what its script measures, and its form is the same for every item."""

import json
import re
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PARTS = ("Paper says", "Scripts do", "We do", "The difference is worth")
STAGES = ("data", "features", "model", "guidance", "training", "selection", "evaluation", "ceilings")
QUICK = (
    *("order", "repairs", "gray", "clamp", "uniform", "smoothing"),
    *("parameters", "batches", "margin", "spreads", "seeds", "ceilings", "blocks"),
)
"""Items that take less than a second each."""

FROM_HISTORIES = ("selection", "heads")
"""Tables that were computed from histories and heads of runs, which are not kept."""

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
    assert sorted(names) == sorted([*studies.page_replication.SECTIONS, *FROM_HISTORIES])
    assert whole.count("<!-- measured:") == len(names)


def items(page: str) -> dict[str, str]:
    """Title -> text of every item, up to the next heading."""
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_every_item_has_its_four_parts_and_every_stage_a_verdict_in_the_index(pages):
    assert sorted(pages) == sorted([*STAGES, "details", "index"])
    assert sum(len(items(pages[stage])) for stage in STAGES) > 20
    for stage in STAGES:
        for title, text in items(pages[stage]).items():
            assert tuple(re.findall(r"^- \*\*([\w ]+):\*\* \S", text, re.MULTILINE)) == PARTS, title
    assert tuple(re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| \S", pages["index"], re.MULTILINE)) == STAGES


def test_links_between_the_pages_name_their_items(pages):
    links = [
        (name, file or f"{name}.md", place)
        for name, text in pages.items()
        for file, place in re.findall(r"\]\((\w+\.md)?#([\w-]+)\)", text)
    ]
    assert len(links) > 15
    for name, file, place in links:
        assert place in map(anchor, items(pages[file.removesuffix(".md")])), f"{name}.md: {file}#{place}"


def test_the_page_shows_the_winners_of_the_runs(studies, whole):
    """The rule's column, beside the runs that the results page is made of."""
    runs, seen = studies.page_semi_synthetic.runs("semi-synthetic"), 0
    for line in studies.make_page.written(whole)["selection"].splitlines()[2:]:
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


def test_ties_are_broken_by_index(studies):
    broken = studies.page_replication.broken_ties
    scores, lengths = torch.tensor([1.0, 0.0, 1.0, 2.0, 2.0]), torch.tensor([3, 2])
    later, earlier = (broken(scores, lengths, descending=down).split([3, 2]) for down in (False, True))
    assert [part.argsort().tolist() for part in later] == [[1, 0, 2], [0, 1]]
    assert [part.argsort().tolist() for part in earlier] == [[1, 2, 0], [1, 0]]
    labels = [0, 0, 1]
    assert roc_auc_score(labels, scores[:3]) == 0.75
    assert [roc_auc_score(labels, way[0]) for way in (later, earlier)] == [1.0, 0.5]
