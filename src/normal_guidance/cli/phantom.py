"""`nguide phantom`: draw CT scans with lesions and write them as DICOM, to try everything without patient data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normal_guidance.cli.completion import ANATOMIES, COMPRESSIONS, LAYOUTS, ODDITIES, one_of, some_of
from normal_guidance.cli.training_options import parse_list


def phantom(
    layout: Annotated[
        str,
        typer.Argument(
            help="Layout of the files: rsna-ich (head), rsna-pe (chest), rsna-at (abdomen) or folder.",
            metavar="LAYOUT",
            autocompletion=one_of(LAYOUTS),
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must be new or empty.", metavar="OUT")],
    scans: Annotated[int, typer.Option(min=1, help="Number of scans.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same files.")] = 0,
    size: Annotated[int, typer.Option(help="Rows and columns of a slice.")] = 128,
    contrast: Annotated[float, typer.Option(help="Contrast of the lesions: 0 is invisible, 2 is easy to see.")] = 1.0,
    positive: Annotated[
        float | None,
        typer.Option(
            help="Share of positive scans. Default: as in the real dataset (head .41, chest .30, abdomen .08)."
        ),
    ] = None,
    slices: Annotated[
        int | None, typer.Option(help="Median number of slices. Default: 32 (head), 64 (chest, abdomen).")
    ] = None,
    anatomy: Annotated[
        str | None,
        typer.Option(
            help="For the layout folder: head, chest or abdomen. Default: head.", autocompletion=one_of(ANATOMIES)
        ),
    ] = None,
    oddities: Annotated[
        str,
        typer.Option(
            help="Irregularities to add: names (tilt,gaps,localizer,...), all that the layout can have, or none.",
            autocompletion=some_of(ODDITIES, "all", "none"),
        ),
    ] = "none",
    compression: Annotated[
        str,
        typer.Option(
            help="none, rle, jpeg2000, jpeg-lossless, jpeg-ls, or mixed (a different one for each scan).",
            autocompletion=one_of(COMPRESSIONS),
        ),
    ] = "none",
) -> None:
    """Draw CT scans with lesions and write them as DICOM with label tables; OUT/phantom.json holds the truth.

    Positive and negative scans differ in their pixels only. No patient data are used.
    """
    from rich.console import Console

    from normal_guidance.scans.phantom.oddities import ODDITIES
    from normal_guidance.scans.phantom.phantom_files import TRUTH, write_phantom

    if oddities == "all":
        names = [name for name, one in ODDITIES.items() if layout in one.layouts]
    else:
        names = [] if oddities == "none" else parse_list("--oddities", oddities, str)
    truth = write_phantom(
        layout,
        out,
        scans=scans,
        seed=seed,
        size=size,
        contrast=contrast,
        positive=positive,
        slices=slices,
        anatomy=anatomy,
        oddities=names,
        compression=compression,
    )
    drawn = truth["scans"]
    found, count = sum(scan["label"] for scan in drawn), sum(len(scan["files"]) for scan in drawn)
    patients = len({scan["patient_id"] or scan["scan_id"] for scan in drawn})
    console = Console()
    console.print(
        f"{len(drawn)} scans of {patients} patients, {found} positive, {count} slices: {out}",
        highlight=False,
        soft_wrap=True,
    )
    for scan in drawn:
        if scan["oddity"]:
            console.print(f"  {scan['scan_id']}: {scan['oddity']}, {scan['detail']}", highlight=False, soft_wrap=True)
    console.print(f"Truth: {out / TRUTH}", highlight=False, soft_wrap=True)
