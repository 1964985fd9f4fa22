"""MR without a unit, from NIfTI files to predictions: index, encode by percentiles, train, bundle, predict."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
from pydicom import dcmread
from pydicom.uid import MRImageStorage

from normal_guidance.clinic.predict.new_scans import NotPredicted
from normal_guidance.clinic.predict.predicting import PredictOptions
from normal_guidance.clinic.results.result_folder import write_predictions
from normal_guidance.fit.bundle import bundle_run, load_bundle, write_bundle
from normal_guidance.front.predicted import predict
from normal_guidance.scans.features.encoding import EncodingTask, encode
from normal_guidance.scans.features.preprocessing import Preprocessing
from normal_guidance.scans.features.windows import Percentiles
from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import read_manifest
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.predictions import read_predictions
from small_bundle import copy_series, tiny, train, use_tiny

SCANS, SLICES = 16, 6
AFFINE = np.diag([-1.0, -1.0, 3.0, 1.0])
HERE = PredictOptions(workers=0)


def draw(number: int) -> np.ndarray:
    """Columns, rows, slices: noise, and in odd scans a bright lesion in two slices; every scanner scales otherwise."""
    random = np.random.default_rng(number)
    volume = random.uniform(0.2, 0.6, (20, 24, SLICES))
    volume[:3] = 0.0  # air
    if number % 2:
        volume[8:14, 8:14, 2:4] += 0.4
    return (volume * random.uniform(100, 3000)).astype(np.float32)


def write(path: Path, volume: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume, AFFINE), path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mr")
    lines = ["scan_id,path,label,patient_id,slice_ranges,modality"]
    for number in range(SCANS):
        write(folder / f"scans/{number}.nii.gz", draw(number))
        ranges = "3-4" if number % 2 else ""
        lines.append(f"s{number},{number}.nii.gz,{number % 2},p{number},{ranges},MR")
    (folder / "labels.csv").write_text("\n".join(lines))
    index("folder", folder / "scans", folder / "index", table=folder / "labels.csv")
    manifest = read_manifest(folder / "index")
    turn = ("train", "train", "train", "train", "val", "val", "test", "test")
    parts = {row.scan_id: turn[number % 8] for number, row in enumerate(manifest)}
    way = Preprocessing(windows=(Percentiles(),))
    outcome = encode(EncodingTask(manifest, tiny, way, read_volume, parts=parts), folder / "store")
    assert outcome.store.provenance["inputs"]["modalities"] == {"MR": SCANS}
    return train(folder / "run", outcome.store, Config("ng", lr=0.1, epochs=4, batch_size=4, train_above_val=False))


def test_a_new_scan_is_scaled_by_its_own_percentiles(run, tmp_path, monkeypatch):
    """A test scan gives the run's own prediction again, and so does the scan of another scanner's scale."""
    use_tiny(monkeypatch)
    bundle = load_bundle(write_bundle(bundle_run(run), tmp_path / "bundle"))
    assert bundle.preprocessing.windows == (Percentiles(),)
    assert bundle.expects.modalities == ("MR",)
    stated = json.loads((tmp_path / "bundle/bundle.json").read_text())["preprocessing"]
    assert (stated["version"], stated["windows"]) == (3, [{"percentiles": [1.0, 99.0]}])
    rows = read_predictions(run / "predictions.parquet", ("scan_id", "logit"), part="test").to_pylist()
    logit_of = {row["scan_id"]: row["logit"] for row in rows}
    number = 7
    same, scaled = write(tmp_path / "new/same.nii.gz", draw(number)), tmp_path / "new/scaled.nii.gz"
    write(scaled, 7.5 * draw(number))
    found = list(predict([same, scaled], bundle, options=HERE))
    for one in found:
        assert one.row.modality == "MR"
        assert one.logit == pytest.approx(logit_of[f"s{number}"], abs=1e-4)
    written = write_predictions(found, bundle, tmp_path / "out")
    assert all(one.complete for one in written)
    assert len(list((tmp_path / "out").glob("*/strip.png"))) == 2


def test_a_model_of_mr_takes_mr_in_dicom_and_refuses_ct(run, trained, tmp_path, monkeypatch):
    use_tiny(monkeypatch)
    bundle = load_bundle(run)
    row, root = trained.manifest[0], trained.manifest.root
    copy_series(row, root, tmp_path / "new/ct", spacing=3.0)
    mr = {"Modality": "MR", "SOPClassUID": MRImageStorage, "SeriesInstanceUID": "1.2.3", "RescaleIntercept": 1024}
    copy_series(row, root, tmp_path / "new/mr", spacing=3.0, **mr)
    refused, predicted = predict(tmp_path / "new", bundle, options=HERE)
    assert isinstance(refused, NotPredicted)
    assert refused.reason.detail.startswith("Modality is CT, not MR")
    assert predicted.row.modality == "MR"
    (written,) = write_predictions([predicted], bundle, tmp_path / "out", dicom=True)
    assert written.complete, written.problems
    reports = [dcmread(path) for path in (tmp_path / "out").glob("**/*.dcm")]
    (report,) = (one for one in reports if one.Modality == "SR")
    assert "Magnetic Resonance" in str(report)
