"""What lies in the folder: the same numbers in every file, pages that need nothing, no patient where none may be."""

import json
import re
import shutil
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from matplotlib.image import imread
from pydicom import dcmread

from normal_guidance.base.errors import UserError
from normal_guidance.cli.clinic import scan_lines
from normal_guidance.clinic import PredictOptions, ScanPrediction, load_bundle, predict, write_predictions
from normal_guidance.clinic.results.result_folder import Written, outcome_json, prediction_json, write_scan
from normal_guidance.clinic.results.scan_pages import draw_strip, index_page, plot_strip, scan_page
from normal_guidance.scans.index.manifest import Finding, read_manifest
from normal_guidance.scans.index.problems import Problem, read_problems
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.show.figure_style import DPI, save
from normal_guidance.statistics.conformal import IntervalCalibration
from normal_guidance.sweep.predictions import PREDICTIONS
from pages import check_page
from small_bundle import PATIENT, WINDOW, copy_series, tiny
from small_dicom import change
from small_files import rows_of_csv

pytestmark = pytest.mark.usefixtures("tiny_encoder")


@pytest.fixture(scope="module")
def scans(trained, tmp_path_factory) -> Path:
    """Two scans that can be predicted, one that is refused, one that fails, and a file that is not an image."""
    folder = tmp_path_factory.mktemp("in")
    for number, (name, tags) in enumerate({"a": {}, "b": {}, "mr": {"Modality": "MR"}}.items()):
        copy_series(trained.manifest[number], trained.manifest.root, folder / name, **tags)
    (folder / "torn").mkdir()
    (folder / "torn" / "1.dcm").write_bytes((folder / "a" / "0000.dcm").read_bytes()[:700])
    (folder / "notes.txt").write_text("no image")
    return folder


def write(scans: Path, bundle, out: Path, **options):
    anonymize = options.get("anonymize", False)
    outcomes = predict(scans, bundle, encoder=tiny(), options=PredictOptions(workers=0, anonymize=anonymize))
    return write_predictions(outcomes, bundle, out, **options)


@pytest.fixture(scope="module")
def one(scans, trained) -> ScanPrediction:
    return next(iter(predict(scans / "a", trained.run, encoder=tiny(), options=PredictOptions(workers=0))))


@pytest.fixture(scope="module")
def written(scans, trained, tmp_path_factory) -> tuple[Path, list[Written], list[Written]]:
    """The folder of all results, what was written, and what was reported while it was."""
    folder, reported = tmp_path_factory.mktemp("results") / "out", []
    return folder, write(scans, load_bundle(trained.run), folder, watch=reported.append), reported


def read(path: Path) -> Any:
    """What a JSON file holds, which has no NaN."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_everything_is_there(scans, bundle, written, tmp_path):
    out, results, reported = written
    assert reported == results
    names = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    of_scan = {"prediction.json", "slices.csv", "strip.png", "strip.jpg", "report.html"}
    of_all = {"summary.csv", "summary.json", "index.html", "predictions.parquet", "manifest.parquet", "problems.csv"}
    assert names == of_all | {f"{scan}/{name}" for scan in ("a", "b") for name in of_scan}
    summary = rows_of_csv(out / "summary.csv")
    assert [line["state"] for line in summary] == ["predicted", "predicted", "refused", "failed"]
    assert [line["scan_id"] for line in summary[2:]] == ["mr", "torn"]
    probabilities = [float(line["probability"]) for line in summary[:2]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert "Modality is MR" in summary[2]["reason"]
    about = read(out / "summary.json")
    assert about["counts"] == {"predicted": 2, "refused": 1, "failed": 1}
    assert about["anonymous"] is False
    assert about["model"] == json.loads(json.dumps({"identity": asdict(bundle.identity), **bundle.as_json()}))
    assert {"unsuitable", "failed"} <= {problem.kind for problem in read_problems(out / "problems.csv")}
    with pytest.raises(UserError, match="exists and is not empty"):
        write(scans, bundle, out)
    write(scans / "mr", bundle, tmp_path / "none")  # nothing predicted is still reported
    assert not (tmp_path / "none" / "manifest.parquet").exists()
    assert pq.read_table(tmp_path / "none" / "predictions.parquet").num_rows == 0
    assert "0 of 1 scans predicted" in (tmp_path / "none" / "index.html").read_text()


def test_all_files_of_a_scan_say_the_same(one, bundle, tmp_path):
    one = replace(one, threshold=0.0)
    folder = write_scan(one, bundle, tmp_path / "out").folder
    content = read(folder / "prediction.json")
    assert (content["format"], content["scan_id"], content["patient_id"]) == (3, "a", one.row.patient_id)
    numbers = (one.logit, one.probability, one.threshold, one.is_positive)
    assert tuple(content[name] for name in ("logit", "probability", "threshold", "positive")) == numbers
    assert content["attention"] == one.attention.tolist()
    assert [line["slice"] for line in content["key_slices"]] == list(one.key_slices)
    words = "is the shortest with 50 % of the attention and promises nothing"
    first, last = one.interval
    images = dict(zip(("first_instance_number", "last_instance_number"), image_numbers(one, first, last), strict=True))
    ends = {"first_slice": first, "last_slice": last, **images}
    assert content["interval"] == {**ends, "share": 0.5, "coverage": None, "meaning": words}
    assert words in (folder / "report.html").read_text()
    for line in content["key_slices"]:
        header = dcmread(one.root / line["file"])
        assert header.InstanceNumber == line["instance_number"]
        assert float(header.ImagePositionPatient[2]) == pytest.approx(line["position_mm"], abs=1e-3)
        assert line["attention"] == max(one.attention[line["slice"] - 1].tolist(), 0)
    assert content["source"]["series_uid"] == header.SeriesInstanceUID
    assert content["model"]["encoder"] == {"name": "tiny", "fingerprint": "tiny-1.0"}
    table = rows_of_csv(folder / "slices.csv")
    assert [float(line["attention"]) for line in table] == content["attention"]
    assert [int(line["slice"]) for line in table] == list(range(1, content["slices"] + 1))
    inside = [int(line["slice"]) for line in table if line["in_interval"] == "1"]
    assert (inside[0], inside[-1], len(inside)) == (first, last, last - first + 1)
    ranked = sorted((int(line["key_slice_rank"]), int(line["slice"])) for line in table if line["key_slice_rank"])
    assert [number for _, number in ranked] == list(one.key_slices)


def image_numbers(prediction: ScanPrediction, *slices: int) -> list[int]:
    """By the files' own headers; slices count from 1."""
    return [dcmread(prediction.root / prediction.row.files[number - 1]).InstanceNumber for number in slices]


def test_a_promise_is_told_in_the_same_words_everywhere(scans, one, bundle, tmp_path):
    words = "contains the whole finding of a positive scan with 90 % probability"
    calibrated = replace(bundle, intervals=IntervalCalibration(0.9, 30, 0.5))
    promised = next(iter(predict(scans / "a", calibrated, options=PredictOptions(workers=0))))
    promised = replace(promised, threshold=0.0)
    first, last = calibrated.intervals.interval(one.attention, torch.tensor([len(one.row)]))
    assert promised.interval_positions == (int(first), int(last))
    ends = [f"{position + 1} (image {one.row.instance_numbers[position]})" for position in (int(first), int(last))]
    sentence = f"The interval, slices {ends[0]} to {ends[1]} of {len(one.row)}, {words}."
    single = replace(promised, interval_positions=(int(first), int(first))).interval_sentence
    assert single == sentence.replace(f"slices {ends[0]} to {ends[1]}", f"slice {ends[0]}")
    (written,) = write_predictions([promised], calibrated, tmp_path / "out", dicom=True)
    content = read(written.folder / "prediction.json")
    told = content["interval"]
    assert (told["first_slice"], told["last_slice"], told["meaning"]) == (int(first) + 1, int(last) + 1, words)
    assert (told["share"], told["coverage"]) == (None, 0.9)
    assert content["model"]["intervals"]["scans"] == 30
    assert [line["interval_meaning"] for line in rows_of_csv(tmp_path / "out" / "summary.csv")] == [words]
    page = (written.folder / "report.html").read_text()
    assert sentence in page
    assert f"interval: {words} (calibrated on 30 scans)" in page
    assert words.encode() in (written.folder / "dicom" / "structured_report.dcm").read_bytes()
    _, curve = plot_strip(promised, [(promised.key_positions[0], np.eye(4))]).subfigs
    assert curve.axes[0].get_title() == sentence


def test_tables_serve_the_viewer(written):
    out, results, _ = written
    predictions = [scan.outcome for scan in results if isinstance(scan.outcome, ScanPrediction)]
    table, manifest = pq.read_table(out / "predictions.parquet"), read_manifest(out)
    assert table.schema.equals(PREDICTIONS)
    ids = [prediction.row.scan_id for prediction in predictions]
    assert manifest.scan_ids == table["scan_id"].to_pylist() == ids
    for row, listed, prediction in zip(table.to_pylist(), manifest, predictions, strict=True):
        assert (row["part"], row["label"], row["slices"]) == ("new", -1, len(prediction.row))
        assert row["probability"] == pytest.approx(prediction.probability)
        np.testing.assert_allclose(np.exp(row["log_attention"]), prediction.head_attention, rtol=1e-5)
        assert len(read_volume(listed, manifest.root)[0]) == row["slices"]


def test_heads_have_their_columns_and_cells_that_spreadsheets_would_run_are_quoted(one, bundle, tmp_path):
    two = replace(one, row=replace(one.row, patient_id="=HYPERLINK(1)"), log_attention=one.log_attention.repeat(2, 1))
    (written,) = write_predictions([two], bundle, tmp_path / "out")
    assert rows_of_csv(tmp_path / "out" / "summary.csv")[0]["patient_id"] == "'=HYPERLINK(1)"
    first = rows_of_csv(written.folder / "slices.csv")[0]
    assert first["attention_head_1"] == first["attention_head_2"] == first["attention"]
    assert len(prediction_json(two, bundle)["head_attention"]) == 2


def test_a_scans_page_needs_nothing_else(one, bundle, tmp_path):
    evil = Problem("a", "<script>.dcm", "gap", "5 mm & more", "kept")
    strip = draw_strip(one, WINDOW, tmp_path / "strip.png")
    page = scan_page(replace(one, problems=(evil,)), bundle, [strip])
    check_page(page)
    assert "<script>" not in page
    assert "&lt;script&gt;.dcm" in page
    side = "positive: at or above" if one.is_positive else "negative: below"
    assert f"{side} the threshold" in page
    assert "not a medical device" in page
    assert "say nothing" not in page
    even = replace(one, log_attention=torch.zeros_like(one.log_attention))
    assert "the key slices below say nothing" in scan_page(even, bundle, [None])
    assert "no threshold was chosen" in scan_page(replace(one, threshold=None), bundle, [None])


def test_the_list_leads_to_the_scans(written, bundle):
    page = (written[0] / "index.html").read_text()
    for scan in ("a", "b"):
        assert f"<a href='{scan}/report.html' data-scan='{scan}'><bdi>{scan}</bdi></a>" in page
    check_page(page.replace("href='a/report.html'", "").replace("href='b/report.html'", ""))
    assert "Modality is MR, not CT" in page
    check_page(index_page([], bundle, ()))


def test_the_strip_shows_the_slices_as_the_encoder_saw_them(one):
    hu, _ = read_volume(one.row, one.root)
    places = sorted(one.key_positions)
    images = [(place, np.clip(hu[place], *WINDOW)) for place in places]
    figure = plot_strip(one, images)
    top, bottom = figure.subfigs
    shown = [panel for panel in top.axes if panel.images]
    assert len(shown) == len(places)
    for panel, place in zip(shown, places, strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), np.clip(hu[place], *WINDOW))
        assert [text.get_text() for text in panel.texts] == ["R", "L", "A", "P"]
    unknown = strip_of(replace(one, row=replace(one.row, orientation=None))).subfigs[0].axes
    assert [text.get_text() for panel in unknown for text in panel.texts] == []
    curves = {line.get_label(): line.get_ydata() for line in bottom.axes[0].lines}
    np.testing.assert_allclose(curves["attention"], one.attention)
    places = torch.arange(len(one.row))
    mean = (one.attention * places).sum()
    variance = (one.attention * (places - mean) ** 2).sum()
    bell = torch.softmax(-((places - mean) ** 2) / (2 * variance), 0)
    np.testing.assert_allclose(curves["normal with its mean and variance"], bell, atol=1e-6)
    assert one.row.patient_id not in figure.get_suptitle()
    assert "research only" in figure.get_suptitle()


def test_the_strip_marks_the_field_that_the_encoder_saw(one):
    """Half of a slice, by the pixel spacing of the files; nothing is marked where the encoder saw all."""
    header = dcmread(one.root / one.row.files[0])
    field = header.Columns * float(header.PixelSpacing[1]) / 2
    images = [(position, np.eye(header.Rows, header.Columns)) for position in one.key_positions]
    for asked, frames in ((field, len(images)), (None, 0)):
        panels = [panel for panel in plot_strip(one, images, asked).subfigs[0].axes if panel.images]
        marks = [patch for panel in panels for patch in panel.patches]
        assert len(marks) == frames
    left, low = (side / 4 - 0.5 for side in (header.Columns, header.Rows))
    marks = [panel.patches[0] for panel in plot_strip(one, images, field).subfigs[0].axes if panel.images]
    for mark in marks:
        assert mark.get_xy() == (left, low)
        assert (mark.get_width(), mark.get_height()) == (header.Columns / 2, header.Rows / 2)


def test_the_index_has_a_picture_and_a_curve_of_each_scan(written):
    page = (written[0] / "index.html").read_text()
    assert page.count('<img alt="key slices" src="data:image/jpeg;base64,') == page.count("<svg ") == 2
    for drawn, scan in zip(
        re.findall(r"points='([^']+)'", page), rows_of_csv(written[0] / "summary.csv"), strict=False
    ):
        attention = read(written[0] / scan["scan_id"] / "prediction.json")["attention"]
        x, y = np.array([point.split(",") for point in drawn.split()], float).T
        np.testing.assert_allclose(np.diff(x), 300 / len(attention), atol=0.11)
        np.testing.assert_allclose((50 - y) / 40, np.array(attention) / max(attention), atol=0.01)
    small = imread(written[0] / "a" / "strip.jpg")
    assert small.shape[0] == 72
    assert small.shape[1] == 72 * len(read(written[0] / "a" / "prediction.json")["key_slices"])  # of square slices


def test_the_strip_on_disk_is_a_picture_that_holds_its_labels(one, tmp_path):
    """With attention up to about .25, ticks once grew wider after the layout, and pushed the axis label out."""
    scores = -((torch.arange(len(one.row)).double() - 6.0) ** 2) / 6.0
    figure = plot_strip(replace(one, log_attention=scores[None]), [(place, np.eye(4)) for place in one.key_positions])
    save(figure, tmp_path / "strip.png")
    assert figure.subfigs[1].axes[0].yaxis.label.get_window_extent().x0 > 0
    picture = imread(draw_strip(one, WINDOW, tmp_path / "strip.png"))
    assert picture.shape[1] == 1350
    assert picture[60:250, :, 0].std() > 0.1
    single = replace(one, key_positions=one.key_positions[:1])
    assert imread(draw_strip(single, None, tmp_path / "one.png")).shape[1] == 1350


FORCED = Problem("a", "", "unsuitable", "it has 2 slices; the model takes 10 or more", "predicted because of --force")
DOUBLE = Problem("a", "a/3.dcm", "duplicate", "same position as a/2.dcm", "left out")
HARMLESS = Problem("a", "a/notes.txt", "no_image", "not a DICOM file", "left out")
WARNED = (
    "Forced: it has 2 slices; the model takes 10 or more.",
    "Two slices at the same position: left out.",
    "This model was not shown to tell scans apart (scan AUROC .540 [.310, .770]); see the model's report.",
)


def test_every_result_says_what_was_sought_where_by_which_model_and_how_far_to_trust_it(one, bundle, tmp_path):
    """A reader of any one of them must learn what was forced or left out, and what the model was not shown to do."""
    seen = replace(one, row=replace(one.row, body_part="HEAD"))
    odd = replace(seen, problems=(FORCED, DOUBLE, HARMLESS), model_cautions=WARNED[2:])
    assert odd.cautions == WARNED[:2]
    model = replace(bundle, cautions=WARNED[2:])
    (written,) = write_predictions([odd], model, tmp_path / "out")
    content, summary = (read(path) for path in (written.folder / "prediction.json", tmp_path / "out" / "summary.json"))
    assert (content["cautions"], content["model_cautions"]) == (list(WARNED[:2]), list(WARNED[2:]))
    assert (content["sought"], content["source"]["body_part"]) == (odd.sought, "HEAD")
    assert content["model"]["identity"] == asdict(model.identity)
    line = rows_of_csv(tmp_path / "out" / "summary.csv")[0]
    assert (line["sought"], line["body_part"], line["model"]) == (odd.sought, "HEAD", bundle.identity.short)
    assert line["cautions"] == summary["scans"][0]["cautions"] == " ".join(WARNED[:2])
    assert f"CAUTION: {WARNED[0]}" in scan_lines(written, bundle)[0]
    page = (written.folder / "report.html").read_text()
    index = (tmp_path / "out" / "index.html").read_text()
    for sentence in map(escape, WARNED[:2]):
        assert page.index("<h1>") < page.index(sentence) < page.index("Probability ")  # above the result
        assert sentence in index
    of_model = escape(WARNED[2])  # is no caution about the scan, and said once
    assert page.index("Probability ") < page.index(">Model</h2>") < page.index(of_model)
    assert index.count(of_model) == 1
    assert index.index(of_model) < index.index("Scans by probability</h2>")
    heading = " ".join(strip_of(odd).get_suptitle().split())
    assert WARNED[2] in heading
    for words in (f"Looked for: {odd.sought}", "Body part: HEAD", str(bundle.identity)[1:]):
        assert words in heading
        assert words in page
    assert "Body part: not stated" in scan_page(replace(one, row=replace(one.row, body_part="")), bundle, [None])


def strip_of(prediction: ScanPrediction):
    figure = plot_strip(prediction, [(place, np.eye(8)) for place in sorted(prediction.key_positions)])
    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    return figure


def test_cautions_are_burned_into_the_strip_which_fits_its_heading(one):
    """The strip becomes a DICOM image of its own, without the page around it."""
    long = FORCED._replace(detail="a reason of many words " * 40)
    figure = strip_of(replace(one, problems=(long, DOUBLE)))
    banner, _, _ = figure.subfigs
    (text,) = banner.texts
    assert " ".join(text.get_text().split()).count("a reason of many words") == 40
    assert WARNED[1] in " ".join(text.get_text().split())
    assert text.get_fontsize() >= 10
    inside, around = text.get_window_extent(), banner.bbox
    assert around.x0 <= inside.x0 < inside.x1 <= around.x1
    assert around.y0 <= inside.y0 < inside.y1 <= around.y1
    assert len(strip_of(one).subfigs) == 2  # no banner without a caution
    figure = strip_of(replace(one, finding=Finding("any", "1386000", "Intracranial hemorrhage of whatever kind " * 5)))
    for text in (figure._suptitle, figure.subfigs[0]._suptitle):
        assert 0 <= text.get_window_extent().x0 < text.get_window_extent().x1 <= figure.bbox.x1
    sentence = figure.subfigs[0]._suptitle.get_window_extent()
    assert figure._suptitle.get_window_extent().y0 >= sentence.y1
    titles = [panel.title.get_window_extent() for panel in figure.subfigs[0].axes if panel.images]
    assert [title.y1 <= sentence.y0 for title in titles] == [True] * len(titles)


@pytest.mark.parametrize(
    ("threshold", "words"),
    [
        (0.0, "Highest attention, scan called positive: where the model looked, which need not show the finding."),
        (1.0, "Highest attention, scan called negative: the key slices point at no finding."),
        (None, "Highest attention; no threshold was chosen, so the scan is called neither positive nor negative."),
    ],
)
def test_key_slices_of_a_negative_scan_point_at_no_finding(one, bundle, threshold, words):
    called = replace(one, threshold=threshold)
    assert words in scan_page(called, bundle, [None])
    assert strip_of(called).subfigs[0].get_suptitle() == words


def test_key_slices_have_the_same_number_everywhere(one, bundle):
    """The number is that by attention among the key slices, not among all slices."""
    several = replace(one, key_positions=(7, 2, 5))
    titles = [panel.get_title().splitlines()[:2] for panel in strip_of(several).subfigs[0].axes if panel.images]
    ranks = {3: 2, 6: 3, 8: 1}
    assert titles == [[f"key slice {rank}", f"slice {place} (image {place})"] for place, rank in ranks.items()]
    page = scan_page(several, bundle, [None])
    assert all(f"<td>key slice {rank} of 3</td><td>{place}</td>" in page for place, rank in ranks.items())


def test_anonymous_results_name_no_patient(scans, bundle, tmp_path):
    renamed = Path(shutil.copytree(scans, tmp_path / "ZEBEDEE^JOHN"))
    header = dcmread(renamed / "a" / "0000.dcm")
    secrets = ["ZEBEDEE", PATIENT, header.SeriesInstanceUID, header.StudyInstanceUID, ".dcm", str(tmp_path)]
    for file in (renamed / "b").iterdir():  # slices with one UID: DICOM results could not say which one they mean
        change(file, SOPInstanceUID="1.2.3")
    written = write(renamed, bundle, tmp_path / "anonymous", anonymize=True, dicom=True)
    assert [scan.outcome.scan_id for scan in written[:2]] == ["scan-003", "scan-004"]
    assert not (tmp_path / "anonymous" / "manifest.parquet").exists()
    assert read(tmp_path / "anonymous" / "summary.json")["anonymous"] is True
    held = {file: file.read_bytes() for file in (tmp_path / "anonymous").rglob("*") if file.is_file()}
    printed = json.dumps([outcome_json(scan, anonymize=True)["problems"] for scan in written])
    for secret in secrets:
        assert [file.name for file, content in held.items() if secret.encode() in content] == []
        assert secret not in printed
    table = pq.read_table(tmp_path / "anonymous" / "predictions.parquet")
    assert table["patient_id"].to_pylist() == table["scan_id"].to_pylist() == ["scan-001", "scan-002"]
    named = write(renamed, bundle, tmp_path / "named", dicom=True)
    text = "".join(file.read_text(errors="ignore") for file in (tmp_path / "named").rglob("*.json"))
    assert all(secret in text for secret in (PATIENT, "ZEBEDEE", ".dcm"))
    assert [(scan.complete, scan.lacks) for scan in named] == [(scan.complete, scan.lacks) for scan in written]
    problems = [(tmp_path / name / "problems.csv").read_text() for name in ("anonymous", "named")]
    assert ["have the same (0008,0018)" in text for text in problems] == [False, True]
    assert all("no DICOM results" in text for text in problems)


@pytest.mark.slow(but="True")
@pytest.mark.parametrize("dicom", [False, True])
def test_pixels_that_name_the_patient_are_in_no_anonymous_result(trained, bundle, tmp_path, dicom):
    row, root = trained.manifest[0], trained.manifest.root
    copy_series(row, root, tmp_path / "in" / "plain", BurnedInAnnotation="NO")
    files = copy_series(row, root, tmp_path / "in" / "named", SeriesInstanceUID="1.2.3")
    change(files[4], BurnedInAnnotation="YES")  # of one slice, which need not be a key slice
    named, plain = write(tmp_path / "in", bundle, tmp_path / "anonymous", anonymize=True, dicom=dicom)
    held = {file.suffix for file in named.folder.rglob("*") if file.is_file()}
    assert held == {".json", ".csv", ".html"}  # neither PNG nor DICOM
    page = (named.folder / "report.html").read_text()
    assert "data:image" not in page
    assert "No picture: its pixels name the patient (BurnedInAnnotation is YES)" in page
    check_page(page)
    assert (named.complete, named.lacks) == (False, "picture and DICOM results" if dicom else "picture")
    (line,) = (line for line in rows_of_csv(tmp_path / "anonymous" / "summary.csv") if line["scan_id"] == "scan-001")
    assert (line["state"], line["lacks"]) == ("predicted", named.lacks)
    assert "burned_in" in (tmp_path / "anonymous" / "problems.csv").read_text()
    known = write(tmp_path / "in", bundle, tmp_path / "open", dicom=dicom)  # who may know the patient sees the scan
    for scan in (plain, *known):
        assert scan.complete
        assert (scan.folder / "strip.png").exists()


def test_a_slice_that_is_gone_costs_the_picture_only(one, bundle, tmp_path):
    written = write_scan(replace(one, root=tmp_path), bundle, tmp_path / "out", dicom=True)
    assert not written.complete
    assert written.problems[0].action == "no picture, no DICOM results"
    check_page((written.folder / "report.html").read_text())
