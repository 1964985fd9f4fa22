"""Files of scans that a table names are found by names and headers; expected by hand."""

from pathlib import Path

import pytest
from drawn_dicom import write_slice

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.matching import match_files, plain, stem_of
from normal_guidance.scans.index.problems import Problem


def match(root: Path, *names: str) -> tuple[dict[str, list[str]], str, list[Problem]]:
    problems: list[Problem] = []
    found, how = match_files(root, Path("labels.csv"), {name: name for name in names}, problems.append)
    return found, how, problems


def touch(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


@pytest.mark.parametrize(
    ("files", "name", "expected"),
    [
        (["images/A17.nii.gz", "images/A18.nii.gz", "masks/A17.nii.gz"], "A17", ["images/A17.nii.gz"]),
        (["A17_0000.nii.gz", "A18_0000.nii.gz"], "A17", ["A17_0000.nii.gz"]),
        (["A17.nii", "A18.nii"], "A17.nii", ["A17.nii"]),
        (["A17/1.dcm", "A17/2.dcm", "A18/1.dcm"], "A17", ["A17/1.dcm", "A17/2.dcm"]),
        (["A17/x/1.dcm", "A17/x/2.dcm", "A18/x/1.dcm"], "A17/x", ["A17/x/1.dcm", "A17/x/2.dcm"]),
        (["A17/A17.nii.gz", "A18/A18.nii.gz"], "A17", ["A17/A17.nii.gz"]),
        (["s/049.nii", "s/050.nii"], "49", ["s/049.nii"]),
        (["P01/1.dcm", "P02/1.dcm"], "p1", ["P01/1.dcm"]),
    ],
)
def test_names_of_files_and_folders(tmp_path, files, name, expected):
    touch(tmp_path, *files)
    found, how, problems = match(tmp_path, name)
    assert (found, how, problems) == ({name: expected}, "files are found by the scans' names", [])


def test_a_name_of_several_places_is_not_guessed(tmp_path):
    touch(tmp_path, "one/A17.nii", "two/A17.nii", "one/A18.nii")
    found, _, problems = match(tmp_path, "A17", "A18", "A19")
    assert found == {"A18": ["one/A18.nii"]}
    assert {problem.scan_id: problem.kind for problem in problems} == dict.fromkeys(
        ("A17", "A19"), "label_without_image"
    )
    assert "2 places have this name, such as one/A17.nii and two/A17.nii; add a column path" in problems[0].detail


@pytest.mark.parametrize(
    ("tag", "names"),
    [
        ("SeriesInstanceUID", ["1.2.1", "1.2.2"]),
        ("StudyInstanceUID", ["1.1.1", "1.1.2"]),
        ("PatientID", ["ann", "bob"]),
    ],
)
def test_headers_say_what_names_do_not(tmp_path, tag, names):
    for number, patient in ((1, "ann"), (2, "bob")):
        for place in (1, 2):
            file = tmp_path / f"{number}{place}.dcm"
            write_slice(
                file,
                f"1.3.{number}.{place}",
                f"1.2.{number}",
                z=place,
                StudyInstanceUID=f"1.1.{number}",
                PatientID=patient,
            )
    found, how, _ = match(tmp_path, *names)
    assert found == {names[0]: ["11.dcm", "12.dcm"], names[1]: ["21.dcm", "22.dcm"]}
    assert how == f"files are found by their {tag}"


def test_where_nothing_fits_three_of_each_side_are_shown(tmp_path):
    touch(tmp_path, *(f"images/x{number}.nii" for number in range(5)))
    with pytest.raises(UserError) as caught:
        match(tmp_path, "a", "b", "c", "d")
    assert "(the table: 'a', 'b', 'c', ...; the folder: 'x0', 'x1', 'x2', ...); correct" in str(caught.value)


def test_plain_names_and_stems():
    assert [plain(name) for name in ("P007", "p7", "100", "0", "a00b01")] == ["p7", "p7", "100", "0", "a0b1"]
    assert [stem_of(path) for path in ("a/b.nii.gz", "a/b_0000.nii", "a/b.zip", "a/b/")] == ["b"] * 4
