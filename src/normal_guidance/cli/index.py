"""`nguide index`: list the scans of a folder and their labels in a manifest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.system import count_text
from normal_guidance.cli.completion import LABELS, SOURCES, one_of
from normal_guidance.cli.json_output import AsJson, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.scans.index.indexing import Index, IndexProgress

MOST_WORKERS = 8
"""More processes than this seldom read one disk faster."""

DOUBLE = "double_scan"
"""The kind of problem of a row whose scan_id another row has; the first row's scan is in the index."""

LEFT_OUT = {
    "label_without_image": "have no files",
    "image_without_label": "have no label",
    "bad_row": "have a row that cannot be used",
    "failed": "have no readable slice",
    "unsafe_path": "have a path that leads out of ROOT",
    DOUBLE: "have a scan_id that stands twice",
}
"""Why scans of a table are left out, in words; other kinds of problems are named."""


def index(
    source: Annotated[
        str,
        typer.Argument(
            help="Layout of files: rsna-ich, rsna-pe or rsna-at (as Kaggle distributes them), prostatex (the clone of "
            "PROSTATEx_masks), or folder (your own).",
            metavar="SOURCE",
            autocompletion=one_of(SOURCES),
        ),
    ],
    root: Annotated[
        Path, typer.Argument(help="Folder of the images and, except for folder, of the label tables.", metavar="ROOT")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for manifest.parquet, problems.csv and report.json.")
    ],
    table: Annotated[
        Path | None,
        typer.Option(
            help="For folder: table (.csv, .parquet) with scan_id, path (relative to ROOT), label, and optionally "
            "patient_id, modality (CT or MR), and slice_labels (0 0 1 1), slice_ranges (12-20;31-33, counted from 0) "
            "or mask (NIfTI)."
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="For rsna-at: labels from image_level_labels_2024.csv (image, as in the paper; the default) or from "
            "any_injury (patient).",
            autocompletion=one_of(LABELS),
        ),
    ] = None,
    findings: Annotated[
        str | None,
        typer.Option(
            help="For folder: columns of the table with 0 or 1, instead of label, with a SNOMED CT code where known: "
            "any=1386000,epidural. The first is the main one, which must be known for every scan."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Processes that read headers; 0: read in this process. Default: one for each core, up to 8."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Index scans: find them, order their slices by geometry, join their labels, and report problems.

    The manifest does not depend on the number of workers.
    """
    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.scans.index.indexing import check_options
    from normal_guidance.scans.index.manifest import parse_findings

    named = () if findings is None else parse_findings(findings)
    check_options(source, table, labels, named)
    console = make_console(stderr=as_json)
    made = make_watched(source, root, out, console, workers, table=table, labels=labels, findings=named)
    for warning in filter(None, (describe_left_out(made, out), describe_modality(made, table))):
        typer.secho(warning, fg=typer.colors.YELLOW, err=True)
    if as_json:
        print_json(made.report)
        return
    for line in summary(made, out):
        say(console, line)


def make_watched(
    source: str, root: Path, out: Path, console: Console, workers: int | None = None, **options: Any
) -> Index:
    """Index scans and show the progress; `options` are those of `normal_guidance.scans.index.indexing.index`."""
    from normal_guidance.scans.index.indexing import index as make_index

    count = min(MOST_WORKERS, os.cpu_count() or 1) if workers is None else workers
    with _watch(console, f"Reading headers in {root}, layout {source}") as watch:
        return make_index(source, root, out, workers=count, watch=watch, **options)


def summary(made: Index, out: Path) -> list[str]:
    """Return the closing lines: counts, problems, and the next command."""
    counts = made.report["counts"]
    scans, positive, sliced = counts["scans"], counts["positive"], counts["with_slice_labels"]
    lines = [
        f"{count_text(scans, 'scan')}, {count_text(counts['slices'], 'slice')}, "
        f"{count_text(counts['patients'], 'patient')}",
        f"{count_text(positive, 'positive scan')} ({100 * positive / scans:.1f} %), {sliced:,} with slice labels",
    ]
    if "findings" in counts:
        lines.append(
            f"Positive by finding: {', '.join(f'{name} {count:,}' for name, count in counts['findings'].items())}"
        )
    problems = counts["problems"]
    if problems:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in problems.items())
        lines.append(f"Problems: {kinds}; see {out / 'problems.csv'}")
    else:
        lines.append("No problems")
    lines.append(f"Manifest: {out / 'manifest.parquet'} ({made.report['seconds']:g} s)")
    encode = f"nguide encode {out} --encoder NAME --split splits/split-1.csv -o STORE"
    lines.append(f"Next: nguide split {out} --seeds 1 -o splits, then {encode}")
    return lines


def describe_left_out(made: Index, out: Path) -> str:
    """Return a warning with the share of a table's scans that are not in the index; empty if all are."""
    if made.report["source"] != "folder":
        return ""
    kept = set(made.manifest.scan_ids)
    # The last problem of a scan is the one that decided; a row without a scan_id of its own stands for itself.
    lost = {
        one.detail if one.kind == DOUBLE else one.scan_id or one.detail: one
        for one in made.problems
        if one.kind == DOUBLE
        or (one.action == "left out" and one.scan_id not in kept and (one.scan_id or one.kind == "bad_row"))
    }
    if not lost:
        return ""
    total, counts = len(kept) + len(lost), Counter(one.kind for one in lost.values())
    shares = ", ".join(f"{count:,} of {total:,} {LEFT_OUT.get(kind, kind)}" for kind, count in counts.most_common())
    first = next(iter(lost.values()))
    return (
        f"warning: {len(lost):,} of the table's {total:,} scans are left out: {shares}; for instance "
        f"{first.scan_id or first.file}: {first.detail}; see {out / 'problems.csv'}"
    )


def describe_modality(made: Index, table: Path | None) -> str:
    """Return a warning with the number of NIfTI scans that count as CT because nothing says what they are."""
    if table is None:
        return ""
    from normal_guidance.scans.index.labels import read_table

    columns = read_table(table, "--table", ("scan_id", "modality"), ("scan_id",))
    told = {scan for scan, modality in zip(columns["scan_id"], columns.get("modality", ()), strict=False) if modality}
    kinds = zip(made.manifest.scan_ids, made.manifest.table["kind"].to_pylist(), strict=True)
    untold = sum(kind == "nifti" and scan not in told for scan, kind in kinds)
    if not untold:
        return ""
    verbs = "has no modality and counts" if untold == 1 else "have no modality and count"
    return f"warning: {count_text(untold, 'NIfTI scan')} {verbs} as CT; for MR add a column modality with MR to {table}"


@contextmanager
def _watch(console: Console, title: str) -> Iterator[Callable[[IndexProgress], None]]:
    """Show a live bar on a terminal; elsewhere one line when reading begins, for log files."""
    from normal_guidance.cli.progress_bar import say

    if not console.is_terminal:
        yield lambda now: None if now.files else say(console, f"{title}: begins")
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=None, note="begins")
        yield lambda now: bars.update(
            task,
            total=None if now.done is None else 1.0,
            completed=now.done or 0.0,
            note=f"{now.files:,} files, {now.scans:,} scans",
        )
