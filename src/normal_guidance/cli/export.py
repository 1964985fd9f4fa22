"""`nguide export`: a trained model as one file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normal_guidance.cli.json_output import AsJson, print_json


def export(
    model: Annotated[Path, typer.Argument(help="Folder of nguide fit, of a bundle, or of a run.", metavar="MODEL")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File that ends in .onnx or .pt2 (torch.export).")],
    as_json: AsJson = False,
) -> None:
    """Write a model as one ONNX file, or as PyTorch's exported program, that runs without this package.

    It takes the features of one scan, (slices, features) in float32 with any number of slices, and gives probability,
    logit and attention as nguide predict does; the metadata names encoder, preprocessing and thresholds. What was
    written is compared with the model before the file appears.
    """
    from normal_guidance.fit.bundle import load_bundle
    from normal_guidance.fit.export import TOLERANCE, export_bundle, read_metadata

    export_bundle(load_bundle(model), out)
    about = read_metadata(out)
    if as_json:
        print_json({"file": out, "bytes": out.stat().st_size, "tolerance": TOLERANCE, "metadata": about})
        return
    encoder = about["encoder"] or "features that nguide encode did not make"
    typer.echo(f"{out}: {about['method']} on {about['features']} features a slice ({encoder})")
    typer.echo(f"Its outputs {about['outputs']} are those of {model} within {TOLERANCE:g} of their size.")
