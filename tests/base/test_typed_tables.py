"""Tables of ours come back with their types; of any other shape, one line names the file and what to do."""

from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import write_parquet
from normal_guidance.base.tables import read_columns, read_rows, refuse_rows

AGAIN = "write it again"


class Line(NamedTuple):
    name: str
    label: Literal[0, 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name\na\n", "a.csv has no column 'label', only name; write it again"),
        ("label,name\n0,a\n", "has the columns label, name, not name, label"),
        ("name,label,label\na,0,1\n", "has the columns name, label, label, not name, label"),
        ("name,label\na,2\n", "row 1: label is 2, not one of 0, 1; write it again"),
        ("name,label\na,0\nb,x\n", "row 2: label is 'x', not one of 0, 1"),
        ("name,label\na,٣\n", "row 1: label is '٣'"),
        ("name,label\na\n", "row 1 has 1 cells, not 2"),
        ('name,label\n"a,0\n', "cannot be read"),
        ("name,label\n" + "x" * 200_000 + ",0\n", "field larger than field limit"),
        ("", "has no column 'name', only none"),
    ],
)
def test_a_csv_file_of_another_shape_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=reason):
        read_rows(tmp_path / "a.csv", Line, AGAIN)


def test_rows_have_types_and_other_columns_or_separators_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for mark in ",;\t":
        path.write_text(f"name{mark}label\na{mark}1\n")
        assert read_rows(path, Line, AGAIN) == [Line("a", 1)]
    path.write_bytes(b"\xef\xbb\xbfother,label,name\nx,1,007\n\ny,0,NA\n")
    assert read_rows(path, Line, AGAIN, exact=False) == [Line("007", 1), Line("NA", 0)]
    path.write_bytes(b"name,label\n\xff,1\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(path, Line, AGAIN)


SCHEMA = pa.schema({"scan_id": pa.string(), "slices": pa.int32(), "values": pa.list_(pa.float32())})


def table(**changed: object) -> pa.Table:
    return pa.table({"scan_id": ["A", "B"], "slices": [1, 2], "values": [[1.0], [2.0, 3.0]], **changed})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"slices": [1, None]}, "column slices has a value missing; write it again"),
        ({"values": [[1.0], [None, 3.0]]}, "column values has a value missing"),
        ({"slices": ["1", "x"]}, "cannot be read"),
        ({"slices": [1, 2**40]}, "cannot be read"),
        ({"values": ["a", "b"]}, "cannot be read"),
    ],
)
def test_a_parquet_file_of_another_shape_is_named(tmp_path: Path, changed: dict, reason: str) -> None:
    write_parquet(tmp_path / "a.parquet", table(**changed))
    with pytest.raises(UserError, match=reason):
        read_columns(tmp_path / "a.parquet", SCHEMA, AGAIN)


def test_columns_may_be_null_where_that_is_said(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", table(slices=[1, None]).drop_columns(["values"]))
    with pytest.raises(UserError, match="has no column 'values'"):
        read_columns(tmp_path / "b.parquet", SCHEMA, AGAIN, ("slices",))
    write_parquet(tmp_path / "a.parquet", table(slices=[1, None]))
    found = read_columns(tmp_path / "a.parquet", SCHEMA, AGAIN, ("slices",))
    assert found["slices"].to_pylist() == [1, None]
    with pytest.raises(UserError, match=r"a.parquet is damaged: scan 'B' is bad; write it again"):
        refuse_rows(tmp_path / "a.parquet", found, pa.array([None, True]), "is bad", AGAIN)


def test_a_file_that_declares_a_billion_values_is_refused_before_they_are_made(tmp_path: Path) -> None:
    path, one = tmp_path / "a.parquet", pa.record_batch({"slices": pa.array([7] * 10**6, pa.int32())})
    with pq.ParquetWriter(path, one.schema) as writer:
        for _ in range(60):
            writer.write_batch(one)
    assert path.stat().st_size < 10**6
    with pytest.raises(UserError, match=r"cannot be read \(it declares 480,000,000 bytes"):
        read_columns(path, one.schema, AGAIN)
