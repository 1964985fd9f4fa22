"""The manifest keeps every field, refuses damaged files, and stays small."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import write_parquet
from normal_guidance.scans.index.manifest import (
    SCHEMA,
    Finding,
    Manifest,
    ScanRow,
    parse_findings,
    read_findings,
    read_manifest,
    write_manifest,
)

ABOUT = {"source": "folder", "root": "."}


def row(number: int, slices: int = 3, **more: object) -> ScanRow:
    values: dict[str, object] = {
        "scan_id": f"S{number}",
        "patient_id": f"P{number // 2}",
        "label": number % 2,
        "slice_labels": np.array([number % 2] * slices, np.int8),
        "kind": "dicom",
        "files": tuple(f"S{number}/{i}.dcm" for i in range(slices)),
        "frames": (0,) * slices,
        "positions": tuple(2.5 * i for i in range(slices)),
        "rows": 512,
        "columns": 384,
        "pixel_spacing": (0.5, 0.75),
        "slice_spacing": 2.5,
        "orientation": (1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
        "modality": "CT",
        "transfer_syntax": "1.2.840.10008.1.2.1",
        "study_uid": "1.2.3",
        "series_uid": "",
        "series_description": "thin",
        "instance_numbers": (None, *range(1, slices)),
        "dataset_labels": {"any_injury": 1, "types": ["subdural"], "incomplete_organ": None},
    }
    return ScanRow(**{**values, **more})  # type: ignore[arg-type]


def same(a: ScanRow, b: ScanRow) -> bool:
    others = (f.name for f in fields(ScanRow) if f.name != "slice_labels")
    return np.array_equal(a.slice_labels, b.slice_labels) and all(getattr(a, f) == getattr(b, f) for f in others)


def test_every_field_comes_back(tmp_path: Path) -> None:
    bare = row(1, slice_labels=None, pixel_spacing=None, slice_spacing=None, orientation=None)
    rows = [row(0), bare, *(row(n, slices=n) for n in range(2, 1500, 100))]
    written = write_manifest(tmp_path / "manifest.parquet", rows, {"source": "folder", "root": "/data"})
    read = read_manifest(tmp_path)
    assert read.root == Path("/data")
    assert read.about["source"] == "folder"
    for manifest in (written, read):
        assert len(manifest) == len(rows)
        assert all(same(a, b) for a, b in zip(manifest, rows, strict=True))
    assert same(read[2], rows[2])
    assert same(read.take([2, 0])[1], rows[0])
    assert read.lengths.tolist() == [len(one) for one in rows]
    assert read.labels.tolist() == [one.label for one in rows]
    shown = "Manifest(2 scans of 3-3 slices (median 3), 6 slices, 1 positive (50.0 %), 1 patients)"
    assert repr(read.take([0, 1])) == shown


def test_the_column_extra_is_json_with_the_names_of_the_fields(tmp_path: Path) -> None:
    """Manifests of this version and of earlier ones have the same text in it."""
    new = row(0, slices=2, dataset_labels={})
    plain = ScanRow("A", "P", 0, None, "nifti", ("a.nii",), (0,), (0.0,), 8, 8)
    table = write_manifest(tmp_path / "manifest.parquet", [new, plain], ABOUT).table
    written = '{"instance_numbers": [null, 1], "series_description": "thin", "series_uid": "", "study_uid": "1.2.3"}'
    assert table["extra"].to_pylist() == [written, "{}"]
    texts = ['{"types": ["subdural"]}', '{"incomplete_organ": null, "patient_label": 1}', "", None]
    old = pa.concat_tables([table, table]).set_column(15, "extra", pa.array(texts))
    first, second, third, fourth = Manifest(old, {})
    assert first.dataset_labels == {"types": ["subdural"]}
    assert second.dataset_labels == {"incomplete_organ": None, "patient_label": 1}
    assert third.dataset_labels == fourth.dataset_labels == {}
    assert (first.study_uid, first.instance_numbers) == (None, None)


@pytest.mark.parametrize("text", ["{", "[1]", '{"instance_numbers": 3}', '{"types": {}}', '{"a": NaN}'])
def test_another_text_in_the_column_extra_is_refused(text: str) -> None:
    values = {name: [None] for name in SCHEMA.names}
    table = pa.table({**values, "scan_id": ["A17"], "extra": [text]})
    with pytest.raises(UserError, match=r"scan 'A17': extra is .*\(.*\); run nguide index again"):
        Manifest(table, {})[0]


def test_more_scans_than_a_piece_and_none(tmp_path: Path) -> None:
    rows = [row(n, slices=1) for n in range(2100)]
    write_manifest(tmp_path / "manifest.parquet", rows, ABOUT)
    assert read_manifest(tmp_path).scan_ids == [one.scan_id for one in rows]
    empty = write_manifest(tmp_path / "empty.parquet", [], ABOUT)
    assert (len(empty), repr(empty), list(empty)) == (0, "Manifest(no scans)", [])


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.parquet"
    with pytest.raises(UserError, match="scan 'S1' occurs twice"):
        write_manifest(path, [row(1), row(1)], ABOUT)
    for write, message in (
        (lambda: None, "run nguide index first"),
        (lambda: path.write_bytes(b"no parquet"), "cannot be read"),
        (lambda: pq.write_table(pa.table({"scan_id": ["A"]}), path), "is damaged: source is missing"),
    ):
        write()
        with pytest.raises(UserError, match=message):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("frames", [[0], [0, 0, 0]], "scan 'S0' has not as many frames as files"),
        ("positions", [[0.0, 1.0, float("nan")], [0.0, 1.0, 2.0]], "positions has a number that is not finite"),
        ("label", [0, 5], "scan 'S1' has a label other than 0 and 1"),
        ("slice_labels", [[0, 1], None], "scan 'S0' has not as many slice_labels as slices"),
        ("scan_id", ["A", "A"], "a scan occurs twice"),
        ("files", [None, ["a", "b", "c"]], "column files has a value missing"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path: Path, name: str, values: list, reason: str) -> None:
    path = tmp_path / "manifest.parquet"
    write_manifest(path, [row(0), row(1)], ABOUT)
    table = pq.read_table(path)
    field = table.schema.field(name)
    write_parquet(path, table.set_column(table.column_names.index(name), field, pa.array(values, field.type)))
    with pytest.raises(UserError, match=rf"manifest.parquet is damaged: {reason}; run nguide index again"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ('{"format": 3, "source": "folder"}', "is damaged: root is missing"),
        ('{"format": 3, "source": 3, "root": "."}', "is damaged: source is 3, not text"),
        ('{"format": true, "source": "folder", "root": "."}', "is damaged: its format True is not a whole number"),
        ('{"format": 3, "source": "a", "root": ".", "findings": {}}', "is damaged: findings is {}, not a list"),
        ("[]", "is damaged: its metadata are not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_metadata_of_another_shape_are_refused(tmp_path: Path, about: str, reason: str) -> None:
    path = tmp_path / "manifest.parquet"
    write_manifest(path, [row(0)], ABOUT)
    write_parquet(path, pq.read_table(path).replace_schema_metadata({"normal_guidance": about}))
    with pytest.raises(UserError, match=rf"manifest.parquet {reason}"):
        read_manifest(path)


def test_names_and_codes_survive_a_file():
    findings = (Finding("any", "1386000", "Intracranial hemorrhage"), Finding("epidural"))
    assert read_findings([finding.as_json() for finding in findings]) == findings
    assert list(map(str, findings)) == ["any (Intracranial hemorrhage, SNOMED CT 1386000)", "epidural"]
    assert parse_findings(" any = 1386000 , epidural ") == (Finding("any", "1386000"), Finding("epidural"))


def test_wrong_names_and_codes_and_damaged_findings_are_refused():
    for text, message in (
        ("any,", "a name is empty"),
        ("any,Any", "finding 'Any' occurs twice"),
        ("../up", "finding '../up': a name has up to 32 letters"),
        ("-x", "finding '-x': a name"),
        ("any=I60", "code 'I60' is not an identifier of SNOMED CT"),
    ):
        with pytest.raises(UserError, match=message):
            parse_findings(text)
    for content in (3, [3], [{"name": "../up"}], [{"nome": "any"}], [{"name": "a"}, {"name": "A"}]):
        with pytest.raises(ValueError, match=r"not a list|not an object|another one|unknown|twice"):
            read_findings(content)
