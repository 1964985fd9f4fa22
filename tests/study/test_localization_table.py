"""Hits, errors and overlaps as a table, from scans that can be worked out by hand."""

import csv
import json

import pytest
import torch

from normal_guidance.show.text_tables import signed
from normal_guidance.statistics.localization import localization_measures
from normal_guidance.statistics.skill import measure_skill, patient_specific
from normal_guidance.study.study_tables import Measures

LABELS = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1])
LENGTHS = torch.tensor([6, 2])


def measured(*attention: float, spacing: float | None = None):
    """Two scans: six slices of which the third and fourth are positive, and two of which the second is."""
    mm = None if spacing is None else torch.full((2,), spacing)
    return localization_measures(torch.tensor(attention), LABELS, LENGTHS, spacing=mm)


# The peak of the first scan lies on its first slice, two slices off; that of the second scan hits.
MISS = (0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9)
HIT = (0.1, 0.1, 0.5, 0.1, 0.1, 0.1, 0.1, 0.9)


@pytest.fixture
def two_seeds() -> Measures:
    own = {1001: measured(*MISS, spacing=5.0), 2001: measured(*HIT, spacing=5.0)}
    return Measures("chest-ct", {"ng": own, "ceiling": {1001: measured(*HIT, spacing=5.0)}})


def test_a_row_is_the_mean_over_seeds(two_seeds):
    grid = two_seeds.grid()
    assert grid.title == "Where attention points, chest-ct"
    rows = {row[0]: dict(zip(grid.header[1:], row[1:], strict=True)) for row in grid.rows}
    assert list(rows) == ["ABMIL + Normal Guidance", "Supervised reference"]
    ng = rows["ABMIL + Normal Guidance"]
    assert ng["Top-1 hit"] == ".750"  # one of two scans, then both
    assert ng["Peak error (slices)"] == "0.5"  # medians of (2, 0) and (0, 0)
    assert ng["Peak error (mm)"] == "2.5"  # the same times 5 mm
    # (.2 of the first scan + .9 of the second) / 2, then (.6 + .9) / 2
    assert ng["Attention on positives"] == ".650"
    assert rows["Supervised reference"]["Top-1 hit"] == "1.000"
    assert "then over 2 splits." in grid.caption


def test_what_is_beyond_position_comes_first():
    scores = torch.tensor(MISS)
    beyond = measure_skill(scores, LABELS, LENGTHS), patient_specific(scores, LABELS, LENGTHS)
    table = Measures("chest-ct", {"ng": {1001: measured(*MISS)}}, {"ng": {1001: beyond}})
    assert table.grid().header[1:3] == ["Skill", "Patient-specific"]
    # AUROC (.375 + 1) / 2, by the middle (1 + .5) / 2
    assert table.grid().rows[0][1:3] == ["-.250", signed(beyond[1].difference)]
    assert "Skill: the share of the way" in table.grid().caption
    found = {one["measure"]: one["value"] for one in json.loads(table.json())["measures"]}
    assert found["skill"] == pytest.approx(beyond[0].skill)


def test_measures_that_no_scan_has_are_left_out():
    grid = Measures("chest-ct", {"ng": {1001: measured(*MISS)}}).grid()
    assert "Peak error (mm)" not in grid.header
    assert "Peak error (slices)" in grid.header
    assert "then over 1 split." in grid.caption


def test_a_method_whose_positions_are_unknown_has_none():
    both = Measures("c", {"ng": {1: measured(*MISS, spacing=2.0)}, "abmil": {1: measured(*MISS)}}).grid()
    column = both.header.index("Peak error (mm)")
    assert [row[column] for row in both.rows] == ["2.0", "-"]


def test_no_scan_to_localize_leaves_the_methods_names():
    nothing = localization_measures(torch.ones(3), torch.tensor([1, 1, 0]), torch.tensor([2, 1]))
    table = Measures("c", {"ng": {1: nothing}})
    assert (table.grid().header, table.grid().rows) == (["Method"], [["ABMIL + Normal Guidance"]])
    assert {one["scans"] for one in json.loads(table.json())["measures"]} == {0}
    assert all(one["value"] is None for one in json.loads(table.json())["measures"])


def test_files_hold_every_seed(two_seeds, tmp_path):
    paths = two_seeds.write(tmp_path, "measures")
    assert [path.name for path in paths] == [f"measures.{end}" for end in ("md", "tex", "csv", "json")]
    assert paths[0].read_text().startswith("# Where attention points, chest-ct\n")
    assert r"\resizebox" in paths[1].read_text()
    lines = list(csv.DictReader(paths[2].read_text().splitlines()))
    assert len(lines) == 3 * 8
    hits = {(line["method"], line["seed"]): line["value"] for line in lines if line["measure"] == "top_1_hit"}
    assert hits == {("ng", "1001"): "0.5", ("ng", "2001"): "1.0", ("ceiling", "1001"): "1.0"}
    assert {line["kind"] for line in lines if "error" in line["measure"]} == {"median"}
    assert len(json.loads(paths[3].read_text())["measures"]) == 24
