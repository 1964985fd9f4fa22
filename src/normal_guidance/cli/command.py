"""The class of every command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from normal_guidance.cli import endings
from normal_guidance.errors import UserError
from normal_guidance.files import remove_left_drafts_of


class Command(TyperCommand):
    """A command whose name and options `endings` knows, so that it can say how to go on.

    It removes what a killed command had begun to write into the same output, and says once if a store that it reads
    lacks scans of its index.
    """

    def invoke(self, ctx: Any) -> Any:  # Any: the class differs between releases of typer
        endings.begin(ctx.command_path.removeprefix(ctx.find_root().command_path).strip(), ctx.params)
        if ctx.params.get("out") is not None and not ctx.params.get("dry_run"):
            remove_left_drafts_of(ctx.params["out"])
        for line in lacking_lines(ctx.params):
            typer.echo(line, err=True)
        return super().invoke(ctx)


def lacking_lines(options: Mapping[str, Any]) -> list[str]:
    """Return a line for each store among the options that lacks scans, except for the one that is written."""
    lines = []
    for path in dict.fromkeys(_paths(value for name, value in options.items() if name != "out")):
        if (path / "store.json").is_file():
            from normal_guidance.features.store_files import LACKING, read_about

            with suppress(UserError):  # the command itself says what is wrong with it
                lacking = read_about(path).provenance.get(LACKING, 0)
                if lacking:
                    lines.append(
                        f"{path} lacks {lacking} scans of its index, which could not be read; its problems.csv says "
                        "why, and the same nguide encode takes them up"
                    )
    return lines


def _paths(values: Iterator[Any]) -> Iterator[Path]:
    for value in values:
        if isinstance(value, Path):
            yield value
        elif isinstance(value, list | tuple):
            yield from _paths(iter(value))
