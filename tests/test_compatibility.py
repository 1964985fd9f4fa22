"""Files that version 0.1 (commit 6b4f884) wrote still open, and hold what they held.

`files_of_version_0_1` has an index, a store, a run, a bundle and the results of `nguide predict` on twelve phantoms of
32 x 32 pixels, with the random projection of tests/small_bundle.py as encoder.  Nothing here may be written anew: a
change that cannot read these files breaks what users have on disk.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from normal_guidance.cli import app
from normal_guidance.clinic import load_bundle
from normal_guidance.clinic.viewer.gallery import open_gallery
from normal_guidance.core.methods import REMOVED
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.manifest import read_manifest
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.run import load_run, load_winner, run_sweep
from small_bundle import use_tiny

FILES = Path(__file__).parent / "files_of_version_0_1"
PARTS = ("train", "val", "test")


def read_rows(folder: Path) -> list[dict]:
    """Straight from the file, by no reader of ours."""
    return pq.read_table(folder / "predictions.parquet").to_pylist()


def test_an_index_opens():
    manifest = read_manifest(FILES / "index")
    assert len(manifest) == 12
    assert sum(int(row.label) for row in manifest) == 6
    assert all(len(row.files) == len(row.positions) == len(row.slice_labels) for row in manifest)


def test_a_store_opens_and_its_fingerprint_is_that_of_the_run():
    store = open_store(FILES / "store")
    data = json.loads((FILES / "run" / "report.json").read_text())["data"]
    assert {part: len(store.part(part)) for part in PARTS} == {part: data[part]["scans"] for part in PARTS}
    assert {part: store.part(part).fingerprint for part in PARTS} == {part: data[part]["fingerprint"] for part in PARTS}


def test_a_run_rebuilds_the_model_that_made_its_predictions():
    run = load_run(FILES / "run")
    (winner,) = run.winners
    assert (winner.config.method, winner.config.lr, winner.config.epochs) == ("ng", 0.1, 4)
    assert winner.test.localization_auroc == pytest.approx(0.7)
    store = open_store(FILES / "store").part("test")
    found = predict_bags(load_winner(FILES / "run"), store)
    rows = {row["scan_id"]: row for row in read_rows(FILES / "run")}
    for scan, logit in zip(store.scan_ids, found.logit.tolist(), strict=True):
        assert logit == pytest.approx(rows[scan]["logit"], abs=1e-5)
    attention = np.concatenate([rows[scan]["attention"] for scan in store.scan_ids])
    np.testing.assert_allclose(found.attention.numpy(), attention, atol=1e-6)


def test_a_run_is_complete_to_the_command_that_made_it(tmp_path):
    """The same options and data find their run; it is not trained again."""
    folder = Path(shutil.copytree(FILES / "run", tmp_path / "run"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    store = open_store(FILES / "store")
    config = Config("ng", lr=0.1, epochs=4, batch_size=4, patience=None, train_above_val=False)
    run_sweep(folder, [config], *(store.part(part) for part in PARTS))
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"} == before


def test_a_bundle_opens_and_says_what_the_run_says(monkeypatch):
    use_tiny(monkeypatch)
    bundle, again = load_bundle(FILES / "bundle"), load_bundle(FILES / "run")
    assert bundle.method == "ng"
    assert bundle.threshold == again.threshold
    assert bundle.operation == again.operation
    features = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9])
    torch.testing.assert_close(bundle.model(features, lengths), again.model(features, lengths))


def test_results_of_predict_open_in_the_viewer():
    rows = read_rows(FILES / "predicted")
    summary = json.loads((FILES / "predicted" / "summary.json").read_text())
    assert len(rows) == summary["counts"]["predicted"] == 12
    gallery = open_gallery(FILES / "predicted")
    (split,) = gallery.splits
    assert len(gallery.scans(0)) == 12
    assert len(split.sources) == 1


@pytest.mark.parametrize("method", REMOVED)
def test_models_of_removed_methods_name_the_commit_that_loads_them(method, tmp_path):
    for name, files in (("run", ("report.json", "best.json")), ("bundle", ("bundle.json",))):
        folder = Path(shutil.copytree(FILES / name, tmp_path / name))
        for file in files:
            text = (folder / file).read_text(encoding="utf-8")
            assert '"method": "ng"' in text
            (folder / file).write_text(text.replace('"method": "ng"', f'"method": "{method}_ng"'), encoding="utf-8")
        result = CliRunner().invoke(
            app, ["predict", str(tmp_path), "--model", str(folder), "-o", str(tmp_path / "out")]
        )
        assert result.exit_code == 2
        assert f"method '{method}_ng' was removed; load it with commit 4bbc9f6" in " ".join(result.output.split())
    assert open_gallery(tmp_path / "run").splits[0].sources[0].title == f"{method}_ng"
