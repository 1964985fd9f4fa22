"""`nguide split` and `nguide audit`: split scans by patient, and check that the parts share nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.training_options import parse_list

if TYPE_CHECKING:
    from normal_guidance.scans.features.store import FeatureStore
    from normal_guidance.scans.index.manifest import Manifest
    from normal_guidance.scans.index.splits import Split

Scans = Annotated[
    Path, typer.Argument(help="Folder that nguide index made, or a feature store.", metavar="INDEX_OR_STORE")
]


def split(
    scans: Scans,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the tables split-SEED.csv.")],
    seeds: Annotated[str, typer.Option(help="Seeds, one split for each.")] = "1001,2001,3001",
    proportions: Annotated[str, typer.Option(help="Proportions of training, validation and test patients.")] = "4:1:1",
    as_json: AsJson = False,
) -> None:
    """Split scans into train, val and test, by patient and stratified by label.

    No patient is in two parts. The same seed gives the same split.
    """
    from normal_guidance.base.files import make_folder
    from normal_guidance.scans.index.splits import split_scans, write_split

    shares, numbers = _proportions(proportions), parse_list("--seeds", seeds, int)
    listed = _listed(scans)
    make_folder(out)
    rows = []
    for seed in numbers:
        found = split_scans(listed.scan_ids, listed.patient_ids, listed.labels.tolist(), seed, shares)
        path = out / f"split-{seed}.csv"
        write_split(path, found)
        rows.append({"file": path, "seed": seed, "parts": found.counts()})
        if not as_json:
            typer.echo(f"{path}: {_counts(found)}")
    if as_json:
        print_json(rows)


def _listed(folder: Path) -> Manifest | FeatureStore:
    """Return the scans of an index or of a store: both have ids, patients and labels."""
    from normal_guidance.scans.features.store import is_store, open_store
    from normal_guidance.scans.index.manifest import read_manifest

    if is_store(folder):
        return open_store(folder)
    if folder.is_dir() and not (folder / "manifest.parquet").is_file():
        raise UserError(
            f"{folder} is neither an index (no manifest.parquet) nor a feature store (no store.json); give a folder of "
            "nguide index, nguide encode or nguide store import"
        )
    return read_manifest(folder)


def audit(
    scans: Scans,
    splits: Annotated[list[Path], typer.Argument(help="Tables that nguide split made.", metavar="SPLIT")],
    store: Annotated[
        Path | None, typer.Option(help="Feature store: also look for the same scan under two names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that the parts of splits share no patient, scan or slice; in a feature store, no patient and no features.

    The command fails and names the first thing that two parts share.
    """
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.scans.index.manifest import Manifest
    from normal_guidance.scans.index.splits import audit as audit_split
    from normal_guidance.scans.index.splits import read_split

    listed = _listed(scans)
    features = open_store(store) if store is not None else None if isinstance(listed, Manifest) else listed
    checksums = None if features is None else _checksums(features)
    rows = []
    for path in splits:
        found = read_split(path)
        try:
            compared = audit_split(found, listed, checksums)
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


def _checksums(store: FeatureStore) -> dict[str, str]:
    return dict(zip(store.scan_ids, store.scans["sha256"].tolist(), strict=True))
