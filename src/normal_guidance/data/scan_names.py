"""Names of scans, in letters of any script, that are fit for folders, links and tables on every system."""

from __future__ import annotations

import re
import unicodedata
from urllib.parse import quote

MOST_LETTERS, MOST_BYTES = 100, 150
"""Longest name of a scan, in letters and in bytes: disks allow 255 bytes, and drafts and records add 54."""

MOST_FOLDER_BYTES = 200
"""Longest name of the folder of a scan whose id is given, as that of features."""

LETTERS = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd"})
"""Unicode's categories of letters, of the marks that belong to them, and of digits."""

UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks that nobody sees."""

MOST_MARKS = 4
"""Most marks on one letter; no script has more, and hundreds of them cover the lines of a page above and below."""

DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))})
"""Names that Windows keeps for devices, also with an ending."""


def safe_name(text: str) -> str:
    """Makes a name of a text, such as a path: other characters become a hyphen, and unseen ones vanish."""
    return _cleaned(_cleaned(text)[:MOST_LETTERS].encode()[:MOST_BYTES].decode(errors="ignore"))


def _cleaned(text: str) -> str:
    """A safe name of any length."""
    text = unicodedata.normalize("NFC", text)
    seen = (one for one in UNSEEN.sub("", text) if unicodedata.category(one) != "Cf")
    plain = "".join(one if one in "._-" or unicodedata.category(one) in LETTERS else "\0" for one in seen)
    name = unicodedata.normalize("NFC", _few_marks(re.sub("\0+", "-", plain)).strip("-.")) or "scan"
    return f"scan-{name}" if name.partition(".")[0].casefold() in DEVICES else name


def _few_marks(text: str) -> str:
    """The text without marks beyond the first few of a letter, and without those that have no letter."""
    kept, marks = [], MOST_MARKS
    for one in text:
        is_mark = unicodedata.category(one).startswith("M")
        marks = marks + 1 if is_mark else MOST_MARKS if one in "._-" else 0
        if not is_mark or marks <= MOST_MARKS:
            kept.append(one)
    return "".join(kept)


def same_name(name: str) -> str:
    """What two names have in common if a disk may take them for the same, by case or by the form of letters."""
    return unicodedata.normalize("NFKC", name).casefold()


def file_name(scan_id: str) -> str:
    """A scan's id as a file name in ASCII; `unquote` is the inverse."""
    name = quote(scan_id, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def folder_name(scan_id: str) -> str:
    """The folder of a scan's results: its id, if that is a safe name, otherwise with %XX in place of other characters."""
    is_safe = scan_id == _cleaned(scan_id) and len(scan_id.encode()) <= MOST_FOLDER_BYTES
    return scan_id if is_safe else file_name(scan_id)
