"""Headers that are missing, wrong or ambiguous: what results repeat, what they report, and what they refuse."""

from dataclasses import replace
from pathlib import Path

import pydicom
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.dicom.objects import write_dicom
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.scans.index.problems import Problem
from small_dicom import IDENTITY, change, change_all, of_images, predicted, read_and_problems, true_references, write


def test_no_pixels_are_read(copied, strip, tmp_path):
    row, root = copied
    before = write(row, root, strip, tmp_path / "before")
    for file in row.files:
        content = (root / file).read_bytes()
        (root / file).write_bytes(content[: content.rindex(b"\xe0\x7f\x10\x00") + 12])  # the tag, and nothing behind
    after = write(row, root, strip, tmp_path / "after")
    uids = [[pydicom.dcmread(path).SOPInstanceUID for path in files.values()] for files in (before, after)]
    assert uids[0] == uids[1]


def test_what_is_missing_is_written_empty_and_told(copied, strip, tmp_path):
    row, root = copied
    gone = [name for name in IDENTITY if name not in ("PatientID", "StudyTime")]
    change_all(row, root, FrameOfReferenceUID=None, StudyTime="25:99", **dict.fromkeys(gone))
    read, problems = read_and_problems(row, root, strip, tmp_path / "out")
    for written in read:
        assert written.PatientID == IDENTITY["PatientID"]
        empty = ("PatientName", "PatientSex", "StudyID", "StudyTime", "StudyDate")
        assert not any(written[name].value for name in empty)
        assert "PatientAge" not in written
    reported = {problem.detail: problem.action for problem in problems}
    assert reported["no (0020,0052) FrameOfReferenceUID"] == "left out"
    assert reported["(0008,0030) StudyTime is not a valid TM"] == "written empty"
    (missing,) = [detail for detail in reported if "(0020,0010) StudyID" in detail]
    assert reported[missing] == "written empty"
    assert "StudyTime" not in missing
    assert {problem.scan_id for problem in problems} == {row.scan_id}


@pytest.mark.parametrize(
    ("characters", "name"),
    [
        ("ISO_IR 100", "Müller^Jürgen"),
        (["", "ISO 2022 IR 87"], "Yamada^Tarou=山田^太郎=やまだ^たろう"),
        ("ISO_IR 13", "ﾔﾏﾀﾞ^ﾀﾛｳ"),
        ("ISO_IR 144", "Люкceмбypг^Роза"),
        ("GB18030", "Wang^XiaoDong=王^小东"),
    ],
)
def test_names_of_any_character_set(copied, strip, tmp_path, characters, name):
    row, root = copied
    changes = {"SpecificCharacterSet": characters, "PatientName": name, "StudyDescription": "CT"}
    change_all(row, root, ReferringPhysicianName="", **changes)
    assert not any(name.encode() in (root / file).read_bytes() for file in row.files)
    read, problems = read_and_problems(row, root, strip, tmp_path / "out")
    assert [str(written.PatientName) for written in read] == [name] * 3
    assert problems == []


@pytest.mark.parametrize(
    ("said", "name", "detail"),
    [
        (b" " * 10, "Müller^Jürgen", "letters beyond ASCII, but no (0008,0005) SpecificCharacterSet"),
        (b"ISO_IR 192", "M?ller^J?rgen", "(0010,0010) PatientName is not in the file's (0008,0005)"),
    ],
)
def test_names_whose_character_set_is_wrong(copied, strip, tmp_path, said, name, detail):
    row, root = copied
    change_all(row, root, SpecificCharacterSet="ISO_IR 100", PatientName="Müller^Jürgen")
    for file in row.files:
        content = (root / file).read_bytes()
        (root / file).write_bytes(content.replace(b"ISO_IR 100", said))
    read, problems = read_and_problems(row, root, strip, tmp_path / "out")
    assert [str(written.PatientName) for written in read] == [name] * 3
    assert any(problem.detail.startswith(detail) for problem in problems)


def test_values_that_are_not_valid(copied, strip, tmp_path):
    """A number that archives match by is repeated though too long; a sex or a date that is none is not."""
    change_all(*copied, AccessionNumber="A" * 20, PatientSex="female", PatientBirthDate="about 1950")
    problems: list[Problem] = []
    files = write_dicom(predicted(*copied), strip, tmp_path / "out", report=problems.append)
    with pydicom.config.disable_value_validation():
        for written in map(pydicom.dcmread, files):
            values = (written.AccessionNumber, written.PatientSex, written.PatientBirthDate)
            assert values == ("A" * 20, "", "")
    wrong = sorted(problem.detail.split()[1] for problem in problems)
    assert wrong == ["AccessionNumber", "PatientBirthDate", "PatientSex"]


def test_a_patient_id_that_is_said_to_be_bytes(copied, strip, tmp_path):
    row, root = copied
    for file in row.files:
        dataset = pydicom.dcmread(root / file)
        dataset[0x00100020] = pydicom.DataElement(0x00100020, "OB", b"MRN-4711")
        dataset.save_as(root / file)
    read, _ = read_and_problems(row, root, strip, tmp_path / "out")
    assert [written.PatientID for written in read] == ["MRN-4711"] * 3


def test_uids_as_in_the_rsna_2019_files(copied, strip, tmp_path):
    """Such UIDs are not valid; references repeat them all the same, and a problem says so."""
    row, root = copied
    names = [f"ID_{number:09x}" for number in range(len(row))]
    for file, name in zip(row.files, names, strict=True):
        with pydicom.config.disable_value_validation():
            change(root / file, SOPInstanceUID=name, StudyInstanceUID="ID_study")
    problems: list[Problem] = []
    files = write_dicom(predicted(row, root), strip, tmp_path / "out", report=problems.append)
    with pydicom.config.disable_value_validation():
        read = pydicom.dcmread(files[0])
        assert of_images(read.ContentSequence) == [(names[number], None) for number in (7, 2, 5)]
        assert read.StudyInstanceUID == "ID_study"
    wrong = ("(0008,0018) SOPInstanceUID", "(0020,000D) StudyInstanceUID")
    assert [problem.detail for problem in problems] == [f"{tag} is not a valid UI" for tag in wrong]
    assert {problem.file for problem in problems} == {row.files[0]}
    hidden: list[Problem] = []
    write_dicom(predicted(row, root), strip, tmp_path / "anonymous", anonymize=True, report=hidden.append)
    assert hidden == [problem._replace(file="") for problem in problems]


def test_a_uid_that_only_the_file_says_and_a_source_that_says_it_is_anonymous(copied, strip, tmp_path):
    """SOP class and instance stand twice in a file; the first is enough."""
    row, root = copied
    truth = true_references(row, root)
    change_all(row, root, SOPInstanceUID=None, SOPClassUID=None, PatientIdentityRemoved="YES")
    read, _ = read_and_problems(row, root, strip, tmp_path / "out")
    assert of_images(read[0].ContentSequence) == [truth[number] for number in (7, 2, 5)]
    said = [(written.PatientIdentityRemoved, written.DeidentificationMethod) for written in read]
    assert said == [("YES", "not stated by the source")] * 3


def test_pictures_that_name_the_patient(copied, strip, tmp_path):
    """The strip shows them: it says so, and cannot be made anonymous."""
    row, root = copied
    change(root / row.files[3], BurnedInAnnotation="YES", LossyImageCompression="01")
    read, _ = read_and_problems(row, root, strip, tmp_path / "out")
    assert (read[2].BurnedInAnnotation, read[2].LossyImageCompression) == ("YES", "01")
    with pytest.raises(UserError, match=r"BurnedInAnnotation is YES: .* clean the pixels first"):
        write(row, root, strip, tmp_path / "anonymous", anonymize=True)
    assert not (tmp_path / "anonymous").exists()


def spoil(number: int = 3, **tags):
    """Rewrites attributes of one slice."""
    return lambda row, root, strip: change(root / row.files[number], **tags)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def repeat_a_uid(row: ScanRow, root: Path, strip: Path) -> None:
    change(root / row.files[3], SOPInstanceUID=pydicom.dcmread(root / row.files[4]).SOPInstanceUID)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda row, root, strip: replace(row, kind="nifti", files=("A.nii.gz",) * len(row)),
            "'SCANID-single' is the NIfTI file A.nii.gz, which has no DICOM identity",
        ),
        (lambda row, root, strip: (root / row.files[3]).unlink(), "0004.dcm cannot be read .*is not there.*put the"),
        (lambda row, root, strip: cut(root / row.files[3]), r"0004.dcm cannot be read .*put the file back"),
        (spoil(StudyInstanceUID=None), r"0004.dcm has no \(0020,000D\) StudyInstanceUID"),
        (spoil(PatientID="another"), r"differ in \(0010,0020\) PatientID; DICOM results belong to one patient"),
        (spoil(StudyInstanceUID="1.2.3"), r"differ in \(0020,000D\) StudyInstanceUID; .* belong to one study"),
        (repeat_a_uid, r"0004.dcm and .*0005.dcm have the same \(0008,0018\) SOPInstanceUID"),
        (lambda row, root, strip: strip.unlink(), r"strip.png cannot be read \(No such file"),
        (lambda row, root, strip: cut(strip), r"strip.png cannot be read as a picture"),
    ],
)
def test_refusals(copied, strip, tmp_path, harm, message):
    row, root = copied
    row = harm(row, root, strip) or row
    with pytest.raises(UserError, match=message):
        write(row, root, strip, tmp_path / "out")
    assert not (tmp_path / "out").exists()
