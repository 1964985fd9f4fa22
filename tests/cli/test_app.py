"""The command line's frame: version, help and unknown words."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from normal_guidance import __version__
from normal_guidance.cli.commands import app

runner = CliRunner()


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"nguide {__version__}\n"


def test_help_is_one_screen_that_begins_with_four_commands():
    printed = runner.invoke(app, ["--help"], env={"COLUMNS": "100"}).stdout.splitlines()
    assert len(printed) <= 40
    panels = [number for number, line in enumerate(printed) if line.startswith("╭")]
    assert "Start here" in printed[panels[0]]
    rows = printed[panels[0] + 1 : panels[1] - 1]
    assert [row.split()[1] for row in rows] == ["fit", "predict", "view", "demo"]
    assert all(re.match(r"│ [a-z]+ +[A-Z]", line) for line in printed if line.startswith("│")), "one line a command"


@pytest.mark.parametrize("words", ["", "--help", "-h", "encode -h", "store --help", "store show -h", "weights -h"])
def test_help_answers_and_flags_have_no_type_in_it(words):
    result = runner.invoke(app, words.split())
    assert result.exit_code == (0 if words else 2)
    assert "Usage" in result.output
    assert "--help" in result.output
    assert "bool" not in result.output.lower()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("train", "nguide fit STORE -o MODEL makes a model; nguide sweep STORE -o RUNS trains methods"),
        ("fit store --epochs 3", "No such option: --epochs. nguide fit does not have it; sweep, experiment,"),
        ("index scans", "nguide index folder scans --table labels.csv -o INDEX"),
        ("index --table labels.csv scans -o idx", "nguide index folder scans --table labels.csv"),
        ("sweep store splits/split-1.csv -o m", "(splits/split-1.csv). A table of parts goes behind --split."),
        ("--no-such-flag", "No such option: --no-such-flag"),
        (
            "phantom folder out --scans 0",
            "Invalid value for '--scans': Input should be greater than or equal to 1. '0' was",
        ),
    ],
)
def test_a_word_that_is_not_taken_gets_a_hint(words, hint):
    result = runner.invoke(app, words.split(), env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert hint in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("export model --out", "Option '--out' requires an argument", "does not have it"),
        ("index folder", "Missing argument 'ROOT'", "labels.csv"),
    ],
)
def test_a_word_that_is_only_missing_gets_none(words, said, hint):
    result = runner.invoke(app, words.split(), env={"COLUMNS": "400"})
    assert said in result.stderr
    assert hint not in result.stderr


def test_fit_refuses_what_is_not_a_store_before_its_slow_imports():
    code = (
        "import sys; from typer.testing import CliRunner; from normal_guidance.cli.commands import app; "
        "said = CliRunner().invoke(app, ['fit', 'nowhere', '-o', 'new']).stderr; "
        "print('not a feature store' in said, 'torch' in sys.modules, 'pandas' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True False False\n"
