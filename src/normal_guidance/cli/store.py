"""`nguide store`: show and verify feature stores, and convert them from and to other formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.command import Command, Group
from normal_guidance.cli.completion import FORMATS, IMPORT_FORMATS, one_of
from normal_guidance.cli.json_output import AsJson, print_json

if TYPE_CHECKING:
    from normal_guidance.scans.features.store import FeatureStore

store_app = typer.Typer(
    help="Show, verify, import and export feature stores.",
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Store = Annotated[Path, typer.Argument(help="Folder of a feature store.", metavar="STORE")]
Form = Annotated[
    str,
    typer.Option(
        "--format",
        "-f",
        help="npz, hdf5 or torchmil.",
        metavar="FORMAT",
        autocompletion=one_of(FORMATS),
    ),
]


@store_app.command(cls=Command)
def show(store: Store, as_json: AsJson = False) -> None:
    """Show what a store holds and how it was made; features are not read."""
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store)
    if as_json:
        print_json(_about(opened))
        return
    typer.echo(repr(opened))
    typer.echo(f"recipe: {opened.recipe or 'unknown'}")
    typer.echo(f"fingerprint: {opened.fingerprint}")
    print_json(opened.provenance)


def _about(store: FeatureStore) -> dict[str, Any]:
    """Return what `show` prints, as JSON."""
    return {
        "folder": store.folder,
        "scans": len(store),
        "positive": int((store.labels == 1).sum()),
        "slices": int(store.lengths.sum()),
        "features": store.width,
        "dtype": str(store.dtype).removeprefix("torch."),
        "bytes": store.memory,
        "findings": [one.as_json() for one in store.findings],
        "parts": {str(part): int(count) for part, count in store.scans["part"].value_counts(sort=False).items()},
        "recipe": store.recipe or None,
        "fingerprint": store.fingerprint,
        "provenance": store.provenance,
    }


@store_app.command(cls=Command)
def verify(store: Store, as_json: AsJson = False) -> None:
    """Read all features and compare each scan's sha256 with the store's index; fail if a scan is damaged."""
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store)
    damaged = opened.damaged()
    if as_json:
        print_json({"folder": store, "scans": len(opened), "bytes": opened.memory, "damaged": damaged})
    if damaged:
        raise UserError(
            f"{store}: {len(damaged)} of {len(opened)} scans are damaged: {', '.join(damaged[:10])}"
            f"{', ...' if len(damaged) > 10 else ''}; copy the store again, or encode it again"
        )
    if not as_json:
        typer.echo(f"{store}: {len(opened)} scans, {opened.memory:,} bytes of features; all are as they were written")


@store_app.command("import", cls=Command)
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="Features: a file (.npz, .npy, .pt, .h5, .parquet), a folder of such files, or torchmil's folders.",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the store.")],
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Table (.csv, .parquet) with scan_id, label, and optionally patient_id, part, slice_labels (0 0 1 1).",
        ),
    ] = None,
    findings: Annotated[
        str | None,
        typer.Option(
            help="Columns of that table with 0 or 1, instead of label, with a SNOMED CT code where known: "
            "any=1386000,epidural. The first is the main one, which must be known for every scan."
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="npz, npy, pt, hdf5, parquet or torchmil. Default: found from the files.",
            metavar="FORMAT",
            autocompletion=one_of(IMPORT_FORMATS),
        ),
    ] = None,
) -> None:
    """Write a store from features of your own.

    A file may hold one scan or many; the command prints under which keys it found features, labels and patients.
    Reading executes no code: pickled objects are refused.
    """
    from normal_guidance.scans.features.convert import import_store
    from normal_guidance.scans.index.manifest import parse_findings

    named = () if findings is None else parse_findings(findings)
    store = import_store(source, out, form, labels=labels, findings=named, tell=lambda line: typer.echo(line, err=True))
    typer.echo(f"{out}: {store!r}")
    if not store.scans["part"].notna().any():
        typer.echo(f"Next: nguide fit {out} -o MODEL")


@store_app.command(cls=Command)
def export(
    store: Store,
    form: Form,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; for hdf5, the file.")],
    finding: Annotated[
        str | None, typer.Option(help="The finding whose labels to write, where the store has several.")
    ] = None,
) -> None:
    """Write a store as npz files, HDF5 or torchmil's folders."""
    from normal_guidance.scans.features.convert import export_store
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store) if finding is None else open_store(store).of_finding(finding)
    export_store(opened, out, form)
    typer.echo(f"{out}: {len(opened)} scans as {form}")
