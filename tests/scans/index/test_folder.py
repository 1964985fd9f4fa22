"""Any folder with a table gives its scans and labels, and reports the rows that do not fit; expected by hand."""

import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import pytest
from drawn_dicom import AXIAL, write_slice
from test_rsna import labels, problems, scans, slices

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.containers import Mask
from normal_guidance.scans.index.geometry import Ordered
from normal_guidance.scans.index.indexing import SOURCES, Index, index
from normal_guidance.scans.index.manifest import parse_findings
from normal_guidance.scans.index.source import slices_of_mask


def write_nifti(path: Path, volume: np.ndarray, affine: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume, affine), path)


class Folder:
    def __init__(self, root: Path) -> None:
        self.root, self.rows = root, []
        root.mkdir()

    def scan(self, name: str, count: int = 4, **tags) -> None:
        for place in range(count):
            write_slice(self.root / name / f"{place}.dcm", f"{name}.{place}", name, z=5.0 * place, number=place, **tags)

    def add(self, scan_id: str, **cells) -> None:
        self.rows.append({"scan_id": scan_id, "path": scan_id, **cells})

    def index(self, suffix: str = ".csv", out: str = "out", **options) -> Index:
        table = self.root.parent / f"labels{suffix}"
        frame = pd.DataFrame(self.rows)
        frame.to_csv(table, index=False, sep=";") if suffix == ".csv" else frame.to_parquet(table)
        return index("folder", self.root, self.root.parent / out, table=table, **options)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "root")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_folder_labels_in_each_notation(folder, suffix):
    for name in "abcdef":
        folder.scan(name, PatientID=f"patient {name}")
    folder.add("a", label=1, slice_labels="0 1 1 0", patient_id="007")
    folder.add("b", label=1, slice_ranges="2-3")
    folder.add("c", label=1, slice_ranges="1;4-4")
    folder.add("d", label=1)
    folder.add("e", label=0)
    folder.add("f", slice_labels="[0, 0, 0, 1]")
    made = folder.index(suffix)
    assert made.problems == []
    assert labels(made) == {
        "a": (1, [0, 1, 1, 0]),
        "b": (1, [0, 1, 1, 0]),
        "c": (1, [1, 0, 0, 1]),
        "d": (1, None),
        "e": (0, [0, 0, 0, 0]),
        "f": (1, [0, 0, 0, 1]),
    }
    assert made.manifest.patient_ids == ["007", *(f"patient {name}" for name in "bcdef")]
    assert made.manifest.about["options"] == {"table": str(folder.root.parent / f"labels{suffix}")}
    folder.rows = [{"scan_id": "a", "path": "a", "label": 0}]
    assert labels(folder.index(out="none")) == {"a": (0, None)}


@pytest.mark.parametrize("value", [0.5, float("inf"), float("-inf")])
def test_folder_numbers_that_are_no_labels(folder, value):
    """Missing values in lists are reported and not turned into numbers; in a column of labels they are bad rows."""
    folder.scan("a")
    folder.scan("b")
    folder.add("a", label=1.0, slice_labels=[0.0, 1.0, 1.0, value])
    folder.add("b", label=value, slice_labels=[0.0, 0.0, 0.0, 0.0])
    made = folder.index(".parquet")
    assert labels(made) == {"a": (1, None)}
    details = {problem.kind: problem.detail for problem in made.problems}
    assert details["label_mismatch"] == f"slice label '{value}' is neither 0 nor 1"
    assert details["bad_row"] == f"row 2: label '{value}' is neither 0 nor 1"


def test_folder_reads_archives_and_folders_in_them(folder):
    folder.scan("x")
    folder.scan("y", count=2)
    with zipfile.ZipFile(folder.root / "both.zip", "w") as archive:
        for file in sorted(folder.root.glob("?/*.dcm")):
            archive.write(file, file.relative_to(folder.root).as_posix())
            file.unlink()
    folder.add("all", path="both.zip", label=0)
    folder.add("part", path="both.zip!y", label=1)
    made = folder.index()
    assert scans(made)["part"].files == ("both.zip!y/0.dcm", "both.zip!y/1.dcm")
    assert scans(made)["all"].files == tuple(f"both.zip!x/{place}.dcm" for place in range(4))
    assert problems(made)["mixed_series"] == [("all", "both.zip!y/0.dcm")]


def test_folder_reads_nifti_with_a_mask(folder):
    """The mask lists its slices from head to feet, the scan from feet to head: they are matched in space."""
    affine = np.diag([-1.0, -1.0, 5.0, 1.0])
    upside_down = np.diag([-1.0, -1.0, -5.0, 1.0])
    upside_down[2, 3] = 5.0 * 5
    mask = np.zeros((16, 16, 6), np.uint8)
    mask[3, 3, 0] = 1  # the uppermost slice
    write_nifti(folder.root / "a.nii.gz", np.zeros((16, 16, 6), np.int16), affine)
    write_nifti(folder.root / "mask.nii", mask, upside_down)
    folder.add("a", path="a.nii.gz", mask="mask.nii", label=1)
    made = folder.index()
    (row,) = made.manifest
    assert (row.kind, row.files, row.frames) == ("nifti", ("a.nii.gz",) * 6, tuple(range(6)))
    assert slices(row) == [0, 0, 0, 0, 0, 1]
    assert (row.positions, row.slice_spacing) == ((0.0, 5.0, 10.0, 15.0, 20.0, 25.0), 5.0)
    assert made.problems == []
    assert row.patient_id == "a"
    assert (row.instance_numbers, row.slice_name(2)) == (None, "3")


def test_folder_mask_over_dicom(folder):
    folder.scan("a")
    mask = np.zeros((16, 16, 4), np.uint8)
    mask[0, 0, 2] = 1
    affine = np.diag([-1.0, -1.0, 5.0, 1.0])  # to NIfTI's axes, which point right and anterior
    affine[:2, 3] = 8
    write_nifti(folder.root / "a.nii", mask, affine)
    folder.add("a", mask="a.nii", label=1)
    made = folder.index()
    assert (slices(next(iter(made.manifest))), made.problems) == ([0, 0, 1, 0], [])


@pytest.mark.parametrize(
    ("cells", "detail"),
    [
        ({"slice_labels": "0 1"}, "2 slice labels for 4 slices"),
        ({"slice_labels": "0 1 2 0"}, "slice label '2' is neither 0 nor 1"),
        ({"slice_labels": "0 0 0 0"}, "label is 1, but 0 of 4 slices are positive"),
        ({"slice_ranges": "3-5"}, "slice range '3-5' does not fit 4 slices, counted from 1 to 4"),
        ({"slice_ranges": "0-1"}, "slice range '0-1' does not fit 4 slices, counted from 1 to 4"),
        ({"slice_ranges": "one"}, "slice range 'one' is not one; write it as 12-20;31-33"),
        ({"slice_ranges": "1", "slice_labels": "0 1 0 0"}, "slice_labels and slice_ranges are given; give one of them"),
    ],
)
def test_folder_slice_labels_that_do_not_fit_are_left_out(folder, cells, detail):
    folder.scan("a")
    folder.add("a", label=1, **cells)
    made = folder.index()
    assert labels(made) == {"a": (1, None)}
    (problem,) = made.problems
    assert problem.kind == "label_mismatch"
    assert problem.detail.startswith(detail)


def test_folder_masks_that_cannot_be_used(folder):
    folder.scan("a")
    (folder.root / "broken.nii").write_bytes(b"no volume")
    for scan_id, mask in (("gone", "gone.nii"), ("broken", "broken.nii"), ("dicom", "a/0.dcm"), ("out", "../x.nii")):
        folder.add(scan_id, path="a", mask=mask, label=1)
    made = folder.index()
    assert [(row.label, slices(row)) for row in made.manifest] == [(1, None)] * 4
    assert problems(made)["label_without_image"] == [("gone", "gone.nii")]
    assert problems(made)["unsafe_path"] == [("out", "../x.nii")]
    assert problems(made)["unreadable"] == [("broken", "broken.nii"), ("dicom", "a/0.dcm")]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ({"path": "nowhere"}, "label_without_image"),
        ({"path": "../outside"}, "unsafe_path"),
        ({"path": "link"}, "unsafe_path"),
        ({"path": "a\0b"}, "label_without_image"),
        ({"path": "x" * 5000}, "label_without_image"),
        ({"path": "empty"}, "label_without_image"),
        ({"path": "broken.zip"}, "unreadable"),
        ({"label": "2"}, "bad_row"),
        ({"label": ""}, "image_without_label"),
        ({"path": ""}, "bad_row"),
        ({"scan_id": "good"}, "double_scan"),
    ],
)
def test_folder_rows_that_cannot_be_used_do_not_stop_the_others(folder, cells, kind):
    folder.scan("a")
    (folder.root / "empty").mkdir()
    (folder.root / "broken.zip").write_bytes(b"PK\3\4 no archive")
    (folder.root.parent / "outside").mkdir()
    (folder.root / "link").symlink_to(folder.root.parent / "outside")
    folder.add("good", path="a", label="1")
    folder.rows.append({"scan_id": "bad", "path": "a", "label": "0", **cells})
    made = folder.index(".parquet")
    assert made.manifest.scan_ids == ["good"]
    assert kind in {problem.kind for problem in made.problems}
    assert {problem.scan_id for problem in made.problems} <= {"bad", "good", ""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scan_id,path\na,a\n", r"no column label \(0 or 1; or one of slice_labels, slice_ranges, mask\)"),
        (
            "label,where\n1,a\n",
            r"no column scan_id \(.*; or one of path, patient_id\); it has label, where; add scan_id",
        ),
        ("scan,p,q\na,0,0\nb,1,1\n", r"no column label \(.*\); it has scan, p, q; add label, or rename"),
        ("scan_id,path,label\n", "has no usable row"),
        ("scan_id,path,label\na,a,7\n", "has no usable row; row 1: label '7' is neither 0 nor 1; each needs"),
        ("scan_id,path,label\na,x/gone,1\n", r"no such file or folder: .*root/x/gone \(paths are relative to .*ROOT\)"),
        (
            "scan_id,path,label\na,gone,1\n",
            r"no scan of .* is in .*root \(the table: 'gone'; the folder: none\)",
        ),
        ("", "cannot be read"),
        ("scan_id,scan_id,path,label\na,b,c,1\n", "column scan_id occurs twice"),
        (
            b"scan_id,path,label\n\xff\xfe,a,1\n",
            r"table .*labels.csv cannot be read .*; save it again, a .csv in UTF-8",
        ),
        # the label of one scan must not go to another of the same patient
        ("patient,label\nP,1\nQ,0\nP,0\n", "has 2 rows of patient 'P', and no column that tells their scans apart"),
    ],
)
def test_folder_tables_that_cannot_be_used(folder, text, message):
    table = folder.root.parent / "labels.csv"
    table.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        index("folder", folder.root, folder.root.parent / "out", table=table)
    assert not (folder.root.parent / "out").exists()


def test_folder_needs_a_table_of_a_known_kind(folder):
    for root, table, message in (
        ("", None, r"needs --table FILE"),
        ("", "labels.xlsx", r"labels.xlsx: the ending is unknown; give a .csv or .parquet"),
        ("", "labels.csv", r"labels.csv is not a file; give the table of labels"),
        ("nowhere", None, r"nowhere is not a folder"),  # the first thing to mend
    ):
        with pytest.raises(UserError, match=message):
            index("folder", folder.root / root, folder.root.parent / "out", table=table)
    assert set(SOURCES) == {"folder", "rsna-ich", "rsna-pe", "rsna-at", "prostatex"}, "the others have their own tests"


def ordered_of(count: int, step: float, **changes) -> Ordered:
    names, heights = tuple((str(k), 0) for k in range(count)), tuple(step * k for k in range(count))
    return replace(Ordered(names, heights, step, AXIAL, 16, 16, None, (), True), **changes)


def mask_at(heights: Iterable[float], *positive: int, orientation: tuple[float, ...] = AXIAL) -> Mask:
    places = tuple((0.0, 0.0, float(z)) for z in heights)
    return Mask("m.nii", orientation, places, tuple(k in positive for k in range(len(places))))


@pytest.mark.parametrize(
    ("change", "mask", "message"),
    [
        ({"located": False}, mask_at((0, 5, 10), 1), "positions of the slices are unknown"),
        ({}, mask_at((0, 5, 10), 1, orientation=(1.0, 0.0, 0.0, 0.0, 0.0, -1.0)), "another orientation"),
        ({}, mask_at((0, 5), 1), "does not cover 1 of 3 slices"),
        ({}, mask_at((0, 5, 10, 15, 20), 1, 4), "1 of 2 nonzero slices of mask m.nii lie outside"),
    ],
)
def test_masks_that_do_not_fit(change, mask, message):
    with pytest.raises(ValueError, match=message):
        slices_of_mask(mask, ordered_of(3, 5.0, **change))


def test_a_mask_marks_the_slices_that_it_touches():
    """Also a finer one, and one of thousands of slices: comparing all pairs in one array would take 26 GB."""
    assert slices_of_mask(mask_at((0, 5, 10), 1), ordered_of(3, 5.0)).tolist() == [0, 1, 0]
    finer = mask_at(range(-2, 13), 9)  # at 7 mm: 2 mm from the second slice, 3 from the third
    assert slices_of_mask(finer, ordered_of(3, 5.0)).tolist() == [0, 1, 0]
    count = 60_000
    found = slices_of_mask(mask_at(reversed(range(count)), 0, 1, 2), ordered_of(count, 1.0))
    assert np.flatnonzero(found).tolist() == [count - 3, count - 2, count - 1]


def test_folder_with_findings(folder):
    for name in "abcd":
        folder.scan(name)
    rows = {
        "a": {"any": 1, "epidural": 1, "subdural": 0, "slice_labels_any": "0 1 1 0", "slice_ranges_epidural": "2"},
        "b": {"any": 0, "epidural": 0, "subdural": "", "slice_labels_any": "", "slice_ranges_epidural": ""},
        "c": {"any": 1, "epidural": 0, "subdural": 1, "slice_labels_any": "", "slice_ranges_epidural": "3"},
        "d": {"any": 1, "epidural": 2, "subdural": 1, "slice_labels_any": "", "slice_ranges_epidural": ""},
    }
    for name, cells in rows.items():
        folder.add(name, **cells)
    made = folder.index(findings=parse_findings("any=1386000,epidural,subdural"))
    manifest = made.manifest
    assert labels(made) == {"a": (1, [0, 1, 1, 0]), "b": (0, [0, 0, 0, 0]), "c": (1, None)}
    assert [(row.label, slices(row)) for row in manifest.of_finding("epidural")] == [
        (1, [0, 1, 0, 0]),
        (0, [0, 0, 0, 0]),
        (0, None),  # its slice labels contradict it
    ]
    subdural = [(row.scan_id, row.label, row.slice_labels) for row in manifest.of_finding("subdural")]
    assert subdural == [("a", 0, None), ("c", 1, None)]
    assert [problem.scan_id for problem in made.problems if problem.kind == "label_mismatch"] == ["c"]
    wrong = [problem.detail for problem in made.problems if problem.kind == "bad_row"]
    assert wrong == ["row 4: label of epidural '2' is neither 0 nor 1"]


@pytest.mark.parametrize(
    ("findings", "message"),
    [
        ("any,subdural", r"labels.csv has no column subdural \(0 or 1\); it has scan_id, path, any, label"),
        ("any", "has a column label beside the findings, the first of which is the label; add it to --findings"),
        ("any,path", "path is another column of the table"),
    ],
)
def test_folder_refuses_findings_that_the_table_lacks(folder, findings, message):
    folder.scan("a")
    folder.add("a", any=1, label=1)
    with pytest.raises(UserError, match=message):
        folder.index(findings=parse_findings(findings))


def test_folder_says_which_scans_are_mr(folder):
    """NIfTI has no field for the modality; DICOM of another modality than the table's is refused."""
    write_nifti(folder.root / "a.nii", np.zeros((16, 16, 6), np.int16), np.diag([-1.0, -1.0, 5.0, 1.0]))
    for scan, tags in (("b", {"Modality": "MR"}), ("c", {"Modality": "MR"}), ("d", {}), ("e", {"Modality": None})):
        folder.scan(scan, **tags)
    folder.add("a", path="a.nii", label=0, modality="mr")
    for scan, modality in (("b", "MR"), ("c", "CT"), ("d", ""), ("e", "MR"), ("f", "MRI")):
        folder.add(scan, label=1, modality=modality)
    made = folder.index()
    assert {row.scan_id: row.modality for row in made.manifest} == {"a": "MR", "b": "MR", "d": "CT", "e": "MR"}
    assert problems(made)["wrong_modality"] == [("c", f"c/{place}.dcm") for place in range(4)]
    (wrong,) = (problem for problem in made.problems if problem.kind == "bad_row")
    assert wrong.detail == "row 6: modality 'MRI' is not one of CT, MR"
