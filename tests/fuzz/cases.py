"""The cases: the damage, the code that reads it, and the conditions that must hold afterwards.

A case returns its outcome: 'read', the kind of an UnreadableError, 'user error', 'indexed'.  Any other exception is a
finding.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from dicom_mutations import mutate_dicom, mutate_pixels
from feature_cases import KINDS as FEATURE_KINDS
from harness import SECRET, Case, Probe, attempt, expect
from mutations import BYTES, NAMES, hostile_zip, mutate, mutate_nifti
from own_cases import KINDS as OWN_KINDS
from samples import TABLES, Samples, table_of
from table_mutations import Table, mutate_csv, mutate_parquet, read_rows

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.index.containers import list_files, locate
from normal_guidance.scans.index.dicom_slices import Header, exclusion, read_elements, read_header, refusing
from normal_guidance.scans.index.geometry import order_slices
from normal_guidance.scans.index.header_reading import HeaderRequest, read_one
from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import Manifest, ScanRow, read_manifest
from normal_guidance.scans.index.pixels import PYDICOM, read_pixels
from normal_guidance.scans.index.problems import KINDS as PROBLEM_KINDS
from normal_guidance.scans.index.problems import Problem, read_problems
from normal_guidance.scans.index.volumes import read_nifti, read_nifti_header, read_volume


def headers_of_slices(random: Random, samples: Samples, probe: Probe) -> str:
    """A header, and the order of slices that such headers give."""
    paths = [random.choice(samples.files(".dcm")) for _ in range(random.choice((1, 1, 3)))]
    contents = [mutate_dicom(random, path.read_bytes()) for path in paths]
    headers: list[Header] = []
    with probe.watched():
        read = [partial(read_header, content, "a.dcm") for content in contents]
        outcomes = [attempt(lambda reader=reader: headers.append(reader())) for reader in read]
        for header in headers:
            exclusion(header)
            _check_header(header)
        if headers and sum(header.frames for header in headers) < 1000:
            ordered = order_slices([pickle.loads(pickle.dumps(header)) for header in headers])
            expect(np.all(np.diff(ordered.positions) > 0), f"positions {ordered.positions}")
    return outcomes[0]


def _check_header(header: Header) -> None:
    expect(1 <= header.rows < 2**31 and 1 <= header.columns < 2**31, f"{header.rows} x {header.columns}")
    expect(header.frames >= 1, f"{header.frames} frames")
    for name in ("position", "orientation", "pixel_spacing"):
        values = getattr(header, name)
        expect(values is None or np.isfinite(values).all(), f"{name} is {values}")
    places = header.frame_positions
    expect(places is None or len(places) == header.frames, f"positions of {header.frames} frames")


def pixels(random: Random, samples: Samples, probe: Probe) -> str:
    change = random.choice((mutate_dicom, mutate_pixels))
    content = change(random, random.choice(samples.files(".dcm")).read_bytes())
    repair = random.random() < 0.8
    with probe.watched():
        probe.tell(_decodes_natively(content))
        outcome = attempt(lambda: _check_slices(read_pixels(content, "a.dcm", repair=repair)[0]))
        probe.tell(False)
    return outcome


def _check_slices(slices: np.ndarray) -> None:
    expect(
        slices.dtype in (np.int16, np.float32) and slices.ndim == 3 and slices.size, f"{slices.dtype} {slices.shape}"
    )
    expect(np.isfinite(slices).all(), "pixels that are not finite")


def _decodes_natively(content: bytes) -> bool:
    """Whether the file states a compression for OpenJPEG or GDCM."""
    try:
        with refusing():
            return read_elements(content, ()).syntax not in PYDICOM
    except (UnreadableError, UserError):
        return False


def _read_bytes(root: Path, file: str) -> bytes:
    found = locate(root, file)
    return found if isinstance(found, bytes) else found.read_bytes()


def _has_native(row: ScanRow, root: Path) -> bool:
    """Whether OpenJPEG or GDCM decodes a file of the scan."""
    contents: list[bytes] = []
    for file in dict.fromkeys(row.files):
        attempt(lambda file=file: contents.append(_read_bytes(root, file)))
    return row.kind == "dicom" and any(map(_decodes_natively, contents))


def nifti(random: Random, samples: Samples, probe: Probe) -> str:
    content = mutate_nifti(random, random.choice(samples.files(".nii")).read_bytes())
    path = probe.root / "a.nii"
    path.write_bytes(content)
    given = random.choice((path, content))
    with probe.watched():
        first = attempt(lambda: _check_header(read_nifti_header(given, "a.nii")))
        second = attempt(lambda: _check_slices(read_nifti(given, "a.nii")))
    return f"header {first}" if first != "read" else second


def volume(random: Random, samples: Samples, probe: Probe) -> str:
    """A scan of a manifest with a file that was damaged after indexing."""
    source = random.choice(("rsna-at", "folder"))
    manifest = samples.manifest(source)
    row = manifest[random.randrange(len(manifest))]
    for file in dict.fromkeys(file.partition("!")[0] for file in row.files):
        (probe.root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(samples.folder / source / file, probe.root / file)
    changed = probe.root / random.choice(row.files).partition("!")[0]
    _damage(random, changed)
    with probe.watched():
        probe.tell(_has_native(row, probe.root))
        outcome = attempt(lambda: _check_slices(read_volume(row, probe.root)[0]))
        probe.tell(False)
    return outcome


def _damage(random: Random, path: Path) -> None:
    content = path.read_bytes()
    if path.suffix == ".dcm":
        content = mutate_dicom(random, content)
    elif path.suffix == ".zip":
        content = mutate(random, content, BYTES)
    else:
        content = mutate_nifti(random, content)
    path.write_bytes(content)


def archive(random: Random, samples: Samples, probe: Probe) -> str:
    """A folder with a hostile archive and links that lead out, and invented names."""
    members = {f"{number}.dcm": random.choice(samples.files(".dcm")).read_bytes() for number in range(2)}
    (probe.root / "z.zip").write_bytes(hostile_zip(random, members))
    (probe.root / "link").symlink_to(random.choice(("../outside", "link", "..", "/", ".", "nowhere")))
    (probe.root / "a").mkdir()
    (probe.root / "a" / "1.dcm").symlink_to(
        random.choice(("../../outside/secret.dcm", "1.dcm", "../z.zip", "/etc/passwd"))
    )
    problems: list[Problem] = []
    with probe.watched():
        files = list(list_files(probe.root, problems.append))
        made_up = random.sample(NAMES, 4)
        outcomes = [_read_name(probe.root, file) for file in (*files, *made_up)]
    expect(len(files) == len(set(files)), "a name twice")
    for file in files:
        parts = file.replace("\\", "/").replace("!", "/").split("/")
        expect(".." not in parts and not file.startswith("/"), f"listed {file!r}")
    expect(all(problem.kind in PROBLEM_KINDS and problem.detail for problem in problems), f"{problems}")
    return "all read" if set(outcomes[: len(files)]) <= {"read"} else "some refused"


def _read_name(root: Path, file: str) -> str:
    def read() -> None:
        content = _read_bytes(root, file)
        expect(content != SECRET, f"read a secret as {file!r}")

    outcome = attempt(read)
    read_one(root, HeaderRequest(file))  # raises nothing, ever
    return outcome


def index_files(source: str, random: Random, samples: Samples, probe: Probe) -> str:
    """A dataset with files that are damaged, missing, or replaced by links and archives."""
    root = _copy(samples, source, probe)
    outer = {row.scan_id: {file.partition("!")[0] for file in row.files} for row in samples.manifest(source)}
    changed = random.sample(sorted(set().union(*outer.values())), random.choice((1, 1, 2, 4)))
    for file in changed:
        _change_file(random, root / file)
    masked = {"volume"} if source == "folder" and random.random() < 0.1 else set()
    if masked:
        _damage(random, root / "mask.nii")
    touched = {scan for scan, held in outer.items() if held & set(changed)} | masked
    return _index(random, samples, source, probe, touched, {file for scan in touched for file in outer[scan]})


def _change_file(random: Random, path: Path) -> None:
    change = random.randrange(12)
    if change < 4:
        path.unlink()
    if change == 1:
        path.symlink_to(random.choice(("../" * len(path.parts) + "etc/passwd", path, path.parent, "/dev/zero", "..")))
    elif change == 2:
        os.mkfifo(path)
    elif change == 3:
        path.mkdir()
    elif change == 4:
        names = ("copy.dcm", "x!", "a.zip!b", "ä\n.dcm", "=1.dcm", ".hidden")
        shutil.copyfile(path, path.with_name(random.choice(names)))
    elif change == 5:
        content = hostile_zip(random, {path.name: path.read_bytes()})
        path.with_name(random.choice(("z.zip", "Z.ZIP", "1.dcm.zip"))).write_bytes(content)
    elif change > 5:
        _damage(random, path)


def index_table(source: str, random: Random, samples: Samples, probe: Probe) -> str:
    """A dataset with a damaged label table."""
    root, name = _copy(samples, source, probe), random.choice(TABLES[source])
    content, place = (root / name).read_bytes(), root / name
    packed = source == "folder" and random.random() < 0.4
    table = (mutate_parquet if packed else mutate_csv)(random, content)
    if source == "folder":
        (root / "link").symlink_to("../outside")
    if packed:
        place = place.with_suffix(".parquet")
    place.write_bytes(table.content)
    touched = _scans_of(content, table, samples.manifest(source))
    return _index(random, samples, source, probe, touched, set(), place)


def _scans_of(content: bytes, table: Table, before: Manifest) -> set[str]:
    """The scans whose rows changed: a row names the scan, its patient or one of its files."""
    _, *rows = read_rows(content)
    if table.touched is None:
        return set(before.scan_ids)
    cells = {cell for number in table.touched if number < len(rows) for cell in rows[number]}
    cells |= {cell.rpartition("_")[0] for cell in cells}  # of the first source: FILE_FINDING
    named = {
        scan.scan_id: {scan.scan_id, scan.patient_id, *(Path(file).stem for file in scan.files)} for scan in before
    }
    return {scan for scan, names in named.items() if names & cells}


def _copy(samples: Samples, source: str, probe: Probe) -> Path:
    shutil.copytree(samples.folder / source, probe.root, dirs_exist_ok=True)
    return probe.root


def _index(
    random: Random,
    samples: Samples,
    source: str,
    probe: Probe,
    touched: set[str],
    damaged: Iterable[str],
    table: Path | None = None,
) -> str:
    labels = random.choice((None, "patient")) if source == "rsna-at" else None
    workers = int(random.random() < 0.01)
    place = table if source == "folder" and table else table_of(source, probe.root)
    out = probe.out / "index"
    with probe.watched():
        outcome = attempt(lambda: index(source, probe.root, out, table=place, labels=labels, workers=workers))
    if outcome == "user error":
        expect(not any(probe.out.iterdir()), f"left behind: {list(probe.out.iterdir())}")
        return outcome
    expect(outcome == "read", f"index raised an UnreadableError: {outcome}")
    after, problems = read_manifest(out), read_problems(out / "problems.csv")
    json.loads((out / "report.json").read_text())
    expect(
        all(problem.kind in PROBLEM_KINDS and problem.action for problem in problems), "problems without kind or action"
    )
    _check_rows(after)
    _check_untouched(samples.manifest(source), after, touched, compare_labels=labels is None)
    held = {file.partition("!")[0] for row in after for file in row.files}
    for file in damaged:
        if not os.path.lexists(probe.root / file) or (probe.root / file).is_dir():
            continue  # a folder, or a link to one, whose files are listed
        told = (
            problem.scan_id in touched or file in problem.file or Path(file).name in problem.detail
            for problem in problems
        )
        expect(file in held or any(told), f"{file} is neither in the manifest nor in problems.csv")
    rows = [row for row in after if row.scan_id in touched]
    return f"indexed, {_read_volumes(rows, probe)}" if rows else "indexed"


def _read_volumes(rows: list[ScanRow], probe: Probe) -> str:
    """Reads the damaged scans as the next stage does."""
    with probe.watched():
        probe.tell(any(_has_native(row, probe.root) for row in rows))
        outcomes = [attempt(lambda row=row: _check_slices(read_volume(row, probe.root)[0])) for row in rows]
        probe.tell(False)
    return "all read" if set(outcomes) <= {"read"} else "some unreadable"


def _check_rows(manifest: Manifest) -> None:
    for row in manifest:
        expect(row.scan_id and row.patient_id, f"ids {row.scan_id!r} {row.patient_id!r}")
        expect(row.label in (0, 1), f"label {row.label}")
        expect(len(row.files) == len(row.frames) == len(row.positions) > 0, f"lengths of {row.scan_id}")
        expect(np.all(np.diff(row.positions) > 0), f"positions of {row.scan_id}: {row.positions}")
        labels = row.slice_labels
        expect(
            labels is None or (len(labels) == len(row) and set(labels.tolist()) <= {0, 1}), f"{row.scan_id}: {labels}"
        )
        json.dumps(dict(row.dataset_labels))


def _check_untouched(before: Manifest, after: Manifest, touched: set[str], *, compare_labels: bool) -> None:
    rows, names = {row.scan_id: row for row in after}, ["files", "frames", "positions"]
    if compare_labels:
        names += ["label", "slice_labels"]
    for row in before:
        if row.scan_id in touched:
            continue
        expect(row.scan_id in rows, f"scan {row.scan_id}, which nobody touched, is lost")
        found = rows[row.scan_id]
        same = [np.array_equal(getattr(found, name), getattr(row, name)) for name in names]
        expect(all(same), f"{found} is not {row}")


KINDS: dict[str, tuple[int, Case]] = {
    "header": (18, headers_of_slices),
    "pixels": (26, pixels),
    "volume": (6, volume),
    "nifti": (10, nifti),
    "archive": (10, archive),
    **{f"files of {source}": (3, partial(index_files, source)) for source in TABLES},
    **{f"table of {source}": (4, partial(index_table, source)) for source in TABLES},
    **FEATURE_KINDS,
    **OWN_KINDS,
}
"""Kinds of cases, and how often each is run."""
