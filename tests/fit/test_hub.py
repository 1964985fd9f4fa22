"""A model goes to the Hub and comes back the same; nothing private goes with it.

The Hub is replaced by a folder: `create_repo`, `upload_folder` and `snapshot_download` are those of a double with the
same arguments.  Nothing here talks to the real Hub.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.predict.predicting import score
from normal_guidance.fit import hub
from normal_guidance.fit.bundle import Bundle, EncoderId, Expectations, load_bundle, write_bundle
from normal_guidance.fit.hub import model_card
from normal_guidance.scans.features.preprocessing import Preprocessing
from normal_guidance.scans.index.manifest import Finding
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.predictions import prediction_table, write_predictions_table
from small_bundle import fitted_bundle
from small_command import output_of

NAME = "mylab/head-ct"
TRAINING = {
    "dataset": "folder",
    "scans": {"train": 60},
    "out_of_fold_auroc": 0.82,
    "test": {"scan_auroc": 0.75, "localization_auroc": None},
    "seed": 0,
    "commit": None,
    "date": "2026-11-18T10:00:00",
    "normal_guidance": "0.2.0",
}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return fitted_bundle(4, expects=Expectations(("CT",), ("axial",), (4.0, 6.0), 20, 60), training=TRAINING)


def write_model(bundle: Bundle, folder: Path, scan: str, patient: str) -> Path:
    """As `nguide fit` leaves it: with predictions that name scans and patients."""
    scans = shifted_mean(40, 2, features=4, shift=0.3)
    ids, patients = (tuple(name.format(n) for n in range(40)) for name in (scan, patient))
    scans = replace(scans, scan_ids=ids, patient_ids=patients)
    table = prediction_table(scans, predict_bags(bundle.model, scans), part="test")
    write_predictions_table(write_bundle(bundle, folder) / "predictions.parquet", [table])
    return folder


@pytest.fixture(scope="module")
def folder(bundle, tmp_path_factory) -> Path:
    folder = write_model(bundle, tmp_path_factory.mktemp("fit") / "model", "SCAN-{:03d}", "DOE^JANE-{}")
    (folder / "report.html").write_text("SCAN-001")
    return folder


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """A Hub that is a folder."""
    place = tmp_path / "hub"

    class Api:
        def __init__(self, **_):
            pass

        def create_repo(self, repo_id, *, private, exist_ok):
            assert exist_ok
            (place / repo_id).mkdir(parents=True, exist_ok=True)
            (place / f"{repo_id}.private").write_text(str(private))

        def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
            assert sorted(allow_patterns) == sorted(
                path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()
            )
            shutil.copytree(folder_path, place / repo_id, dirs_exist_ok=True)

    def snapshot_download(repo_id, *, revision, local_dir, allow_patterns):
        if not (place / repo_id).is_dir():
            raise OSError("404 Client Error")
        (Path(local_dir) / ".cache").mkdir()
        for path in (place / repo_id).rglob("*"):
            name = path.relative_to(place / repo_id)
            if path.is_file() and any(name.match(pattern) for pattern in allow_patterns):
                (Path(local_dir) / name).parent.mkdir(exist_ok=True)
                shutil.copy(path, Path(local_dir) / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return place


def test_a_model_comes_back_the_same(folder, fake_hub, tmp_path):
    files = hub.push_to_hub(folder, NAME, private=True)
    assert (fake_hub / f"{NAME}.private").read_text() == "True"
    (fake_hub / NAME / "evil.py").write_text("raise SystemExit")
    found, own = hub.pull_from_hub(NAME, tmp_path / "model"), load_bundle(folder)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == files
    assert found.identity.fingerprint == own.identity.fingerprint
    scan = torch.randn(9, 4)
    assert score(found, scan).logit == score(own, scan).logit


def test_several_findings_come_back(bundle, fake_hub, tmp_path):
    both = replace(bundle, finding=Finding("any"), further=(replace(bundle, finding=Finding("epidural")),))
    write_bundle(both, tmp_path / "both")
    files = hub.push_to_hub(tmp_path / "both", NAME)
    assert {"findings.json", "any/bundle.json", "epidural/model.safetensors"} <= set(files)
    assert [model.finding.name for model in hub.pull_from_hub(NAME, tmp_path / "back").each] == ["any", "epidural"]


def test_the_card_is_made_of_the_bundles_numbers_and_names_no_scan_patient_or_folder(folder, bundle, tmp_path):
    hub.push_to_hub(folder, NAME, dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: normal-guidance\n")
    (auroc,) = hub.aurocs_of(folder, bundle).values()
    assert 0 < auroc["test"].low < auroc["test"].value < auroc["test"].high <= 1
    counts = bundle.operation.point.validation
    for words in (
        "not a medical device",
        "60 (train)",
        "CT, axial, slices 4 to 6 mm apart, 20 to 60 slices",
        f"| scan AUROC, test | {auroc['test']} |",
        "| scan AUROC, out-of-fold | .820 (interval not recorded) |",
        f"({counts.found} of {counts.positive})",
        f"nguide hub pull {NAME} -o model",
    ):
        assert words in card, words
    assert ".750" not in card  # the number without an interval gives way to that with one
    content = b"".join(path.read_bytes() for path in (tmp_path / "dry").rglob("*") if path.is_file())
    assert b"SCAN-0" not in content
    assert b"DOE^JANE" not in content
    assert str(folder).encode() not in content


@pytest.mark.parametrize("text", ["SCAN-007", "DOE^JANE-7", "/data/ann/scans", "~/scans", "C:\\scans"])
def test_private_text_is_refused(text, bundle, tmp_path):
    private = replace(bundle, training={**TRAINING, "dataset": text})
    broken = write_model(private, tmp_path / "model", "SCAN-{:03d}", "DOE^JANE-{}")
    with pytest.raises(UserError, match=r"bundle.json holds .* \(training.dataset\), which looks private; nothing"):
        hub.push_to_hub(broken, NAME, dry_run=tmp_path / "dry")
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize("named", [{"scans": {"train": 600}}, {"dataset": "patient 600"}])
def test_a_number_that_people_chose_may_be_an_id_but_the_cards_own_are_not(bundle, tmp_path, named):
    model = write_model(replace(bundle, training={**TRAINING, **named}), tmp_path / "model", "S{}", "6{:02d}")
    if "scans" in named:
        hub.push_to_hub(model, NAME, dry_run=tmp_path / "dry")
        assert "600 (train)" in (tmp_path / "dry" / "README.md").read_text()
    else:
        with pytest.raises(UserError, match=r"README.md holds '600', the id .* push a copy without predictions"):
            hub.push_to_hub(model, NAME, dry_run=tmp_path / "dry")


def test_an_encoder_in_a_folder_loses_its_path(bundle):
    def named(name):
        about = {"encoder": EncoderId(name, "0" * 64), "preprocessing": Preprocessing(windows=((0.0, 80.0),))}
        return hub.without_paths(replace(bundle, **about)).encoder.name

    assert named("/data/ann/dinov2-base") == "dinov2-base"
    assert named("microsoft/rad-dino") == "microsoft/rad-dino"
    assert "`vit-b16-imagenet`" in model_card(replace(bundle, encoder=EncoderId("vit-b16-imagenet", "0" * 64)), NAME)


def test_mistakes_are_named(folder, fake_hub, tmp_path):
    with pytest.raises(UserError, match=r"nobody/nothing could not be read.*404.*check its name"):
        hub.pull_from_hub("nobody/nothing", tmp_path / "model")
    (fake_hub / "some/other").mkdir(parents=True)
    with pytest.raises(UserError, match="some/other is not a model of nguide"):
        hub.pull_from_hub("some/other", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_hub_that_is_not_reached_is_named(folder, fake_hub, tmp_path, monkeypatch):
    (transport, _) = huggingface_hub.errors.HfHubHTTPError.__bases__

    def unreached(*_, **__):
        raise transport("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", unreached)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreached)
    with pytest.raises(UserError, match=r"could not be written \(no route to host\); check the connection"):
        hub.push_to_hub(folder, NAME)
    with pytest.raises(UserError, match=r"could not be read \(no route to host\); check its name and the connection"):
        hub.pull_from_hub(NAME, tmp_path / "model")


def test_commands(folder, fake_hub, tmp_path):
    pushed = json.loads(output_of("hub", "push", folder, NAME, "--json"))
    assert pushed["files"] == ["README.md", "bundle.json", "model.safetensors"]
    pulled = output_of("hub", "pull", NAME, "-o", tmp_path / "model")
    assert f"--model{tmp_path / 'model'}" in pulled.replace(" ", "")
    exported = output_of("export", tmp_path / "model", "-o", tmp_path / "model.pt2")
    assert "ensemble on 4 features a slice" in exported
