"""Several findings, from a table of labels to predictions: each has its own labels, model, numbers and results."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.predict.predicting import score
from normal_guidance.clinic.viewer.gallery import open_gallery
from normal_guidance.clinic.viewer.runs import find_splits
from normal_guidance.fit.bundle import load_bundle
from normal_guidance.fit.fit_ensemble import make_plan
from normal_guidance.fit.fitting import fit_findings
from normal_guidance.fit.measured import fit_and_measure
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.manifest import Finding, Labels, ScanRow, write_manifest
from normal_guidance.sweep.predictions import read_predictions
from small_bundle import few_settings
from small_command import output_of

SCANS, NEW, FEATURES = 40, 8, 5
NAMES = ("any", "left", "rare")


def draw(folder: Path) -> None:
    """Forty scans: `left` shifts feature 0 in a block, `right` feature 1; `any` is either; `rare` has two scans."""
    random = np.random.default_rng(0)
    lengths = random.integers(8, 14, SCANS)
    features = random.normal(size=(lengths.sum(), FEATURES)).astype(np.float32)
    lines = ["scan_id,patient_id,part,any,left,rare,slice_ranges_any,slice_labels_left"]
    for number, (start, length) in enumerate(zip(lengths.cumsum() - lengths, lengths, strict=True)):
        left, right = number % 4 == 1, number % 4 == 3
        for feature, shown in enumerate((left, right)):
            features[start + 3 : start + 6, feature] += 4.0 * shown
        known = "" if number == 0 else str(int(left))
        cells = " ".join("1" if left and 3 <= place < 6 else "0" for place in range(length)) if known else ""
        part = "test" if number >= 30 else "train"
        labels = f"{int(left or right)},{known},{int(number in (1, 3))}"
        lines.append(f"S{number:02},P{number},{part},{labels},{'4-6' if left or right else ''},{cells}")
    ids = [f"S{number:02}" for number in range(SCANS)]
    np.savez(folder / "features.npz", x=features, lengths=lengths, ids=ids)
    np.savez(folder / "new.npz", x=features[: lengths[:NEW].sum()], lengths=lengths[:NEW], ids=ids[:NEW])
    (folder / "labels.csv").write_text("\n".join(lines))


@pytest.fixture(scope="module", autouse=True)
def few_folds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        few_settings(patch, FOLDS=3)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Everything from the command line: import, fit, predict."""
    folder = tmp_path_factory.mktemp("findings")
    draw(folder)
    store, model, out = folder / "store", folder / "model", folder / "out"
    table = ("--labels", folder / "labels.csv", "--findings", "any=1386000,left,rare")
    imported = output_of("store", "import", folder / "features.npz", *table, "-o", store)
    fitted = output_of("fit", store, "-o", model, "--keep-test")
    predicted = output_of("predict", folder / "new.npz", "--model", model, "-o", out)
    folders = {"folder": folder, "store": store, "model": model, "out": out}
    return SimpleNamespace(**folders, imported=imported, fitted=fitted, predicted=predicted)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_each_finding_is_fitted_as_if_it_were_the_only_one(made):
    assert "findings any left rare" in made.imported
    bundle, store = load_bundle(made.model), open_store(made.store)
    assert [model.finding for model in bundle.each] == [Finding("any", "1386000"), Finding("left")]
    for model, name in zip(bundle.each, NAMES, strict=False):
        scans = store.of_finding(name)
        train, test = scans.part("train"), scans.part("test")
        alone = fit_and_measure(train, make_plan(train.labels.tolist(), train.patient_ids), test=test)
        logit, _ = score(model, test.bags()[0].features)
        assert logit == pytest.approx(alone.tested.logit[0].item(), abs=1e-4)
        assert f"{name}: {alone.sentences()[0]}" in made.fitted
        page = (made.model / name / "report.html").read_text()
        assert escape(f"What the fitted model does: {model.finding}") in page
    assert load_bundle(made.model / "left").training["scans"] == {"train": 29, "test": 10}  # of S00 it is unknown


def test_a_rare_finding_is_skipped_with_a_sentence(made):
    why = "2 positive scans of 2 patients and 28 negative ones of 28; at least 3 patients of each are needed: add "
    why += "labelled scans of other patients"
    assert f"rare: skipped: {why}" in made.fitted
    about = json.loads((made.model / "findings.json").read_text())
    assert [one["name"] for one in about["findings"]] == ["any", "left"]
    assert about["skipped"] == [{"name": "rare", "reason": why}]
    page = (made.model / "report.html").read_text()
    assert "<a href='any/report.html'>any</a>" in page
    assert why in page
    with pytest.raises(UserError, match=r"no finding of store .* can be fitted: rare: 2 positive scans of 2 patients"):
        fit_findings(open_store(made.store), made.folder / "none", ["rare"])
    assert not (made.folder / "none").exists()


def test_a_killed_fit_goes_on_with_the_finding_that_it_was_at(made, tmp_path):
    def stop(name: str, share: float) -> None:
        if name == "left" and share > 0.9:
            raise KeyboardInterrupt

    store, told = open_store(made.store), []
    with pytest.raises(KeyboardInterrupt):
        fit_findings(store, tmp_path / "model", ["any", "left"], keep_test=True, watch=stop)
    assert [file.name for file in tmp_path.iterdir()] == [".model.kinds"]
    fit_findings(store, tmp_path / "model", ["any", "left"], keep_test=True, watch=lambda *now: told.append(now))
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert sum(1 for name, share in told if name == "any") == 1  # all its kinds were there
    assert all(
        (tmp_path / "model" / name / "model.safetensors").read_bytes()
        == (made.model / name / "model.safetensors").read_bytes()
        for name in ("any", "left")
    )


def test_a_finding_without_positive_test_scans_is_not_tested(made, tmp_path):
    split = tmp_path / "split.csv"
    part = {number: "test" if number % 4 == 3 and number > 30 else "train" for number in range(SCANS)}
    lines = [f"S{number:02},{one}" for number, one in part.items()]
    split.write_text("\n".join(["scan_id,part", *lines]))
    options = ("--finding", "left,rare", "--keep-test", "--json")
    told = output_of("fit", made.store, "-o", tmp_path / "model", "--split", split, *options)
    content = json.loads(told[told.index("{") :])
    assert [one["name"] for one in content["findings"]] == ["left"]
    assert content["findings"][0]["test"] is None
    assert content["skipped"][0]["name"] == "rare"
    assert "All 3 test scans are negative, so it was not tested." in (tmp_path / "model/report.html").read_text()


def test_predictions_are_one_by_one_in_every_file(made):
    bundle, store = load_bundle(made.model), open_store(made.store)
    rows = read_csv(made.out / "summary.csv")
    assert len(rows) == 2 * NEW
    assert list(rows[0])[:2] == ["scan_id", "finding"]
    by_key = {(row["scan_id"], row["finding"]): row for row in rows}
    about = json.loads((made.out / "S05" / "prediction.json").read_text())
    assert [(one["name"], one["code"]) for one in about["findings"]] == [("any", "1386000"), ("left", None)]
    for place, (one, own) in enumerate(zip(about["findings"], bundle.each, strict=True)):
        logit, log_attention = score(own, store.select(["S05"]).bags().features)
        assert one["logit"] == pytest.approx(logit, abs=1e-5)
        np.testing.assert_allclose(one["attention"], log_attention.softmax(-1).mean(0), atol=1e-6)
        assert one["threshold"] == own.threshold
        assert one["positive"] == (one["probability"] >= own.threshold)
        row = by_key["S05", one["name"]]
        assert float(row["probability"]) == pytest.approx(one["probability"], abs=1e-4)
        assert row["key_slices"].split() == [str(key["slice"]) for key in one["key_slices"]]
        table = read_predictions(made.out / "predictions.parquet", ("scan_id", "logit"), group=one["name"])
        assert len(table) == NEW
        assert dict(zip(*table.to_pydict().values(), strict=True))["S05"] == pytest.approx(logit, abs=1e-5)
        assert f"scan S05: {one['name']}: probability {one['probability']:.3f}" in made.predicted
        if place == 0:
            assert all(about[name] == one[name] for name in ("logit", "probability", "interval"))
    shown = [float(line["attention_left"]) for line in read_csv(made.out / "S05" / "slices.csv")]
    assert shown == pytest.approx(about["findings"][1]["attention"], abs=1e-4)


def test_predictions_follow_their_own_finding(made):
    """S03 shows `right` only: `any` is positive, `left` is not."""
    found = {one["name"]: one for one in json.loads((made.out / "S03/prediction.json").read_text())["findings"]}
    assert (found["any"]["positive"], found["left"]["positive"]) == (True, False)
    page = (made.out / "S03" / "report.html").read_text()
    assert "<h2 id=any>any</h2>" in page
    assert "<h2 id=left>left</h2>" in page
    assert escape("any (SNOMED CT 1386000)") in page
    summary = json.loads((made.out / "summary.json").read_text())
    assert summary["counts"] == {"predicted": NEW, "refused": 0, "failed": 0}
    index = (made.out / "index.html").read_text()
    assert f"{NEW} of {NEW} scans predicted. Positive: any " in index
    assert index.count("<a href='S") == NEW


def test_one_chosen_finding_is_a_bundle_with_a_name(made, tmp_path):
    output_of("fit", made.store, "-o", tmp_path / "left", "--finding", "left", "--keep-test")
    bundle = load_bundle(tmp_path / "left")
    assert (bundle.finding, bundle.further) == (Finding("left"), ())
    torch.testing.assert_close(bundle.model.state_dict(), load_bundle(made.model / "left").model.state_dict())
    output_of("predict", made.folder / "new.npz", "--model", tmp_path / "left", "-o", tmp_path / "out")
    assert {row["finding"] for row in read_csv(tmp_path / "out" / "summary.csv")} == {"left"}
    assert (find_splits(tmp_path / "out")[0].sources[0].title) == "left"


def test_bundle_copies_all_findings(made, tmp_path):
    told = output_of("bundle", made.model, "-o", tmp_path / "copy", "--sensitivity", "1")
    assert "left: " in told
    files = sorted(str(file.relative_to(tmp_path / "copy")) for file in (tmp_path / "copy").rglob("*.*"))
    own = ["bundle.json", "model.safetensors"]
    assert files == [*(f"any/{name}" for name in own), "findings.json", *(f"left/{name}" for name in own)]
    copy = load_bundle(tmp_path / "copy")
    assert [one.finding.name for one in copy.each] == ["any", "left"]
    assert [one.operation.point.validation.sensitivity for one in copy.each] == [1.0, 1.0]


def test_view_and_trust_take_one_finding(made, tmp_path):
    splits = find_splits(made.model / "left")
    assert splits[0].sources[0].title == "Ensemble"
    assert [one.group for one in find_splits(made.out)[0].sources] == ["any", "left"]
    for words in (["view", made.model], ["trust", made.model, "--store", made.store, "-o", tmp_path / "trust"]):
        assert "holds a model of each of the findings any, left; give one:" in output_of(*words, code=2)
    told = output_of("trust", made.model / "left", "--store", made.store, "-o", tmp_path / "trust", code=2)
    assert "2 patients have positive scans and 8 have negative ones" in told  # by the labels of `left`


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("all", "has no finding 'all'; it has any, left, rare"),
        ("any,any", "'any' is empty or given twice"),
        ("rare", "2 positive scans of 2 patients"),
    ],
)
def test_wrong_findings_are_refused(made, tmp_path, option, message):
    assert message in output_of("fit", made.store, "-o", tmp_path / "model", "--finding", option, code=2)
    assert not (tmp_path / "model").exists()


def test_a_damaged_folder_is_named(made, tmp_path):
    output_of("bundle", made.model, "-o", tmp_path / "copy")
    path = tmp_path / "copy" / "findings.json"
    for content, message in (
        ('{"findings": [], "skipped": []}', "is damaged: it lists no finding; copy the folder again"),
        ('{"format": 2}', "format 2, but this normal-guidance reads format 3; open it with normal-guidance 0.2"),
        ('{"findings": [{"name": "any"}, {"name": "gone"}], "skipped": []}', "gone is neither a bundle"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            load_bundle(tmp_path / "copy")
    of_another = {"findings": [{"name": "any", "code": "1386000"}, {"name": "other"}], "skipped": []}
    path.write_text(json.dumps(of_another))
    (tmp_path / "copy" / "left").rename(tmp_path / "copy" / "other")
    with pytest.raises(UserError, match=r"other was not fitted together with .*any; fit all findings again"):
        load_bundle(tmp_path / "copy")


def test_the_viewer_shows_the_slice_labels_of_the_finding(made, tmp_path):
    scans = open_store(made.store).of_finding("any")
    row = ScanRow("S03", "P3", 1, None, "dicom", (), (), (), 16, 16)
    rows = []
    for scan, length in zip(scans.scan_ids, scans.lengths.tolist(), strict=True):
        labels = {"left": Labels(0, np.zeros(length, np.int8))}
        places = {"files": ("a",) * length, "frames": (0,) * length, "positions": tuple(map(float, range(length)))}
        rows.append(replace(row, scan_id=scan, slice_labels=np.ones(length, np.int8), further=labels, **places))
    findings = [Finding("any").as_json(), Finding("left").as_json()]
    write_manifest(tmp_path / "manifest.parquet", rows, {"source": "drawn", "root": ".", "findings": findings})
    for name, label in (("any", 1), ("left", 0)):
        gallery = open_gallery(made.model / name, tmp_path)
        number = gallery.scans(0)[0]["number"]
        assert set(gallery.scan(0, number)["truth"]) == {label}
