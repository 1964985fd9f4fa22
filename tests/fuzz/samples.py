"""The samples for mutation: small phantom datasets, single files of every kind, and folders that we wrote ourselves.

The first process makes them once per run; the workers only read them.  Our own folders are made by the code that makes
them for users:

    index/    nguide index       manifest.parquet, problems.csv, report.json
    splits/   nguide split       split-1.csv
    store/    nguide encode      store.json, index.parquet, shards, report.json, problems.csv
    job/      nguide encode      the same, interrupted: store.job with units and statistics
    study/    nguide experiment  a run (config, report, weights, history, predictions) and a method without one
    bundle/   nguide bundle      two findings: findings.json, bundle.json, weights

A reader of such a folder returns what its commands would use, and what they would only show, as text that can be
compared.  It reads everything anew.
"""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import nibabel
import numpy as np
import pydicom
import torch
from pydicom.uid import ExplicitVRBigEndian, ImplicitVRLittleEndian
from table_mutations import read_rows, write_rows

sys.path.append(str(Path(__file__).parents[1]))
from normal_guidance.fit.bundle import bundle_run, load_bundle, write_bundle
from normal_guidance.scans.features.encoding import EncodingOptions, EncodingTask, encode
from normal_guidance.scans.features.preprocessing import Preprocessing
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import Finding, Manifest, read_manifest
from normal_guidance.scans.index.problems import Problem, read_problems, summarize, write_problems
from normal_guidance.scans.index.splits import audit, read_split, split_scans, write_split
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.scans.phantom.phantom_files import write_phantom
from normal_guidance.study.experiment import Study, stored_dataset, train_study
from normal_guidance.study.study_tables import collect
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.predictions import read_predictions
from normal_guidance.sweep.run import load_run, load_winner, read_history
from small_bundle import WINDOW, make_run, tiny

OWN = "own"
"""The folder of what we wrote ourselves."""

SIZE, SLICES, SCANS = 32, 12, 3
TABLE = "labels.csv"

TABLES = {
    "rsna-ich": ("stage_2_train.csv",),
    "rsna-pe": ("train.csv",),
    "rsna-at": ("image_level_labels_2024.csv", "train_series_meta.csv", "train_2024.csv"),
    "folder": (TABLE,),
}
"""Label tables of every source."""


def write_samples(folder: Path) -> None:
    """Fills an empty folder."""
    for source in TABLES:
        root = folder / source
        write_phantom(source, root, scans=SCANS, size=SIZE, slices=SLICES, positive=0.5, compression="mixed")
        if source == "folder":
            _add_other_kinds(root)
        found = index(source, root, folder / f"{source}-index", table=table_of(source, root))
        assert len(found.manifest) == SCANS + 2 * (source == "folder"), found.problems
    _write_files(folder)
    make_folders(folder / OWN)


def table_of(source: str, root: Path) -> Path | None:
    return root / TABLE if source == "folder" else None


def _add_other_kinds(root: Path) -> None:
    """A scan in an archive, one in a file of many frames, a NIfTI volume with a mask."""
    scans = root / "scans"
    with zipfile.ZipFile(root / "scans.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((scans / "scan-0001").iterdir()):
            info = zipfile.ZipInfo(f"scan-0001/{file.name}")  # without today's date: cases are to be repeated
            archive.writestr(info, file.read_bytes(), zipfile.ZIP_DEFLATED)
            file.unlink()
    (scans / "scan-0001").rmdir()
    volume, mask = _volume(), np.zeros((SIZE, SIZE, SLICES), np.int16)
    mask[3:5, 3:5, 4:6] = 1
    for name, voxels in (("volume.nii.gz", volume), ("mask.nii", mask)):
        (root / name).write_bytes(_nifti(voxels, name.endswith(".gz")))
    write_phantom("folder", root / "frames", scans=1, size=SIZE, slices=SLICES, oddities=["multi_frame"])
    frames = next((root / "frames").rglob("*.dcm"))
    header, *rows = read_rows((root / TABLE).read_bytes())
    rows = [[*row, "", ""] for row in rows]
    rows[1][2] = "scans.zip!scan-0001"
    rows.append(["volume", "P9", "volume.nii.gz", "1", "", "", "mask.nii"])
    rows.append(["frames", "P10", frames.relative_to(root).as_posix(), "1", "", "4-6;8", ""])
    (root / TABLE).write_bytes(write_rows([[*header, "slice_ranges", "mask"], *rows]))


def _volume() -> np.ndarray:
    return np.random.default_rng(0).integers(-1000, 1000, (SIZE, SIZE, SLICES)).astype(np.int16)


def _nifti(voxels: np.ndarray, packed: bool = False, image: Callable[..., object] = nibabel.Nifti1Image) -> bytes:
    made = image(voxels, np.diag([-0.5, -0.5, 5.0, 1.0]))
    content = made.to_bytes()  # type: ignore[attr-defined]
    return gzip.compress(content, mtime=0) if packed else content


def _write_files(folder: Path) -> None:
    """Single files, two of each compression, some with oddities, other encodings of the header, volumes."""
    made = folder / "files"
    oddities = ["multi_frame", "bits", "secondary_capture"]
    truth = write_phantom("folder", made, scans=9, size=SIZE, slices=SLICES, oddities=oddities, compression="mixed")
    kept = {made / file for scan in truth["scans"] for file in (scan["odd_files"] or scan["files"])[:2]}
    plain = next(made / scan["files"][0] for scan in truth["scans"] if scan["transfer_syntax"].endswith(".1.2.1"))
    for name, syntax in (("implicit", ImplicitVRLittleEndian), ("big", ExplicitVRBigEndian)):
        dataset = pydicom.dcmread(plain)
        dataset.walk(lambda *_: None)  # parses every value: unparsed ones are written as they came
        if name == "big":
            dataset.PixelData = np.frombuffer(dataset.PixelData, "<u2").byteswap().tobytes()
        dataset.file_meta.TransferSyntaxUID = syntax
        options = {"implicit_vr": name == "implicit", "little_endian": name != "big"}
        kept.add(made / f"{name}.dcm")
        pydicom.dcmwrite(made / f"{name}.dcm", dataset, **options)
    for file in {*made.rglob("*.dcm")} - kept:
        file.unlink()
    volume = _volume()
    (made / "one.nii").write_bytes(_nifti(volume))
    (made / "packed.nii.gz").write_bytes(_nifti(volume, packed=True))
    (made / "float.nii").write_bytes(_nifti(volume.astype(np.float32)))
    (made / "two.nii.gz").write_bytes(_nifti(volume, packed=True, image=nibabel.Nifti2Image))


class Samples(NamedTuple):
    """The samples in a folder, read on demand."""

    folder: Path

    def files(self, suffix: str) -> list[Path]:
        return _files(self.folder / "files", suffix)

    def manifest(self, source: str) -> Manifest:
        return _manifest(self.folder / f"{source}-index")


@cache
def _files(folder: Path, suffix: str) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if suffix in path.name]


@cache
def _manifest(folder: Path) -> Manifest:
    return read_manifest(folder)


NAME = "small"
PROBLEMS = (Problem("scan-0001", "scan-0001/3.dcm", "duplicate", "same position", "left out"),)


class Read(NamedTuple):
    """What commands use, and what they only show."""

    used: str
    shown: str = ""


def make_folders(folder: Path) -> None:
    """Fills a new folder; `READERS` read its folders."""
    folder.mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = make_run(folder)
    (folder / "splits").mkdir()
    write_split(folder / "splits" / "split-1.csv", _split(made.manifest))
    for name in ("index", "store"):
        write_problems(folder / name / "problems.csv", PROBLEMS)
    _interrupt(folder)
    train_study(_study(folder), make_grid=_grid)
    bundle = bundle_run(made.run)
    first, second = (replace(bundle, finding=Finding(name)) for name in ("any", "other"))
    write_bundle(replace(first, further=(second,)), folder / "bundle")
    torch.set_num_threads(threads)


def _split(scans: Any) -> Any:
    return split_scans(scans.scan_ids, scans.patient_ids, [int(label) for label in scans.labels], 1)


def _study(folder: Path) -> Study:
    dataset = stored_dataset([folder / "store"], [folder / "splits"], NAME)
    protocol = Config("ng", epochs=2, batch_size=4, train_above_val=False)
    return Study(dataset, folder / "study", ("ng", "centered_gaussian"), dataset.seeds, protocol)


def _grid(base: Config) -> tuple[Config, ...]:
    return grid(base, lr=[0.1], l1=[0.0])


def _interrupt(folder: Path) -> None:
    """An encoding that ends when its units are done, before the store is written."""

    def watch(progress: Any) -> None:
        if len(list((folder / "job" / "store.job").glob("unit-*"))) >= 2:
            raise KeyboardInterrupt

    (folder / "job").mkdir()
    with suppress(KeyboardInterrupt):
        _resume(folder, watch)
        raise RuntimeError("the encoding was not interrupted")


def _resume(folder: Path, watch: Callable[[Any], None] = lambda progress: None) -> Any:
    manifest = read_manifest(folder / "index")
    parts = dict(zip(manifest.scan_ids, _split(manifest).parts, strict=True))
    options = EncodingOptions(unit=64, threads=1)
    return _encode(folder / "job" / "store", manifest, parts, options=options, watch=watch)


def _encode(out: Path, manifest: Any, parts: Mapping[str, str], **options: Any) -> Any:
    how = Preprocessing(windows=(WINDOW,))
    watch = options.pop("watch", lambda progress: None)
    return encode(EncodingTask(manifest, tiny, how, read_volume, parts=parts, **options), out, watch=watch)


def _text(*values: object) -> str:
    return "\n".join(repr(value) for value in values)


def _values(tensors: Mapping[str, torch.Tensor]) -> list[tuple[object, ...]]:
    return [(name, tensor.dtype, tensor.tolist()) for name, tensor in sorted(tensors.items())]


def read_index(folder: Path) -> Read:
    manifest = read_manifest(folder / "index")
    problems = read_problems(folder / "index" / "problems.csv")
    rows = [asdict(row) for row in manifest]
    return Read(_text(manifest.root, manifest.findings, rows), _text(manifest.about, problems, summarize(problems)))


def read_splits(folder: Path) -> Read:
    store, path = open_store(folder / "store"), folder / "splits" / "split-1.csv"
    split = read_split(path)
    return Read(_text(store.with_parts(path).scans["part"].tolist()), _text(audit(split, store), split.counts()))


def read_store(folder: Path) -> Read:
    """The store, and what `nguide encode` says of one that is complete."""
    store, manifest = open_store(folder / "store"), read_manifest(folder / "index")
    bags, columns = store.bags(), store.scans.drop(columns="slice_labels").to_dict("list")
    labels = None if bags.slice_labels is None else bags.slice_labels.tolist()
    turn = ("train", "train", "val", "test")
    part_of = {patient: turn[number % 4] for number, patient in enumerate(sorted(set(manifest.patient_ids)))}
    parts = {row: part_of[patient] for row, patient in zip(manifest.scan_ids, manifest.patient_ids, strict=True)}
    again = _encode(folder / "store", manifest, parts, options=EncodingOptions(threads=1))
    used = (columns, labels, store.provenance, store.recipe, store.findings, store.slice_spacing, store.width)
    return Read(_text(*used, _values({"": bags.features})), _text(again.failed, again.problems))


def read_job(folder: Path) -> Read:
    """Resumes the encoding, which ends the job."""
    done = _resume(folder)
    used = (done.store.fingerprint, done.store.recipe, done.store.provenance)
    return Read(_text(*used, _values({"": done.store.bags().features})), _text(done.failed, done.problems))


def read_study(folder: Path) -> Read:
    """Does what `nguide experiment` does with a complete study, and `nguide bundle` with one of its runs."""
    train_study(_study(folder), make_grid=_grid)
    results, runs = collect(folder / "study", NAME), sorted((folder / "study").glob("*/*"))
    trained = [run for run in runs if (run / "report.json").exists()]
    page, bundle = json.loads(results.json()), bundle_run(folder / "study" / "ng" / "1").as_json()
    tables = [read_predictions(run / "predictions.parquet") for run in runs]
    tables += [read_history(run / "history.parquet") for run in trained]
    weights = [_values(load_winner(run).state_dict()) for run in trained]
    shown = (page.pop("about", None), bundle.pop("training"))
    used = (page, bundle, weights, [load_run(run).winners for run in trained], [table.to_pydict() for table in tables])
    return Read(_text(*used), _text(*shown))


def read_bundle(folder: Path) -> Read:
    models = load_bundle(folder / "bundle").each
    known = [model.as_json() for model in models]
    shown = [[about.pop("training"), about.pop("normal_guidance")] for about in known]
    return Read(_text(known, [_values(model.model.state_dict()) for model in models]), _text(shown))


READERS: dict[str, Callable[[Path], Read]] = {
    "index": read_index,
    "splits": read_splits,
    "store": read_store,
    "job": read_job,
    "study": read_study,
    "bundle": read_bundle,
}
"""By the folder that each reads."""


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that we write; the lock is empty of content."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
