"""A small model for the tests of everything behind `nguide predict`: phantoms, a tiny encoder, one short run."""

import os
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydicom import dcmread
from pydicom.dataset import Dataset

from normal_guidance.fit import bundle as bundles
from normal_guidance.fit import fit_ensemble, measured
from normal_guidance.fit.bundle import Bundle, Expectations, load_bundle
from normal_guidance.fit.fit_ensemble import KINDS
from normal_guidance.fit.slice_finder import SliceFinder
from normal_guidance.front import scans_to_store
from normal_guidance.scans.features.encoders import Encoder
from normal_guidance.scans.features.encoding import EncodingTask, encode
from normal_guidance.scans.features.preprocessing import Preprocessing
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import ScanRow, read_manifest
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.scans.phantom.phantom_files import write_phantom
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.run import run_sweep

SIZE, WIDTH = 16, 8
WINDOW = (-100.0, 300.0)
PATIENT = "PHANTOM-"
"""The beginning of the patients' ids."""


def tiny(device: str = "cpu", precision: str = "float32", *, scale: float = 1.0) -> Encoder:
    """A random projection: of no practical use, but as exact as any encoder."""
    weights = torch.randn(WIDTH, SIZE * SIZE, generator=torch.Generator().manual_seed(1)) * scale / SIZE
    layer = torch.nn.Linear(SIZE * SIZE, WIDTH, bias=False)
    layer.weight.data = weights
    module = torch.nn.Sequential(torch.nn.Flatten(), layer).requires_grad_(False)
    return Encoder("tiny", 1, SIZE, WIDTH, True, f"tiny-{scale}", module, device)


def use_tiny(monkeypatch: pytest.MonkeyPatch, **options: float) -> None:
    """Replace the encoder that a bundle loads."""
    monkeypatch.setattr(bundles, "load_encoder", lambda name, **_: tiny(**options))


def few_settings(patch: pytest.MonkeyPatch, **constants: object) -> None:
    """An ensemble of three kinds, one model a group and few steps, for tests of what does not depend on them."""
    kinds = tuple(kind for kind in KINDS if kind.method in ("whole_bells_ng", "evidence", "mean"))
    for name, value in ({"STEPS": 30, "EPOCHS": 6, "RATES": (0.1,), "KEPT": 1, "KINDS": kinds} | constants).items():
        for module in (fit_ensemble, measured):
            if hasattr(module, name):
                patch.setattr(module, name, value)


@cache
def _drawn() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    write_phantom("folder", Path(folder.name) / "scans", scans=16, seed=3, size=32, slices=12, positive=0.5)
    return folder


def draw_scans(folder: Path) -> Path:
    """Draw 16 small scans, with their table labels.csv, for `nguide fit SCANS LABELS`."""
    return shutil.copytree(Path(_drawn().name) / "scans", folder / "scans")


def fit_scans_quickly(patch: pytest.MonkeyPatch) -> None:
    """Encode a folder of scans with the tiny encoder, in this process, and fit few settings."""
    few_settings(patch, FOLDS=3)
    patch.setattr(scans_to_store, "load_encoder", lambda name, *, channels, offline, **where: tiny(**where))
    for name in ("index", "EncodingTask"):
        patch.setattr(scans_to_store, name, _without_workers(getattr(scans_to_store, name)))


def _without_workers(function: Callable[..., object]) -> Callable[..., object]:
    return lambda *arguments, **options: function(*arguments, **(options | {"workers": 0}))


def fitted_bundle(features: int, **known: object) -> Bundle:
    """An ensemble of three kinds, after few steps, in float16, of features that no encoder made."""
    with pytest.MonkeyPatch.context() as patch:
        few_settings(patch, KINDS=(KINDS[0], KINDS[2], KINDS[5]), STEPS=10, EPOCHS=2)
        finder = SliceFinder(folds=3).fit(shifted_mean(40, 1, features=features, shift=2.0))
    about = {
        "expects": Expectations(),
        "training": {},
        "encoder": None,
        "preprocessing": None,
        "repair": False,
        **known,
    }
    operation, dtype = finder.operation_, "float16"
    return Bundle(config=None, model=finder.ensemble_, features=features, dtype=dtype, operation=operation, **about)


def train(folder: Path, store: FeatureStore, config: Config) -> Path:
    parts = (store.part(part) for part in ("train", "val", "test"))
    return run_sweep(folder, [config], *parts).folder


def make_run(folder: Path, scans: int = 24) -> SimpleNamespace:
    """Make phantoms, their index and store, and a run on them."""
    write_phantom("folder", folder / "scans", scans=scans, seed=3, size=32, slices=12, positive=0.5)
    index("folder", folder / "scans", folder / "index", table=folder / "scans" / "labels.csv")
    manifest = read_manifest(folder / "index")
    turn = ("train", "train", "val", "test")
    part_of = {patient: turn[number % 4] for number, patient in enumerate(sorted(set(manifest.patient_ids)))}
    parts = {row.scan_id: part_of[row.patient_id] for row in manifest}
    way = Preprocessing(windows=(WINDOW,))
    outcome = encode(EncodingTask(manifest, tiny, way, read_volume, parts=parts), folder / "store")
    config = Config("ng", lr=0.1, epochs=4, batch_size=4, train_above_val=False)
    run = train(folder / "run", outcome.store, config)
    return SimpleNamespace(folder=folder, manifest=manifest, store=outcome.store, run=run, config=config)


def copy_series(
    row: ScanRow, root: Path, out: Path, slices: int | None = None, spacing: float | None = None, **tags: object
) -> list[Path]:
    """Copy a phantom's series with the given number of slices, repeated where it has too few, and other tags."""
    out.mkdir(parents=True, exist_ok=True)
    files, originals = [], [dcmread(root / file) for file in row.files]
    step = row.slice_spacing if spacing is None else spacing
    for number in range(len(row) if slices is None else slices):
        dataset = originals[number % len(row)]
        for name, value in tags.items():
            setattr(dataset, name, value)
        x, y, _ = map(float, dataset.ImagePositionPatient)
        dataset.ImagePositionPatient = [x, y, round(float(row.positions[0]) + step * number, 4)]
        _number(dataset, number)
        files.append(out / f"{number:04d}.dcm")
        dataset.save_as(files[-1])
    return files


def _number(dataset: Dataset, number: int) -> None:
    dataset.InstanceNumber = number + 1
    uid = f"{dataset.SeriesInstanceUID}.{number + 1}"[-64:].lstrip(".")
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = uid


def read_or_die(row: ScanRow, root: Path, *, repair: bool = True) -> tuple[np.ndarray, list]:
    """Like a decoder that one scan kills with its whole process; workers find this function by its name."""
    if row.scan_id.startswith("deadly"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return read_volume(row, root, repair=repair)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def tiny_encoder(monkeypatch) -> None:
    """The encoder that the run was trained with: small, and found by its name."""
    use_tiny(monkeypatch)


@pytest.fixture
def bundle(trained):
    return load_bundle(trained.run)
