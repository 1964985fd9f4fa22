"""Differences as tables and sentences, from three that were made by hand."""

import csv
import json
import math

import pytest

from normal_guidance.statistics.differences import Difference
from normal_guidance.study.study_tables import Differences, read_differences

SHOWN = Difference("ng", "abmil", "localization_auroc", 0.1349, 0.0899, 0.1801, 2e-8, 4e-7, 3, 1104, 1080)
NOT_SHOWN = Difference("ng", "ceiling", "scan_auroc", -0.003, -0.016, 0.01, 0.325, 0.65, 3, 3639, 3600)
UNTESTED = Difference("abmil", "ceiling", "scan_auroc", 0.25, math.nan, math.nan, math.nan, math.nan, 1, 2, 1)


@pytest.fixture
def three() -> Differences:
    return Differences("chest-ct", (SHOWN, NOT_SHOWN, UNTESTED))


def test_tables_by_metric(three):
    first, second = three.grids()
    assert first.title == "Differences in Localization AUROC, chest-ct"
    assert first.header == ["Method", "Against", "Difference", "Interval", "p (Holm)", "Shown", "Scans", "Patients"]
    assert first.rows == [
        ["ABMIL + Normal Guidance", "ABMIL", "+.135", "[.090, .180]", "< .001", "yes", "1,104", "1,080"]
    ]
    assert second.rows == [
        ["ABMIL + Normal Guidance", "Supervised reference", "-.003", "[-.016, .010]", ".650", "no", "3,639", "3,600"],
        ["ABMIL", "Supervised reference", "+.250", "-", "-", "-", "2", "1"],
    ]


def test_sentences(three):
    assert three.sentences("localization_auroc") == [
        "ABMIL + Normal Guidance localizes better than ABMIL: +.135 [.090, .180], p < .001 (Holm)"
    ]
    assert three.sentences("scan_auroc") == [
        "No difference between ABMIL + Normal Guidance and Supervised reference in scan AUROC was shown: -.003 "
        "[-.016, .010], p = .650 (Holm)",
        "ABMIL and Supervised reference cannot be compared in scan AUROC: too few patients (1)",
    ]
    assert three.sentences("scan_auprc") == []


def test_only_tested_ones_are_drawn(three):
    (row,) = three.forest("localization_auroc")
    assert (row.label, row.estimate, row.low, row.high, row.significant) == (
        "ABMIL + Normal Guidance − ABMIL", 0.1349, 0.0899, 0.1801, True,
    )  # fmt: skip
    assert [row.significant for row in three.forest("scan_auroc")] == [False]


def test_files_hold_every_digit(three, tmp_path):
    paths = three.write(tmp_path, "differences")
    assert [path.name for path in paths] == [f"differences.{end}" for end in ("md", "tex", "csv", "json")]
    page = paths[0].read_text()
    assert page.startswith("# Chest-ct: which differences are real\n\n## Differences in Localization AUROC, chest-ct\n")
    for metric in ("localization_auroc", "scan_auroc"):
        for sentence in three.sentences(metric):
            assert f"- {sentence}\n" in page
    assert paths[1].read_text().count(r"\begin{table}") == 2
    lines = list(csv.DictReader(paths[2].read_text().splitlines()))
    assert [float(line["estimate"]) for line in lines] == [0.1349, -0.003, 0.25]
    assert [line["shown"] for line in lines] == ["yes", "no", "no"]
    assert [line["p"] for line in lines] == ["2e-08", "0.325", ""]
    records = json.loads(paths[3].read_text())["differences"]
    assert [(one["test"], one["p_adjusted"]) for one in records] == [
        ("bootstrap", 4e-7), ("DeLong", 0.65), ("DeLong", None),
    ]  # fmt: skip


def test_what_was_written_is_read_again(three, tmp_path):
    three.write(tmp_path, "differences")
    again = read_differences(tmp_path / "differences.json")
    assert (again.dataset, again.found[:2]) == ("chest-ct", (SHOWN, NOT_SHOWN))
    assert again.markdown() == three.markdown()
    assert all(math.isnan(number) for number in (again.found[2].low, again.found[2].p, again.found[2].p_adjusted))


def test_nothing_found_is_still_a_page(tmp_path):
    paths = Differences("chest-ct", ()).write(tmp_path, "differences")
    assert paths[0].read_text() == "# Chest-ct: which differences are real\n"
    assert paths[2].read_text() == ""
    assert json.loads(paths[3].read_text())["differences"] == []
