"""`nguide describe`: describe a dataset by the paper's tables and density figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.json_output import AsJson, print_json, valid_json


def describe(
    index: Annotated[Path, typer.Argument(help="Folder that nguide index made.", metavar="INDEX")],
    split: Annotated[
        Path | None, typer.Option(help="Table that nguide split made: describe each of its parts as well.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for description.md, description.json and density.png. Default: print only."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe indexed scans: lengths, blocks of positive slices, and their positions."""
    from normal_guidance.base.files import make_folder, write_atomically, write_json
    from normal_guidance.scans.index.indexing import describe as describe_scans
    from normal_guidance.scans.index.manifest import PARTS, read_manifest
    from normal_guidance.scans.index.splits import read_parts
    from normal_guidance.study.study_tables import description_tables

    manifest = read_manifest(index)
    found = {"all": describe_scans(manifest)}
    if split is not None:
        part_of = read_parts(split, manifest)
        missing = [scan for scan in manifest.scan_ids if scan not in part_of]
        if missing:
            raise UserError(f"{split} has no part for scan {missing[0]!r} ({len(missing)} such scans); split again")
        for part in PARTS:
            numbers = [n for n, scan in enumerate(manifest.scan_ids) if part_of[scan] == part]
            if numbers:
                found[part] = describe_scans(manifest.take(numbers))
    page = "\n".join(grid.markdown() for grid in description_tables(str(manifest.about["source"]), found))
    values = valid_json({part: description.to_dict() for part, description in found.items()})
    if as_json:
        print_json(values)
    else:
        typer.echo(page)
    if out is not None:
        from normal_guidance.study.figures.datasets import draw_density

        make_folder(out)
        write_atomically(out / "description.md", page.encode())
        write_json(out / "description.json", values)
        densities = {part: one.density for part, one in found.items() if one.positive_slices}
        if densities:
            draw_density(densities, out / "density.png")
