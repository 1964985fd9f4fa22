"""`nguide split` and `nguide audit`: split scans by patient, and check that the parts share nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.training_options import parse_list
from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from normal_guidance.data.splits import Split

Index = Annotated[Path, typer.Argument(help="Folder that nguide index made.", metavar="INDEX")]


def split(
    index: Index,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the tables split-SEED.csv.")],
    seeds: Annotated[str, typer.Option(help="Seeds, one split for each.")] = "1001,2001,3001",
    proportions: Annotated[str, typer.Option(help="Proportions of training, validation and test patients.")] = "4:1:1",
    as_json: AsJson = False,
) -> None:
    """Split scans into train, val and test, by patient and stratified by label.

    No patient is in two parts. The same seed gives the same split.
    """
    from normal_guidance.data.manifest import read_manifest
    from normal_guidance.data.splits import split_scans, write_split
    from normal_guidance.files import make_folder

    shares, numbers = _proportions(proportions), parse_list("--seeds", seeds, int)
    manifest = read_manifest(index)
    make_folder(out)
    rows = []
    for seed in numbers:
        found = split_scans(manifest.scan_ids, manifest.patient_ids, manifest.labels.tolist(), seed, shares)
        path = out / f"split-{seed}.csv"
        write_split(path, found)
        rows.append({"file": path, "seed": seed, "parts": found.counts()})
        if not as_json:
            typer.echo(f"{path}: {_counts(found)}")
    if as_json:
        print_json(rows)


def audit(
    index: Index,
    splits: Annotated[list[Path], typer.Argument(help="Tables that nguide split made.", metavar="SPLIT")],
    store: Annotated[
        Path | None, typer.Option(help="Feature store: also look for the same scan under two names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that the parts of splits share no patient, scan or slice.

    The command fails and names the first thing that two parts share.
    """
    from normal_guidance.data.manifest import read_manifest
    from normal_guidance.data.splits import audit as audit_split
    from normal_guidance.data.splits import read_split

    manifest = read_manifest(index)
    checksums = None if store is None else _checksums(store)
    rows = []
    for path in splits:
        found = read_split(path)
        try:
            compared = audit_split(found, manifest, checksums)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        rows.append({"file": path, "overlap": False, "compared": compared, "parts": found.counts()})
        if not as_json:
            typer.echo(f"{path}: no overlap; compared {', '.join(f'{n:,} {what}' for what, n in compared.items())}")
            typer.echo(f"  {_counts(found)}")
    if as_json:
        print_json(rows)


def _proportions(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(":")]
    except ValueError as error:
        raise UserError(f"--proportions {text}: write whole numbers, as in 4:1:1") from error


def _counts(found: Split) -> str:
    return ", ".join(
        f"{part} {counts['scans']:,} scans ({counts['positive']:,} positive) of {counts['patients']:,} patients"
        for part, counts in found.counts().items()
    )


def _checksums(store: Path) -> dict[str, str]:
    from normal_guidance.features.store import open_store

    scans = open_store(store).scans
    return dict(zip(scans["scan_id"].tolist(), scans["sha256"].tolist(), strict=True))
