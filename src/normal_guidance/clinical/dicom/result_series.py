"""The series that results lie in: their numbers and descriptions, which tell results of two source series apart."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from normal_guidance.clinical.dicom.source_series import SourceSeries
from normal_guidance.clinical.scan_prediction import ScanPrediction

FIRST = 9800
"""Series numbers end with this and more: scanners seldom use such large ones."""

SOURCE_STEP = 10_000
"""The results of the source series 7 have the numbers from 79801 on, those of a series 0 from 9801 on."""

FINDING_STEP = 10
"""The series of the next finding have numbers that are larger by this."""

LARGEST = 100_000
"""Larger source numbers, negative and missing ones are replaced by a hash between this and its double."""

LONGEST = 64
"""Characters of a SeriesDescription."""


class Kind(NamedTuple):
    """A kind of result: its place among the results of a finding, and what its series is called."""

    place: int
    title: str


KINDS = {
    "key_objects.dcm": Kind(1, "AI key slices, research only"),
    "structured_report.dcm": Kind(2, "AI report, research only"),
    "strip.dcm": Kind(3, "AI picture, research only"),
}
"""The results by the names of their files."""


def series_number(source: SourceSeries, kind: Kind, finding: int = 0) -> int:
    """The SeriesNumber of a result: no two source series of a study, findings or kinds share one.

    Two source series with one number would; a study has at most one series of a number unless it was merged.

    Args:
        source: the scan.
        kind: one of `KINDS`.
        finding: the finding's place among those of the scan, from 0.
    """
    number = source.series.number
    if number is None or not 0 <= number < LARGEST:
        digest = sha256(source.slices[0].series_uid.encode()).digest()
        number = LARGEST + int.from_bytes(digest[:8], "big") % LARGEST
    return SOURCE_STEP * number + FIRST + FINDING_STEP * finding + kind.place


def series_description(prediction: ScanPrediction, source: SourceSeries, kind: Kind) -> str:
    """The finding, a warning where there are cautions, the kind, and which source series it is of.

    Where there is no room, the source's description is cut first, then the finding's name.
    """
    series = source.series
    warning = "CAUTION" if prediction.cautions else ""
    of = "" if series.number is None else f", of {series.number}"
    name = "" if prediction.finding is None else prediction.finding.name
    room = LONGEST - len(f"{warning}, : {kind.title}{of}")
    first = ", ".join(filter(None, (name[:room], warning)))
    text = f"{first}: {kind.title}{of}" if first else f"{kind.title}{of}"
    between = " " if of else ", of "
    return f"{text}{between}{series.description}"[:LONGEST].rstrip(" ,") if series.description else text
