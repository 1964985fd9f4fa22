"""The pages of docs/results say what the studies and runs in docs/results/runs say."""

import importlib
import json
import re
from pathlib import Path

import pytest

from normal_guidance.evaluation.found import find
from normal_guidance.evaluation.published import method_title
from normal_guidance.evaluation.words import digits, signed
from normal_guidance.reports.results import collect

DOCS = Path(__file__).parents[1] / "docs"
RUNS = DOCS / "results/runs"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


@pytest.fixture
def semi_synthetic(script):
    """The blocks of the page by their names."""
    show = script("show_semi_synthetic")
    blocks = script("measure_replication").written(show.PAGE.read_text())
    assert list(blocks) == list(show.SECTIONS)
    return blocks


def test_the_semi_synthetic_page_is_made_of_its_runs(script, semi_synthetic):
    assert semi_synthetic["tables"] == script("show_semi_synthetic").tables()


def test_the_semi_synthetic_differences_are_those_of_its_means(semi_synthetic):
    """Without the bootstrap; the Gaussian has a score of its own there."""
    means: dict[str, dict[str, float]] = {}
    for one in json.loads(collect(RUNS / "semi-synthetic", "semi-synthetic").json())["tables"]:
        means.setdefault(one["table"], {})[method_title(one["method"], "semi-synthetic")] = one["ours_mean"]
    checked = 0
    for line in semi_synthetic["differences"].splitlines()[2:]:
        method, against, *cells = (cell.strip().strip("*") for cell in line.split("|")[1:-1])
        if "Centered Gaussian" in (method, against):
            continue
        for metric, cell in zip(("localization_auroc", "localization_auprc", "scan_auroc"), cells, strict=True):
            difference = means[metric][method] - means[metric][against]
            assert float(cell.split()[0]) == pytest.approx(difference, abs=0.00051), line
            checked += 1
    assert checked == 14 * 3


def test_the_page_beyond_shows_what_each_run_reached():
    """One row a method; those of the paper that are not repeated there have none."""
    page = (DOCS / "results/beyond.md").read_text().replace("**", "").splitlines()
    rows = {cells[1].strip(): cells[2:5] for line in page if len(cells := line.split("|")) == 8}
    checked = 0
    for folder in ("semi-synthetic", "beyond"):
        for one in find(RUNS / folder, "semi-synthetic"):
            title = method_title(one.method, "semi-synthetic")
            cells = rows.get(title) or rows.get(f"{title} (our run)")
            if cells is None or one.scores is None:
                continue
            checked += 1
            reached = f"{digits(one.scores.localization_auroc)} / {digits(one.scores.scan_auroc)}"
            assert cells[(1001, 2001, 3001).index(one.seed)].strip() == reached, (title, one.seed)
    assert checked > 20


def test_the_phantoms_page_shows_its_studies(script):
    show = script("show_phantoms")
    written = script("measure_replication").written(show.PAGE.read_text())
    assert written == {name: section() for name, section in show.SECTIONS.items()}


def test_a_method_that_was_not_tested_in_a_layout_has_a_dash(script):
    show = script("show_phantoms")
    rows = {line.split("|")[1].strip(): line for line in show.against(show.LOCALIZATION, show.CEILINGS).splitlines()}
    assert rows["ABMIL"].split("|")[4].strip() == "-", "the chest study has no reference for every split"
    assert "**-.263 [-.383, -.143], p = .005**" in rows["ABMIL"]


def rows_of_beyond(cells):
    """Method -> cells, of the page's tables of so many columns behind the method's."""
    lines = (DOCS / "results/beyond.md").read_text().splitlines()
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in tables if len(row) == cells + 1 and re.search(r"\], p [=<]", " ".join(row))}


@pytest.mark.parametrize(("folder", "columns", "methods"), [("semi-synthetic", 2, 13), ("unfiltered", 6, 3)])
def test_the_page_beyond_shows_how_far_posterior_bells_are_ahead(script, folder, columns, methods):
    """The unfiltered runs are in a table of their own, without the other bells."""
    rows = rows_of_beyond(columns)
    assert len(rows) == methods
    found = script("compare_runs").compare("posterior_bells", [RUNS / folder, RUNS / "beyond"]).found
    estimates = {(method_title(one.against, "semi-synthetic"), one.metric): signed(one.estimate) for one in found}
    for title, cells in rows.items():
        assert cells[-2].startswith(estimates[title, "localization_auroc"]), title
        assert cells[-1].startswith(estimates.get((title, "scan_auroc"), "-")), title


def test_the_page_beyond_shows_transmil_without_the_filter():
    rows, found = rows_of_beyond(6), list(find(RUNS / "unfiltered", "semi-synthetic"))
    assert len(found) == 9
    for one in found:
        cells = rows[method_title(one.method, "semi-synthetic")]
        reached = f"{digits(one.scores.localization_auroc)} / {digits(one.scores.scan_auroc)}"
        assert cells[(1001, 2001, 3001).index(one.seed)] == reached, (one.method, one.seed)


def test_a_method_without_predictions_is_refused(script, tmp_path):
    with pytest.raises(SystemExit, match="ng has no predictions for every seed"):
        script("compare_runs").compare("ng", [tmp_path])
