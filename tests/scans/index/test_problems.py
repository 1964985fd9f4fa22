"""problems.csv comes back as it was written; a damaged one is named."""

import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.problems import Problem, read_problems, write_problems


def test_problems_come_back(tmp_path):
    problems = [
        Problem("A", "a.dcm", "gap", "x, y", "kept"),
        Problem("", "z.zip!", "unreadable", "no name", "left out"),
    ]
    write_problems(tmp_path / "problems.csv", problems)
    assert read_problems(tmp_path / "problems.csv") == sorted(problems)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("A,a.dcm,gap," + "x" * 200_000 + ",kept\n", r"problems.csv cannot be read \(field larger than field limit"),
        ("A,a.dcm\n", r"problems.csv, row 1 has 2 cells, not 5; index the scans again"),
    ],
)
def test_damaged_tables_are_named(tmp_path, rows, message):
    (tmp_path / "problems.csv").write_text("scan_id,file,kind,detail,action\n" + rows)
    with pytest.raises(UserError, match=message):
        read_problems(tmp_path / "problems.csv")
