"""`nguide weights`: show, import and check the pretrained weights of the named encoders."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from normal_guidance.cli.command import Command, Group
from normal_guidance.cli.completion import ENCODERS, one_of
from normal_guidance.cli.json_output import AsJson, print_json


class _ListByDefault(Group):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: the class differs between releases of typer
        return super().parse_args(ctx, args or ["list"])


weights_app = typer.Typer(
    cls=_ListByDefault,
    help="List, import and check the pretrained weights of encoders. Default: list.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@weights_app.command("list", cls=Command)
def list_weights(as_json: AsJson = False) -> None:
    """List the known weights and where they are; the files are not read."""
    from normal_guidance.scans.features.weights import KNOWN_WEIGHTS, cache_folder, find_weights

    found = {name: find_weights(name) for name in KNOWN_WEIGHTS}
    if as_json:
        rows = [{"name": name, **asdict(known), "found": found[name]} for name, known in KNOWN_WEIGHTS.items()]
        print_json({"cache": cache_folder(), "weights": rows})
        return
    for name, known in KNOWN_WEIGHTS.items():
        file = found[name]
        where = f"in {file}" if file else f"not on this machine; nguide weights import {name} {known.file}"
        typer.echo(f"{name}: {known.source}, {known.mib} MiB, {where}")
    typer.echo(f"cache: {cache_folder()} (NGUIDE_CACHE chooses another)")


@weights_app.command("import", cls=Command)
def import_(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of an encoder that nguide weights list shows.", metavar="NAME", autocompletion=one_of(ENCODERS)
        ),
    ],
    file: Annotated[Path, typer.Argument(help="The published file, downloaded elsewhere.", metavar="FILE")],
) -> None:
    """Copy a weights file into the cache, if its sha256 is the published one."""
    from normal_guidance.scans.features.weights import import_weights

    typer.echo(f"{name}: {import_weights(name, file)}")


@weights_app.command("check", cls=Command)
def check(as_json: AsJson = False) -> None:
    """Compare the sha256 of each weights file with the published one; fail if a file is damaged."""
    from normal_guidance.base.errors import UserError
    from normal_guidance.scans.features.weights import check_weights

    found = check_weights()
    if as_json:
        print_json([one._asdict() for one in found])
    for one in [] if as_json else found:
        typer.echo(f"{one.name}: {one.state} ({', '.join(str(part) for part in (one.file, one.detail) if part)})")
    damaged = [str(one.file) for one in found if one.state == "damaged"]
    if damaged:
        raise UserError(f"{', '.join(damaged)}: damaged; delete it and import it again (nguide weights import)")
