"""The pages of docs/results say what the tables in docs/results/tables say."""

import json
from pathlib import Path

import numpy as np
import pytest

from normal_guidance.show.text_tables import digits

DOCS = Path(__file__).resolve().parents[1] / "docs"
SEEDS = (1001, 2001, 3001)


def written(studies, page):
    """The tables of a page and its appendices by name."""
    return studies.make_page.written(text_of(studies, page))


def text_of(studies, page):
    """The page, then its appendices."""
    return "\n\n".join(file.read_text(encoding="utf-8") for file in studies.make_page.files(page))


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_table_has_its_place_once(studies):
    for page in studies.make_page.RESULTS:
        text = text_of(studies, page)
        names = [name for name, _ in studies.make_page.BLOCK.findall(text)]
        assert text.count("<!-- measured:") == len(names), page
        assert sorted(names) == sorted(getattr(studies, f"page_{page.replace('-', '_')}").SECTIONS), page


def test_the_command_writes_what_it_is_asked_for(studies, monkeypatch, tmp_path, capsys):
    page = tmp_path / "results/appendix/phantoms-differences.md"
    page.parent.mkdir(parents=True)
    page.write_text("Before.\n\n<!-- measured: twins -->\n\n| old |\n\n<!-- end -->\n\nAfter.\n")
    monkeypatch.setattr(studies.make_page, "DOCS", tmp_path)
    monkeypatch.setattr(studies.page_phantoms, "draw", lambda: None)
    studies.make_page.main(["phantoms", "twins"])
    assert "| old |" in page.read_text()
    studies.make_page.main(["phantoms", "twins", "--write"])
    made = studies.page_phantoms.SECTIONS["twins"]()
    assert page.read_text() == f"Before.\n\n<!-- measured: twins -->\n\n{made}\n\n<!-- end -->\n\nAfter.\n"
    assert capsys.readouterr().out == f"## twins\n\n{made}\n\n" * 2
    with pytest.raises(SystemExit) as stop:
        studies.make_page.main(["phantoms", "triplets"])
    assert stop.value.code == 2
    assert "'triplets' is unknown; choose from localization_auroc" in capsys.readouterr().err


def test_the_sensitivity_of_the_page_is_that_of_its_run(studies):
    page = text_of(studies, "semi-synthetic").replace("**", "")
    rows = [cells_of(line) for line in page[page.index("| Divergence") :].split("\n\n")[0].splitlines()[2:]]
    (row,) = studies.page_semi_synthetic.runs("sensitivity").values()
    winners = json.loads(row["report"])["winners"]
    names = {"forward_kl": "Forward KL", "reverse_kl": "Reverse KL", "squared_error": "Squared error"}
    for winner, cells in zip(winners, rows, strict=True):
        config, test = winner["config"], winner["test"]
        assert cells[:2] == [names[config["divergence"]], f"{config['guidance_weight']:g}"]
        metrics = ("localization_auroc", "localization_auprc", "scan_auroc", "scan_auprc")
        assert [cell.split()[0] for cell in cells[2:]] == [digits(test[metric]) for metric in metrics]


def test_a_method_that_was_not_tested_in_a_layout_has_a_dash(studies):
    show = studies.page_phantoms
    rows = {cells_of(line)[0]: line for line in show.against(show.LOCALIZATION, show.CEILINGS).splitlines()}
    assert cells_of(rows["ABMIL"])[3] == "-", "the chest study has no reference for every split"
    assert "**-.263 [-.383, -.143], p = .005**" in rows["ABMIL"]


@pytest.mark.parametrize(("folder", "runs"), [("semi-synthetic", 15), ("beyond", 12)])
def test_the_page_beyond_shows_what_each_run_reached(studies, folder, runs):
    """One row a method; those of the paper that are not repeated there have none."""
    page = text_of(studies, "beyond").replace("**", "")
    (lines,) = [part.splitlines()[2:] for part in page.split("\n\n") if part.startswith("| Method | 1001 |")]
    rows, checked = {title: cells for title, *cells in map(cells_of, lines)}, 0
    for (method, seed), scores in studies.page_semi_synthetic.scores(folder).items():
        title = studies.removed_heads.title_of(method, "semi-synthetic")
        cells = rows.get(title) or rows.get(f"{title} (our run)")
        if cells is None:
            continue
        checked += 1
        reached = f"{digits(scores.localization_auroc)} / {digits(scores.scan_auroc)}"
        assert cells[SEEDS.index(seed)] == reached, (title, seed)
    assert checked == runs


def test_every_point_has_its_row_its_reference_and_its_results(studies):
    beyond, shown = studies.page_beyond, set()
    for axis in beyond.AXES:
        points = beyond.points(axis)
        rows = [(point.variant, point.label) for point in points]
        assert len(set(rows)) == len(rows) > 0, axis
        assert {(point.variant, point.against) for point in points} <= set(rows), axis
        assert all(tuple(beyond.winners_of(point)) == SEEDS for point in points), axis
        shown |= {(point.variant, point.job, point.weight) for point in points}
    assert shown == set(beyond.winners()), "the table holds what no row shows"


def test_the_published_means_and_choices_are_those_of_the_table(studies):
    """Without the intervals, which take a minute."""
    beyond, tables, checked = studies.page_beyond, written(studies, "beyond"), 0
    for axis in beyond.AXES[:-1]:
        rows = {cells_of(line)[0].strip("*"): cells_of(line)[1:] for line in tables[axis].splitlines()[2:]}
        assert list(rows) == [point.label for point in beyond.points(axis)]
        for point in beyond.points(axis):
            winners, cells = beyond.winners_of(point).values(), rows[point.label]
            mean = np.mean([np.mean(one["auroc"]) for one in winners])
            assert float(cells[0].split()[0]) == pytest.approx(mean, abs=0.00051), point.label
            chosen = [f"{one['lr']:g}, {one['l1']:g}".replace("0.", ".") for one in winners if one["lr"]]
            assert cells[5] == ("; ".join(chosen) or "-"), point.label
            checked += 1
    assert checked == 95


def test_figures_are_drawn_of_rows(studies, monkeypatch, tmp_path):
    beyond = studies.page_beyond
    interval = beyond.Interval(0.8, 0.7, 0.9)

    def rows(axis):
        both = dict.fromkeys(beyond.SHOWN, interval)
        alone = {beyond.LOCALIZATION: interval}
        return [
            beyond.Row(point, alone if point.method in beyond.DASHES else both, {}) for point in beyond.points(axis)
        ]

    monkeypatch.setattr(beyond, "measured", rows)
    beyond.draw(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beyond-data.png", "beyond-forms.png"]
    assert "| The paper's data | **Bayes oracle** | .800 [.700, .900] |" in beyond.data_tables(rows("data"))


def test_regret_is_what_a_choice_loses(studies):
    def winner(weight, localization, val_auroc, val_localization, **criteria):
        known = {"weight": weight, "auroc": [localization], "val_auroc": val_auroc, "criteria": criteria}
        return {**known, "val_localization": val_localization}

    winners = [
        winner(0.0, 0.6, val_auroc=0.9, val_localization=0.5, kept=0.1, lost=1.0),
        winner(1.0, 0.8, val_auroc=0.7, val_localization=0.9, kept=0.3),
        winner(10.0, 0.7, val_auroc=0.8, val_localization=0.4, kept=0.4, lost=0.0),
    ]
    made = studies.page_beyond.choices([winners])
    assert {rule: (one.weight, one.regret) for rule, (one,) in made.items()} == {
        "validation scan AUROC": (0.0, pytest.approx(0.2)),
        "kept": (10.0, pytest.approx(0.1)),
        "slice labels of the validation scans": (1.0, 0.0),
    }
    assert "| kept | 10 | .700 | .100 | .100 |" in studies.page_beyond.regret_table({"NG": made})


TABLES = {
    "semi-synthetic": ("summary", "tables", "differences", "measures", "initialisations", "field"),
    "phantoms": (
        *("localization_auroc", "localization_auprc", "scan_auroc", "gaussian", "twins", "scan_twins", "supervised"),
    ),
    "fit": ("ensemble", "members", "each_division", "prostatex", "stability"),
    "beyond": ("ahead", "unfiltered", "about", "choice", "kernel"),
    "prostatex": ("methods",),
    "mitbih": ("methods",),
    "lidc-positions": ("methods", "seeds"),
    "field": ("localization", "scans"),
    "index": ("expect", "winners"),
    "robustness": ("bits",),
}
"""Tables by page, but those of `beyond` whose intervals take a minute."""


@pytest.mark.slow(but=[f"{page}-{name}" for page in TABLES for name in TABLES[page] if name != "winners"])
@pytest.mark.parametrize(("page", "name"), [(page, name) for page in TABLES for name in TABLES[page]])
def test_every_page_is_made_of_its_tables(studies, page, name):
    assert getattr(studies, f"page_{page.replace('-', '_')}").SECTIONS[name]() == written(studies, page)[name]


def test_a_lambda_that_validation_chose_is_a_row_of_its_own(studies):
    keep = studies.keep_fit
    assert keep.kept_name({"method": "ng", "weights": "0.1/1/10"}) == "ng chosen"
    assert keep.kept_name({"method": "ng"}) == keep.kept_name({"method": "ng", "weights": "1"}) == "ng"
    assert keep.kept_name({"method": "abmil_entropy", "weights": "0.1/1/10"}) == "abmil_entropy"
