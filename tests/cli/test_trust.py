"""`nguide trust`: table, page, numbers and picture."""

from normal_guidance.base.files import read_json
from small_command import document, nguide
from small_trust import make_run


def test_a_run_is_tested_and_everything_is_written(tmp_path):
    trained = make_run(tmp_path)
    said = nguide("trust", trained.run, "-o", tmp_path / "out", "--device", "cpu").stdout
    for title in ("Shuffle slices", "Randomise weights", "Delete and insert", "Inverted attention"):
        assert said.count(title) >= 2  # in the table, and in words
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["trust.json", "trust.md", "trust.png"]
    written = read_json(tmp_path / "out" / "trust.json")
    assert [one["name"] for one in written["findings"]] == ["shuffle", "randomize", "deletion", "inverted"]
    page = (tmp_path / "out" / "trust.md").read_text()
    assert "trust.png" in page
    for one in written["findings"]:
        assert f"## {one['title']}: {one['verdict']}" in page
        assert one["meaning"] in page
    told = document("trust", trained.run, "--split", trained.split, "-o", tmp_path / "json", "--by", "attention")
    assert told == read_json(tmp_path / "json" / "trust.json")
    assert (told["by"], told["part"]) == ("attention", "test")
