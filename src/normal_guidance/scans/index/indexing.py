"""Makes a manifest from a folder of scans and its label tables.

    manifest.parquet   one row per scan (`normal_guidance.scans.index.manifest`)
    problems.csv       problems, and what was done about them (`normal_guidance.scans.index.problems`)
    report.json        versions, options, counts, time

Headers are read group by group: for most sources, only the headers of a few scans are in memory at a time.  Manifest
and problems depend on the files and tables only, not on the number of workers.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from normal_guidance import __version__
from normal_guidance.base.errors import UnreadableError, UserError, shorten
from normal_guidance.base.files import folder_atomically, refuse_what_is_there, write_json
from normal_guidance.base.workers import Death, Failure, Pool, StartError
from normal_guidance.core.bags import UNKNOWN, LabelledScans
from normal_guidance.core.blocks import PERCENTILES, BlockStatistics, block_statistics
from normal_guidance.scans.index.containers import (
    CT,
    Mask,
    Refusal,
    is_nifti,
    locate,
)
from normal_guidance.scans.index.dicom_slices import Header, exclusion, read_header
from normal_guidance.scans.index.geometry import Ordered, order_slices
from normal_guidance.scans.index.manifest import (
    MANIFEST,
    Finding,
    Labels,
    Manifest,
    ScanRow,
    write_manifest,
)
from normal_guidance.scans.index.problems import Problem, summarize, write_problems
from normal_guidance.scans.index.sources import (
    SOURCES,
    Candidate,
    Group,
    ScanSource,
    SourceOptions,
)

# Headers of many files, read in worker processes in the order of the files.
# A parser in C may crash its whole process: then only the file that it was reading is refused.


CHUNK = 64
"""Files sent to a worker at once: about 50 ms of work, so that sockets are idle and progress is smooth."""

AHEAD = 4
"""Chunks per worker that may be read ahead of the first unfinished one: some take longer, such as those with masks."""

PATIENCE = 300.0
"""Seconds for one chunk; a worker that needs longer hangs and is killed."""

MAX_FRAMES = 100_000
"""Most slices in one file; a higher number means damage."""


class HeaderRequest(NamedTuple):
    """A file to read."""

    file: str
    mask: bool = False
    any_modality: bool = False
    """Whether to accept images of any modality."""
    modalities: tuple[str, ...] = CT
    """Modalities to accept; NIfTI has no field for its own and counts as the first."""


Found = Header | Mask | Refusal
"""The result of reading a file."""


def read_all(root: Path, wanted: Iterable[HeaderRequest], workers: int = 0) -> Iterator[Found]:
    """Reads every file, in their order; with 0 workers, in this process."""
    files: deque[str] = deque()

    def draw() -> Iterator[HeaderRequest]:
        for one in wanted:
            files.append(one.file)
            yield one

    with Pool(workers, PATIENCE) as pool:
        try:
            for found in pool.map(partial(read_one, root), draw(), batch=CHUNK, batches=AHEAD):
                file = files.popleft()
                yield _refuse(file, found) if isinstance(found, Failure) else found
        except StartError as error:
            what = f"one {_brief(error.death)}" if error.death else str(error)
            raise UserError(f"worker processes cannot start: {what}; use --workers 0") from error


def _refuse(file: str, failure: Failure) -> Refusal:
    """The refusal of a file whose worker died; `read_one` returns all other refusals."""
    assert failure.death is not None, failure
    return Refusal(file, "unreadable", f"the process that read it {_brief(failure.death)}")


def _brief(death: Death) -> str:
    """How a worker ended."""
    return f"died ({death.cause})" if death.cause else f"did not answer within {death.silence:g} s"


def read_one(root: Path, wanted: HeaderRequest) -> Found:
    """Reads a header, or returns why there is none; nothing that is wrong with the file raises an error."""
    try:
        return _read_mask(root, wanted.file) if wanted.mask else _read_header(root, wanted)
    except UnreadableError as error:
        return Refusal(wanted.file, error.kind, error.detail)
    except UserError:
        raise  # a missing package, which is not the file's fault
    except Exception as error:  # a bug of a parser, triggered by the file
        return Refusal(wanted.file, "unreadable", f"{type(error).__name__}: {error}")


def _read_header(root: Path, wanted: HeaderRequest) -> Header | Refusal:
    file, modality = wanted.file, wanted.modalities[0]
    content = locate(root, file)
    if is_nifti(file):
        from normal_guidance.scans.index.volumes import read_nifti_header

        # a file is a series of its own
        header = replace(read_nifti_header(content, file), series_uid=file, modality=modality)
        refused = None
    else:
        header = read_header(content, file)
        refused = exclusion(replace(header, modality="") if wanted.any_modality else header, wanted.modalities)
        header = header if header.modality else replace(header, modality=modality)
    if refused is None and header.frames > MAX_FRAMES:
        refused = UnreadableError("unreadable", f"{header.frames} frames are more than {MAX_FRAMES}")
    return header if refused is None else Refusal(file, refused.kind, refused.detail, header.series_uid)


def _read_mask(root: Path, file: str) -> Mask:
    from normal_guidance.scans.index.volumes import read_nifti, read_nifti_header

    if not is_nifti(file):
        raise UnreadableError("unreadable", "a mask is a NIfTI file: .nii or .nii.gz")
    content = locate(root, file)
    header = read_nifti_header(content, file)
    if header.frame_positions is None or header.frame_orientation is None:
        raise UnreadableError("unreadable", "the mask has no positions")
    positive = np.abs(read_nifti(content, file)).max(axis=(1, 2)) > 0
    return Mask(file, header.frame_orientation, header.frame_positions, tuple(positive.tolist()))


PROBLEMS, REPORT = "problems.csv", "report.json"

PACKAGES = ("pydicom", "nibabel", "numpy", "pyarrow")
"""Packages whose versions stand in the report."""

WATCH_FILES = 64
"""Files between two calls of `watch`."""


@dataclass(frozen=True)
class IndexProgress:
    """The progress of `index`."""

    files: int
    scans: int
    done: float | None
    """The approximate share that is done, from 0 to 1; None where it is unknown."""


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
    workers: int = 0,
    watch: Watch | None = None,
) -> Index:
    """Reads all headers below a root, orders the slices, adds the labels, and writes the folder `out`.

    Args:
        source: one of `SOURCES`.
        root: the folder that holds images and label tables.
        out: a folder that is empty or does not exist; it appears when everything is done.
        table: for `folder` only: the table of scans that `normal_guidance.scans.index.source` describes.
        labels: for `rsna-at` only: 'image' (the default) or 'patient'.
        findings: for `folder` only: columns of the table with a label each, in place of the column label.
        workers: processes that read headers; 0 reads them in this one.
        watch: receives the progress when the first file is about to be read, and every `WATCH_FILES` files.
    """
    begin = time.monotonic()
    options = check_options(source, table, labels, findings)
    refuse_what_is_there(Path(out))
    problems: list[Problem] = []
    dataset = SOURCES[source].open(Path(root), options, problems.append)  # a wrong root leaves no folder
    watch = watch or (lambda progress: None)
    with folder_atomically(out) as draft:
        watch(IndexProgress(files=0, scans=0, done=None))
        about: dict[str, Any] = {
            "source": source,
            "root": str(dataset.root.resolve()),
            "options": _stated(source, options),
        }
        about["version"] = __version__
        if dataset.findings:
            about["findings"] = [one.as_json() for one in dataset.findings]
        run = _Run(dataset, problems, watch)
        manifest = write_manifest(draft / MANIFEST, run.rows(workers), about)
        if not len(manifest):
            raise UserError(f"{root} has no usable scan; {_why(problems)}")
        write_problems(draft / PROBLEMS, problems)
        report = make_report(manifest, problems, run.files, time.monotonic() - begin)
        write_json(draft / REPORT, report)
    return Index(manifest, problems, report)


def read_rows(
    dataset: ScanSource,
    problems: list[Problem],
    *,
    workers: int = 0,
    watch: Watch | None = None,
    any_modality: bool = False,
    modalities: Sequence[str] = CT,
    with_series: bool = False,
) -> Iterator[ScanRow]:
    """The scans of an open source with their slices in order; problems are appended to `problems`.

    `modalities` are accepted where the source does not say one; NIfTI, which has none, counts as the first.
    `any_modality` accepts all images. `with_series` keeps the UIDs, the description and the instance
    numbers of each series in its row.
    """
    return _Run(dataset, problems, watch or (lambda progress: None), any_modality, tuple(modalities), with_series).rows(
        workers
    )


def check_options(
    source: str,
    table: str | Path | None = None,
    labels: str | None = None,
    findings: Sequence[Finding] = (),
) -> SourceOptions:
    """The options of a source; refuses options that it does not have."""
    if source not in SOURCES:
        raise UserError(f"source {source!r} is unknown; choose one of {', '.join(SOURCES)}")
    given = {"table": None if table is None else Path(table), "labels": labels, "findings": tuple(findings) or None}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name, value in chosen.items():
        if name not in SOURCES[source].options:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"{source} has no option --{name} (given: {shown}); leave it out")
    return SourceOptions(**chosen)


def _stated(source: str, options: SourceOptions) -> dict[str, str]:
    return {name: str(getattr(options, name)) for name in SOURCES[source].options if name != "findings"}


def _why(problems: Sequence[Problem]) -> str:
    if not problems:
        return "no file was found"
    first = min((one for one in problems if one.kind != "failed"), default=min(problems))  # what failed says no cause
    counts = ", ".join(f"{kind} {count}" for kind, count in summarize(problems).items())
    place, detail = shorten(first.file or first.scan_id, 200), shorten(first.detail, 400)
    reads = "; give DICOM files or NIfTI (.nii, .nii.gz)" if first.kind == "no_image" else ""
    return f"problems: {counts}; for instance {place}: {first.kind}, {detail}{reads}"


def make_report(manifest: Manifest, problems: Sequence[Problem], files: int, seconds: float) -> dict[str, Any]:
    """The content of report.json."""
    return {
        **manifest.about,
        "versions": {"normal_guidance": __version__, "python": platform.python_version(), **_versions()},
        "counts": {
            "files": files,
            "scans": len(manifest),
            "slices": int(manifest.lengths.sum()),
            "positive": int(manifest.labels.sum()),
            "with_slice_labels": len(manifest) - manifest.table["slice_labels"].null_count,
            "patients": len(set(manifest.patient_ids)),
            **_finding_counts(manifest),
            "problems": summarize(problems),
        },
        "seconds": round(seconds, 1),
    }


def _finding_counts(manifest: Manifest) -> dict[str, Any]:
    """Positive scans of each finding; nothing where the label has no name."""
    counts = {one.name: int(manifest.of_finding(one.name).labels.sum()) for one in manifest.findings}
    return {"findings": counts} if counts else {}


def _versions() -> dict[str, str | None]:
    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: of(package) for package in PACKAGES}


class _Run:
    """One pass over a dataset, with counts for the progress."""

    def __init__(
        self,
        dataset: ScanSource,
        problems: list[Problem],
        watch: Watch,
        any_modality: bool = False,
        modalities: tuple[str, ...] = CT,
        with_series: bool = False,
    ) -> None:
        self.dataset, self.report, self.watch = dataset, problems.append, watch
        self.any_modality, self.modalities, self.with_series = any_modality, modalities, with_series
        self.files = self.groups = self.scans = 0
        self.share = _Share()
        self.seen: set[str] = set()

    def rows(self, workers: int) -> Iterator[ScanRow]:
        for group, found in self._read(workers):
            masks = [one for one in found if isinstance(one, Mask)]
            headers = [one for one in found if isinstance(one, Header)]
            for refusal in found:
                if isinstance(refusal, Refusal):
                    self._refuse(group, refusal)
            if group.name and not headers:
                scan_id = self.dataset.scan_of(group, "")
                detail = f"none of its {len(group.files)} files is a slice"
                self.report(Problem(scan_id, "", "failed", detail, "left out"))
            found.clear()  # the headers of a flat folder are gigabytes
            for candidate in self.dataset.candidates(group, headers):
                row = self._row(candidate, masks)
                if row is not None:
                    self.scans += 1
                    yield row
        self.dataset.finish()

    def _read(self, workers: int) -> Iterator[tuple[Group, list[Found]]]:
        """The groups with the results of reading their files."""
        waiting: deque[Group] = deque()
        found: list[Found] = []
        for one in read_all(self.dataset.root, self._wanted(waiting), workers):
            found.append(self.share(one) if isinstance(one, Header) else one)
            self._count()
            group = waiting[0]
            if len(found) == len(group.files) + len(group.masks):
                waiting.popleft()
                self.groups += 1
                yield group, found
                found = []

    def _wanted(self, waiting: deque[Group]) -> Iterator[HeaderRequest]:
        for group in self.dataset.groups():
            waiting.append(group)
            modalities = (group.modality,) if group.modality else self.modalities
            yield from (HeaderRequest(file, False, self.any_modality, modalities) for file in group.files)
            yield from (HeaderRequest(file, mask=True) for file in group.masks)

    def _count(self) -> None:
        self.files += 1
        if self.files % WATCH_FILES == 0:
            done = None
            if self.dataset.expected_files:
                done = self.files / self.dataset.expected_files
            elif self.dataset.expected_groups:
                done = self.groups / self.dataset.expected_groups
            self.watch(IndexProgress(self.files, self.scans, None if done is None else min(done, 1.0)))

    def _refuse(self, group: Group, refusal: Refusal) -> None:
        scan_id = self.dataset.scan_of(group, refusal.series_uid)
        self.report(Problem(scan_id, refusal.file, refusal.kind, refusal.detail, "left out"))

    def _row(self, candidate: Candidate, masks: Sequence[Mask]) -> ScanRow | None:
        scan_id = candidate.scan_id
        if scan_id in self.seen:
            place = candidate.headers[0].file
            self.report(Problem(scan_id, place, "double_scan", "another scan has this id", "left out"))
            return None
        self.seen.add(scan_id)
        ordered = order_slices(candidate.headers)
        nifti = is_nifti(ordered.slices[0][0])
        for finding in ordered.findings:
            if not (nifti and finding.kind == "multi_frame"):  # every NIfTI file is one
                self.report(Problem(scan_id, *finding))
        labels = self.dataset.join(candidate, ordered, masks)
        if labels.label is None:
            return None
        row = _make_row(candidate, ordered, "nifti" if nifti else "dicom", labels.label, labels)
        return _with_series(row, candidate.headers) if self.with_series else row


def _make_row(candidate: Candidate, ordered: Ordered, kind: str, label: int, labels: Labels) -> ScanRow:
    kept = {file for file, _ in ordered.slices}
    headers = [header for header in candidate.headers if header.file in kept]
    return ScanRow(
        scan_id=candidate.scan_id,
        patient_id=candidate.patient_id,
        label=label,
        slice_labels=labels.slices,
        kind=kind,
        files=tuple(file for file, _ in ordered.slices),
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
    )


def _with_series(row: ScanRow, headers: Sequence[Header]) -> ScanRow:
    """The row with what identifies its series in hospital software."""
    number_of = {header.file: header.instance_number for header in headers if header.frames == 1}
    return replace(
        row,
        study_uid=headers[0].study_uid,
        series_uid="" if row.kind == "nifti" else headers[0].series_uid,
        series_description=headers[0].description,
        instance_numbers=tuple(number_of.get(file) for file in row.files),
        body_part=headers[0].body_part,
        burned_in=any(header.burned_in for header in headers),
    )


class _Share:
    """Makes equal values of headers one object: headers of a series differ in file, SOP, number, position and time.

    A header then takes .5 instead of 1.8 KiB; the flat folder of RSNA 2019 has 752,803.
    """

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def __call__(self, header: Header) -> Header:
        own = ("file", "sop_uid", "instance_number", "position", "frame_positions", "acquired")
        values = {one.name: getattr(header, one.name) for one in fields(Header)}
        for name, value in values.items():
            if name not in own:
                values[name] = self.known.setdefault((name, value), value)
        return Header(**values)


# Statistics of labelled scans: lengths, blocks of positive slices, and their places in a scan.
# They fill the three block tables and the density figure of the paper, for any manifest.


BINS = 20
"""Bars of the density figure, as in the paper."""


@dataclass(frozen=True, eq=False)
class Description:
    """Counts, and statistics of the scans with slice labels; made by `describe`."""

    scans: int
    positive: int
    patients: int
    slices: int
    labelled: int
    """Scans with slice labels."""
    positive_slices: int
    lengths: Mapping[str, float]
    """Mean and percentiles of the slices per scan."""
    blocks: BlockStatistics | None
    """None where no slice is labelled positive."""
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
    column = manifest.table["slice_labels"].combine_chunks()
    known = column.is_valid().to_numpy(zero_copy_only=False)
    labels = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    return _describe(manifest.lengths, manifest.labels, manifest.patient_ids, known, labels)


def describe_scans(scans: LabelledScans) -> Description:
    """Describes scans with features, as `describe` does those of a manifest."""
    lengths, known, labels = scans.lengths.cpu(), np.zeros(len(scans.lengths), bool), np.zeros(0, np.int64)
    if scans.slice_labels is not None:
        packed = scans.slice_labels.cpu()
        known = np.array([bool((own != UNKNOWN).all()) for own in packed.split(lengths.tolist())])
        labels = packed.numpy()[np.repeat(known, lengths.numpy())].astype(np.int64)
    return _describe(lengths.numpy(), scans.labels.cpu().numpy(), scans.patient_ids, known, labels)


def _describe(
    lengths: np.ndarray, labels: np.ndarray, patient_ids: Sequence[str], known: np.ndarray, slice_labels: np.ndarray
) -> Description:
    """`known` says for each scan whether its slices are labelled; `slice_labels` are the packed labels of those."""
    own, positive = lengths[known], int(slice_labels.sum())
    blocks = block_statistics(torch.from_numpy(slice_labels), torch.from_numpy(own)) if positive else None
    return Description(
        scans=len(lengths),
        positive=int(labels.sum()),
        patients=len(set(patient_ids)),
        slices=int(lengths.sum()),
        labelled=int(known.sum()),
        positive_slices=positive,
        lengths=_percentiles(lengths),
        blocks=blocks,
        density=positive_density(slice_labels, own),
    )


def positive_density(labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Density of the relative position j / S of the positive slices, j from 1, in `BINS` bins between 0 and 1."""
    ends = np.repeat(lengths.cumsum(), lengths)
    sizes = np.repeat(lengths, lengths)
    slice_number = np.arange(1, len(labels) + 1) - (ends - sizes)
    relative = slice_number[labels == 1] / sizes[labels == 1]
    # A slice at the border of two bins belongs to the lower one: j / S lies in (0, 1].
    found = np.clip(np.ceil(relative * BINS - 1e-9).astype(int) - 1, 0, BINS - 1)
    counts = np.bincount(found, minlength=BINS)
    return counts / max(1, counts.sum()) * BINS


def _percentiles(values: np.ndarray) -> dict[str, float]:
    found = np.quantile(values, list(PERCENTILES.values()))
    return {"mean": float(values.mean()), **dict(zip(PERCENTILES, map(float, found), strict=True))}
