"""`nguide trust`: table, page, numbers and picture."""

import json

import pytest
from typer.testing import CliRunner

from normal_guidance.base.files import read_json
from normal_guidance.cli import app
from small_trust import make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("trained"))


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["trust", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_a_run_is_tested_and_everything_is_written(trained, tmp_path):
    code, said, _ = call(trained.run, "-o", tmp_path / "out", "--device", "cpu")
    assert code == 0
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


def test_json_is_the_file(trained, tmp_path):
    code, said, _ = call(trained.run, "--split", trained.split, "-o", tmp_path, "--by", "attention", "--json")
    assert code == 0
    told = json.loads(said, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert told == read_json(tmp_path / "trust.json")
    assert (told["by"], told["part"]) == ("attention", "test")


def test_mistakes_are_one_line(trained, tmp_path):
    for words, reason in (
        ([trained.run, "--store", tmp_path, "-o", tmp_path], "is not a feature store"),
        ([trained.run, "-o", tmp_path, "--by", "heads"], "--by heads is unknown; choose one of slices, attention"),
        ([trained.run, "-o", tmp_path, "--part", "train"], "models are not tested on part 'train'"),
        ([tmp_path, "-o", tmp_path / "out"], "is not a complete run"),
    ):
        code, _, complaint = call(*words)
        assert code == 2
        assert reason in complaint
        assert len(complaint.splitlines()) == 1
    assert not (tmp_path / "out").exists()
