"""Problems of scans and slices, and what was done about them: the lines of problems.csv.

A problem of one scan never stops the others.  `KINDS` is the complete list; code that finds a new kind adds it there.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.files import write_atomically
from normal_guidance.show.text_tables import csv_text

KINDS = {
    # Files
    "unreadable": "The file cannot be read as an image.",
    "no_image": "The file is not an image of a scan (a report, a segmentation, a directory record, text, ...).",
    "localizer": "A localizer or scout, which is not a slice of the scan.",
    "secondary_capture": "A secondary capture or another derived picture, which is not a slice of the scan.",
    "wrong_modality": "Another modality than the one expected: CT, unless a table or the model says MR.",
    "burned_in": "The pixels name the patient: BurnedInAnnotation is YES.",
    "unsafe_path": "The path leads out of its folder or archive.",
    # Geometry
    "no_position": "No position in space: ordered by InstanceNumber.",
    "no_order": "Neither position nor InstanceNumber: ordered by file name.",
    "duplicate": "Two slices at the same position.",
    "gap": "Slices are missing: the step between two neighbours is larger than the usual one.",
    "uneven": "Steps between slices differ without a slice missing.",
    "tilt": "Gantry tilt: slices are sheared against each other.",
    "mixed_orientation": "Slices of different orientation in one series.",
    "mixed_size": "Slices of different size or pixel spacing in one series.",
    "mixed_series": "Several series where one was expected.",
    "no_series": "No SeriesInstanceUID, so that its scan is unknown.",
    "several_acquisitions": "Several acquisitions of the same part of the body in one series.",
    "mixed_acquisitions": "Several slices at most positions, and nothing tells which belong together.",
    "one_slice": "The series has one slice.",
    "multi_frame": "One file holds several slices.",
    # Pixels
    "no_spacing": "No pixel spacing, which a field in mm needs.",
    "intercept": "The rescale intercept does not fit the stored values (RSNA 2019).",
    "bits": "BitsStored or PixelRepresentation do not fit the stored values (RSNA 2023).",
    "no_rescale": "Rescale slope or intercept is missing or impossible.",
    # Labels
    "label_without_image": "A label whose image is missing.",
    "image_without_label": "An image without a label.",
    "bad_row": "A line of a label table that cannot be read.",
    "double_label": "The same label more than once.",
    "conflicting_label": "Labels that contradict each other.",
    "label_mismatch": "Slice labels that do not fit the slices or the scan's label.",
    "indeterminate": "An exam that its readers called indeterminate; it counts as negative.",
    "incomplete_organ": "A series that does not show the whole organ.",
    "no_patient": "No patient id: the scan counts as a patient of its own.",
    "mixed_patient": "Several patients in one series.",
    "double_scan": "The same scan more than once.",
    "failed": "The scan could not be processed.",
    "header": "A header value that DICOM results repeat is missing or wrong.",
    "unsuitable": "A scan of another kind than those the model was trained on.",
    "late_slices": "Slices arrived after an earlier result, which this one replaces.",
}
"""Kinds of problems, with their descriptions."""


class Problem(NamedTuple):
    """One line of problems.csv."""

    scan_id: str  # empty where the scan is unknown
    file: str  # relative to the root; empty for the scan as a whole
    kind: str  # one of `KINDS`
    detail: str  # the values that were found
    action: str  # what was done about it


Report = Callable[[Problem], object]  # receives each problem when it is found


def write_problems(path: str | Path, problems: Iterable[Problem]) -> None:
    """Writes problems.csv, sorted, so that two runs give the same file."""
    text = csv_text(Problem._fields, sorted(tuple(map(_one_line, problem)) for problem in problems))
    write_atomically(path, text.encode())


def _one_line(field: str) -> str:
    """Cleans a message: those of decoders may have line breaks, bytes that are not text, or be very long."""
    words = " ".join(field.split())
    safe = "'" + words if words.startswith(("=", "@")) else words  # spreadsheets run such text
    return safe.encode("utf-8", "replace").decode()[:500]


def read_problems(path: str | Path) -> list[Problem]:
    """Reads problems.csv; a kind that is not in `KINDS` is refused."""
    from normal_guidance.base.tables import read_rows  # only here: others need no pyarrow

    again = "index the scans again"
    problems = read_rows(Path(path), Problem, again)
    for number, problem in enumerate(problems, start=1):
        if problem.kind not in KINDS:
            raise UserError(f"{path}, row {number}: kind {shorten(problem.kind)!r} is unknown; {again}")
    return problems


def summarize(problems: Iterable[Problem]) -> dict[str, int]:
    """The number of problems of each kind, the most frequent first."""
    return dict(Counter(problem.kind for problem in problems).most_common())


# Names of scans, in letters of any script, that are fit for folders, links and tables on every system.

MOST_LETTERS, MOST_BYTES = 100, 150
"""Longest name of a scan, in letters and in bytes: disks allow 255 bytes, and drafts and records add 54."""

MOST_FOLDER_BYTES = 200  # longest name of the folder of a scan whose id is given, as that of features

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
    seen = (sign for sign in UNSEEN.sub("", text) if unicodedata.category(sign) != "Cf")
    plain = "".join(sign if sign in "._-" or unicodedata.category(sign) in LETTERS else "\0" for sign in seen)
    kept, marks = [], MOST_MARKS
    for sign in re.sub("\0+", "-", plain):  # marks without a letter vanish, and those beyond the first few of one
        is_mark = unicodedata.category(sign).startswith("M")
        marks = marks + 1 if is_mark else MOST_MARKS if sign in "._-" else 0
        if not is_mark or marks <= MOST_MARKS:
            kept.append(sign)
    name = unicodedata.normalize("NFC", "".join(kept).strip("-.")) or "scan"
    return f"scan-{name}" if name.partition(".")[0].casefold() in DEVICES else name


def same_name(name: str) -> str:
    """What two names have in common if a disk may take them for the same, by case or by the form of letters."""
    return unicodedata.normalize("NFKC", name).casefold()


def file_name(scan_id: str) -> str:
    """A scan's id as a file name in ASCII; `unquote` is the inverse."""
    name = quote(scan_id, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def folder_name(scan_id: str) -> str:
    """The folder of a scan's results: its id if that is a safe name, else with %XX in place of other characters."""
    is_safe = scan_id == _cleaned(scan_id) and len(scan_id.encode()) <= MOST_FOLDER_BYTES
    return scan_id if is_safe else file_name(scan_id)


# What a reader must know before trusting a result: what was forced, left out, double or incomplete.  Pages, strips,
# DICOM results, messages and the viewer all say these sentences, without names of files, ids or values of headers.

HARMLESS = frozenset({"header", "localizer", "multi_frame", "no_image", "no_patient", "secondary_capture", "tilt"})
"""Kinds that change nothing about a prediction, or occur in every good study."""

FORCED, INCOMPLETE, LEFT_OUT, DUPLICATED, DOUBTFUL = "forced", "incomplete", "left out", "duplicated", "doubtful"

FLAG_OF_KIND = {
    "unsuitable": FORCED,
    **dict.fromkeys(("gap", "unreadable", "failed", "incomplete_organ", "one_slice", "late_slices"), INCOMPLETE),
    **dict.fromkeys(("duplicate", "double_scan"), DUPLICATED),
}
"""The flag of a problem by its kind; others that cost slices have the flag `LEFT_OUT`, the rest `DOUBTFUL`."""

FLAGS = (FORCED, INCOMPLETE, LEFT_OUT, DUPLICATED, DOUBTFUL)  # the gravest first


class Caution(NamedTuple):
    """A sentence, and one of `FLAGS`."""

    flag: str
    text: str


def cautions(problems: Iterable[Problem]) -> tuple[Caution, ...]:
    """The cautions of a scan, the gravest first."""
    every = list(problems)
    files = sorted({problem.file for problem in every if problem.file}, key=len, reverse=True)
    stated: dict[Caution, None] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for problem in every:
        if problem.kind in HARMLESS:
            continue
        lost = LEFT_OUT if problem.action.startswith("left out") else DOUBTFUL
        flag = FLAG_OF_KIND.get(problem.kind, lost)
        if flag != FORCED:
            counts[flag, problem.kind, problem.action] += 1
            continue
        detail = problem.detail
        for file in files:
            detail = detail.replace(file, "a file")
        stated[Caution(FORCED, f"Forced: {detail.rstrip('.')}.")] = None
    for (flag, kind, action), count in counts.items():
        parts = [*([f"{count} times"] if count > 1 else []), *([action] if action != "kept" else [])]
        stated[Caution(flag, KINDS[kind].rstrip(".") + (f": {', '.join(parts)}." if parts else "."))] = None
    return tuple(sorted(stated, key=lambda caution: FLAGS.index(caution.flag)))
