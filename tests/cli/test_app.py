"""The command line's frame: version, help, unknown flags, and what an error looks like."""

import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.cli.commands import Commands, app

runner = CliRunner()


@pytest.fixture
def failing_app():
    """An application with the same policy for errors and two commands that fail."""
    failing = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @failing.command()
    def mend() -> None:
        raise UserError("scan 'A17' has no slices;\nremove its row from the manifest")

    @failing.command()
    def bug() -> None:
        raise ValueError("this one is ours")

    return failing


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"nguide {__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_answers(flag):
    result = runner.invoke(app, [flag])
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    assert "--install-completion" in result.stdout


def test_paragraphs_of_help_are_not_broken():
    """The line breaks of a docstring are not those of the terminal."""
    for command in typer.main.get_command(app).commands.values():
        assert not re.search(r"[^\n]\n[^\n]", command.help), command.name


def test_every_option_says_what_it_means():
    """A help text under another name than that of the parameter would be lost."""
    groups = [typer.main.get_command(app)]
    for group in groups:
        for command in group.commands.values():
            groups += [command] if hasattr(command, "commands") else []
            assert [param.name for param in command.params if not (param.help or param.hidden)] == [], command.name


def test_no_arguments_shows_help():
    assert "Usage" in runner.invoke(app, []).output


@pytest.mark.parametrize("arguments", [["--no-such-flag"], ["no-such-command"]])
def test_unknown_words_fail(arguments):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "no-such" in result.stderr


def test_a_missing_value_is_not_an_option_that_the_command_lacks():
    said = runner.invoke(app, ["export", "model", "--out"]).stderr
    assert "Option '--out' requires an argument" in said
    assert "does not have it" not in said


def test_a_missing_layout_is_named_with_the_folder_wherever_it_stands():
    said = runner.invoke(app, ["index", "--table", "labels.csv", "scans", "-o", "idx"]).stderr
    assert "nguide index folder scans --table labels.csv" in " ".join(said.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train"], "nguide fit STORE -o MODEL makes a model; nguide sweep STORE -o RUNS trains methods"),
        (
            ["fit", "store", "--epochs", "3"],
            "No such option: --epochs. nguide fit does not have it; sweep, experiment,",
        ),
        (["index", "scans"], "nguide index folder scans --table labels.csv -o INDEX"),
        (
            ["fit", "store", "splits/split-1.csv", "-o", "m"],
            "(splits/split-1.csv). A table of parts goes behind --split.",
        ),
    ],
)
def test_a_word_that_is_not_taken_gets_a_hint(arguments, hint):
    result = runner.invoke(app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert hint in " ".join(result.stderr.split())


def test_a_missing_folder_of_a_known_layout_needs_no_hint():
    result = runner.invoke(app, ["index", "folder"], env={"COLUMNS": "400"})
    assert "Missing argument 'ROOT'" in result.stderr
    assert "labels.csv" not in result.stderr


@pytest.mark.parametrize("command", ["", "encode", "store", "store show", "weights"])
def test_flags_have_no_type_in_the_help(command):
    result = runner.invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "--help" in result.stdout
    assert "bool" not in result.stdout.lower()


def test_fit_refuses_what_is_not_a_store_before_its_slow_imports():
    code = (
        "import sys; from typer.testing import CliRunner; from normal_guidance.cli.commands import app; "
        "said = CliRunner().invoke(app, ['fit', 'nowhere', '-o', 'new']).stderr; "
        "print('not a feature store' in said, 'torch' in sys.modules, 'pandas' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True False False\n"


def test_user_error_is_one_line_on_stderr(failing_app):
    result = runner.invoke(failing_app, ["mend"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "error: scan 'A17' has no slices; remove its row from the manifest\n"


def test_user_error_is_red_on_a_terminal(failing_app):
    assert runner.invoke(failing_app, ["mend"], color=True).stderr.startswith("\x1b[31merror: ")


def test_our_own_error_keeps_its_traceback(failing_app):
    result = runner.invoke(failing_app, ["bug"])
    assert result.exit_code == 1
    assert type(result.exception) is ValueError


def test_the_installed_command_answers():
    """The entry point, in a process of its own, as a user runs it."""
    command = [sys.executable, "-c", "from normal_guidance.cli.__main__ import main; main()", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"nguide {__version__}\n"
