"""PROSTATEx in both arrangements, on drawn ADC maps: the clone of the repository with masks, and a table of labels."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from test_folder import write_nifti
from test_rsna import labels

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.indexing import Index, index
from normal_guidance.scans.index.problems import Problem

SLICES = 5
AFFINE, MASKS = np.diag([-2.0, -2.0, 3.0, 1.0]), "Masks/ADC"
HEADER = '"ID","Clinically Significant","Gleason Grade Group"\n'


class Clone:
    """Four patients: 0 with two significant findings, 1 with another one, 25 with both kinds, 56 without any."""

    def __init__(self, root: Path) -> None:
        self.root, self.base = root, root / "Files" / "lesions"
        self.rows = [
            '"ProstateX-0000_Finding1","True",3',
            '"ProstateX-0000_Finding2","True",2',
            '"ProstateX-0001_Finding1","False",1',
            '"ProstateX-0025_Finding1","True",2',
            '"ProstateX-0025_Finding2","False","No biopsy information"',
        ]
        for name in ("0000_ep2d_diff_tra_7", "0001_ep2d_diff_tra_8", "0025_ep2d_diff_tra_7a"):
            self.image(f"ProstateX-{name}.nii.gz")
        self.image("ProstateX-0056_diffusie-3Scan-4bval_fs_8.nii.gz")
        self.mask("ProstateX-0000-Finding1-ep2d_diff_tra_DYNDIST_MIX_ADC_ROI.nii.gz", 0)
        self.mask("ProstateX-0000-Finding2-ep2d_diff_tra_DYNDIST_MIX_ADC_ROI.nii.gz", 2, 3)
        self.mask("ProstateX-0001-Finding1-ep2d_diff_tra_DYNDIST_ADC_ROI.nii.gz", 1)
        self.mask("ProstateX-0025-Finding1-ep2d_diff_tra_DYNDIST_ADC0_ROI.nii.gz", 4)
        self.mask("ProstateX-0025-Finding2-ep2d_diff_tra_DYNDIST_ADC0_ROI.nii.gz", 1)

    def image(self, name: str) -> None:
        write_nifti(self.base / "Images/ADC" / name, np.full((8, 6, SLICES), 1000, np.int16), AFFINE)

    def mask(self, name: str, *positive: int, slices: int = SLICES) -> None:
        """A mask from head to feet, the images being from feet to head: both must be matched in space."""
        volume = np.zeros((8, 6, slices), np.uint8)
        volume[3, 3, [slices - 1 - place for place in positive]] = 1
        upside_down = np.diag([-2.0, -2.0, -3.0, 1.0])
        upside_down[2, 3] = 3.0 * (slices - 1)
        write_nifti(self.base / "Masks/ADC" / name, volume, upside_down)

    def index(self, root: Path | None = None) -> Index:
        (self.base / "PROSTATEx_Classes.csv").write_text(HEADER + "\n".join(self.rows) + "\n")
        return index("prostatex", root or self.root, self.root.parent / "out")


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path / "PROSTATEx_masks")


EXPECTED = {
    "ProstateX-0000": (1, [1, 0, 1, 1, 0]),
    "ProstateX-0001": (0, [0] * SLICES),
    "ProstateX-0025": (1, [0, 0, 0, 0, 1]),
    "ProstateX-0056": (0, [0] * SLICES),
}


def test_slices_are_positive_by_the_masks_of_significant_findings(clone):
    made = clone.index()
    assert labels(made) == EXPECTED
    assert made.manifest.patient_ids == list(EXPECTED)
    assert {row.modality for row in made.manifest} == {"MR"}
    assert made.manifest[2].files[0] == "Images/ADC/ProstateX-0025_ep2d_diff_tra_7a.nii.gz"
    detail, action = "no row of PROSTATEx_Classes.csv", "no finding: counts as negative"
    assert made.problems == [Problem("ProstateX-0056", "", "image_without_label", detail, action)]
    (clone.root.parent / "out").rename(clone.root.parent / "first")
    assert labels(clone.index(clone.base)) == EXPECTED  # the folder of the lesions may be given itself


def test_a_table_of_labels_gives_the_same_scans(clone, tmp_path):
    derived = tmp_path / "derived"
    lines = ["scan_id,patient_id,path,label,slice_labels"]
    for scan, (label, slices) in EXPECTED.items():
        write_nifti(derived / f"images/{scan}.nii.gz", np.full((8, 6, SLICES), 1000, np.int16), AFFINE)
        lines.append(f"{scan},{scan},images/{scan}.nii.gz,{label},{' '.join(map(str, slices))}")
    (derived / "labels.csv").write_text("\n".join(lines))
    made = index("prostatex", derived, tmp_path / "derived-index")
    assert made.problems == []
    own = [column for column in made.manifest.table.column_names if column != "files"]
    assert made.manifest.table.select(own).equals(clone.index().manifest.table.select(own))


@pytest.mark.parametrize(
    ("mask", "labelled", "finding", "action"),
    [
        ("0025-Finding1-ep2d_diff_tra_DYNDIST_ADC0", None, "Finding1", "positive without slice labels"),
        ("0000-Finding2-ep2d_diff_tra_DYNDIST_MIX_ADC", [1, 0, 0, 0, 0], "Finding2", "its slices count as negative"),
    ],
)
def test_significant_findings_without_a_mask_are_reported(clone, mask, labelled, finding, action):
    scan = f"ProstateX-{mask[:4]}"
    (clone.base / f"Masks/ADC/ProstateX-{mask}_ROI.nii.gz").unlink()
    made = clone.index()
    assert labels(made) == {**EXPECTED, scan: (1, labelled)}
    (problem,) = (problem for problem in made.problems if problem.scan_id == scan)
    detail = f"{finding} is clinically significant and has no mask in Masks/ADC"
    assert problem == Problem(scan, "", "label_mismatch", detail, action)


@pytest.mark.parametrize(
    ("write", "detail"),
    [
        (lambda clone, name: clone.mask(name, 0, slices=3), r"mask .* does not cover 2 of 5 slices"),
        (lambda clone, name: clone.mask(name), r"mask .* has no voxel"),
        (lambda clone, name: (clone.base / MASKS / name).write_bytes(gzip.compress(b"none")), "1 of 1 masks cannot be"),
    ],
    ids=["another shape", "empty", "unreadable"],
)
def test_masks_that_cannot_be_used_cost_the_slice_labels_only(clone, write, detail):
    write(clone, "ProstateX-0025-Finding1-ep2d_diff_tra_DYNDIST_ADC0_ROI.nii.gz")
    made = clone.index()
    assert labels(made) == {**EXPECTED, "ProstateX-0025": (1, None)}
    (problem,) = (problem for problem in made.problems if problem.kind == "label_mismatch")
    assert problem.action == "positive without slice labels"
    assert re.search(detail, problem.detail), problem.detail


def test_names_rows_images_and_masks_that_are_odd(clone):
    unknown = "ProstateX-0001-Finding9-ep2d_diff_tra_DYNDIST_ADC_ROI.nii.gz"
    clone.mask(unknown, 2)
    clone.mask("stray.nii.gz", 2)
    clone.image("ProstateX-0001_ep2d_diff_tra_9.nii.gz")
    clone.image("localizer.nii.gz")
    clone.rows += ['"ProstateX-0001_Finding1","True",1'] * 2
    clone.rows += [
        '"ProstateX-0007_Finding1","True",2',
        '"ProstateX-8","True",2',
        '"ProstateX-0001_Finding2","perhaps",2',
    ]
    made = clone.index()
    assert labels(made) == {**EXPECTED, "ProstateX-0001": (1, [0, 1, 0, 0, 0])}
    ignored = [problem for problem in made.problems if problem.action == "mask ignored"]
    assert {problem.file: problem.detail for problem in ignored} == {
        f"{MASKS}/{unknown}": "PROSTATEx_Classes.csv has no row ProstateX-0001_Finding9",
        f"{MASKS}/stray.nii.gz": "the name has no patient and finding",
    }
    others = [problem for problem in made.problems if problem not in ignored]
    assert sorted((problem.kind, problem.scan_id, problem.action) for problem in others) == [
        *[("bad_row", "", "line left out")] * 2,
        ("conflicting_label", "ProstateX-0001", "counts as True"),
        ("double_label", "ProstateX-0001", "counted once"),
        ("double_scan", "ProstateX-0001", "the first one counts"),
        ("image_without_label", "", "left out"),
        ("image_without_label", "ProstateX-0056", "no finding: counts as negative"),
        ("label_without_image", "ProstateX-0007", "label ignored"),
    ]


def test_wrong_folders_and_tables_are_named(clone, tmp_path):
    with pytest.raises(UserError, match=r"nowhere is not a folder; give the clone of github.com/rcuocolo"):
        index("prostatex", tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match=r"PROSTATEx_Classes.csv is not there; give the clone of .*Files/lesions/PROST"):
        index("prostatex", clone.root, tmp_path / "out")
    clone.rows = ['"ProstateX-0000","True",3']
    with pytest.raises(UserError, match=r"PROSTATEx_Classes.csv has no usable row; it needs ID \(ProstateX-0000_Fin"):
        clone.index()
    (clone.base / "Masks").rename(clone.base / "masks-elsewhere")
    with pytest.raises(UserError, match=r"Masks/ADC is not there; give the clone"):
        clone.index()
    (clone.base / "PROSTATEx_Classes.csv").write_text("a,b\n1,2\n")
    (clone.base / "masks-elsewhere").rename(clone.base / "Masks")
    with pytest.raises(UserError, match="cannot be read as a table with the columns ID, Clinically Significant"):
        index("prostatex", clone.root, tmp_path / "out")
