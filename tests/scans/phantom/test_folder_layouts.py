"""Label tables are Kaggle's, column by column, and agree with the truth and with the files."""

import csv
import json
from collections import defaultdict
from pathlib import Path

import pytest

from normal_guidance.scans.phantom.phantom_files import LAYOUTS, write_phantom

SMALL = {"size": 32, "slices": 12}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("phantoms")
    for layout in LAYOUTS:
        write_phantom(layout, root / layout, scans=10, seed=3, positive=0.4, **SMALL)
    return {layout: root / layout for layout in LAYOUTS}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def truth_of(folder: Path) -> list[dict]:
    return json.loads((folder / "phantom.json").read_text())["scans"]


def slices_of(folder: Path) -> dict[str, int]:
    scans = truth_of(folder)
    return {f: y for scan in scans for f, y in zip(scan["files"], scan["slice_labels"], strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_files_are_there_and_no_other(datasets, layout):
    there = {path.relative_to(datasets[layout]).as_posix() for path in datasets[layout].rglob("*.dcm")}
    assert there == set(slices_of(datasets[layout]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_truth_counts(datasets, layout):
    scans = truth_of(datasets[layout])
    assert sum(scan["label"] for scan in scans) == 4
    assert all(scan["label"] == max(scan["slice_labels"]) for scan in scans)
    assert len({scan["scan_id"] for scan in scans}) == 10


def test_head_labels(datasets):
    folder = datasets["rsna-ich"]
    rows = rows_of(folder / "stage_2_train.csv")
    assert list(rows[0]) == ["ID", "Label"]
    found = defaultdict(dict)
    for row in rows:
        sop, _, kind = row["ID"].rpartition("_")
        found[f"stage_2_train/{sop}.dcm"][kind] = int(row["Label"])
    kinds = ["epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any"]
    assert all(list(labels) == kinds for labels in found.values())
    assert {file: labels["any"] for file, labels in found.items()} == slices_of(folder)
    assert all(labels["any"] == max(labels.values()) for labels in found.values())


def test_chest_labels(datasets):
    folder = datasets["rsna-pe"]
    rows = rows_of(folder / "train.csv")
    assert list(rows[0]) == [
        "StudyInstanceUID",
        "SeriesInstanceUID",
        "SOPInstanceUID",
        "pe_present_on_image",
        "negative_exam_for_pe",
        "qa_motion",
        "qa_contrast",
        "flow_artifact",
        "rv_lv_ratio_gte_1",
        "rv_lv_ratio_lt_1",
        "leftsided_pe",
        "chronic_pe",
        "true_filling_defect_not_pe",
        "rightsided_pe",
        "acute_and_chronic_pe",
        "central_pe",
        "indeterminate",
    ]
    uids = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
    found = {f"train/{'/'.join(row[uid] for uid in uids)}.dcm": int(row["pe_present_on_image"]) for row in rows}
    assert found == slices_of(folder)
    exams = defaultdict(set)
    for row in rows:
        exams[row["SeriesInstanceUID"]].add(tuple(list(row.values())[4:]))
    assert all(len(values) == 1 for values in exams.values())
    for scan in truth_of(folder):
        row = next(row for row in rows if row["SeriesInstanceUID"] == scan["scan_id"])
        sides = {kind for *_, kind in scan["lesions"]}
        assert {side for side in ("left", "right") if row[f"{side}sided_pe"] == "1"} == sides
        assert int(row["negative_exam_for_pe"]) == 1 - scan["label"]
        assert int(row["rv_lv_ratio_gte_1"]) + int(row["rv_lv_ratio_lt_1"]) == scan["label"]


def test_abdomen_labels(datasets):
    folder = datasets["rsna-at"]
    images, series = rows_of(folder / "image_level_labels_2024.csv"), rows_of(folder / "train_series_meta.csv")
    patients = rows_of(folder / "train_2024.csv")
    assert list(images[0]) == ["patient_id", "series_id", "instance_number", "injury_name"]
    assert list(series[0]) == ["patient_id", "series_id", "aortic_hu", "incomplete_organ"]
    assert list(patients[0]) == [
        "patient_id",
        "bowel_healthy",
        "bowel_injury",
        "extravasation_healthy",
        "extravasation_injury",
        "kidney_healthy",
        "kidney_low",
        "kidney_high",
        "liver_healthy",
        "liver_low",
        "liver_high",
        "spleen_healthy",
        "spleen_low",
        "spleen_high",
        "any_injury",
    ]
    named = [f"train_images/{r['patient_id']}/{r['series_id']}/{r['instance_number']}.dcm" for r in images]
    assert set(named) == {file for file, label in slices_of(folder).items() if label}
    assert {row["injury_name"] for row in images} <= {"Active_Extravasation", "Bowel"}
    assert {f"{row['patient_id']}_{row['series_id']}" for row in series} == {s["scan_id"] for s in truth_of(folder)}
    for row in patients:
        scans = [scan for scan in truth_of(folder) if scan["patient_id"] == row["patient_id"]]
        kinds = {kind for scan in scans for *_, kind in scan["lesions"]}
        assert row["bowel_injury"] == str(int("Bowel" in kinds))
        assert row["extravasation_injury"] == str(int("Active_Extravasation" in kinds))
        injuries = {f"{organ}_{grade}" for organ, grade in scans[0]["injuries"].items()}
        assert {name for name in row if name.endswith(("_low", "_high")) and row[name] == "1"} == injuries
        assert row["any_injury"] == str(int(bool(kinds or injuries)))
        for organ in ("kidney", "liver", "spleen"):
            assert sum(int(row[f"{organ}_{grade}"]) for grade in ("healthy", "low", "high")) == 1


def test_folder_labels(datasets):
    rows = rows_of(datasets["folder"] / "labels.csv")
    assert list(rows[0]) == ["scan_id", "patient_id", "path", "label", "slice_labels"]
    for row, scan in zip(rows, truth_of(datasets["folder"]), strict=True):
        assert (row["scan_id"], int(row["label"])) == (scan["scan_id"], scan["label"])
        assert [int(word) for word in row["slice_labels"].split()] == scan["slice_labels"]
        assert {Path(file).parent.as_posix() for file in scan["files"]} == {row["path"]}


@pytest.mark.slow(but="rsna-ich")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_two_seeds_share_a_scan_or_patient(datasets, layout, tmp_path):
    write_phantom(layout, tmp_path / "other", scans=10, seed=4, positive=0.4, **SMALL)
    write_phantom(layout, tmp_path / "first", scans=10, seed=0, positive=0.4, **SMALL)
    sets = [truth_of(folder) for folder in (datasets[layout], tmp_path / "other", tmp_path / "first")]
    for name in ("scan_id", "patient_id"):
        ids = [{scan[name] for scan in scans if scan[name]} for scans in sets]  # rsna-pe names no patients
        assert len(set.union(*ids)) == sum(map(len, ids))
