"""`nguide doctor`: report what is installed and what is missing, with the command that repairs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from normal_guidance import __version__
from normal_guidance.cli.json_output import AsJson, print_json

if TYPE_CHECKING:
    from normal_guidance.cli.doctor.checks import Check, Diagnosis

BROKEN_EXIT_CODE = 1
"""A package that every command needs is missing or broken."""

COLORS = {"ok": typer.colors.GREEN, "none": None, "missing": typer.colors.YELLOW, "broken": typer.colors.RED}


def doctor(as_json: AsJson = False) -> None:
    """Check this installation: versions, codecs, encoders, GPU, disk. For each missing part, show how to install it.

    Exit code 0: everything that all commands need works; 1: part of it is missing or broken. The command reads no scan,
    makes no network call and changes nothing.
    """
    from normal_guidance.cli.doctor.checks import examine

    diagnosis = examine()
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        for line in describe(diagnosis):
            typer.echo(line)
    if not diagnosis.ok:
        raise typer.Exit(BROKEN_EXIT_CODE)


def describe(diagnosis: Diagnosis) -> list[str]:
    """Return the lines to print."""
    commit = diagnosis.commit
    built = "" if commit is None else f", commit {commit['id'][:7]}{' with changes' if commit['dirty'] else ''}"
    wide = max(len(check.name) for check in diagnosis.checks)
    lines = [f"nguide {__version__}{built}"]
    for check in diagnosis.checks:
        lines += _lines(check, wide)
    wrong = [check for check in diagnosis.checks if check.state in ("missing", "broken")]
    broken = [check.name for check in wrong if check.essential]
    if broken:
        lines.append(f"No command works without: {', '.join(broken)}")
    elif wrong:
        lines.append(
            "Everything that all commands need is here; missing or broken, and needed by some commands only: "
            f"{len(wrong)}"
        )
    else:
        lines.append("Everything is here")
    return lines


def _lines(check: Check, wide: int) -> list[str]:
    state = typer.style(f"{'-' if check.state == 'none' else check.state:8}", fg=COLORS[check.state])
    below = " " * (wide + 11)
    lines = [f"{state} {check.name:{wide}}  {check.found}"]
    if check.state in ("missing", "broken"):
        lines += [f"{below}for: {check.purpose}", f"{below}fix: {check.fix}"]
    return lines
