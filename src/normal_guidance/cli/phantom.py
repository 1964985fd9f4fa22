"""`nguide phantom`: drawn CT scans with lesions as real DICOM, to try everything without a patient's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normal_guidance.cli.completion import ANATOMIES, COMPRESSIONS, ODDITIES, SOURCES, one_of, some_of
from normal_guidance.cli.training_options import parse_list


def phantom(
    layout: Annotated[
        str,
        typer.Argument(
            help="rsna-ich (head), rsna-pe (chest), rsna-at (abdomen) or folder.", autocompletion=one_of(SOURCES)
        ),
    ],
    out: Annotated[Path, typer.Argument(help="A folder that is empty or not there.")],
    scans: Annotated[int, typer.Option(min=1, help="Number of scans.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")] = 0,
    size: Annotated[int, typer.Option(help="Rows and columns of a slice.")] = 128,
    contrast: Annotated[float, typer.Option(help="Of the lesions: 0 is invisible, 2 is plain.")] = 1.0,
    positive: Annotated[
        float | None, typer.Option(help="Share of positive scans. Default: the real dataset's, .41, .30, .08.")
    ] = None,
    slices: Annotated[
        int | None, typer.Option(help="Median number of slices. Default: 32 (head), 64 (chest, abdomen).")
    ] = None,
    anatomy: Annotated[
        str | None,
        typer.Option(
            help="head, chest or abdomen, for the layout folder. Default: head.", autocompletion=one_of(ANATOMIES)
        ),
    ] = None,
    oddities: Annotated[
        str,
        typer.Option(
            help="Names (tilt,gaps,localizer,...), 'all' that the layout can have, or 'none'.",
            autocompletion=some_of(ODDITIES, "all", "none"),
        ),
    ] = "none",
    compression: Annotated[
        str,
        typer.Option(
            help="none, rle, jpeg2000, jpeg-lossless, jpeg-ls, or mixed: every scan another.",
            autocompletion=one_of(COMPRESSIONS),
        ),
    ] = "none",
) -> None:
    """Draw CT scans with lesions and write them as DICOM with label tables; OUT/phantom.json tells what is true.

    Nothing but the pixels tells positive scans from negative ones. No patient is behind them.
    """
    from rich.console import Console

    from normal_guidance.simulate.phantom.dataset import TRUTH, write_phantom
    from normal_guidance.simulate.phantom.oddities import ODDITIES

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
    told = truth["scans"]
    found, count = sum(scan["label"] for scan in told), sum(len(scan["files"]) for scan in told)
    patients = len({scan["patient_id"] or scan["scan_id"] for scan in told})
    console = Console()
    console.print(
        f"{len(told)} scans of {patients} patients, {found} positive, {count} slices: {out}",
        highlight=False,
        soft_wrap=True,
    )
    for scan in told:
        if scan["oddity"]:
            console.print(f"  {scan['scan_id']}: {scan['oddity']}, {scan['detail']}", highlight=False, soft_wrap=True)
    console.print(f"What is true about them: {out / TRUTH}", highlight=False, soft_wrap=True)
