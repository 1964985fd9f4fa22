"""Commands on scans: `nguide index`, `split`, `audit`, `describe`, `phantom`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import make_folder, write_atomically, write_json
from normal_guidance.base.records import valid_json
from normal_guidance.base.system import count_text
from normal_guidance.cli.command import SOURCES, AsJson, Out, one_of, print_json, print_result, some_of
from normal_guidance.cli.options import parse_list
from normal_guidance.show.progress_bar import Shown, make_console, say, watch

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.scans.features.store import FeatureStore
    from normal_guidance.scans.index.indexing import Index, IndexProgress
    from normal_guidance.scans.index.manifest import Manifest
    from normal_guidance.scans.index.splits import Split

LAYOUTS = ("rsna-ich", "rsna-pe", "rsna-at", "folder")
LABELS = ("image", "patient")
ANATOMIES = ("head", "chest", "abdomen")
ODDITIES = (
    *("tilt", "gaps", "duplicates", "mixed_series", "localizer", "secondary_capture", "one_slice", "unreadable"),
    *("truncated", "wrong_intercept", "bits", "multi_frame", "no_position", "reversed", "shuffled", "double_rows"),
    *("rows_without_image", "indeterminate", "incomplete_organ"),
)
COMPRESSIONS = ("none", "rle", "jpeg2000", "jpeg-lossless", "jpeg-ls", "mixed")


def index(
    source: Annotated[str, one_of(SOURCES)],
    root: Path,
    out: Out,
    table: Path | None = None,
    labels: Annotated[str | None, one_of(LABELS)] = None,
    findings: str | None = None,
    workers: Annotated[int | None, typer.Option(min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Index scans: find them, order their slices by geometry, join their labels, and report problems.

    The manifest does not depend on the number of workers.

    Args:
        source: Layout of files: rsna-ich, rsna-pe or rsna-at (as Kaggle distributes them), prostatex (the clone of
            PROSTATEx_masks), or folder (your own).
        root: Folder of the images and, except for folder, of the label tables.
        out: Folder for manifest.parquet, problems.csv and report.json.
        table: For folder: table (.csv, .parquet) with scan_id and label, and optionally path (relative to ROOT; else
            files are found by the scan's name), patient_id, modality (CT or MR), and slice_labels (0 0 1 1),
            slice_ranges (12-20;31-33, counted from 1) or mask (NIfTI). Columns of other common names are taken, too.
        labels: For rsna-at: labels from image_level_labels_2024.csv (image, as in the paper; the default) or from
            any_injury (patient).
        findings: For folder: columns of the table with 0 or 1, instead of label, with a SNOMED CT code where known:
            any=1386000,epidural. The first is the main one, which must be known for every scan.
        workers: Processes that read headers; 0: read in this process. Default: one for each core, up to 8.
    """
    from normal_guidance.scans.index.indexing import check_options, left_out_line
    from normal_guidance.scans.index.manifest import one_class, parse_findings

    named = () if findings is None else parse_findings(findings)
    check_options(source, table, labels, named)
    console = make_console(stderr=as_json)
    made = make_watched(source, root, out, console, workers, table=table, labels=labels, findings=named)
    alike = one_class(made.manifest.labels)
    for warning in filter(None, (left_out_line(made, out), alike and f"warning: {alike}")):
        typer.secho(warning, fg=typer.colors.YELLOW, err=True)
    print_result(as_json, made.report, summary_lines(made, out))


def make_watched(
    source: str, root: Path, out: Path, console: Console, workers: int | None = None, **options: Any
) -> Index:
    """Index scans and show the progress; `options` are those of `normal_guidance.scans.index.indexing.index`."""
    from normal_guidance.scans.index.indexing import index as make_index

    title = f"Reading headers in {root}, layout {source}"

    def show(now: IndexProgress) -> Shown:
        return Shown(title, now.done, f"{now.files:,} files, {now.scans:,} scans")

    with watch(console, title, show) as update:

        def report(now: IndexProgress) -> None:
            if not now.files and not console.is_terminal:
                say(console, f"{title}: begins")
            update(now)

        return make_index(source, root, out, workers=workers, watch=report, **options)


def summary_lines(made: Index, out: Path) -> list[str]:
    """Return the closing lines: counts, problems, and the next command."""
    counts = made.report["counts"]
    scans, positive, sliced = counts["scans"], counts["positive"], counts["with_slice_labels"]
    lines = [f"Guessed: {guess}" for guess in made.report.get("guessed", ())]
    lines += [
        f"{count_text(scans, 'scan')}, {count_text(counts['slices'], 'slice')}, "
        f"{count_text(counts['patients'], 'patient')}",
        f"{count_text(positive, 'positive scan')} ({100 * positive / scans:.1f} %), {sliced:,} with slice labels",
    ]
    if "findings" in counts:
        lines.append(f"Positive by finding: {_counted(counts['findings'])}")
    if counts["problems"]:
        lines.append(f"Problems: {_counted(counts['problems'])}; see {out / 'problems.csv'}")
    else:
        lines.append("No problems")
    lines.append(f"Manifest: {out / 'manifest.parquet'} ({made.report['seconds']:g} s)")
    return [*lines, f"Next: nguide encode {out} -o STORE"]


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


Scans = Annotated[
    Path, typer.Argument(help="Folder that nguide index made, or a feature store.", metavar="INDEX_OR_STORE")
]


def split(
    scans: Scans, out: Out, seeds: str = "1001,2001,3001", proportions: str = "4:1:1", as_json: AsJson = False
) -> None:
    """Split scans into train, val and test, by patient and stratified by label.

    No patient is in two parts. The same seed gives the same split.

    Args:
        out: Folder for the tables split-SEED.csv.
        seeds: Seeds, one split for each.
        proportions: Proportions of training, validation and test patients.
    """
    from normal_guidance.scans.index.splits import split_scans, write_split

    try:
        shares = [int(word) for word in proportions.split(":")]
    except ValueError as error:
        raise UserError(f"--proportions {proportions}: write whole numbers, as in 4:1:1") from error
    numbers = parse_list("--seeds", seeds, int)
    listed = _listed(scans)
    make_folder(out)
    rows, lines = [], []
    for seed in numbers:
        parts = split_scans(listed.scan_ids, listed.patient_ids, listed.labels.tolist(), seed, shares)
        path = out / f"split-{seed}.csv"
        write_split(path, parts)
        rows.append({"file": path, "seed": seed, "parts": parts.counts()})
        lines.append(f"{path}: {_parts_line(parts)}")
    print_result(as_json, rows, lines)


def _listed(folder: Path) -> Manifest | FeatureStore:
    """Return the scans of an index or of a store: both have ids, patients and labels."""
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.scans.features.store_place import is_store
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
    splits: Annotated[list[Path], typer.Argument(metavar="SPLIT")],
    store: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Check that the parts of splits share no patient, scan or slice; in a feature store, no patient and no features.

    The command fails and names the first thing that two parts share.

    Args:
        splits: Tables that nguide split made.
        store: Feature store: also look for the same scan under two names.
    """
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.scans.index.manifest import Manifest
    from normal_guidance.scans.index.splits import audit as audit_split
    from normal_guidance.scans.index.splits import read_split

    listed = _listed(scans)
    features = open_store(store) if store is not None else None if isinstance(listed, Manifest) else listed
    checksums = None
    if features is not None:
        checksums = dict(zip(features.scan_ids, features.scans["sha256"].tolist(), strict=True))
    rows = []
    for path in splits:
        parts = read_split(path)
        try:
            compared = audit_split(parts, listed, checksums)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        rows.append({"file": path, "overlap": False, "compared": compared, "parts": parts.counts()})
        if not as_json:
            typer.echo(f"{path}: no overlap; compared {', '.join(f'{n:,} {what}' for what, n in compared.items())}")
            typer.echo(f"  {_parts_line(parts)}")
    if as_json:
        print_json(rows)


def _parts_line(parts: Split) -> str:
    return ", ".join(
        f"{part} {counts['scans']:,} scans ({counts['positive']:,} positive) of {counts['patients']:,} patients"
        for part, counts in parts.counts().items()
    )


def describe(
    index: Path,
    split: Path | None = None,
    out: Annotated[Path | None, typer.Option("--out", "-o")] = None,
    as_json: AsJson = False,
) -> None:
    """Describe indexed scans: lengths, blocks of positive slices, and their positions.

    Args:
        index: Folder that nguide index made.
        split: Table that nguide split made: describe each of its parts as well.
        out: Folder for description.md, description.json and density.png. Default: print only.
    """
    from normal_guidance.scans.index.indexing import describe as describe_scans
    from normal_guidance.scans.index.manifest import PARTS, read_manifest
    from normal_guidance.scans.index.splits import read_parts
    from normal_guidance.study.study_tables import description_tables

    manifest = read_manifest(index)
    described = {"all": describe_scans(manifest)}
    if split is not None:
        part_of = read_parts(split, manifest)
        missing = [scan for scan in manifest.scan_ids if scan not in part_of]
        if missing:
            raise UserError(f"{split} has no part for scan {missing[0]!r} ({len(missing)} such scans); split again")
        for part in PARTS:
            numbers = [n for n, scan in enumerate(manifest.scan_ids) if part_of[scan] == part]
            if numbers:
                described[part] = describe_scans(manifest.take(numbers))
    page = "\n".join(grid.markdown() for grid in description_tables(str(manifest.about["source"]), described))
    values = valid_json({part: description.to_dict() for part, description in described.items()})
    print_result(as_json, values, [page])
    if out is not None:
        from normal_guidance.study import figures

        make_folder(out)
        write_atomically(out / "description.md", page.encode())
        write_json(out / "description.json", values)
        densities = {part: scans.density for part, scans in described.items() if scans.positive_slices}
        if densities:
            figures.save(figures.plot_density(densities), out / "density.png")


def phantom(
    layout: Annotated[str, one_of(LAYOUTS)],
    out: Path,
    scans: Annotated[int, typer.Option(min=1)] = 24,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    size: int = 128,
    contrast: float = 1.0,
    positive: float | None = None,
    slices: int | None = None,
    anatomy: Annotated[str | None, one_of(ANATOMIES)] = None,
    oddities: Annotated[str, some_of(ODDITIES, "all", "none")] = "none",
    compression: Annotated[str, one_of(COMPRESSIONS)] = "none",
) -> None:
    """Draw CT scans with lesions and write them as DICOM with label tables; OUT/phantom.json holds the truth.

    Positive and negative scans differ in their pixels only. No patient data are used.

    Args:
        layout: Layout of the files: rsna-ich (head), rsna-pe (chest), rsna-at (abdomen) or folder.
        out: Folder to write; it must be new or empty.
        scans: Number of scans.
        seed: Seed; the same seed gives the same files.
        size: Rows and columns of a slice.
        contrast: Contrast of the lesions: 0 is invisible, 2 is easy to see.
        positive: Share of positive scans. Default: as in the real dataset (head .41, chest .30, abdomen .08).
        slices: Median number of slices. Default: 32 (head), 64 (chest, abdomen).
        anatomy: For the layout folder: head, chest or abdomen. Default: head.
        oddities: Irregularities to add: names (tilt,gaps,localizer,...), all that the layout can have, or none.
        compression: none, rle, jpeg2000, jpeg-lossless, jpeg-ls, or mixed (a different one for each scan).
    """
    from normal_guidance.scans.phantom.drafts import ODDITIES
    from normal_guidance.scans.phantom.phantom_files import TRUTH, write_phantom

    if oddities == "all":
        names = [name for name, oddity in ODDITIES.items() if layout in oddity.layouts]
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
    with_lesion, count = sum(scan["label"] for scan in drawn), sum(len(scan["files"]) for scan in drawn)
    patients = len({scan["patient_id"] or scan["scan_id"] for scan in drawn})
    typer.echo(f"{len(drawn)} scans of {patients} patients, {with_lesion} positive, {count} slices: {out}")
    for scan in drawn:
        if scan["oddity"]:
            typer.echo(f"  {scan['scan_id']}: {scan['oddity']}, {scan['detail']}")
    typer.echo(f"Truth: {out / TRUTH}")
