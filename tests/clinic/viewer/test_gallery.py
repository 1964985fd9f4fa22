"""What the page shows about studies, runs and new scans, compared with the files behind it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.viewer.gallery import Gallery, NotHereError, open_gallery
from normal_guidance.clinic.viewer.runs import body_of, curve, display_windows, fitted_normal, key_positions
from normal_guidance.scans.features.windows import WINDOWS
from normal_guidance.scans.index.manifest import write_manifest
from small_viewer import bell, rows_of, write_predictions, write_result


def test_a_study_has_splits_methods_in_the_order_of_the_tables_and_windows_of_radiologists_and_the_model(gallery):
    about = gallery.about()
    assert [split["name"] for split in about["splits"]] == ["1001", "2001"]
    assert [method["name"] for method in about["splits"][0]["methods"]] == ["centered_gaussian", "ng", "mhng"]
    assert about["splits"][0]["methods"][1]["title"] == "ABMIL + Normal Guidance"
    assert about["missing"] == []
    json.dumps(about, allow_nan=False)
    windows = {window["name"]: (window["low"], window["high"]) for window in about["windows"]["CT"]}
    names = ["brain", "subdural", "stroke", "bone", "lung", "mediastinum", "soft", "encoder 1", "encoder 2"]
    assert list(windows) == names
    assert windows["brain"] == (0, 80)
    assert windows["subdural"] == (-20, 180)
    assert windows["stroke"] == (20, 60)
    assert windows["encoder 1"] == (-100, 300)  # as the store says
    assert windows["encoder 2"] == (-1024, 3071)  # it saw everything
    for name, same in (("lung", "lung"), ("mediastinum", "mediastinum"), ("soft", "abdomen")):
        assert windows[name] == WINDOWS[same]  # a name means the same for encoders


@pytest.mark.parametrize(
    ("modality", "sources", "encoder", "first"),
    [
        ("CT", ["rsna-ich"], [], "brain"),
        ("CT", ["predict"], [(-100.0, 300.0)], "brain"),  # the encoder's window for heads
        ("CT", ["rsna-pe"], [(-100.0, 300.0)], "mediastinum"),
        ("CT", ["folder"], [(-1350.0, 150.0)], "mediastinum"),
        ("CT", ["rsna-at"], [], "soft"),
        ("CT", ["folder"], [], "soft"),
        ("CT", ["folder"], [(7.0, 9.0)], "encoder"),
        ("CT", ["folder"], [(7.0, 9.0), None], "encoder 1"),
        ("MR", ["prostatex"], [(0.0, 3000.0)], "own"),
    ],
)
def test_scans_start_in_the_window_for_their_part_of_the_body(modality, sources, encoder, first):
    windows = display_windows(modality, body_of(sources, encoder), encoder)
    assert [window["name"] for window in windows if window["first"]] == [first]


def test_the_list_has_every_scan_with_its_scores(gallery, manifest):
    listed = gallery.scans(0)
    json.dumps(listed, allow_nan=False)
    by_id = {scan["id"]: scan for scan in listed}
    assert sorted(by_id) == sorted(manifest.scan_ids)
    for expected in rows_of(manifest):
        scan = by_id[expected["scan_id"]]
        assert all(scan[name] == expected[name] for name in ("label", "part", "slices"))
        gaussian, *others = scan["scores"]
        assert gaussian is None  # it scores no scans
        assert others == pytest.approx([expected["probability"]] * 2, rel=1e-6)


def test_a_scan_has_its_curves_geometry_and_truth(gallery, manifest):
    for listed in gallery.scans(1)[:4]:
        scan = gallery.scan(1, listed["number"])
        json.dumps(scan, allow_nan=False)
        row = manifest[manifest.scan_ids.index(scan["id"])]
        expected = next(row for row in rows_of(manifest, heads=4, shift=-6.0) if row["scan_id"] == scan["id"])
        assert scan["truth"] == row.slice_labels.tolist()
        assert scan["positions_mm"] == pytest.approx(row.positions)
        assert (scan["image"]["rows"], scan["image"]["columns"]) == (row.rows, row.columns)
        mhng = scan["methods"]["mhng"]
        assert mhng["attention"] == pytest.approx(expected["attention"].tolist(), rel=1e-5)
        np.testing.assert_allclose(mhng["heads"], np.exp(expected["log_attention"]), rtol=1e-5)
        assert scan["methods"]["ng"]["heads"] == []  # one head is the curve itself
        assert (scan["methods"]["centered_gaussian"] is None) == (scan["part"] == "val")


def test_numbers_that_are_not_ours_are_refused(gallery):
    asked = {"scans": [(2,), (-1,)], "scan": [(0, len(gallery)), (0, -1)], "row": [(-1,), (10**9,)]}
    for method, numbers in [(method, each) for method, given in asked.items() for each in given]:
        with pytest.raises(NotHereError, match="reload the page"):
            getattr(gallery, method)(*numbers)


def test_both_supervised_references_are_one_method(manifest, tmp_path):
    slices = [row | {"probability": float("nan")} for row in rows_of(manifest)]
    scans = [row | {"slices": 1, "attention": [1.0], "log_attention": [[0.0]]} for row in rows_of(manifest)[2:]]
    write_predictions(tmp_path / "slice_reference" / "1", slices)
    write_predictions(tmp_path / "scan_reference" / "1", scans)
    gallery = open_gallery(tmp_path)
    assert gallery.about()["splits"][0]["methods"] == [{"name": "ceiling", "title": "Supervised reference"}]
    scores = [scan["scores"][0] for scan in gallery.scans(0)]
    assert scores[:2] == [None, None]  # the scan reference leaves scans out
    assert scores[2:] == pytest.approx([row["probability"] for row in scans])
    assert len(gallery.scan(0, 0)["methods"]["ceiling"]["attention"]) == slices[0]["slices"]


def test_a_run_is_named_by_its_report_and_has_a_method_for_each_winner(manifest, tmp_path):
    groups = [row for group in ("forward_kl", "reverse_kl") for row in rows_of(manifest, group=group)]
    gallery = opened(tmp_path, groups, report={"winners": [{"config": {"method": "ng"}}]})
    (split,) = gallery.about()["splits"]
    assert [method["name"] for method in split["methods"]] == ["ng forward_kl", "ng reverse_kl"]
    assert len(gallery.scans(0)) == len(manifest)
    assert set(gallery.scan(0, 0)["methods"]) == {"ng forward_kl", "ng reverse_kl"}


def opened(folder: Path, rows: list[dict], **files: Any) -> Gallery:
    write_predictions(folder, rows)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return open_gallery(folder)


@pytest.fixture
def predicted(manifest, tmp_path):
    """Lends a function that opens the scans of the phantom, changed, as `nguide predict` leaves them."""

    def make(method: str, window: Any, **changes: Any) -> Gallery:
        rows = [replace(row, **changes) for row in manifest]
        write_manifest(tmp_path / "manifest.parquet", rows, {"source": "predict", "root": str(manifest.root)})
        model = {"config": {"method": method}, "preprocessing": {"windows": [window]}}
        predictions = [row | {"label": -1, "part": "new"} for row in rows_of(manifest)]
        return opened(tmp_path, predictions, summary={"model": model})

    return make


def test_new_scans_bring_their_images_window_and_method_and_have_no_label(predicted):
    gallery = predicted("mhng", [-150, 250], label=0, slice_labels=None)
    about = gallery.about()
    assert about["missing"] == []
    assert about["splits"][0]["methods"] == [{"name": "mhng", "title": "TransMIL + Multi-Head Normal Guidance"}]
    model = about["windows"]["CT"][-1]
    assert (model["title"], model["low"], model["high"], model["note"]) == ("Model", -150, 250, "what the model saw")
    assert {scan["label"] for scan in gallery.scans(0)} == {None}
    scan = gallery.scan(0, 0)
    assert scan["image"] is not None
    assert (scan["truth"], scan["label"]) == (None, None)


def test_new_scans_whose_ids_were_left_out_have_curves(manifest, tmp_path):
    """`nguide predict --anonymize` writes no manifest."""
    rows = [row | {"label": -1, "patient_id": None} for row in rows_of(manifest)]
    gallery = opened(tmp_path, rows, summary={"model": "another format"})
    assert gallery.scan(0, 0)["methods"]["model"]["attention"]
    assert "encoder" not in {window["name"] for window in gallery.about()["windows"]["CT"]}


@pytest.fixture
def view(manifest, tmp_path):
    """The gallery of one predicted scan; `changes` are those of its prediction.json."""

    def make(*groups: str, **changes) -> Gallery:
        row = rows_of(manifest)[0]
        write_result(tmp_path, row["scan_id"], **changes)
        return opened(tmp_path, [row | {"group": group} for group in groups or [""]])

    return make


def problem(kind: str, action: str, detail: str = "its value") -> dict[str, str]:
    return {"scan_id": "A", "file": "", "kind": kind, "detail": detail, "action": action}


def test_call_key_slices_interval_and_series_are_those_of_predict(view):
    gallery = view()
    (result,) = gallery.folder.glob("*/prediction.json")
    result.with_name("slices.csv").write_text("slice,instance_number\n1,7\n2,\n3,5\n")
    scan = gallery.scan(0, 0)
    (shown,) = scan["methods"].values()
    assert shown["key_positions"] == [3, 1]  # in the order of prediction.json, not chosen again
    assert shown["interval"] == {"first_position": 1, "last_position": 4, "meaning": "contains it"}
    assert (shown["threshold"], shown["positive"]) == (0.25, True)
    assert (scan["series"], scan["instance_numbers"]) == ("HEAD 5 mm", [7, None, 5])
    assert gallery.scans(0)[0]["positive"] == [True]


def test_findings_are_chosen_by_name_and_have_results_of_their_own(view):
    own = {"name": "subdural", "key_slices": [{"slice": 9}], "interval": None, "threshold": 0.5, "positive": False}
    gallery = view("any", "subdural", findings=[own | {"name": "any", "positive": True}, own])
    about = gallery.about()
    assert about["choice"] == "Finding"
    assert [method["title"] for method in about["splits"][0]["methods"]] == ["any", "subdural"]
    assert gallery.scans(0)[0]["positive"] == [True, False]
    assert gallery.scan(0, 0)["methods"]["subdural"]["key_positions"] == [8]


def test_a_model_shows_its_report_and_finds_the_index_beside_it(manifest, phantom, tmp_path):
    model = write_predictions(tmp_path / "model", rows_of(manifest))
    assert (open_gallery(model).manifest, open_gallery(model).page) == (None, None)
    shutil.copytree(phantom / "index", tmp_path / "model.index")
    window = {"windows": [[-100.0, 300.0]]}
    (model / "bundle.json").write_text(json.dumps({"preprocessing": window, "training": {"dataset": "rsna-ich"}}))
    (model / "report.html").write_text("the report")
    gallery = open_gallery(model)
    assert gallery.manifest.scan_ids == manifest.scan_ids
    assert (gallery.page, gallery.about()["page"]) == (model / "report.html", "Report")
    assert gallery.model.windows == ((-100.0, 300.0),)
    shutil.copytree(model, tmp_path / "model.of" / "any")
    (tmp_path / "model.of" / "findings.json").write_text("{}")
    (tmp_path / "model.index").rename(tmp_path / "model.of.index")
    assert open_gallery(tmp_path / "model.of" / "any").manifest.scan_ids == manifest.scan_ids


def test_new_scans_show_their_index(view):
    gallery = view()
    assert gallery.about()["page"] == ""
    (gallery.folder / "index.html").write_text("all scans")
    assert open_gallery(gallery.folder).about()["page"] == "Predictions"


def test_what_was_forced_incomplete_left_out_or_duplicated_or_what_the_model_was_not_shown_to_do_is_flagged(view):
    odd = [
        problem("duplicate", "left out", "same position as 2.dcm"),
        problem("duplicate", "left out", "same position as 3.dcm"),
        problem("tilt", "kept"),
        problem("localizer", "left out"),
        problem("mixed_size", "left out"),
        problem("gap", "kept", "10 mm, usually 5 mm: 1 missing"),
        problem("unsuitable", "predicted because of --force", "its modality is MR"),
    ]
    forced, unproven = "Forced: its modality is MR.", "This model was not shown to tell scans apart."
    gallery = view(problems=odd, cautions=[forced], model_cautions=[unproven])
    assert gallery.scans(0)[0]["flags"] == ["forced", "incomplete", "left out", "duplicated"]
    texts = [warning["text"] for warning in gallery.scan(0, 0)["warnings"]]
    assert (texts[0], texts[3], texts[4]) == (forced, "Two slices at the same position: 2 times, left out.", unproven)
    assert [warning["flag"] for warning in gallery.scan(0, 0)["warnings"][4:]] == ["note"] * 3  # not of this scan


def test_scans_whose_result_is_gone_or_that_were_not_predicted_are_told(manifest, tmp_path):
    rows = rows_of(manifest)[:2]
    write_result(tmp_path, rows[0]["scan_id"])
    scans = [{"scan_id": "A", "state": "predicted"}, {"scan_id": "B", "state": "refused", "reason": "it is MR"}]
    gallery = opened(tmp_path, rows, summary={"model": {}, "scans": scans})
    assert [scan["flags"] for scan in gallery.scans(0)] == [[], ["doubtful"]]
    texts = [[warning["text"] for warning in gallery.scan(0, number)["warnings"]] for number in (0, 1)]
    assert texts == [[], ["The scan has no prediction.json: what was odd about it is not known."]]
    assert gallery.about()["not_predicted"] == [{"id": "B", "reason": "it is MR"}]


@pytest.mark.parametrize(
    "changes", [{"key_slices": [{"slice": "x"}]}, {"threshold": "high"}, {"problems": [{"kind": 3}]}, {"source": []}]
)
def test_a_damaged_result_is_told(view, changes):
    with pytest.raises(UserError, match=r"prediction\.json is damaged"):
        view(**changes).scan(0, 0)


def test_slices_that_the_scan_does_not_have_are_not_shown(view):
    gallery = view(
        key_slices=[{"slice": 900}, {"slice": 1}],
        interval={"first_slice": 0, "last_slice": 3, "meaning": "contains it"},
    )
    (shown,) = gallery.scan(0, 0)["methods"].values()
    assert (shown["key_positions"], shown["interval"]) == ([0], None)


def test_scans_that_an_index_lacks_or_has_otherwise_show_what_it_allows(manifest, study, tmp_path):
    """No image without a row or with other slices; no truth without slice labels, no millimetres without a spacing."""
    first, second, third, *_ = manifest
    lists = {name: getattr(second, name)[1:] for name in ("files", "frames", "positions")}
    shorter = replace(second, **lists, slice_labels=None)
    bare = replace(third, slice_labels=None, slice_spacing=None, orientation=None)
    write_manifest(tmp_path / "manifest.parquet", [shorter, bare], manifest.about)
    gallery = open_gallery(study, tmp_path)
    numbers = {scan["id"]: scan["number"] for scan in gallery.scans(0)}
    lacking, other, shown = (gallery.scan(0, numbers[row.scan_id]) for row in (first, second, third))
    assert "has no scan" in lacking["note"]
    assert f"has {len(second) - 1} slices" in other["note"]
    assert (shown["truth"], shown["positions_mm"], shown["image"]["letters"]) == (None, None, None)


def test_folders_without_predictions_and_runs_that_saw_other_slices_are_refused(tmp_path, study, manifest, phantom):
    with pytest.raises(UserError, match=r"holds neither predictions\.parquet"):
        open_gallery(tmp_path)
    with pytest.raises(UserError, match="run nguide index first"):
        open_gallery(study, tmp_path)
    with pytest.raises(UserError, match="is not a feature store"):
        open_gallery(study, phantom / "index", tmp_path)
    write_predictions(tmp_path / "ng" / "1", rows_of(manifest))
    write_predictions(tmp_path / "abmil" / "1", [rows_of(manifest)[0] | {"slices": 3}])
    with pytest.raises(UserError, match="another run"):
        open_gallery(tmp_path)
    (tmp_path / "predictions.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match="cannot be read"):
        open_gallery(tmp_path)


@pytest.mark.parametrize("attention", [[0.5, 0.5], [float("nan")] * 12, [-1.0] * 12])
def test_damaged_attention_is_told_and_not_drawn(manifest, tmp_path, attention):
    gallery = opened(tmp_path, [rows_of(manifest)[0] | {"attention": attention}])
    with pytest.raises(UserError, match="damaged, or the model diverged"):
        gallery.scan(0, 0)


def test_the_fitted_normal_has_the_curves_mean_and_variance_and_its_scale():
    attention = torch.from_numpy(0.3 * bell(200, 70, 9) + 0.7 * bell(200, 110, 14))
    fitted = fitted_normal(attention).double().numpy()
    places, weights = np.arange(200), attention.double().numpy()
    mean = (places * weights).sum() / weights.sum()
    variance = (weights * (places - mean) ** 2).sum() / weights.sum()
    density = np.exp(-((places - mean) ** 2) / (2 * variance))
    np.testing.assert_allclose(fitted, density / density.sum() * weights.sum(), rtol=1e-3, atol=1e-7)

    # The slice reference's probabilities need not sum to one; its normal is drawn over the same area.
    probabilities = torch.tensor([0.1, 0.9, 0.8, 0.05])
    drawn = curve(probabilities, probabilities.logit()[None], None)
    assert sum(drawn["normal"]) == pytest.approx(1.85, rel=1e-5)
    assert drawn["probability"] is None


def test_key_slices_are_those_of_predict_and_none_where_attention_is_flat():
    attention = torch.tensor([0.1, 0.3, 0.05, 0.25, 0.2, 0.06, 0.04])
    assert key_positions(attention, 5.0) == [1, 3]
    assert key_positions(attention, 1.0) == [1]  # the others are within 8 mm
    assert key_positions(torch.tensor([0.5, 0.5])) == []
    assert key_positions(torch.tensor([0.5, 0.496])) == []
    assert key_positions(torch.zeros(4)) == []


def test_mr_has_windows_without_hounsfield_units(predicted):
    """Each slice's own range, which the page measures, and ADC; percentiles are of a scan, and the page has a slice."""
    gallery = predicted("ng", {"percentiles": [0.5, 99.5]}, modality="MR")
    windows = gallery.about()["windows"]["MR"]
    shown = [(window["title"], window["low"], window["high"]) for window in windows]
    assert shown == [("Auto", None, None), ("ADC", 0, 3000), ("Model", None, None)]
    assert "percentiles 0.5 to 99.5" in windows[-1]["note"]
    assert gallery.scan(0, 0)["modality"] == "MR"
