"""Names of scans: letters of any script stay, everything that a disk, a page or a reader could misread goes."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.scans.index.problems import (
    MOST_BYTES,
    folder_name,
    safe_name,
    same_name,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("患者 山田/頭部CT", "患者-山田-頭部CT"),
        ("أحمد صورة", "أحمد-صورة"),
        ("हिन्दी स्कैन", "हिन्दी-स्कैन"),  # its vowels are marks
        ("José Ñandú", "José-Ñandú"),
        ("Jose\u0301", "José"),  # decomposed, as macOS gives names
        ("head 👨\u200d👩\u200d👧 1", "head-1"),
        ("👍", "scan"),
        ("a\u202egnp.exe", "agnp.exe"),  # would be shown as aexe.png
        ("\u2066a\u2069\u200b\ufeffb", "ab"),
        ("a\ufe0f\u3164b", "ab"),
        ("x\x1b[31m\r\n\0y", "x-31m-y"),
        ("../../etc/passwd", "etc-passwd"),
        ("..\\C:\\a|b", "C-a-b"),
        ("a／b∕c", "a-b-c"),  # what looks like a separator
        ("CON", "scan-CON"),
        ("nul.dcm", "scan-nul.dcm"),
        ("Lpt9.a", "scan-Lpt9.a"),
        ("a. ", "a"),
        ("-rf", "rf"),
        ("=1+1", "1-1"),
        ("<script>'\"&", "script"),
        ("\udcff\udcfe bad", "bad"),  # bytes of a name that are not UTF-8
        ("\u0301a" + "\u0301" * 100, "á" + "\u0301" * 4),
        ("日" * 200, "日" * 50),
        ("x" * 300, "x" * 100),
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
