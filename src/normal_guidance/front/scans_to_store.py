"""From a folder of scans and a table of labels to a feature store, with nothing to choose.

    MODEL.index/    scans, their slices in order, labels: what `nguide index` writes
    MODEL.store/    the features of every slice: what `nguide encode` writes

Both lie beside the model that is fitted next, so that the single commands can go on from there.  A call that was
killed goes on: a finished index is read again, and finished slices are not encoded again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import refuse_what_is_there
from normal_guidance.base.system import count_text, peak_bytes, size_text, time_text
from normal_guidance.fit.fit_ensemble import DrawnScans, estimate_fit, make_plan
from normal_guidance.fit.fit_page import PAGE
from normal_guidance.scans.features.encoders import load_encoder
from normal_guidance.scans.features.encoding import EncodingEstimate, EncodingTask, encode, estimate_encoding
from normal_guidance.scans.features.encoding_machine import EncodingOptions
from normal_guidance.scans.features.preprocessing import Preprocessing
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.scans.features.windows import default_window, parse_windows
from normal_guidance.scans.index.indexing import IndexProgress, index, left_out_line
from normal_guidance.scans.index.manifest import MANIFEST, Finding, Manifest, beside, read_manifest
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.show.progress_bar import Shown

AROUND = 8.0  # seconds for starting, measuring and the page

Say = Callable[[str], object]  # receives a line for people
Watch = Callable[[Shown], object]  # receives the progress of a stage


@dataclass(frozen=True)
class ScanFolder:
    """A folder of scans with its table, and how their slices become features."""

    scans: Path
    table: Path
    findings: tuple[Finding, ...] = ()
    encoder: str = "efficientnet-lite0"
    window: str | None = None  # None: by modality
    field: float | None = None
    device: str = "cpu"
    offline: bool = False

    def __post_init__(self) -> None:
        if not self.scans.is_dir():
            raise UserError(f"{self.scans} is not a folder; give the folder of the scans")
        if not self.table.is_file():
            raise UserError(f"{self.table} is not a file; give the table of labels (.csv, .parquet)")
        Preprocessing(windows=parse_windows(self.window or "none"), field=self.field)  # refused before the work

    def index(self, out: Path, say: Say, watch: Watch) -> Manifest:
        """The scans of the table, with their slices in order; an index that is there already is not made again."""

        def report(now: IndexProgress) -> None:
            watch(Shown("reading headers", now.done, f"{now.files:,} files, {now.scans:,} scans"))

        before = (out / MANIFEST).is_file()
        if before:
            manifest = read_manifest(out)
            self._check(out, manifest)
        else:
            made = index(
                "folder", self.scans, out, table=self.table, findings=self.findings, workers=None, watch=report
            )
            manifest = made.manifest
            if warning := left_out_line(made, out):
                say(warning)
            if several := {problem.scan_id for problem in made.problems if problem.kind == "mixed_series"}:
                scans = count_text(len(several), "scan")
                say(f"Guessed: the largest of several series, in {scans}; see {out / 'problems.csv'}")
        for guess in manifest.about.get("guessed", ()):
            say(f"Guessed: {guess}")
        patients, positive = len({*manifest.patient_ids}), int(manifest.labels.sum())
        say(
            f"Scans: {len(manifest):,} of {count_text(patients, 'patient')}, {positive:,} positive, "
            f"{count_text(int(manifest.lengths.sum()), 'slice')}{' (indexed before)' if before else ''}"
        )
        try:
            make_plan(manifest.labels.tolist(), manifest.patient_ids)  # too few to learn from
        except UserError:  # before the encoding; with a corrected table the same command begins anew
            if not before:
                rmtree(out)
            raise
        return manifest

    def _check(self, out: Path, manifest: Manifest) -> None:
        """Refuse an index of other scans or labels."""
        table = sha256(self.table.read_bytes()).hexdigest()
        then = [manifest.about.get(name) for name in ("root", "table_sha256", "findings")]
        now = [str(self.scans.resolve()), table, [finding.as_json() for finding in self.findings] or None]
        changed = [
            name for name, old, new in zip(("folder", "table", "findings"), then, now, strict=True) if old != new
        ]
        if changed:
            raise UserError(
                f"{out} was made of another {' and '.join(changed)} than {self.scans} and {self.table}; delete it, or "
                "give another folder for the model (-o)"
            )

    def _window(self, manifest: Manifest) -> str:
        return self.window or default_window(manifest.table["modality"].to_pylist())[0]

    def _task(self, manifest: Manifest) -> EncodingTask:
        windows = parse_windows(self._window(manifest))
        load = partial(load_encoder, self.encoder, channels=len(windows), offline=self.offline)
        way, options = Preprocessing(windows=windows, field=self.field), EncodingOptions(device=self.device)
        return EncodingTask(manifest, load, way, read_volume, options=options, workers=os.cpu_count() or 1)

    def store(self, manifest: Manifest, out: Path, say: Say, watch: Watch) -> FeatureStore:
        """The features of the scans; a store that is there already, or half of one, is gone on with."""
        result = encode(self._task(manifest), out, watch=lambda now: watch(now.shown()))
        done = "before" if result.complete_before else f"in {time_text(result.seconds)}"
        field = f", the middle {self.field:g} mm" if self.field else ""
        say(
            f"Features: {result.store.width:,} of each slice by {self.encoder}, window {self._window(manifest)}"
            f"{field}; encoded {done}"
        )
        if result.failed:
            say(
                f"warning: {sum(result.failed.values())} of {len(manifest)} scans could not be decoded and are left "
                f"out; {out / 'problems.csv'} says why"
            )
        return result.store

    def forecast(self, out: Path, say: Say, watch: Watch) -> Forecast:
        """What all of it would take, by indexing the scans and by encoding and fitting a few; nothing stays."""
        with TemporaryDirectory() as folder:
            begin = time.monotonic()
            index_of_it = Path(folder) / "index"  # which will not be there to be looked at
            manifest = self.index(index_of_it, lambda line: say(line.partition(f"; see {folder}")[0]), watch)
            indexing = time.monotonic() - begin
            watch(Shown("measuring", None, "encoding and fitting a few scans"))
            encoding = estimate_encoding(self._task(manifest), out)
        width = encoding.store_bytes // (4 * encoding.slices)
        drawn = DrawnScans(torch.from_numpy(manifest.lengths), torch.from_numpy(manifest.labels), width)
        fitting = estimate_fit(drawn, manifest.patient_ids, self.device)
        seconds = {"index": indexing, "encode": encoding.total_s, "fit": fitting + AROUND}
        return Forecast(encoding, sum(seconds.values()), seconds, peak_bytes("cpu"))


class Forecast(NamedTuple):
    """What `nguide fit SCANS LABELS` would take on this machine."""

    encoding: EncodingEstimate
    total_s: float
    seconds: dict[str, float]  # of each stage
    memory_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "encoding": asdict(self.encoding)}

    def lines(self) -> list[str]:
        """The same for people."""
        stages = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in self.seconds.items())
        disk = self.encoding.store_bytes + self.encoding.job_bytes
        return [
            f"Disk: {size_text(disk)} at most, {size_text(self.encoding.store_bytes)} in the end; "
            f"{size_text(self.encoding.free_bytes)} are free",
            f"Memory: {size_text(self.memory_bytes)}",
            f"Time: about {time_text(self.total_s)} ({stages}). Nothing was written.",
        ]


def scans_to_store(folder: ScanFolder, model: Path, say: Say, watch: Watch) -> FeatureStore:
    """Index and encode a folder of scans, or what is left of it to do, beside the model that will be fitted."""
    if not (model / PAGE).is_file():  # a complete model is recognised when its store is open
        refuse_what_is_there(model)
    manifest = folder.index(beside(model, "index"), say, watch)
    return folder.store(manifest, beside(model, "store"), say, watch)
