"""Commands of nguide in this process, as a user types them."""

import json
from typing import Any, NoReturn

import typer
from click.testing import Result
from typer.testing import CliRunner

from normal_guidance.cli.commands import app


def nguide(*words: object, code: int = 0, **options: object) -> Result:
    """Run a command, which must end with this code."""
    result = CliRunner().invoke(app, [str(word) for word in words], **options)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*words: object, code: int = 0) -> Any:
    """The one JSON document that a command prints, as strict readers read it: no NaN, nothing behind it."""
    return json.loads(nguide(*words, "--json", code=code).stdout, parse_constant=_refuse)


def _refuse(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")


def output_of(*words: object, code: int = 0) -> str:
    """All that a command prints, with single blanks: tables and boxes are as wide as the terminal."""
    return " ".join(nguide(*words, code=code).output.split())


def refusal(*words: object) -> str:
    """The one line that a mistake is told in, and nothing else is."""
    result = nguide(*words, code=2)
    assert result.stderr.startswith("error: "), result.stderr
    assert (result.stderr.count("\n"), result.stdout) == (1, "")
    return result.stderr


def every_command(group: Any = None, name: str = "") -> dict[str, Any]:
    """Every command by the words that one types."""
    group = group or typer.main.get_command(app)
    if not hasattr(group, "commands"):
        return {name: group}
    below = [every_command(command, f"{name} {word}".strip()) for word, command in group.commands.items()]
    return {words: command for commands in below for words, command in commands.items()}
