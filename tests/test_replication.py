"""docs/replication.md: its tables are what its script measures, and its form is the same for every item."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from normal_guidance.evaluation.runs import run_sweep
from normal_guidance.simulate.semi_synthetic import shifted_mean
from normal_guidance.training.config import Config, grid
from normal_guidance.training.fit import Epoch, select_epoch

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RUNS = DOCS / "results" / "runs" / "semi-synthetic"

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

NUMBER = re.compile(r"[+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?")


@pytest.fixture(scope="module")
def script():
    """docs/ is a folder of scripts and no package, so it is on the path only here."""
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("measure_replication")
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def page():
    return (DOCS / "replication.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def history(script):
    """Random AUROC of 12 configurations: filtered and unfiltered choices differ, and many values are equal."""
    del script  # only puts docs/ on the path
    selection = importlib.import_module("measured.selection")
    random = np.random.default_rng(3)
    train, val = (random.integers(50, 60, (40, 12)) / 100 for _ in range(2))
    train[:, 5] = 0  # never above validation
    return selection.History(train, val, random.random(12), random.random(12))


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
def test_the_page_shows_what_the_script_measures(name, script, page):
    assert why_different(script.SECTIONS[name](), script.written(page)[name]) is None


def test_the_comparison_can_fail():
    assert why_different("| S | .546 | 73% |", "| S | .547 | 73% |") is None
    assert why_different("| S | .546 | 73% |", "| S | .548 | 73% |") == ".546 is not .548"
    assert why_different("| 1,083 | 8.46e-05 |", "| 1,083 | 8.49e-05 |") == "8.46e-05 is not 8.49e-05"
    assert why_different("| mean | 1 |", "| max | 1 |") == "the words differ"
    assert why_different("| 1 | 2 |", "| 1 |") == "the words differ"


def test_every_measurement_has_its_place_once(script, page):
    names = [name for name, _ in script.BLOCK.findall(page)]
    assert sorted(names) == sorted([*script.SECTIONS, *script.FROM_RUNS])
    assert page.count("<!-- measured:") == len(names)


def test_tables_are_put_where_they_belong(script):
    page = "a\n\n<!-- measured: x -->\n\n| 1 |\n\n<!-- end -->\n\n<!-- measured: y -->\n\n| 2 |\n\n<!-- end -->\n"
    assert script.written(page) == {"x": "| 1 |", "y": "| 2 |"}
    assert script.written(script.put(page, "y", "| 3 |")) == {"x": "| 1 |", "y": "| 3 |"}


def test_an_unknown_item_is_refused(script, monkeypatch, capsys):
    for name, reason in (("clmap", "choose of order"), ("heads", "needs --runs")):
        monkeypatch.setattr(sys, "argv", ["measure_replication.py", "--only", name])
        with pytest.raises(SystemExit) as stop:
            script.main()
        assert stop.value.code == 2
        assert reason in capsys.readouterr().err


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


@pytest.mark.parametrize("train_above_val", [True, False])
def test_the_choice_equals_that_of_single_fits(history, train_above_val):
    found = importlib.import_module("measured.selection").select(history, train_above_val=train_above_val)
    best = []
    for train, val in zip(history.train.T, history.val.T, strict=True):
        epochs = tuple(Epoch(i + 1, 0.0, float(t), float(v)) for i, (t, v) in enumerate(zip(train, val, strict=True)))
        best.append(select_epoch(epochs, train_above_val=train_above_val))
    assert [epoch.val_auroc if epoch else -np.inf for epoch in best] == found.best.tolist()
    assert (best[5] is None) == train_above_val
    assert best[found.config].number == found.epoch
    assert best[found.config].val_auroc == max(epoch.val_auroc for epoch in best if epoch)


def test_patience_ends_a_configuration(script):
    del script
    selection = importlib.import_module("measured.selection")
    val = np.array([[0.5], [0.6], [0.5], [0.5], [0.7]])
    history = selection.History(np.ones_like(val), val, np.zeros(1), np.ones(1))
    assert [selection.select(history, patience=patience).epoch for patience in (None, 3, 2)] == [5, 5, 2]
    val = np.array([[0.5], [0.6], [0.7], [0.8]])
    learning = selection.History(np.array([[0.4], [0.4], [0.4], [0.9]]), val, np.zeros(1), np.ones(1))
    assert selection.select(learning, patience=2).epoch == 4


def test_selection_reads_run_folders(script, tmp_path):
    train, val = (shifted_mean(48, seed, features=8, shift=2.0) for seed in (1, 2))
    configs = grid(Config("abmil", epochs=6, batch_size=16, seed=7), lr=[0.1, 0.01], l1=[0.0, 0.1])
    run = run_sweep(tmp_path / "abmil" / "7", configs, train, val, val)
    cells = [cell.strip() for cell in script.FROM_RUNS["selection"]([tmp_path]).splitlines()[2].split("|")]
    assert cells[1].startswith("abmil, epochs 6, batch_size 16")
    assert cells[2] == "7"
    (winner,) = run.winners
    chosen, _, area = cells[3].partition(": ")
    assert [float(word) for word in chosen.split(", ")] == [winner.config.l1, winner.config.lr, winner.epoch]
    assert float(area) == pytest.approx(winner.val_auroc, abs=6e-5)


def test_the_page_shows_the_winners_of_the_runs(script, page):
    """The rule's column, beside the run folders that the results page is made of."""
    seen = 0
    for line in script.written(page)["selection"].splitlines()[2:]:
        method, seed, kept = (cell.strip() for cell in line.split("|")[1:4])
        best = RUNS / method / seed / "best.json"
        if best.exists():
            winner = json.loads(best.read_text())
            chosen, _, area = kept.partition(": ")
            expected = [winner["config"]["l1"], winner["config"]["lr"], winner["epoch"]]
            assert [float(word) for word in chosen.split(", ")] == expected
            assert float(area) == pytest.approx(winner["val_auroc"], abs=6e-5)
            seen += 1
    assert seen >= 15


# ----------------------------------------------------------------------------------------------------
# Ties
# ----------------------------------------------------------------------------------------------------


def test_ties_are_broken_by_index(script):
    del script
    broken = importlib.import_module("measured.evaluation").broken_ties
    scores, lengths = torch.tensor([1.0, 0.0, 1.0, 2.0, 2.0]), torch.tensor([3, 2])
    later, earlier = (broken(scores, lengths, descending=down).split([3, 2]) for down in (False, True))
    assert [part.argsort().tolist() for part in later] == [[1, 0, 2], [0, 1]]
    assert [part.argsort().tolist() for part in earlier] == [[1, 2, 0], [1, 0]]
    labels = [0, 0, 1]
    assert roc_auc_score(labels, scores[:3]) == 0.75
    assert [roc_auc_score(labels, way[0]) for way in (later, earlier)] == [1.0, 0.5]
