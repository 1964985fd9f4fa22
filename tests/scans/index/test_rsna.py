"""Each challenge gives its scans and labels in the distributed layout, with its traps, and reports what does not fit.

The files are real DICOM, 16 x 16 pixels; expected labels are written out by hand.
"""

from pathlib import Path

import pandas as pd
import pytest
from drawn_dicom import AXIAL, write_slice
from pydicom.uid import ExplicitVRLittleEndian

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.indexing import Index, index
from normal_guidance.scans.index.manifest import ScanRow, read_manifest
from normal_guidance.scans.index.problems import KINDS
from normal_guidance.scans.index.source import LISTED

TYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")


def scans(made: Index) -> dict[str, ScanRow]:
    return {row.scan_id: row for row in made.manifest}


def labels(made: Index) -> dict[str, tuple[int, list[int] | None]]:
    return {row.scan_id: (row.label, slices(row)) for row in made.manifest}


def slices(row: ScanRow) -> list[int] | None:
    return None if row.slice_labels is None else row.slice_labels.tolist()


def wanted(usual: dict[str, tuple], changed: dict[str, tuple | None]) -> dict[str, tuple]:
    """The labels, changed for some scans; None for a scan that is left out."""
    return {scan: expected for scan, expected in {**usual, **changed}.items() if expected is not None}


def problems(made: Index) -> dict[str, list[tuple[str, str]]]:
    """Scan and file of every problem, by kind."""
    found: dict[str, list[tuple[str, str]]] = {}
    for problem in sorted(made.problems):
        assert problem.kind in KINDS
        found.setdefault(problem.kind, []).append((problem.scan_id, problem.file))
    return found


def check(made: Index, expected: dict, wanted: dict[str, tuple[int, list[int] | None]], *says: str) -> None:
    """Checks all problems, all labels, and words of details and actions."""
    assert problems(made) == expected
    assert labels(made) == wanted
    text = "\n".join(f"{problem.detail}; {problem.action}" for problem in made.problems)
    assert all(word in text for word in says), text


HEAD_LABELS = {"ID_seriesA": (0, [0, 0]), "ID_seriesB": (1, [1, 0, 0])}


class Head:
    """Two scans of three and two slices, files named in no order; b2 shows subdural bleeding."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.types = {sop: dict.fromkeys(TYPES, 0) for sop in ("a1", "a2", "b1", "b2", "b3")}
        self.types["b2"] |= {"subdural": 1, "any": 1}
        self.extra_rows: list[tuple[str, object]] = []
        for sop, z in (("b1", 10.0), ("b2", 0.0), ("b3", 5.0), ("a1", 5.0), ("a2", 0.0)):
            self.slice(sop, z)

    def slice(self, sop: str, z: float, **tags: object) -> None:
        series, patient = ("ID_seriesA", "ID_patient1") if sop[0] == "a" else ("ID_seriesB", "ID_patient2")
        path = self.root / f"stage_2_train/ID_{sop}.dcm"
        write_slice(path, f"ID_{sop}", series, z=z, **{"PatientID": patient, **tags})

    def row(self, *rows: tuple[str, object]) -> None:
        self.extra_rows += rows

    def drop(self, *sops: str) -> None:
        for sop in sops:
            del self.types[sop]

    def index(self, **options) -> Index:
        rows = [(f"ID_{sop}_{kind}", value) for sop, types in self.types.items() for kind, value in types.items()]
        table = pd.DataFrame([*rows, *self.extra_rows], columns=["ID", "Label"])
        table.to_csv(self.root / "stage_2_train.csv", index=False)
        return index("rsna-ich", self.root, self.root.parent / "out", **options)


@pytest.fixture
def head(tmp_path) -> Head:
    return Head(tmp_path / "root")


def test_head_scans_are_series_of_a_flat_folder(head):
    made = head.index()
    check(made, {}, HEAD_LABELS)
    one, two = made.manifest
    assert (one.patient_id, two.patient_id) == ("ID_patient1", "ID_patient2")
    assert two.files == tuple(f"stage_2_train/ID_{sop}.dcm" for sop in ("b2", "b3", "b1"))
    assert (two.positions, two.slice_spacing, two.frames) == ((0.0, 5.0, 10.0), 5.0, (0, 0, 0))
    assert (two.rows, two.columns, two.pixel_spacing, two.orientation) == (16, 16, (1.0, 1.0), AXIAL)
    assert (two.kind, two.modality, two.transfer_syntax) == ("dicom", "CT", ExplicitVRLittleEndian)
    assert (one.dataset_labels, two.dataset_labels) == ({"types": []}, {"types": ["subdural"]})


def test_head_types_are_findings_with_slice_labels(head):
    head.types["a1"]["epidural"] = 1  # but its `any` is 0
    head.types["b3"] |= {"epidural": 1, "any": 1}
    made = head.index()
    manifest = read_manifest(made.manifest.root.parent / "out")
    assert [finding.name for finding in manifest.findings] == ["any", *TYPES[:-1]]
    assert [finding.code for finding in manifest.findings] == ["1386000", *[None] * 5]
    assert {name: [slices(row) for row in manifest.of_finding(name)] for name in TYPES} == {
        "any": [[0, 0], [1, 1, 0]],
        "epidural": [[0, 0], [0, 1, 0]],
        "subdural": [[0, 0], [1, 0, 0]],
        **{key: [[0, 0], [0, 0, 0]] for key in TYPES[1:4]},
    }
    assert manifest.of_finding("epidural").labels.tolist() == [0, 1]
    assert made.report["counts"]["findings"] == dict.fromkeys(TYPES, 0) | {"any": 1, "epidural": 1, "subdural": 1}


A1, B1, B2, B3, C1, ZZ = (f"stage_2_train/ID_{name}.dcm" for name in ("a1", "b1", "b2", "b3", "c1", "zz"))
HEAD = {
    "labels that contradict each other": (
        lambda head: (head.row(("ID_b3_any", 1)), head.types["a1"].update(epidural=1)),
        {"conflicting_label": [("", A1), ("", B3)]},
        {"ID_seriesB": (1, [1, 1, 0])},
        "any is 0, but these are 1: epidural; counts as 0, as any says",
        "rows with label 0 and with label 1: any; counts as 1",
    ),
    "labels without image and images without label": (
        lambda head: (head.types.update(zz=dict.fromkeys(TYPES, 1)), head.drop("b3", "a1", "a2")),
        {"image_without_label": [("ID_seriesA", ""), ("ID_seriesB", B3)], "label_without_image": [("", ZZ)]},
        {"ID_seriesA": None, "ID_seriesB": (1, [1, 0])},
        "none of its 2 files has a label",
    ),
    "rows that say nothing": (
        lambda head: (head.row(("ID_b1_any", 7), ("nonsense", 1), ("ID_b1_headache", 1)), head.types["b1"].pop("any")),
        {"bad_row": [("", "stage_2_train.csv")] * 3, "image_without_label": [("", B1), ("ID_seriesB", B1)]},
        {"ID_seriesB": (1, [1, 0])},
    ),
    "the UID decides over the file's name": (
        lambda head: (head.slice("b3", 5.0, SOPInstanceUID="ID_b2"), head.slice("b2", 0.0, SOPInstanceUID="ID_b3")),
        {"label_mismatch": [("ID_seriesB", B2), ("ID_seriesB", B3)]},
        {"ID_seriesB": (1, [0, 1, 0])},
    ),
    "the name serves where the UID has none": (lambda head: head.slice("b2", 0.0, SOPInstanceUID="1.2.840.7"), {}, {}),
    "patients and series that cannot be told": (
        lambda head: (
            head.slice("a1", 5.0, PatientID=None),
            head.slice("a2", 0.0, PatientID=""),
            head.slice("b3", 5.0, PatientID="ID_other"),
            head.slice("c1", 0.0, SeriesInstanceUID=None),
            head.types.update(c1=dict.fromkeys(TYPES, 0)),
        ),
        {"mixed_patient": [("ID_seriesB", "")], "no_patient": [("ID_seriesA", "")], "no_series": [("", C1)]},
        {},
        "counts as ID_patient2",
        "scan is its own patient",
    ),
    "a positive slice that is left out is said": (
        lambda head: head.slice("b2", 5.0, number=2),
        {"duplicate": [("ID_seriesB", B2)], "label_mismatch": [("ID_seriesB", B2)]},
        {"ID_seriesB": (0, [0, 0])},
        "scan counts as 0 by the others",
    ),
}


@pytest.mark.parametrize("case", HEAD)
def test_head_oddities(head, case):
    change, expected, changed, *says = HEAD[case]
    change(head)
    check(head.index(), expected, wanted(HEAD_LABELS, changed), *says)


def test_millions_of_missing_images_are_a_number(head):
    head.types |= {f"x{number}": dict.fromkeys(TYPES, 0) for number in range(LISTED + 5)}
    made = head.index()
    assert len(problems(made)["label_without_image"]) == LISTED + 1
    details = [problem.detail for problem in made.problems if not problem.file]
    assert details[:1] == [f"5 more of these; the first {LISTED} are listed"]


CHEST_LABELS = {"se1": (1, [0, 1, 1]), "se2": (0, [0, 0])}


class Chest:
    """Two scans in folders of their studies, whose instance numbers run against the positions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rows: list[dict[str, object]] = []
        for study, series, values in (("st1", "se1", (0, 1, 1)), ("st2", "se2", (0, 0))):
            for place, label in enumerate(values):
                self.add(study, series, f"{series}i{place}", label, z=2.0 * place, number=9 - place)

    def add(self, study: str, series: str, sop: str, label: int, *, negative: int = 0, indeterminate: int = 0, **tags):
        names = {"StudyInstanceUID": study, "SeriesInstanceUID": series, "SOPInstanceUID": sop}
        exam = {"negative_exam_for_pe": negative, "qa_motion": 0, "indeterminate": indeterminate}
        self.rows.append({**names, "pe_present_on_image": label, **exam})
        write_slice(self.root / f"train/{study}/{series}/{sop}.dcm", sop, series, **{"StudyInstanceUID": study} | tags)

    def row(self, number: int, **changed: object) -> None:
        self.rows.append({**self.rows[number], **changed})

    def index(self) -> Index:
        pd.DataFrame(self.rows).to_csv(self.root / "train.csv", index=False)
        return index("rsna-pe", self.root, self.root.parent / "out")


def test_chest_scans_are_folders_and_the_study_is_the_patient(tmp_path):
    chest = Chest(tmp_path / "root")
    chest.rows = chest.rows[::-1]  # Kaggle's table is in no order
    made = chest.index()
    check(made, {}, CHEST_LABELS)
    assert made.manifest.patient_ids == ["st1", "st2"]
    assert made.manifest[0].files == tuple(f"train/st1/se1/se1i{place}.dcm" for place in range(3))
    assert made.manifest[0].dataset_labels == {"indeterminate": 0, "negative_exam_for_pe": 0}


TWICE = "train/st9/se1/y.dcm"


def put_text(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("hello")


CHEST = {
    "indeterminate exams count as negative": (
        lambda chest: [chest.add("st3", "se3", f"x{k}", 0, indeterminate=1, z=k) for k in range(2)],
        {"indeterminate": [("se3", "")]},
        {"se3": (0, [0, 0])},
        "indeterminate is 1; counts as negative",
    ),
    "slices decide against the exam": (
        lambda chest: [chest.add("st3", "se3", f"x{k}", 1 - k, negative=1, indeterminate=1, z=k) for k in range(2)],
        {"conflicting_label": [("se3", "")], "indeterminate": [("se3", "")]},
        {"se3": (1, [1, 0])},
        "negative_exam_for_pe is 1, but 1 slices show one",
        "indeterminate is 1; counts as positive by its slices",
    ),
    "rows twice, contradicting or bad": (
        lambda chest: (
            chest.row(0),
            chest.row(3, pe_present_on_image=1),
            chest.row(4, SOPInstanceUID=""),
            chest.row(4, pe_present_on_image="maybe"),
        ),
        {
            "bad_row": [("", "train.csv")] * 2,
            "conflicting_label": [("se2", "train/st2/se2/se2i0.dcm")],
            "double_label": [("se1", "train/st1/se1/se1i0.dcm")],
        },
        {"se2": (1, [1, 0])},
    ),
    "labels and images that are alone": (
        lambda chest: (
            (chest.root / "train/st1/se1/se1i0.dcm").unlink(),
            chest.row(0, SeriesInstanceUID="se9"),
            write_slice(chest.root / "train/st2/se2/late.dcm", "late", "se2", z=9.0),
            write_slice(chest.root / "train/st7/se7/x.dcm", "x", "se7"),
        ),
        {
            "image_without_label": [("se2", "train/st2/se2/late.dcm"), ("se7", "")],
            "label_without_image": [("se1", "train/st1/se1/se1i0.dcm"), ("se9", "train/st1/se9")],
        },
        {"se1": (1, [1, 1])},
    ),
    "a folder of other files is not a scan": (
        lambda chest: put_text(chest.root / "train/st8/se8/a.txt"),
        {"failed": [("se8", "")], "image_without_label": [("se8", "")], "no_image": [("se8", "train/st8/se8/a.txt")]},
        {},
    ),
    "a series twice": (lambda chest: chest.add("st9", "se1", "y", 0), {"double_scan": [("se1", TWICE)]}, {}),
}


@pytest.mark.parametrize("case", CHEST)
def test_chest_oddities(tmp_path, case):
    chest = Chest(tmp_path / "root")
    change, expected, changed, *says = CHEST[case]
    change(chest)
    check(chest.index(), expected, {**CHEST_LABELS, **changed}, *says)


ORGANS = {"bowel": ("healthy", "injury"), "extravasation": ("healthy", "injury")}
ORGANS |= dict.fromkeys(("kidney", "liver", "spleen"), ("healthy", "low", "high"))


BY_IMAGE = {  # positions descend with the instance number: 10, 4, 3, 2
    "10_101": (1, [0, 1, 1, 0]),
    "20_201": (1, [0, 0, 1, 0]),
    **dict.fromkeys(("30_301", "40_401", "40_402"), (0, [0] * 4)),
}
BY_PATIENT = {**BY_IMAGE, "20_201": (1, None), "30_301": (1, None)}  # the liver's slices have no rows


class Abdomen:
    """Patients: 10 bowel injury; 20 bowel and liver; 30 liver only; 40 none, with two series."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = [(10, 101, 3, "Bowel"), (10, 101, 4, "Bowel"), (20, 201, 3, "Active_Extravasation")]
        self.meta = [(10, 101, 200.5, 0), (20, 201, 200.5, 0), (30, 301, 99.0, 0), (40, 401, 1.0, 1), (40, 402, 1.0, 0)]
        self.patients = {10: ("bowel_injury",), 20: ("extravasation_injury", "liver_high"), 30: ("liver_low",), 40: ()}
        self.any_injury = {}
        for patient, series, *_ in self.meta:
            for place, instance in enumerate((2, 3, 4, 10)):
                path, uid = root / f"train_images/{patient}/{series}/{instance}.dcm", f"1.2.{series}"
                tags = {"z": -3.0 * place, "number": instance, "PatientID": str(patient)}
                write_slice(path, f"{uid}.{instance}", uid, **tags)

    def index(self, by: str | None = None) -> Index:
        table = pd.DataFrame(self.images, columns=["patient_id", "series_id", "instance_number", "injury_name"])
        table.to_csv(self.root / "image_level_labels_2024.csv", index=False)
        table = pd.DataFrame(self.meta, columns=["patient_id", "series_id", "aortic_hu", "incomplete_organ"])
        table.to_csv(self.root / "train_series_meta.csv", index=False)
        cells = {f"{organ}_{state}": 0 for organ, states in ORGANS.items() for state in states}
        rows = []
        for patient, injuries in self.patients.items():
            shown = {**dict.fromkeys(injuries, 1), "any_injury": self.any_injury.get(patient, int(bool(injuries)))}
            rows.append({"patient_id": patient, **cells, **shown})
        pd.DataFrame(rows).to_csv(self.root / "train_2024.csv", index=False)
        return index("rsna-at", self.root, self.root.parent / "out", labels=by)


INCOMPLETE, AT = {"incomplete_organ": [("40_401", "")]}, "train_images"


def test_abdomen_by_image_and_by_patient(tmp_path):
    abdomen = Abdomen(tmp_path / "root")
    made = abdomen.index()
    check(made, INCOMPLETE, BY_IMAGE)
    assert made.manifest.patient_ids == ["10", "20", "30", "40", "40"]
    assert [Path(file).stem for file in scans(made)["10_101"].files] == ["10", "4", "3", "2"]
    assert made.manifest.about["options"] == {"labels": "image"}
    assert scans(made)["20_201"].dataset_labels == {
        "image_label": 1,
        "image_injuries": ["Active_Extravasation"],
        "patient_label": 1,
        "patient_injuries": ["extravasation_injury", "liver_high"],
        "incomplete_organ": 0,
    }
    (abdomen.root.parent / "out").rename(abdomen.root.parent / "by-image")
    made = abdomen.index("patient")
    check(made, INCOMPLETE, BY_PATIENT)
    assert made.manifest.about["options"] == {"labels": "patient"}


ABDOMEN = {
    "patients without row or against the images": (
        "patient",
        lambda abdomen: (abdomen.patients.pop(30), abdomen.patients.update({10: ()})),
        {"conflicting_label": [("10_101", "")], "image_without_label": [("30_301", "")]},
        {"10_101": (0, None), "30_301": None},
    ),
    "series without row and files at the wrong place": (
        "image",
        lambda abdomen: (
            abdomen.meta.pop(),
            write_slice(abdomen.root / AT / "1.dcm", "1.2.9.1", "1.2.9"),
            write_slice(abdomen.root / AT / "10/1.dcm", "1.2.9.2", "1.2.9"),
        ),
        {"image_without_label": [("", f"{AT}/1.dcm"), ("", f"{AT}/10/1.dcm"), ("40_402", "")]},
        {},
    ),
    "rows twice, bad or alone": (
        "image",
        lambda abdomen: (
            abdomen.images.append(abdomen.images[0]),
            abdomen.images.extend([(10, 101, 99, "Bowel"), (10, 199, 1, "Bowel"), (10, 101, "x", "Bowel")]),
            abdomen.patients.update({50: ()}),
        ),
        {
            "bad_row": [("", "image_level_labels_2024.csv")],
            "double_label": [("10_101", f"{AT}/10/101/3.dcm")],
            "label_without_image": [("", f"{AT}/50"), ("10_101", f"{AT}/10/101/99.dcm"), ("10_199", f"{AT}/10/199")],
        },
        {},
    ),
    "any_injury that contradicts the injuries": (
        "patient",
        lambda abdomen: abdomen.any_injury.update({30: 0}),
        {"conflicting_label": [("", "train_2024.csv")]},
        {"30_301": (0, [0] * 4)},
    ),
}


@pytest.mark.parametrize("case", ABDOMEN)
def test_abdomen_oddities(tmp_path, case):
    abdomen = Abdomen(tmp_path / "root")
    by, change, expected, changed = ABDOMEN[case]
    change(abdomen)
    usual = BY_PATIENT if by == "patient" else BY_IMAGE
    check(abdomen.index(by), {**INCOMPLETE, **expected}, wanted(usual, changed))


TABLES = {
    "rsna-ich": ("stage_2_train.csv", "stage_2_train", "rsna-intracranial-hemorrhage-detection"),
    "rsna-pe": ("train.csv", "train", "rsna-str-pulmonary-embolism-detection"),
    "rsna-at": ("image_level_labels_2024.csv", "train_images", "rsna-2023-abdominal-trauma-detection"),
}


@pytest.mark.parametrize("source", TABLES)
def test_missing_tables_and_folders_are_named(tmp_path, source):
    table, images, competition = TABLES[source]

    def refused(message: str, root: Path = tmp_path) -> None:
        with pytest.raises(UserError, match=message):
            index(source, root, tmp_path / "out")

    refused(f"{tmp_path}/{table} is not there; unpack the table from Kaggle's {competition}")
    for name in (table, "train_series_meta.csv", "train_2024.csv"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    refused(f"{tmp_path}/{images} is not a folder; unpack the images of Kaggle's {competition}")
    (tmp_path / images).mkdir()
    refused(f"{tmp_path}/{table} cannot be read as a table with the columns")
    refused(r"nowhere is not a folder; give the folder that holds", tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_the_competitions_own_folder_is_found(head):
    inner = head.root.parent / "above" / "rsna-intracranial-hemorrhage-detection"
    head.index()
    inner.parent.mkdir()
    head.root.rename(inner)
    made = index("rsna-ich", inner.parent, head.root.parent / "out2")
    assert (len(made.manifest), made.manifest.root) == (2, inner)
