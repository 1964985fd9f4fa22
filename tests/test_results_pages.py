"""The pages of docs/results say what the studies and runs in docs/results/runs say."""

import importlib
import json
from pathlib import Path

import pytest

from normal_guidance.core.method_names import method_title
from normal_guidance.evaluation.study_folder import find_results
from normal_guidance.reports.study_tables import collect
from normal_guidance.statistics.number_format import digits, signed

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


def table_of_beyond(heading):
    """Method -> cells, of the table of the page that begins with these words."""
    page = (DOCS / "results/beyond.md").read_text().replace("**", "")
    (lines,) = [table.splitlines()[2:] for table in page.split("\n\n") if table.startswith(heading)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {title: cells for title, *cells in rows}


@pytest.mark.parametrize(
    ("heading", "folder", "runs"),
    [
        ("| Method | 1001 |", "semi-synthetic", 15),
        ("| Method | 1001 |", "beyond", 12),
        ("| Method, no filter |", "unfiltered", 9),
    ],
)
def test_the_page_beyond_shows_what_each_run_reached(heading, folder, runs):
    """One row a method; those of the paper that are not repeated there have none."""
    rows, checked = table_of_beyond(heading), 0
    for one in find_results(RUNS / folder, "semi-synthetic"):
        title = method_title(one.method, "semi-synthetic")
        cells = rows.get(title) or rows.get(f"{title} (our run)")
        if cells is None or one.scores is None:
            continue
        checked += 1
        reached = f"{digits(one.scores.localization_auroc)} / {digits(one.scores.scan_auroc)}"
        assert cells[(1001, 2001, 3001).index(one.seed)] == reached, (title, one.seed)
    assert checked == runs


def test_the_phantoms_page_shows_its_studies(script):
    show = script("show_phantoms")
    written = script("measure_replication").written(show.PAGE.read_text())
    assert written == {name: section() for name, section in show.SECTIONS.items()}


def test_a_method_that_was_not_tested_in_a_layout_has_a_dash(script):
    show = script("show_phantoms")
    rows = {line.split("|")[1].strip(): line for line in show.against(show.LOCALIZATION, show.CEILINGS).splitlines()}
    assert rows["ABMIL"].split("|")[4].strip() == "-", "the chest study has no reference for every split"
    assert "**-.263 [-.383, -.143], p = .005**" in rows["ABMIL"]


@pytest.mark.parametrize(
    ("heading", "folder", "methods"),
    [("| Against |", "semi-synthetic", 13), ("| Method, no filter |", "unfiltered", 3)],
)
def test_the_page_beyond_shows_how_far_posterior_bells_are_ahead(script, heading, folder, methods):
    """In the last two columns."""
    rows = table_of_beyond(heading)
    assert len(rows) == methods
    found = script("compare_runs").compare("posterior_bells", [RUNS / folder, RUNS / "beyond"]).found
    estimates = {(method_title(one.against, "semi-synthetic"), one.metric): signed(one.estimate) for one in found}
    for title, cells in rows.items():
        assert cells[-2].startswith(estimates[title, "localization_auroc"]), title
        assert cells[-1].startswith(estimates.get((title, "scan_auroc"), "-")), title


def test_a_method_without_predictions_is_refused(script, tmp_path):
    with pytest.raises(SystemExit, match="ng has no predictions for every seed"):
        script("compare_runs").compare("ng", [tmp_path])
