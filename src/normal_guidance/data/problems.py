"""Problems of scans and slices, and what was done about them: the lines of problems.csv.

A problem of one scan never stops the others.  `KINDS` is the complete list; code that finds a new kind adds it there.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from normal_guidance.errors import UserError, shorten
from normal_guidance.files import write_atomically

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

    scan_id: str
    """Empty where the scan is unknown."""
    file: str
    """Relative to the root; empty for the scan as a whole."""
    kind: str
    """One of `KINDS`."""
    detail: str
    """The values that were found."""
    action: str
    """What was done about it."""


Report = Callable[[Problem], object]
"""Receives each problem when it is found."""


class UnreadableError(ValueError):
    """An image that cannot be used; the code that reads scans catches and records it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail

    def __reduce__(self) -> tuple[type[UnreadableError], tuple[str, str]]:
        return type(self), (self.kind, self.detail)  # so that worker processes can raise it


def write_problems(path: str | Path, problems: Iterable[Problem]) -> None:
    """Writes problems.csv, sorted, so that two runs give the same file."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Problem._fields)
    writer.writerows(sorted(_one_line(problem) for problem in problems))
    write_atomically(path, text.getvalue().encode())


def _one_line(problem: Problem) -> Problem:
    """Cleans a message: those of decoders may have line breaks, bytes that are not text, or be very long."""
    words = (" ".join(field.split()) for field in problem)
    safe = ("'" + word if word.startswith(("=", "@")) else word for word in words)  # spreadsheets run such text
    return Problem(*(word.encode("utf-8", "replace").decode()[:500] for word in safe))


def read_problems(path: str | Path) -> list[Problem]:
    """Reads problems.csv; a kind that is not in `KINDS` is refused."""
    from normal_guidance.data.typed_tables import read_rows  # only here: others need no pyarrow

    again = "index the scans again"
    found = read_rows(Path(path), Problem, again)
    for number, problem in enumerate(found, start=1):
        if problem.kind not in KINDS:
            raise UserError(f"{path}, row {number}: kind {shorten(problem.kind)!r} is unknown; {again}")
    return found


def summarize(problems: Iterable[Problem]) -> dict[str, int]:
    """The number of problems of each kind, the most frequent first."""
    return dict(Counter(problem.kind for problem in problems).most_common())
