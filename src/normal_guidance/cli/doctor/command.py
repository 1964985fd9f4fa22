"""`nguide doctor`: what is here, what is missing, what that is for, and the command that mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from normal_guidance import __version__
from normal_guidance.cli.json_output import AsJson, print_json

if TYPE_CHECKING:
    from normal_guidance.cli.doctor.checks import Check, Diagnosis

BROKEN_EXIT_CODE = 1
"""Something that everything depends on is missing or broken."""

COLORS = {"ok": typer.colors.GREEN, "none": None, "missing": typer.colors.YELLOW, "broken": typer.colors.RED}


def doctor(as_json: AsJson = False) -> None:
    """Look at this installation: versions, codecs, encoders, GPU, disk; what is missing, and the command that mends it.

    Exit code 0: what every command needs is here, though parts that are not needed by all may be missing; 1: something
    essential is missing or broken. Reads no scan, makes no network call, changes nothing.
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
    """Lines for people."""
    commit = diagnosis.commit
    built = "" if commit is None else f", commit {commit['id'][:7]}{' with changes' if commit['dirty'] else ''}"
    wide = max(len(check.name) for check in diagnosis.checks)
    lines = [f"nguide {__version__}{built}"]
    for check in diagnosis.checks:
        lines += _lines(check, wide)
    wrong = [check for check in diagnosis.checks if check.state in ("missing", "broken")]
    broken = [check.name for check in wrong if check.essential]
    if broken:
        lines.append(f"Nothing works without: {', '.join(broken)}")
    elif wrong:
        lines.append(f"What every command needs is here; missing or broken for some: {len(wrong)}")
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
