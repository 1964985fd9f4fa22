"""One way to number slices: a scan whose images run against its slices is predicted, and every result says the same."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from pydicom import dcmread

from normal_guidance.cli.clinic import scan_lines
from normal_guidance.clinic import PredictOptions, ScanPrediction, load_bundle, predict, write_predictions
from normal_guidance.clinic.node.destination import SentSeries
from normal_guidance.clinic.node.send_text import _of_finding, make_observation, read_content
from normal_guidance.clinic.results.scan_pages import plot_strip
from normal_guidance.clinic.viewer.gallery import open_gallery
from normal_guidance.scans.index.labels import parse_ranges
from small_bundle import copy_series, tiny
from small_dicom import change

pytestmark = pytest.mark.usefixtures("tiny_encoder")
FIRST_IMAGE = 40  # the InstanceNumber of the slice at the feet; the others count down from it


@pytest.fixture(scope="module")
def predicted(trained, tmp_path_factory) -> ScanPrediction:
    folder = tmp_path_factory.mktemp("numbered") / "a"
    for number, file in enumerate(copy_series(trained.manifest[0], trained.manifest.root, folder)):
        change(file, InstanceNumber=FIRST_IMAGE - number)
    return next(iter(predict(folder, trained.run, encoder=tiny(), options=PredictOptions(workers=0))))


def results(prediction: ScanPrediction, trained, out: Path) -> Path:
    (written,) = write_predictions([prediction], load_bundle(trained.run), out, dicom=True)
    assert written.complete
    return written.folder


@pytest.fixture(scope="module")
def folder(predicted, trained, tmp_path_factory) -> Path:
    return results(replace(predicted, threshold=0.0), trained, tmp_path_factory.mktemp("out") / "out")


@pytest.fixture(scope="module")
def truth(predicted, folder) -> dict[int, int]:
    """The InstanceNumber of each slice, counted from 1: the files' own, by their height."""
    headers = [dcmread(file) for file in predicted.root.rglob("*.dcm")]
    headers.sort(key=lambda header: float(header.ImagePositionPatient[2]))
    return {number: header.InstanceNumber for number, header in enumerate(headers, start=1)}


@pytest.fixture(scope="module")
def keys(predicted, truth, folder) -> list[tuple[int, int]]:
    """Slice and image of each key slice; the first is where the table of attention is highest."""
    (row,) = pq.read_table(folder.parent / "predictions.parquet").to_pylist()
    found = [
        (key["slice"], key["instance_number"])
        for key in json.loads((folder / "prediction.json").read_text())["key_slices"]
    ]
    assert found[0][0] == int(np.argmax(row["attention"])) + 1
    assert found == [(number, truth[number]) for number, _ in found]
    return found


@pytest.fixture(scope="module")
def ends(truth, folder) -> tuple[tuple[int, int], tuple[int, int]]:
    told = json.loads((folder / "prediction.json").read_text())["interval"]
    first, last = ((told[f"{end}_slice"], told[f"{end}_instance_number"]) for end in ("first", "last"))
    assert (first, last) == ((first[0], truth[first[0]]), (last[0], truth[last[0]]))
    return first, last


def test_python_counts_slices_from_1_and_positions_from_0(predicted, keys, ends):
    called = replace(predicted, threshold=0.0)
    assert called.key_slices == tuple(number for number, _ in keys)
    assert called.key_positions == tuple(number - 1 for number, _ in keys)
    assert called.interval == (ends[0][0], ends[1][0])
    assert called.interval_positions == (ends[0][0] - 1, ends[1][0] - 1)
    assert called.attention[called.key_positions[0]] == called.attention.max()
    for number, image in keys:
        assert called.instance_numbers[number - 1] == image


def test_tables_say_the_same(folder, truth, keys, ends):
    with (folder / "slices.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {int(line["slice"]): int(line["instance_number"]) for line in lines} == truth
    ranked = sorted((int(line["key_slice_rank"]), int(line["slice"])) for line in lines if line["key_slice_rank"])
    assert [number for _, number in ranked] == [number for number, _ in keys]
    inside = [int(line["slice"]) for line in lines if line["in_interval"] == "1"]
    assert (inside[0], inside[-1]) == (ends[0][0], ends[1][0])
    with (folder.parent / "summary.csv").open() as file:
        (line,) = csv.DictReader(file)
    (scan,) = json.loads((folder.parent / "summary.json").read_text())["scans"]
    for told in (line, scan):
        assert told["key_slices"].split() == [str(number) for number, _ in keys]
        assert told["key_instance_numbers"].split() == [str(image) for _, image in keys]
        for end, (number, image) in zip(("first", "last"), ends, strict=True):
            assert int(told[f"interval_{end}_slice"]) == number
            assert int(told[f"interval_{end}_instance_number"]) == image


def test_pages_pictures_and_the_terminal_say_the_same(predicted, trained, folder, keys, ends):
    called = replace(predicted, threshold=0.0)
    page, index = ((folder / name).read_text() for name in ("report.html", "../index.html"))
    numbers, images = (" ".join(map(str, column)) for column in zip(*keys, strict=True))
    for rank, (number, image) in enumerate(keys, start=1):
        assert f"<td>key slice {rank} of {len(keys)}</td><td>{number}</td><td>{image}</td>" in page
    sentence = f"The interval, slices {ends[0][0]} (image {ends[0][1]}) to {ends[1][0]} (image {ends[1][1]}) of "
    assert sentence in page
    assert f"<td data-of='key slices'>{numbers}</td><td data-of='image numbers'>{images}</td>" in index
    panels = plot_strip(called, [(place, np.eye(4)) for place in sorted(called.key_positions)]).subfigs[0].axes
    titles = [panel.get_title().splitlines()[1] for panel in panels if panel.images]
    assert titles == [f"slice {number} (image {image})" for number, image in sorted(keys)]
    (written,) = write_predictions([called], load_bundle(trained.run), folder.parent.with_name("again"))
    (line,) = scan_lines(written, load_bundle(trained.run))
    assert line.endswith(f"key slices {numbers} (images {images})")


def test_dicom_and_messages_say_the_same(predicted, folder, truth, keys, ends):
    image_of = {dcmread(file).SOPInstanceUID: dcmread(file).InstanceNumber for file in predicted.root.rglob("*.dcm")}
    objects = dcmread(folder / "dicom" / "key_objects.dcm").ContentSequence
    uids = [item.ReferencedSOPSequence[0].ReferencedSOPInstanceUID for item in objects if item.ValueType == "IMAGE"]
    assert [image_of[uid] for uid in uids] == [image for _, image in keys]
    report = (folder / "dicom" / "structured_report.dcm").read_bytes()
    named = re.findall(rb"key slice \d+ of \d+: slice (\d+), whole slice", report)
    assert [int(number) for number in dict.fromkeys(named)] == [number for number, _ in keys]
    assert b"interval" in report
    content = read_content(folder / "prediction.json", SentSeries("key", folder.parent))
    (finding,) = content.findings
    (told,) = (part for part in _of_finding(finding, "1") if part[1].startswith("key_slices"))
    assert told[3] == ", ".join(f"{number} (image {image})" for number, image in keys)
    parts = [part.valueInteger for part in make_observation(content, finding).component]
    assert parts == [number for key in keys for number in key]


def test_the_viewer_is_told_positions_and_images(folder, truth, keys, ends):
    scan = open_gallery(folder.parent).scan(0, 0)
    (method,) = scan["methods"].values()
    assert [position + 1 for position in method["key_positions"]] == [number for number, _ in keys]
    assert method["interval"]["first_position"] + 1 == ends[0][0]
    assert method["interval"]["last_position"] + 1 == ends[1][0]
    assert dict(enumerate(scan["instance_numbers"], start=1)) == truth


def test_no_result_says_that_the_interval_of_a_negative_scan_contains_a_finding(predicted, trained, tmp_path):
    called = replace(predicted, threshold=1.0, coverage=0.9)  # calibrated: it would promise to contain the finding
    folder = results(called, trained, tmp_path / "out")
    assert (called.interval, called.interval_sentence) == (None, "No interval: the scan is called negative.")
    assert json.loads((folder / "prediction.json").read_text())["interval"] is None
    with (folder / "slices.csv").open() as file:
        assert {line["in_interval"] for line in csv.DictReader(file)} == {""}
    with (folder.parent / "summary.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert {value for name, value in line.items() if name.startswith("interval_")} == {""}
    assert "<rect" not in (folder.parent / "index.html").read_text()  # no shade in the curve
    (method,) = open_gallery(folder.parent).scan(0, 0)["methods"].values()
    assert method["interval"] is None
    page = (folder / "report.html").read_text()
    assert "No interval: the scan is called negative." in page
    assert "contains the whole finding" not in page.partition("<h2 id=model>")[0]
    report = (folder / "dicom" / "structured_report.dcm").read_bytes()  # OHIF needs its ends, which have a region
    assert b"contains the whole finding" not in report
    assert b"the interval is of a scan called negative and points at no finding" in report
    assert (
        "<rect" in (results(replace(called, threshold=0.0), trained, tmp_path / "p").parent / "index.html").read_text()
    )


def test_ranges_of_a_users_table_count_from_1():
    """As `slice` in every result: what is copied from a result into a table means the same slice."""
    labels = torch.from_numpy(parse_ranges("1;3-4", 5))
    assert [position + 1 for position in labels.nonzero().flatten().tolist()] == [1, 3, 4]
