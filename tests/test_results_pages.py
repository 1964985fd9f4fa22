"""The pages of docs/results say what the tables in docs/results/tables say."""

from pathlib import Path

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
    page = tmp_path / "results/phantoms.md"
    page.parent.mkdir(parents=True)
    page.write_text("Before.\n\n<!-- measured: localization -->\n\n| old |\n\n<!-- end -->\n\nAfter.\n")
    monkeypatch.setattr(studies.make_page, "DOCS", tmp_path)
    monkeypatch.setattr(studies.page_phantoms, "draw", lambda: None)
    studies.make_page.main(["phantoms", "localization"])
    assert "| old |" in page.read_text()
    studies.make_page.main(["phantoms", "localization", "--write"])
    made = studies.page_phantoms.SECTIONS["localization"]()
    assert page.read_text() == f"Before.\n\n<!-- measured: localization -->\n\n{made}\n\n<!-- end -->\n\nAfter.\n"
    assert capsys.readouterr().out == f"## localization\n\n{made}\n\n" * 2
    with pytest.raises(SystemExit) as stop:
        studies.make_page.main(["phantoms", "triplets"])
    assert stop.value.code == 2
    assert "'triplets' is unknown; choose from localization" in capsys.readouterr().err


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


def test_the_figure_of_beyond_is_drawn_of_its_points(studies, monkeypatch, tmp_path):
    beyond = studies.page_beyond
    points = beyond.points()
    assert len({(point.variant, point.label) for point in points}) == len(points) > 0
    assert all(tuple(beyond.winners_of(point)) == SEEDS for point in points)
    monkeypatch.setattr(
        beyond, "measured", lambda: [beyond.Row(point, dict.fromkeys(beyond.SHOWN, (0.8, 0.1))) for point in points]
    )
    beyond.draw(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["beyond-data.png"]


TABLES = {
    "semi-synthetic": ("summary", "tables", "initialisations"),
    "phantoms": ("localization",),
    "fit": ("ensemble", "kinds", "stability"),
    "beyond": ("ahead",),
    "prostatex": ("methods",),
    "mitbih": ("methods",),
    "lidc-positions": ("methods",),
    "field": ("localization",),
    "robustness": ("bits",),
}


@pytest.mark.parametrize(("page", "name"), [(page, name) for page in TABLES for name in TABLES[page]])
def test_every_page_is_made_of_its_tables(studies, page, name):
    assert getattr(studies, f"page_{page.replace('-', '_')}").SECTIONS[name]() == written(studies, page)[name]


def test_a_lambda_that_validation_chose_is_a_row_of_its_own(studies):
    keep = studies.keep_fit
    assert keep.kept_name({"method": "ng", "weights": "0.1/1/10"}) == "ng chosen"
    assert keep.kept_name({"method": "ng"}) == keep.kept_name({"method": "ng", "weights": "1"}) == "ng"
    assert keep.kept_name({"method": "abmil_entropy", "weights": "0.1/1/10"}) == "abmil_entropy"
