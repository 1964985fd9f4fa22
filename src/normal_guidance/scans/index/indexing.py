"""Makes a manifest (and problems.csv, report.json) from a folder of scans and its label tables.

Headers are read group by group: for most sources, only the headers of a few scans are in memory at a time.  Manifest
and problems depend on the files and tables only, not on the number of workers.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normal_guidance import __version__
from normal_guidance.base.errors import UserError, choose_one_of, shorten
from normal_guidance.base.files import folder_atomically, refuse_what_is_there, write_json
from normal_guidance.core.arrays import place_in_bag
from normal_guidance.core.bags import UNKNOWN, LabelledScans
from normal_guidance.core.blocks import PERCENTILES, BlockStatistics, block_statistics
from normal_guidance.scans.index.challenges import ATTRIBUTION, AbdomenScans, ChestScans, HeadScans, open_prostatex
from normal_guidance.scans.index.containers import CT, Mask, Refusal, is_nifti
from normal_guidance.scans.index.dicom_slices import Header
from normal_guidance.scans.index.geometry import order_slices
from normal_guidance.scans.index.header_reading import HeaderRequest, HeaderResult, read_all
from normal_guidance.scans.index.manifest import MANIFEST, Finding, Manifest, ScanRow, write_manifest
from normal_guidance.scans.index.problems import Problem, Report, summarize, write_problems
from normal_guidance.scans.index.source import Candidate, FileGroup, FolderScans, ScanSource, SourceOptions


@dataclass(frozen=True)
class Source:
    """One kind of dataset."""

    title: str
    open: Callable[[Path, SourceOptions, Report], ScanSource]
    options: tuple[str, ...] = ()  # fields of `SourceOptions` that this source uses
    attribution: tuple[str, ...] = ()  # sentences that a page with results on these scans must carry


SOURCES = {
    "rsna-ich": Source("head CT, RSNA 2019 Intracranial Hemorrhage", HeadScans),
    "rsna-pe": Source("chest CT, RSNA 2020 Pulmonary Embolism", ChestScans),
    "rsna-at": Source("abdominal CT, RSNA 2023 Abdominal Trauma", AbdomenScans, ("labels",)),
    "prostatex": Source(
        "prostate MR (ADC maps), PROSTATEx with masks of its lesions", open_prostatex, attribution=ATTRIBUTION
    ),
    "folder": Source("DICOM folders, zips or NIfTI files with a table", FolderScans, ("table", "findings")),
}
"""The sources of `nguide index`: three challenges as Kaggle distributes them, PROSTATEx, any folder with a table."""

PROBLEMS, REPORT = "problems.csv", "report.json"

PACKAGES = ("pydicom", "nibabel", "numpy", "pyarrow")  # packages whose versions stand in the report

WATCH_FILES = 64  # files between two calls of `watch`

HEADER_FIELDS = frozenset(part.name for part in fields(Header))
DIFFERENT = frozenset(("file", "sop_uid", "instance_number", "position", "frame_positions", "acquired"))
"""Fields in which the headers of a series differ."""


@dataclass(frozen=True)
class IndexProgress:
    """The progress of `index`."""

    files: int
    scans: int
    done: float | None  # the approximate share that is done, from 0 to 1; None where it is unknown


Watch = Callable[[IndexProgress], object]


@dataclass(frozen=True)
class Index:
    """The result of `index`."""

    manifest: Manifest
    problems: list[Problem]
    report: dict[str, Any]


def index(
    source: str,
    root: str | Path,
    out: str | Path,
    *,
    table: str | Path | None = None,
    labels: str | None = None,
    findings: Sequence[Finding] = (),
    workers: int | None = 0,
    watch: Watch = lambda progress: None,
) -> Index:
    """Reads all headers below a root, orders the slices, adds the labels, and writes the folder `out`."""
    # `table`, `labels` and `findings` are `SourceOptions`; with 0 workers this process reads the headers,
    # with None at most 8: more seldom read one disk faster.
    begin = time.monotonic()
    options = check_options(source, table, labels, findings)
    refuse_what_is_there(Path(out))
    problems: list[Problem] = []
    dataset = SOURCES[source].open(Path(root), options, problems.append)  # a wrong root leaves no folder
    with folder_atomically(out) as draft:
        watch(IndexProgress(files=0, scans=0, done=None))
        about: dict[str, Any] = {
            "source": source,
            "root": str(dataset.root.resolve()),
            "options": {name: str(getattr(options, name)) for name in SOURCES[source].options if name != "findings"},
            "version": __version__,
        }
        if options.table is not None:
            about["table_sha256"] = sha256(options.table.read_bytes()).hexdigest()
        if isinstance(dataset, FolderScans) and dataset.guessed:
            about["guessed"] = list(dataset.guessed)
        if dataset.findings:
            about["findings"] = [finding.as_json() for finding in dataset.findings]
        indexing = Indexing(dataset, problems, watch)
        readers = min(8, os.cpu_count() or 1) if workers is None else workers
        manifest = write_manifest(draft / MANIFEST, indexing.rows(readers), about)
        if not len(manifest):
            raise UserError(f"{root} has no usable scan; {_why(problems)}")
        write_problems(draft / PROBLEMS, problems)
        report = make_report(manifest, problems, indexing.files, time.monotonic() - begin)
        write_json(draft / REPORT, report)
    return Index(manifest, problems, report)


def check_options(
    source: str,
    table: str | Path | None = None,
    labels: str | None = None,
    findings: Sequence[Finding] = (),
) -> SourceOptions:
    """The options of a source; refuses options that it does not have."""
    choose_one_of("source", source, SOURCES)
    given = {"table": None if table is None else Path(table), "labels": labels, "findings": tuple(findings) or None}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name, value in chosen.items():
        if name not in SOURCES[source].options:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"{source} has no option --{name} (given: {shown}); leave it out")
    return SourceOptions(**chosen)


def _why(problems: Sequence[Problem]) -> str:
    """Why no scan is usable."""
    if not problems:
        return "no file was found"
    first = min((problem for problem in problems if problem.kind != "failed"), default=min(problems))  # has a cause
    counts = ", ".join(f"{kind} {count}" for kind, count in summarize(problems).items())
    name, detail = shorten(first.file or first.scan_id, 200), shorten(first.detail, 400)
    reads = "; give DICOM files or NIfTI (.nii, .nii.gz)" if first.kind == "no_image" else ""
    return f"problems: {counts}; for instance {name}: {first.kind}, {detail}{reads}"


def make_report(manifest: Manifest, problems: Sequence[Problem], files: int, seconds: float) -> dict[str, Any]:
    """The content of report.json."""
    versions: dict[str, str | None] = {"normal_guidance": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    names = [finding.name for finding in manifest.findings]
    of_findings = {name: int(manifest.of_finding(name).labels.sum()) for name in names}
    return {
        **manifest.about,
        "versions": versions,
        "counts": {
            "files": files,
            "scans": len(manifest),
            "slices": int(manifest.lengths.sum()),
            "positive": int(manifest.labels.sum()),
            "with_slice_labels": len(manifest) - manifest.table["slice_labels"].null_count,
            "patients": len(set(manifest.patient_ids)),
            **({"findings": of_findings} if names else {}),
            "problems": summarize(problems),
        },
        "seconds": round(seconds, 1),
    }


@dataclass
class Indexing:
    """One pass over an open source, with counts for the progress."""

    dataset: ScanSource
    problems: list[Problem]  # problems are appended to it
    watch: Watch = lambda progress: None
    any_modality: bool = False
    modalities: tuple[str, ...] = CT  # those to accept where the source does not say one; NIfTI counts as the first
    with_series: bool = False  # whether rows say what identifies their series in hospital software
    files: int = 0
    groups: int = 0
    scans: int = 0
    scan_ids: set[str] = field(default_factory=set)
    shared: dict[Any, Any] = field(default_factory=dict)

    def report(self, scan_id: str, file: str, kind: str, detail: str) -> None:
        self.problems.append(Problem(scan_id, file, kind, detail, "left out"))

    def rows(self, workers: int) -> Iterator[ScanRow]:
        """The scans with their slices in order; with 0 workers this process reads the headers."""
        for group, results in self._read(workers):
            masks = [result for result in results if isinstance(result, Mask)]
            headers = [result for result in results if isinstance(result, Header)]
            for refusal in results:
                if isinstance(refusal, Refusal):
                    scan_id = self.dataset.scan_of(group, refusal.series_uid)
                    self.report(scan_id, refusal.file, refusal.kind, refusal.detail)
            if group.name and not headers:
                detail = f"none of its {len(group.files)} files is a slice"
                self.report(self.dataset.scan_of(group, ""), "", "failed", detail)
            results.clear()  # the headers of a flat folder are gigabytes
            for candidate in self.dataset.candidates(group, headers):
                row = self._row(candidate, masks)
                if row is not None:
                    self.scans += 1
                    yield row
        self.dataset.finish()

    def _read(self, workers: int) -> Iterator[tuple[FileGroup, list[HeaderResult]]]:
        """The groups with the results of reading their files."""
        waiting: deque[FileGroup] = deque()
        results: list[HeaderResult] = []
        for result in read_all(self.dataset.root, self._wanted(waiting), workers):
            results.append(self._share(result) if isinstance(result, Header) else result)
            self.files += 1
            if self.files % WATCH_FILES == 0:
                counts = (self.files, self.dataset.expected_files), (self.groups, self.dataset.expected_groups)
                done = next((min(count / expected, 1.0) for count, expected in counts if expected), None)
                self.watch(IndexProgress(self.files, self.scans, done))
            group = waiting[0]
            if len(results) == len(group.files) + len(group.masks):
                waiting.popleft()
                self.groups += 1
                yield group, results
                results = []

    def _wanted(self, waiting: deque[FileGroup]) -> Iterator[HeaderRequest]:
        for group in self.dataset.groups():
            waiting.append(group)
            modalities = (group.modality,) if group.modality else self.modalities
            yield from (HeaderRequest(file, False, self.any_modality, modalities) for file in group.files)
            yield from (HeaderRequest(file, mask=True) for file in group.masks)

    def _share(self, header: Header) -> Header:
        """Makes equal values of headers one object: .5 instead of 1.8 KiB for each of RSNA 2019's 752,803 headers."""
        values = {name: getattr(header, name) for name in HEADER_FIELDS}
        for name in HEADER_FIELDS - DIFFERENT:
            values[name] = self.shared.setdefault((name, values[name]), values[name])
        return Header(**values)

    def _row(self, candidate: Candidate, masks: Sequence[Mask]) -> ScanRow | None:
        scan_id = candidate.scan_id
        if scan_id in self.scan_ids:
            self.report(scan_id, candidate.headers[0].file, "double_scan", "another scan has this id")
            return None
        self.scan_ids.add(scan_id)
        ordered = order_slices(candidate.headers)
        files = tuple(file for file, _ in ordered.slices)
        nifti = is_nifti(files[0])
        for finding in ordered.findings:
            if not (nifti and finding.kind == "multi_frame"):  # every NIfTI file is one
                self.problems.append(finding._replace(scan_id=scan_id))
        labels = self.dataset.join(candidate, ordered, masks)
        if labels.label is None:
            return None
        kept = set(files)
        headers = [header for header in candidate.headers if header.file in kept]
        number_of = {header.file: header.instance_number for header in headers if header.frames == 1}
        numbers = tuple(number_of.get(file) for file in files)
        series: dict[str, Any] = {
            "instance_numbers": numbers if any(number is not None for number in numbers) else None
        }
        if self.with_series:
            every, first = candidate.headers, candidate.headers[0]
            series["study_uid"], series["series_uid"] = first.study_uid, "" if nifti else first.series_uid
            series["series_description"], series["body_part"] = first.description, first.body_part
            series["burned_in"] = any(header.burned_in for header in every)
        return ScanRow(
            scan_id=scan_id,
            patient_id=candidate.patient_id,
            label=labels.label,
            slice_labels=labels.slices,
            kind="nifti" if nifti else "dicom",
            files=files,
            frames=tuple(frame for _, frame in ordered.slices),
            positions=ordered.positions,
            rows=ordered.rows,
            columns=ordered.columns,
            pixel_spacing=ordered.pixel_spacing,
            slice_spacing=ordered.spacing,
            orientation=ordered.orientation,
            modality=headers[0].modality or "CT",
            transfer_syntax=",".join(sorted({header.transfer_syntax for header in headers})),
            dataset_labels=candidate.dataset_labels,
            further=labels.further or {},
            **series,
        )


DOUBLE = "double_scan"  # the problem of a row whose scan_id an earlier row has; that scan is in the index

LEFT_OUT = {
    "label_without_image": "have no files",
    "image_without_label": "have no label",
    "bad_row": "have a row that cannot be used",
    "failed": "have no readable slice",
    "unsafe_path": "have a path that leads out of ROOT",
    DOUBLE: "have a scan_id that stands twice",
}
"""Why scans of a table are left out, in words; other kinds of problems are named."""


def left_out_line(made: Index, out: Path) -> str:
    """Return a warning with the share of a table's scans that are not in the index; empty if all are."""
    if made.report["source"] != "folder":
        return ""
    kept = set(made.manifest.scan_ids)
    # The last problem of a scan is the one that decided; a row without a scan_id of its own stands for itself.
    lost = {}
    for problem in made.problems:
        key = problem.scan_id or (problem.detail if problem.kind == "bad_row" else "")
        if problem.kind == DOUBLE:
            lost[problem.detail] = problem
        elif key and problem.action == "left out" and problem.scan_id not in kept:
            lost[key] = problem
    if not lost:
        return ""
    total, counts = len(kept) + len(lost), Counter(problem.kind for problem in lost.values())
    shares = ", ".join(f"{count:,} of {total:,} {LEFT_OUT.get(kind, kind)}" for kind, count in counts.most_common())
    first = next(iter(lost.values()))
    return (
        f"warning: {len(lost):,} of the table's {total:,} scans are left out: {shares}; for instance "
        f"{first.scan_id or first.file}: {first.detail}; see {out / 'problems.csv'}"
    )


# Statistics of labelled scans, for the three block tables and the density figure of the paper.

BINS = 20  # bars of the density figure, as in the paper


@dataclass(frozen=True, eq=False)
class Description:
    """Counts, and statistics of the scans with slice labels; made by `describe`."""

    scans: int
    positive: int
    patients: int
    slices: int
    labelled: int  # scans with slice labels
    positive_slices: int
    lengths: Mapping[str, float]  # mean and percentiles of the slices per scan
    blocks: BlockStatistics | None  # None where no slice is labelled positive
    density: np.ndarray
    """Density of the positive slices' relative position j / S in `BINS` equal bins; it integrates to one."""

    def to_dict(self) -> dict[str, Any]:
        """The statistics as JSON values."""
        blocks = self.blocks
        return {
            **{name: getattr(self, name) for name in ("scans", "positive", "patients", "slices", "labelled")},
            "positive_slices": self.positive_slices,
            "lengths": dict(self.lengths),
            "bags_by_blocks": {} if blocks is None else {str(k): v for k, v in blocks.bags_by_blocks.items()},
            "blocks": {} if blocks is None else {**blocks.summary(), "receptive_field": blocks.receptive_field},
            "density": self.density.tolist(),
        }


def describe(manifest: Manifest) -> Description:
    """Describes all scans of a manifest."""
    if not len(manifest):
        raise UserError("the manifest has no scans; index some first")
    return describe_scans(manifest.without_features())


def describe_scans(scans: LabelledScans) -> Description:
    """Describes scans with features, as `describe` does those of a manifest."""
    lengths, known, slice_labels = (
        scans.lengths.cpu().numpy(),
        np.zeros(len(scans.lengths), bool),
        np.zeros(0, np.int64),
    )
    if scans.slice_labels is not None:
        packed = scans.slice_labels.cpu().numpy().astype(np.int64)
        known = packed[np.cumsum(lengths) - lengths] != UNKNOWN  # all slices of a scan are labelled, or none
        slice_labels = packed[np.repeat(known, lengths)]
    labelled, positive = lengths[known], int(slice_labels.sum())
    quantiles = np.quantile(lengths, list(PERCENTILES.values())).tolist()
    return Description(
        scans=len(lengths),
        positive=int(scans.labels.sum()),
        patients=len(set(scans.patient_ids)),
        slices=int(lengths.sum()),
        labelled=int(known.sum()),
        positive_slices=positive,
        lengths={"mean": float(lengths.mean()), **dict(zip(PERCENTILES, quantiles, strict=True))},
        blocks=block_statistics(torch.from_numpy(slice_labels), torch.from_numpy(labelled)) if positive else None,
        density=positive_density(slice_labels, labelled),
    )


def positive_density(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Density of the relative position j / S of the positive slices, j from 1, in `BINS` bins between 0 and 1."""
    sizes = np.repeat(lengths, lengths)
    slice_number = place_in_bag(torch.from_numpy(lengths)).numpy() + 1
    relative = slice_number[labels == 1] / sizes[labels == 1]
    # A slice at the border of two bins belongs to the lower one: j / S lies in (0, 1].
    bins = np.clip(np.ceil(relative * BINS - 1e-9).astype(int) - 1, 0, BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    return counts / max(1, counts.sum()) * BINS
