"""Tables of a study against numbers worked out by hand, and each format read back by something else."""

import errno
import io
import json
import math
import os
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.methods import METHODS
from normal_guidance.core.metrics import MeanSd
from normal_guidance.show.text_tables import digits
from normal_guidance.statistics.differences import Difference
from normal_guidance.statistics.localization import Summary, localization_measures
from normal_guidance.statistics.split_results import METRICS, Scores
from normal_guidance.study.study_tables import Comparison, Differences, Measures, paper_tables, sensitivity_table

NAN = math.nan


def scores(*numbers: float | None) -> Scores:
    return Scores(*numbers, localized=507, left_out=2)


def of_seeds(*rows: tuple[float | None, ...]) -> dict[int, Scores]:
    return {seed: scores(*row) for seed, row in zip((1001, 2001, 3001), rows, strict=True)}


GAUSSIAN = of_seeds((0.7046, 0.56, None, None), (0.6688, 0.57, None, None), (0.6938, 0.58, None, None))
GUIDED = of_seeds((0.6, 0.4, 0.75, 0.75), (0.7, 0.4, 0.75, 0.76), (0.8, 0.4, 0.756, 0.77))
ORACLE = of_seeds((0.88212, 0.82, 0.80088, 0.81), (0.8799, 0.825, 0.81505, 0.82), (0.88979, 0.83, 0.81303, 0.81))
TABLES = paper_tables({"ceiling": ORACLE, "ng": GUIDED, "centered_gaussian": GAUSSIAN}, "semi-synthetic")
SENSITIVITY = {
    ("squared_error", 1.0): {1: scores(0.80, 0.70, 0.92, 0.91), 2: scores(0.82, 0.70, 0.92, 0.91)},
    ("forward_kl", 10.0): {2: scores(0.89, 0.75, 0.91, 0.91), 1: scores(0.87, 0.75, 0.91, 0.91)},
    ("forward_kl", 0.1): {1: scores(0.84, NAN, 0.90, 0.9104), 2: scores(0.84, 0.70, 0.90, 0.9104)},
}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.689, ".689"), (0.85, ".850"), (0.0, ".000"), (1.0, "1.000"), (-0.0, ".000"), (-0.0004, ".000"),
        (-0.0123, "-.012"), (0.0625, ".063"), (0.6895, ".690"), ((0.7503 + 0.7498 + 0.7514) / 3, ".751"),
        (0.9996, "1.000"), (-1.25, "-1.250"), (NAN, "-"), (None, "-"), (math.inf, "-"),
    ],
)  # fmt: skip
def test_three_digits_as_a_reader_rounds(value, shown):
    assert digits(value) == shown


def test_the_printed_difference_is_the_difference_of_what_is_printed():
    for ours in (0.6885, 0.6884, 0.6886, 0.6895, 0.6905):
        printed = float(digits(ours)) - 0.690
        assert float(digits(ours - 0.690)) == pytest.approx(printed, abs=1e-12)


# 2 (.015 + .0005) + .0005 = .0315: beyond it, no rounding brings the two within 2 sd; an sd printed as .000 has .0015.
@pytest.mark.parametrize(
    ("off", "sd", "inside"),
    [(0.0, 0.015, True), (0.03149, 0.015, True), (0.03151, 0.015, False), (0.00149, 0.0, True), (0.00151, 0.0, False),
     (NAN, 0.015, None)],
)  # fmt: skip
def test_inside_two_sd_with_room_for_rounding(off, sd, inside):
    printed = MeanSd(0.689, sd, "population")
    for mean in (0.689 + off, 0.689 - off):
        assert Comparison("localization_auroc", (mean,), "population", printed).inside_2_sd is inside


def test_mean_and_sd_by_hand():
    gaussian, guided, oracle = TABLES.rows
    assert [row.method for row in TABLES.rows] == ["centered_gaussian", "ng", "ceiling"]
    localization, _, scan, _ = guided.cells
    for cell, mean, sd, difference, inside in (
        (localization, 0.7, math.sqrt(0.02 / 3), 0.159, False),  # population; .159 > 2 x .055
        (scan, 0.752, math.sqrt(24e-6 / 2), 0.001, True),  # sample
    ):
        assert (cell.ours.mean, cell.ours.sd, cell.difference) == pytest.approx((mean, sd, difference), abs=1e-12)
        assert cell.inside_2_sd is inside
    assert (gaussian.cells[2].ours, gaussian.cells[2].inside_2_sd) == (None, None)
    assert oracle.cells[2].ours.sd == pytest.approx(0.00626, abs=5e-6)  # population, as the paper prints this row


MARKDOWN = """\
### Localization AUROC, semi-synthetic

Mean ± population sd over 3 seeds (1001, 2001, 3001). Inside 2 sd: |difference| ≤ 2 × published sd, .0005 of rounding \
allowed on the published mean and on that sd.

| Method                  |        Ours |   Published | Difference | Inside 2 sd |
|:------------------------|------------:|------------:|-----------:|------------:|
| Centered Gaussian       | .689 ± .015 | .689 ± .015 |       .000 |         yes |
| ABMIL + Normal Guidance | .700 ± .082 | .541 ± .055 |      +.159 |          no |
| Bayes oracle            | .884 ± .004 | .884 ± .004 |       .000 |         yes |

"""


def test_markdown_exactly():
    markdown = TABLES.markdown()
    assert markdown.startswith(MARKDOWN)
    assert "| Centered Gaussian       |           - |           - |          - |           - |\n" in markdown
    assert "| ABMIL + Normal Guidance | .752 ± .003 | .751 ± .003 |      +.001 |         yes |\n" in markdown
    titles = re.findall(r"^### (.+), semi-synthetic$", markdown, re.MULTILINE)
    assert titles == ["Localization AUROC", "Localization AUPRC", "Scan AUROC", "Scan AUPRC", "Every seed"]


def test_markdown_of_every_seed_has_what_is_published_of_it():
    lines = TABLES.markdown().split("### Every seed")[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert cells[0] == [
        "Method", "Seed", "Localization AUROC", "Published", "Localization AUPRC", "Scan AUROC", "Published",
        "Scan AUPRC", "Localized", "Left out",
    ]  # fmt: skip
    assert cells[1] == ["Centered Gaussian", "1001", ".705", ".705", ".560", "-", "-", "-", "507", "2"]
    assert cells[5] == ["ABMIL + Normal Guidance", "2001", ".700", ".500", ".400", ".750", "-", ".760", "507", "2"]
    assert cells[9] == ["Bayes oracle", "3001", ".890", ".890", ".830", ".813", ".813", ".810", "507", "2"]
    assert len(cells) == 1 + 9


def test_another_dataset_has_no_published_columns_and_one_seed_no_sd():
    table = paper_tables({"ceiling": {7: ORACLE[1001]}, "max": {7: GUIDED[1001]}}, "my_ct")
    markdown = table.markdown()
    assert not {"Published", "Inside", "±"} & set(re.findall(r"\w+|±", markdown))
    assert "From 1 seed (7).\n" in markdown
    assert "### Scan AUROC, my\\_ct\n" in markdown
    assert (
        "| Method               | Ours |\n"
        "|:---------------------|-----:|\n"
        "| Max pooling          | .750 |\n"
        "| Supervised reference | .801 |\n"
    ) in markdown
    assert "| Max pooling          | .600 |\n" in markdown  # .000 would be the population sd
    assert all(math.isnan(cell.ours.sd) for cell in table.rows[0].cells)
    frame = read_csv(table.csv())
    assert list(frame) == list(read_csv(TABLES.csv()))
    assert frame[["published_mean", "ours_sd"]].isna().all(axis=None)


def test_a_row_with_fewer_seeds_says_so():
    fewer = {seed: ORACLE[seed] for seed in (3001, 1001)}
    table = paper_tables({"ng": GUIDED, "ceiling": fewer}, "semi-synthetic")
    guided, oracle = table.rows
    assert (table.seeds, guided.seeds, oracle.seeds) == ((1001, 2001, 3001), (1001, 2001, 3001), (1001, 3001))
    page = table.markdown()
    assert page.count("| Bayes oracle (2 of 3 seeds) | ") == 4
    assert "(Bayes oracle: population sd, as in the paper) over 3 seeds (1001, 2001, 3001)." in page
    assert page.count("| ABMIL + Normal Guidance     | ") == 4
    assert page.split("### Every seed")[1].count("| Bayes oracle ") == 2
    assert r"Bayes oracle (2 of 3 seeds) & .886 $\pm$ .004 & " in table.latex()


def check_latex(text: str) -> None:
    """Environments nest, braces and dollars pair, rows have all their columns, nothing special stands unescaped."""
    assert text.startswith("% ")
    text = text.partition("\n")[2]  # the one comment
    stack = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert stack == []
    bare = re.sub(r"\\\\|\\[&%$#_{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert len(re.findall(r"\$[^$\n]*\$", bare)) * 2 == bare.count("$")
    assert not re.search(r"[%#_~^|<>]", bare)
    assert text.isascii()
    for columns, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 1
        for row in rows:
            assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1


@pytest.mark.parametrize("dataset", ["semi-synthetic", r"50%_{ct} & $x^2$ #1 ~a|b<c>\d"])
def test_latex_is_well_formed(dataset):
    check_latex(paper_tables({"centered_gaussian": GAUSSIAN, "ng": GUIDED}, dataset).latex())
    check_latex(sensitivity_table(SENSITIVITY, dataset).latex())


def test_latex_rows():
    latex = TABLES.latex()
    assert latex.count(r"\toprule") == latex.count(r"\begin{table}[ht]") == 5
    assert r"ABMIL + Normal Guidance & .700 $\pm$ .082 & .541 $\pm$ .055 & +.159 & no \\" in latex
    assert r"\caption{Localization AUROC, semi-synthetic. Mean $\pm$ population sd over" in latex
    assert r"50\%" in paper_tables({"ng": GUIDED}, "50%").latex()
    minus = paper_tables({"ng": GUIDED}, "head-ct").latex()
    assert r"ABMIL + Normal Guidance & .700 $\pm$ .082 & .871 $\pm$ .002 & $-$.171 & no \\" in minus
    assert latex.count(r"\resizebox{\linewidth}{!}{\begin{tabular}") == latex.count(r"\end{tabular}}") == 1


def read_csv(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text))


def exactly(*numbers: float) -> object:
    """pandas before 3 reads the last bit of some numbers wrongly."""
    return pytest.approx(numbers, rel=1e-15)


def test_csv_gives_back_every_digit():
    frame = read_csv(TABLES.csv()).set_index(["table", "method"])
    assert len(frame) == 4 * 3
    for row in TABLES.rows:
        for metric, cell in zip(METRICS, row.cells, strict=True):
            line = frame.loc[(metric, row.method)]
            assert line["sd_kind"] == cell.sd_kind
            assert line["seeds"] == "1001 2001 3001"
            if cell.ours is None:
                assert line[["ours_mean", "ours_sd", "difference", "inside_2_sd", "published_mean"]].isna().all()
                continue
            assert (line["ours_mean"], line["ours_sd"]) == exactly(cell.ours.mean, cell.ours.sd)
            assert (line["published_mean"], line["published_sd"]) == exactly(cell.published.mean, cell.published.sd)
            assert (line["difference"],) == exactly(cell.difference)
            assert line["inside_2_sd"] == ("yes" if cell.inside_2_sd else "no")


def test_json_round_trip():
    data = json.loads(TABLES.json())
    results: dict[str, dict[int, Scores]] = {}
    for record in data["per_seed"]:
        fields = {name: record[name] for name in (*METRICS, "localized", "left_out")}
        results.setdefault(record["method"], {})[record["seed"]] = Scores(**fields)
    assert paper_tables(results, data["tables"][0]["dataset"]) == TABLES


def test_a_seed_without_a_number_leaves_the_method_without_one():
    table = paper_tables({"max": {1: GUIDED[1001], 2: scores(NAN, 0.4, 0.7, 0.7)}}, "head-ct")
    assert "| Max pooling |    - | .286 ± .004 |          - |           - |" in table.markdown()
    table = paper_tables({"max": {1: scores(NAN, 0.4, 0.7, 0.7)}}, "head-ct")
    data = json.loads(table.json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["tables"][0]["ours_mean"] is None
    assert data["tables"][0]["ours_per_seed"] == [None]
    assert data["tables"][2]["ours_sd"] is None


def test_a_number_of_some_seeds_alone_is_refused():
    some = {1: GUIDED[1001], 2: scores(0.6, 0.4, None, 0.7), 3: GUIDED[2001], 5: scores(0.6, 0.4, None, 0.7)}
    with pytest.raises(UserError, match=r"max has no scan_auroc for 2 seeds \(2, 5\) of 4; train these again, or"):
        paper_tables({"max": some}, "head-ct")


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    paths = TABLES.write(tmp_path / "deep", "results.v1")
    assert [path.name for path in paths] == ["results.v1.md", "results.v1.tex", "results.v1.csv", "results.v1.json"]
    texts = [TABLES.markdown(), TABLES.latex(), TABLES.csv(), TABLES.json()]
    assert [path.read_text(encoding="utf-8") for path in paths] == texts
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == sorted(path.name for path in paths)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "t.md").write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=r"t\.md cannot be written \(No space left on device\); choose another folder"):
        TABLES.write(tmp_path / "full", "t")
    assert [(path.name, path.read_text()) for path in (tmp_path / "full").iterdir()] == [("t.md", "old")]


def test_sensitivity_beside_the_paper_exactly():
    assert sensitivity_table(SENSITIVITY, "head-ct").markdown() == (
        "### Sensitivity to divergence and λ, head-ct\n\n"
        "ABMIL + Normal Guidance, mean ± sd over 2 seeds (1, 2): population sd for localization, sample sd for scans. "
        "The best of ours is bold.\n\n"
        "| Divergence    |   λ | Localization AUROC |   Published | Localization AUPRC |   Published "
        "|      Scan AUROC |   Published |      Scan AUPRC |   Published |\n"
        "|:--------------|----:|-------------------:|------------:|-------------------:|------------:"
        "|----------------:|------------:|----------------:|------------:|\n"
        "| Forward KL    | 0.1 |        .840 ± .000 | .846 ± .004 |                  - | .718 ± .011 "
        "|     .900 ± .000 |           - | **.910 ± .000** |           - |\n"
        "| Forward KL    |  10 |    **.880 ± .010** | .877 ± .001 |    **.750 ± .000** | .760 ± .009 "
        "|     .910 ± .000 |           - | **.910 ± .000** |           - |\n"
        "| Squared error |   1 |        .810 ± .010 | .834 ± .007 |        .700 ± .000 | .702 ± .011 "
        "| **.920 ± .000** | .924 ± .012 | **.910 ± .000** | .910 ± .010 |\n"
    )


def test_sensitivity_elsewhere_or_of_another_method_stands_alone():
    elsewhere, other = sensitivity_table(SENSITIVITY, "chest-ct"), sensitivity_table(SENSITIVITY, "head-ct", "mhng")
    assert r"Forward KL & 10 & \textbf{.880 $\pm$ .010} & \textbf{.750 $\pm$ .000} & .910" in elsewhere.latex()
    assert r"\resizebox" not in elsewhere.latex()
    assert f"\n{METHODS['mhng'].title}, mean ± sd over 2 seeds" in other.markdown()
    assert METHODS["ng"].title not in other.markdown() + other.latex()
    assert {record["method"] for record in json.loads(other.json())["tables"]} == {"mhng"}
    for table in (elsewhere, other):
        assert "Published" not in table.markdown()
        assert read_csv(table.csv())["published_mean"].isna().all()


# Differences, from three that were made by hand

SHOWN = Difference("ng", "abmil", "localization_auroc", 0.1349, 0.0899, 0.1801, 2e-8, 4e-7, 3, 1104, 1080)
NOT_SHOWN = Difference("ng", "ceiling", "scan_auroc", -0.003, -0.016, 0.01, 0.325, 0.65, 3, 3639, 3600)
UNTESTED = Difference("abmil", "ceiling", "scan_auroc", 0.25, math.nan, math.nan, math.nan, math.nan, 1, 2, 1)


THREE = Differences("chest-ct", (SHOWN, NOT_SHOWN, UNTESTED))


def test_tables_by_metric():
    first, second = THREE.grids()
    assert first.title == "Differences in Localization AUROC, chest-ct"
    assert first.header == ["Method", "Against", "Difference", "Interval", "p (Holm)", "Shown", "Scans", "Patients"]
    assert first.rows == [
        ["ABMIL + Normal Guidance", "ABMIL", "+.135", "[.090, .180]", "< .001", "yes", "1,104", "1,080"]
    ]
    assert second.rows == [
        ["ABMIL + Normal Guidance", "Supervised reference", "-.003", "[-.016, .010]", ".650", "no", "3,639", "3,600"],
        ["ABMIL", "Supervised reference", "+.250", "-", "-", "-", "2", "1"],
    ]


def test_sentences_and_every_digit_of_differences():
    page = THREE.markdown()
    assert page.startswith("# Chest-ct: which differences are real\n\n## Differences in Localization AUROC, chest-ct\n")
    sentences = [line for line in page.splitlines() if line.startswith("- ")]
    assert sentences == [f"- {row.words(THREE.titles)}" for row in THREE.rows]
    assert sentences[2] == "- ABMIL and Supervised reference cannot be compared in scan AUROC: too few patients (1)"
    assert THREE.latex().count(r"\begin{table}") == 2
    records = json.loads(THREE.json())["differences"]
    assert [(record["test"], record["shown"], record["p_adjusted"]) for record in records] == [
        ("bootstrap", True, 4e-7), ("DeLong", False, 0.65), ("DeLong", False, None),
    ]  # fmt: skip


def test_nothing_found_is_still_a_page():
    nothing = Differences("chest-ct", ())
    assert (nothing.markdown(), nothing.csv()) == ("# Chest-ct: which differences are real\n", "")
    assert json.loads(nothing.json())["differences"] == []


# Measures, from scans that can be worked out by hand

LABELS = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1])
LENGTHS = torch.tensor([6, 2])


def measured(*attention: float, spacing: float | None = None):
    """Two scans: six slices of which the third and fourth are positive, and two of which the second is."""
    mm = None if spacing is None else spacing * torch.arange(8.0)
    return localization_measures(torch.tensor(attention), LABELS, LENGTHS, positions=mm).summary()


# The peak of the first scan lies on its first slice, two slices off; that of the second scan hits.
MISS = (0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9)
HIT = (0.1, 0.1, 0.5, 0.1, 0.1, 0.1, 0.1, 0.9)


def test_a_row_is_the_mean_over_seeds_and_files_hold_every_seed():
    miss, hit = measured(*MISS, spacing=5.0), measured(*HIT, spacing=5.0)
    table = Measures("chest-ct", {("ng", 1001): miss, ("ng", 2001): hit, ("ceiling", 1001): hit})
    (grid,) = table.grids()
    rows = {row[0]: dict(zip(grid.header[1:], row[1:], strict=True)) for row in grid.rows}
    assert list(rows) == ["ABMIL + Normal Guidance", "Supervised reference"]
    expected = {
        "Top-1 hit": ".750",  # one of two scans, then both
        "Peak error (slices)": "0.5",  # medians of (2, 0) and (0, 0)
        "Peak error (mm)": "2.5",  # the same times 5 mm
        "Attention on positives": ".650",  # (.2 of the first scan + .9 of the second) / 2, then (.6 + .9) / 2
    }
    assert expected.items() <= rows["ABMIL + Normal Guidance"].items()
    assert rows["Supervised reference"]["Top-1 hit"] == "1.000"
    assert "then over 2 splits." in grid.caption
    assert table.markdown().startswith("# Where attention points, chest-ct\n")
    records = json.loads(table.json())["measures"]
    assert len(records) == 3 * 8
    hits = {(one["method"], one["seed"]): one["value"] for one in records if one["measure"] == "top_1_hit"}
    assert hits == {("ng", 1001): 0.5, ("ng", 2001): 1.0, ("ceiling", 1001): 1.0}


def test_what_is_beyond_position_comes_first():
    beyond = {"skill": Summary(-0.25, "mean", 2), "patient_specific": Summary(0.1, "mean", 2)}
    table = Measures("chest-ct", {("ng", 1001): beyond | measured(*MISS)})
    (grid,) = table.grids()
    assert grid.header[1:3] == ["Skill", "Patient-specific"]
    assert grid.rows[0][1:3] == ["-.250", "+.100"]
    assert "Skill: the share of the way" in grid.caption
    assert {one["measure"]: one["value"] for one in json.loads(table.json())["measures"]}["skill"] == -0.25


def test_measures_that_no_scan_has_are_left_out():
    (grid,) = Measures("chest-ct", {("ng", 1001): measured(*MISS)}).grids()
    assert [name for name in grid.header if name.startswith("Peak")] == ["Peak error (slices)"]
    assert "then over 1 split." in grid.caption
    (both,) = Measures("c", {("ng", 1): measured(*MISS, spacing=2.0), ("abmil", 1): measured(*MISS)}).grids()
    column = both.header.index("Peak error (mm)")
    assert [row[column] for row in both.rows] == ["2.0", "-"]


def test_no_scan_to_localize_leaves_the_methods_names():
    nothing = localization_measures(torch.ones(3), torch.tensor([1, 1, 0]), torch.tensor([2, 1]))
    table = Measures("c", {("ng", 1): nothing.summary()})
    (grid,) = table.grids()
    assert (grid.header, grid.rows) == (["Method"], [["ABMIL + Normal Guidance"]])
    assert {(row["scans"], row["value"]) for row in json.loads(table.json())["measures"]} == {(0, None)}
