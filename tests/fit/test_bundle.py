"""A bundle gives what the run gives, holds nothing about patients, and refuses what does not belong to it."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.clinic.predict.predicting import score
from normal_guidance.fit.bundle import EncoderId, Expectations, bundle_run, load_bundle, write_bundle
from normal_guidance.scans.features.encoders import load_encoder
from normal_guidance.scans.features.store import open_store, write_store
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.statistics.calibration import choose_operation
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.run import load_run, load_winner, run_sweep
from small_bundle import PATIENT, WINDOW, fitted_bundle, tiny, train, use_tiny


def copy(folder: Path, out: Path) -> Path:
    return Path(shutil.copytree(folder, out))


def change(path: Path, edit) -> Path:
    content = read_json(path)
    edit(content)
    write_json(path, content)
    return path.parent


def test_a_bundle_says_how_a_scan_becomes_a_prediction(trained):
    bundle = load_bundle(trained.run)
    assert (bundle.method, bundle.config, bundle.features) == ("ng", trained.config, 8)
    assert bundle.preprocessing.to_dict() == trained.store.provenance["preprocessing"]
    assert bundle.preprocessing.windows == (WINDOW,)
    assert (bundle.encoder.name, bundle.encoder.fingerprint, bundle.repair) == ("tiny", "tiny-1.0", True)
    spacings = [row.slice_spacing for row in trained.manifest]
    expects, lengths = bundle.expects, trained.manifest.lengths
    assert expects.slice_spacing == pytest.approx(np.percentile(spacings, (1, 99)), abs=1e-3)
    assert (expects.modalities, expects.planes) == (("CT",), ("axial",))
    assert (expects.fewest_slices, expects.most_slices) == (lengths.min(), lengths.max())
    winner = load_run(trained.run).winners[0]
    assert bundle.training["validation_auroc"] == winner.val_auroc
    assert bundle.training["test"]["scan_auroc"] == winner.test.scan_auroc
    assert bundle.training["scans"] == {part: len(trained.store.part(part)) for part in ("train", "val", "test")}
    assert bundle.training["dataset"] == "folder"


def test_calibration_comes_from_the_validation_scans(trained):
    table = pd.read_parquet(trained.run / "predictions.parquet")
    parts = {
        part: (torch.tensor(rows["logit"].tolist()), torch.tensor(rows["label"].tolist()))
        for part, rows in table.groupby("part")
    }
    bundle = load_bundle(trained.run)
    assert bundle.operation == choose_operation(*parts["val"], test=parts["test"])
    sensitive = bundle_run(trained.run, sensitivity=1.0).operation.point
    assert (sensitive.rule, sensitive.target, sensitive.validation.sensitivity) == ("sensitivity", 1.0, 1.0)


def test_a_bundle_folder_gives_the_same_numbers_and_holds_nothing_about_patients(trained, tmp_path):
    bundle = load_bundle(trained.run)
    written = load_bundle(write_bundle(bundle, tmp_path / "bundle"))
    assert written.as_json() == bundle.as_json()
    features = torch.randn(9, 8)
    (logit, heads), (again, same) = score(bundle, features), score(written, features)
    assert logit == again == load_winner(trained.run)(features, torch.tensor([9])).logit.item()
    assert torch.equal(heads, same)
    files = sorted((tmp_path / "bundle").iterdir())
    assert [file.name for file in files] == ["bundle.json", "model.safetensors"]
    held = b"".join(file.read_bytes() for file in files)
    for secret in (PATIENT, *trained.manifest.scan_ids, str(trained.folder), str(Path.home())):
        assert secret.encode() not in held
    assert PATIENT.encode() in (trained.run / "predictions.parquet").read_bytes()  # where they would be found


def test_features_are_rounded_as_in_training(bundle):
    half, features = replace(bundle, dtype="float16"), torch.randn(9, 8)
    assert score(half, features)[0] == score(half, features.half().float())[0]
    assert score(half, features)[0] != score(replace(bundle, dtype="float32"), features)[0]


def test_bundles_of_another_kind_are_refused(trained, tmp_path):
    folder = write_bundle(load_bundle(trained.run), tmp_path / "bundle")
    with pytest.raises(UserError, match="is a folder that is not empty"):
        write_bundle(load_bundle(folder), folder)
    for name, edit, message in (
        ("newer", lambda content: content.update(format=99), "format 99, but this normal-guidance reads format 3"),
        ("damaged", lambda content: content.pop("encoder"), r"bundle.json is damaged"),
    ):
        with pytest.raises(UserError, match=message):
            load_bundle(change(copy(folder, tmp_path / name) / "bundle.json", edit))
    swapped = copy(folder, tmp_path / "swapped")
    content = bytearray((swapped / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (swapped / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"is not the file that bundle.json names \(sha256"):
        load_bundle(swapped)
    (swapped / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read or checked"):
        load_bundle(swapped)


def test_an_ensemble_is_read_as_it_was_written_and_damage_is_named(bundle, tmp_path):
    made = fitted_bundle(4, training=bundle.training)
    folder = write_bundle(made, tmp_path / "bundle")
    again, features = load_bundle(folder), torch.randn(9, 4)
    assert again.as_json() == made.as_json()
    assert score(again, features)[0] == score(made, features)[0]
    for number, edit in enumerate(
        (
            lambda content: content.update(ensemble=None),
            lambda content: content["ensemble"].pop("shown"),
            lambda content: content["ensemble"]["kinds"].pop(),
            lambda content: content["ensemble"]["kinds"][0].update(members=10**9),
            lambda content: content["ensemble"]["kinds"][0].update(method="nothing"),
            lambda content: content["ensemble"]["kinds"][0].update(form="sideways"),
            lambda content: content["ensemble"]["kinds"][1].update(hidden=10**12),
            lambda content: content.update(features=5),
        )
    ):
        with pytest.raises(UserError, match=r"bundle\.json( is damaged|: )"):
            load_bundle(change(copy(folder, tmp_path / str(number)) / "bundle.json", edit))


def test_folders_that_are_given_by_mistake(trained, tmp_path):
    folder = write_bundle(load_bundle(trained.run), tmp_path / "bundle")
    with pytest.raises(UserError, match="is a bundle already; use it: nguide predict"):
        bundle_run(folder)
    runs = tmp_path / "runs"
    copy(trained.run, runs / "ng" / "0")
    for load in (bundle_run, load_bundle):
        with pytest.raises(UserError, match=rf"give the folder of one, such as {runs}/ng/0$"):
            load(runs)
        with pytest.raises(UserError, match=r"give the folder of one$"):
            load(tmp_path)


def test_an_encoder_with_other_weights_is_refused(bundle, monkeypatch):
    real = load_encoder("efficientnet-lite0", offline=True)
    packaged = replace(bundle, encoder=EncoderId("efficientnet-lite0", real.fingerprint))
    assert packaged.load_encoder(offline=True).fingerprint == real.fingerprint
    use_tiny(monkeypatch)
    assert bundle.load_encoder().fingerprint == tiny().fingerprint
    use_tiny(monkeypatch, scale=2.0)
    with pytest.raises(UserError, match=r"fingerprint tiny-1.0, but tiny here has tiny-2.0; .* --weights FILE"):
        bundle.load_encoder()


def test_runs_that_do_not_know_their_features_are_refused(trained, tmp_path):
    sets = [shifted_mean(16, seed, features=8) for seed in (1, 2)]
    config = Config("abmil", epochs=1, batch_size=8, train_above_val=False)
    with pytest.raises(UserError, match="was trained without a store; train it again"):
        load_bundle(run_sweep(tmp_path / "memory", [config], *sets).folder)
    parts = zip(("train", "val"), sets, strict=True)
    renamed = [(part, replace(bags, scan_ids=tuple(f"{part}{n}" for n in range(16)))) for part, bags in parts]
    write_store(tmp_path / "store", renamed, provenance={"imported_from": "npz"})
    store = open_store(tmp_path / "store")
    run = run_sweep(tmp_path / "imported", [config], store.part("train"), store.part("val"))
    assert run.report["features"]["provenance"] == {"imported_from": "npz"}
    bundle = load_bundle(run.folder)
    assert (bundle.encoder, bundle.preprocessing, bundle.features) == (None, None, 8)
    assert load_bundle(write_bundle(bundle, tmp_path / "bundle")).as_json() == bundle.as_json()
    with pytest.raises(UserError, match="how a new scan becomes such features is unknown; give features"):
        bundle.load_encoder()


def test_a_store_that_does_not_know_its_scans_is_noted(trained, tmp_path):
    run = copy(trained.run, tmp_path / "run")
    change(run / "report.json", lambda content: content["features"]["provenance"].pop("inputs"))
    bundle = load_bundle(run)
    assert bundle.expects == Expectations()
    assert str(bundle.expects) == "not recorded"
    assert "new scans are not checked" in bundle.operation.notes[-1]


def test_a_run_with_several_winners_needs_a_choice(trained, tmp_path):
    configs = grid(replace(trained.config, epochs=1), lr=[0.1], l1=[0.0], divergence=["forward_kl", "reverse_kl"])
    parts = [trained.store.part(part) for part in ("train", "val")]
    run = run_sweep(tmp_path / "run", configs, *parts)
    with pytest.raises(UserError, match=r"several winners; choose a group with .*--group NAME: .*reverse_kl-"):
        load_bundle(run.folder)
    bundle = bundle_run(run.folder, group="reverse_kl-lambda1.0-seed0")
    assert bundle.config.divergence == "reverse_kl"
    assert bundle.operation.point.test is None


def test_a_model_that_does_not_score_scans_is_refused(trained, tmp_path):
    config = replace(trained.config, method="slice_reference", receptive_field=3, epochs=1)
    run = train(tmp_path / "run", trained.store, config)
    with pytest.raises(UserError, match="is a run of slice_reference, which does not score scans"):
        load_bundle(run)


AXIAL, CORONAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)
HEAD = Expectations(("CT",), ("axial",), (4.0, 6.0), 20, 60)


def scan(slices: int = 30, spacing: float | None = 5.0, orientation=AXIAL, modality: str = "CT") -> ScanRow:
    files, frames, positions = ("a.dcm",) * slices, (0,) * slices, tuple(map(float, range(slices)))
    about = (8, 8, None, spacing, orientation, modality)
    return ScanRow("A", "P", -1, None, "dicom", files, frames, positions, *about)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        *[(scan(slices), None) for slices in (10, 30, 2000)],
        *[(scan(spacing=spacing), None) for spacing in (4 / 1.5, 9.0)],
        (scan(spacing=None, orientation=None), None),
        (scan(9), "it has 9 slices; the model was trained on 20 to 60 and takes 10 or more"),
        (scan(1), "it has 1 slice; "),
        (scan(spacing=2.6), "its slices are 2.6 mm apart; the model was trained on 4 to 6 mm and takes 2.67 to 9 mm"),
        (scan(spacing=9.1), "its slices are 9.1 mm apart"),
        (scan(modality="MR"), "its modality is MR; the model was trained on CT"),
        (scan(orientation=CORONAL), "its slices are coronal; the model was trained on axial ones"),
    ],
)
def test_only_scans_of_the_kind_are_taken(row, reason):
    reasons = HEAD.why_not(row)
    assert len(reasons) == (reason is not None)
    assert all(text.startswith(reason) for text in reasons)
    assert Expectations().why_not(row) == []
