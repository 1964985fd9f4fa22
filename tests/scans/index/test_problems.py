"""problems.csv comes back as it was written; names keep letters of any script and lose what could be misread."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.problems import (
    KINDS,
    MOST_BYTES,
    Problem,
    folder_name,
    read_problems,
    safe_name,
    same_name,
    summarize,
    write_problems,
)


def test_problems_are_sorted_and_survive_odd_text(tmp_path):
    path = tmp_path / "problems.csv"
    odd = Problem("B", "b.dcm", "unreadable", 'line\nbreak, "quotes", \udce4', "left out")
    write_problems(path, [odd, Problem("A", "", "gap", "x" * 900, "kept")])
    first, second = read_problems(path)
    assert (first.scan_id, len(first.detail)) == ("A", 500)
    assert second == odd._replace(detail='line break, "quotes", ?')
    assert summarize([first, second]) == {"gap": 1, "unreadable": 1}
    assert {first.kind, second.kind} <= set(KINDS)
    write_problems(path, [Problem("=cmd|'/c calc'!A1", "", "gap", "", "")])
    assert read_problems(path)[0].scan_id.startswith("'=cmd")


HEADER = "scan_id,file,kind,detail,action\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "A,a.dcm,gap," + "x" * 200_000 + ",kept\n", r"problems.csv cannot be read \(field larger than field"),
        (HEADER + "A,a.dcm\n", r"problems.csv, row 1 has 2 cells, not 5; index the scans again"),
        (HEADER + "A,a.dcm,gone,x,kept\n", r"problems.csv, row 1: kind 'gone' is unknown; index the scans again"),
        ("a,b\n", "no column 'scan_id', only a, b"),
    ],
)
def test_damaged_tables_are_named(tmp_path, text, message):
    (tmp_path / "problems.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_problems(tmp_path / "problems.csv")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("患者 山田/頭部CT", "患者-山田-頭部CT"),
        ("हिन्दी स्कैन", "हिन्दी-स्कैन"),  # its vowels are marks
        ("Jose\u0301", "José"),  # decomposed, as macOS gives names
        ("head 👨\u200d👩\u200d👧 1", "head-1"),
        ("a\u202egnp.exe", "agnp.exe"),  # would be shown as aexe.png
        ("\u2066a\u2069\u200b\ufeffb", "ab"),
        ("x\x1b[31m\r\n\0y", "x-31m-y"),
        ("../../etc/passwd", "etc-passwd"),
        ("..\\C:\\a|b", "C-a-b"),
        ("a／b∕c", "a-b-c"),  # what looks like a separator
        ("CON", "scan-CON"),
        ("nul.dcm", "scan-nul.dcm"),
        ("=1+1", "1-1"),
        ("<script>'\"&", "script"),
        ("\udcff\udcfe bad", "bad"),  # bytes of a name that are not UTF-8
        ("\u0301a" + "\u0301" * 100, "á" + "\u0301" * 4),
        ("日" * 200, "日" * 50),
    ],
)
def test_letters_stay_and_the_rest_goes(text, name):
    assert safe_name(text) == name


@given(st.text(max_size=200), st.integers(2, 9999))
def test_a_safe_name_is_the_name_of_its_folder(text, number):
    name = safe_name(text)
    assert name
    assert safe_name(name) == name
    assert len(name.encode()) <= MOST_BYTES + len("scan-")
    assert unicodedata.is_normalized("NFC", name)
    assert not {unicodedata.category(one)[0] for one in name} & {"C", "Z", "S"}
    for one in (name, f"{name}-{number}"):  # as the second scan of that name is called
        assert folder_name(one) == one


def test_names_that_a_disk_may_take_for_one_are_the_same():
    assert same_name("Straße") == same_name("STRASSE")
    assert same_name("Ａ") == same_name("a")
    assert same_name("山") != same_name("川")
