"""`nguide reproduce` on public scans: index, split, encode and compare the methods, with one command.

    OUT/index    the scans and their labels
    OUT/splits   split-SEED.csv, by patient
    OUT/store    the features
    OUT/study    runs, tables, figures and report.html, as nguide experiment makes them

Each step is the command of that name and is skipped where its folder is complete.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from normal_guidance.base.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.cli.training_options import TrainingOptions
    from normal_guidance.scans.index.manifest import Manifest


@dataclass(frozen=True)
class ScanDataset:
    """A public set of scans that `nguide reproduce` reads.

    Args:
        source: the source of `nguide index`.
        origin: where the user gets the scans, for errors.
        window: the encoder's window.
        field: mm of each slice's middle that are encoded.
        normalize: mean and sd of the windowed slices, rounded.  They are the same for all splits, so that one store
            serves all; Hugging Face models normalise by themselves.
    """

    source: str
    origin: str
    window: str
    field: str
    normalize: str


SCAN_DATASETS = {
    "prostatex": ScanDataset("prostatex", "the clone of github.com/rcuocolo/PROSTATEx_masks", "adc", "70", "1100,820"),
}
"""The datasets of `nguide reproduce` that need --root."""

ENCODER = "efficientnet-lite0"
"""The default encoder: its weights come inside a package."""


def reproduce_scans(
    name: str,
    root: Path | None,
    out: Path,
    methods: tuple[str, ...],
    seeds: Sequence[int],
    encoder: str,
    training: TrainingOptions,
    as_json: bool = False,
) -> None:
    """Do the steps that OUT lacks, and say where the page is and how to open the viewer."""
    from normal_guidance.cli.experiment import plan_study, run_study
    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.scans.index.sources import SOURCES
    from normal_guidance.study.experiment import stored_dataset

    dataset = SCAN_DATASETS[name]
    if root is None:
        raise UserError(f"{name} is read, not drawn: give its folder (--root DIR), {dataset.origin}")
    _check(methods, training)
    console = make_console(stderr=as_json)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        manifest = _index(dataset, root, out / "index", console)
        splits = _split(out, seeds)
        _encode(dataset, out, encoder, training)
    data = stored_dataset([out / "store"], splits, name)
    training = training.in_slices(open_store(out / "store").slice_spacing)
    run_study(plan_study(data, out / "study", methods, training), manifest, console, as_json=as_json)
    for line in SOURCES[dataset.source].attribution:
        say(console, line)
    words = ["nguide", "view", out / "study", "--index", out / "index", "--store", out / "store"]
    say(console, f"Viewer: {shlex.join(map(str, words))}")


def _check(methods: Sequence[str], training: TrainingOptions) -> None:
    """Refuse before the first scan is read what the study would refuse after minutes of encoding."""
    from normal_guidance.core.methods import COMMITTEE, COMPARED, NAMED

    for method in methods:
        if method not in COMPARED:
            raise UserError(f"method {method!r} is unknown; choose among {', '.join(NAMED)}, {COMMITTEE}")
    training.check_guidance(methods)
    training.study_axes()
    training.execution()


def _index(dataset: ScanDataset, root: Path, folder: Path, console: Console) -> Manifest:
    """Index the scans, or read the index; refuse that of another folder."""
    from normal_guidance.cli.index import make_watched, summary
    from normal_guidance.cli.progress_bar import say
    from normal_guidance.scans.index.manifest import read_manifest

    if not (folder / "manifest.parquet").is_file():
        for line in summary(make_watched(dataset.source, root, folder, console), folder):
            if not line.startswith("Next: "):  # this command goes on by itself
                say(console, line)
    manifest = read_manifest(folder)
    if manifest.about["source"] != dataset.source or not manifest.root.is_relative_to(root.resolve()):
        raise UserError(
            f"{folder} is an index of {manifest.about['source']} in {manifest.root}, not of {dataset.source} in "
            f"{root}; give that folder (--root), or another one for the results (--out)"
        )
    return manifest


def _split(out: Path, seeds: Sequence[int]) -> list[Path]:
    """Make the splits that are missing, and return those of the seeds."""
    from normal_guidance.cli.split import split

    tables = {seed: out / "splits" / f"split-{seed}.csv" for seed in seeds}
    missing = [seed for seed, table in tables.items() if not table.is_file()]
    if missing:
        split(out / "index", out / "splits", ",".join(map(str, missing)))
    return list(tables.values())


def _encode(dataset: ScanDataset, out: Path, encoder: str, training: TrainingOptions) -> None:
    """Encode the scans; `nguide encode` resumes, does nothing to a complete store, and refuses another encoder's.

    Scans that the store lacks have been named, and the study is of the others.
    """
    from normal_guidance.cli.encode import encode
    from normal_guidance.scans.features.encoders import ENCODERS

    normalize = dataset.normalize if encoder in ENCODERS else None
    where = (out / "index", encoder, out / "store")
    with suppress(typer.Exit):
        encode(*where, dataset.window, dataset.field, normalize=normalize, device=training.device)
