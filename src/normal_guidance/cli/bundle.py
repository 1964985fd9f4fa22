"""`nguide bundle`: make a folder of a trained model that others can use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normal_guidance.cli.json_output import AsJson, print_json


def bundle(
    run: Annotated[Path, typer.Argument(help="Folder of a run on a store, or of nguide fit.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the bundle.")],
    sensitivity: Annotated[
        float | None,
        typer.Option(help="Set the threshold to find this share of the positive validation scans, such as 0.95."),
    ] = None,
    group: Annotated[str, typer.Option(help="Name of the winner, where the run has several.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a bundle of a run: weights, encoder's name, window, normalisation, calibration, threshold; no patient data.

    Without --sensitivity, the threshold maximises sensitivity + specificity on the validation scans.
    """
    from normal_guidance.base.files import read_json
    from normal_guidance.fit.bundle import BUNDLE, bundle_run, write_bundle
    from normal_guidance.scans.index.manifest import FINDINGS
    from normal_guidance.statistics.calibration import describe
    from normal_guidance.statistics.conformal import promise

    made = bundle_run(run, group=group, sensitivity=sensitivity)
    write_bundle(made, out)
    if as_json:
        print_json(read_json(out / (FINDINGS if made.further else BUNDLE)))
        return
    if made.encoder is None:
        typer.echo(f"{out}: {made.method} on {made.features} features a slice that nguide encode did not make")
    else:
        typer.echo(f"{out}: {made.method} on {made.encoder.name}, made for {made.expects}")
    for one in made.each:
        promised = [] if one.intervals is None else [f"An interval {promise(one.intervals.coverage)}."]
        for line in (*describe(one.operation), *promised):
            typer.echo(f"{one.finding.name}: {line}" if one.finding else line)
    typer.echo(f"Next: nguide predict {'SCAN' if made.encoder else 'FEATURES'} --model {out} -o OUT")
