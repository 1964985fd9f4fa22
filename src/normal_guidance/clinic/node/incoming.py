"""DICOM objects that arrive: their identity from the header, and the files that hold them.

    STATE/incoming/SERIES/OBJECT.dcm

SERIES and OBJECT are hashes of UIDs, so no value of a header becomes part of a path.  A file appears when it is
complete and on the disk.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.files import make_folder, write_atomically
from normal_guidance.scans.index.dicom_slices import read_elements, text

TEXTS = {
    "modality": 0x00080060,
    "body": 0x00180015,
    "description": 0x0008103E,
    "study": 0x00081030,
    "protocol": 0x00181030,
    "station": 0x00081010,
}
"""Conditions on text (--take "modality=CT body=HEAD description=*axial*"), with the tags of their values: Modality,
BodyPartExamined, SeriesDescription, StudyDescription, ProtocolName, StationName.  Upper and lower case are the same; *
stands for anything."""

NUMBERS = {"thickness": 0x00180050}  # conditions on numbers, with the tags of their values: SliceThickness in mm
FILES = "files"  # the condition on the number of files that arrived
_RANGE = re.compile(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Rule:
    """Conditions that a series fits all of: patterns for text, low and high for numbers."""

    texts: Mapping[str, str]
    ranges: Mapping[str, tuple[float, float]]

    def misfit(self, values: Mapping[str, str]) -> str | None:
        """Say which condition is not met, without the value, which may name a patient; None if all are."""
        for name, pattern in self.texts.items():
            if not fnmatchcase(values.get(name, "").casefold(), pattern.casefold()):
                return f"{name} does not fit {pattern}"
        for name, (low, high) in self.ranges.items():
            if not low <= _number(values.get(name, "")) <= high:
                return f"{name} is not {low:g} to {high:g}"
        return None


def _number(text: str) -> float:
    """The number in a text; NaN, which lies in no range, if there is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def parse_rule(text: str) -> Rule:
    texts, ranges = {}, {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--take {shorten(text)!r} has a quote without its end; close it") from error
    if not words:
        raise UserError("--take is empty; write for example modality=CT, or leave it out")
    for word in words:
        name, _, value = word.partition("=")
        if name in TEXTS and value:
            texts[name] = value
        elif name in (*NUMBERS, FILES) and (limits := _RANGE.fullmatch(value)):
            ranges[name] = float(limits[1]), float(limits[2] or limits[1])
        elif name in (*TEXTS, *NUMBERS, FILES):
            form = "a pattern such as *axial*" if name in TEXTS else "a number or a range such as 2-6"
            raise UserError(f"--take {shorten(text)!r}: {name}={shorten(value)} is not a condition; give {form}")
        else:
            known = ", ".join((*TEXTS, *NUMBERS, FILES))
            raise UserError(f"--take {shorten(text)!r}: there is no condition {name!r}; choose from {known}")
    return Rule(texts, ranges)


def why_ignored(rules: Sequence[Rule], values: Mapping[str, str]) -> str | None:
    """Say why no rule takes a series; None if one does, or if there are no rules."""
    misfits = [rule.misfit(values) for rule in rules]
    if not misfits or None in misfits:
        return None
    return "no rule takes it: " + "; ".join(filter(None, misfits))


UID = re.compile(r"[0-9.]{1,64}")  # what counts as a UID here; leading zeros, which the standard forbids, are common
_STUDY, _SERIES, _CLASS, _OBJECT = 0x0020000D, 0x0020000E, 0x00080016, 0x00080018
HASH_LETTERS = 32  # letters of a hash that names a folder or a file: 128 bits


class NotTakenError(ValueError):
    """An object that cannot be stored, with the reason."""


@dataclass(frozen=True)
class Received:
    """A DICOM object as it arrived."""

    study_uid: str
    series_uid: str
    sop_uid: str
    sop_class: str
    digest: str  # SHA-256 of the data set, without the file's own header, which names the sender
    content: bytes  # the whole file

    @property
    def series(self) -> str:
        """The hash that names the series."""
        return hash_of(self.study_uid, self.series_uid)

    @property
    def name(self) -> str:
        """The hash that names the object."""
        return hash_of(self.sop_uid)


def hash_of(*parts: str) -> str:
    """Name something by a hash of its UIDs."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:HASH_LETTERS]


def read_received(content: bytes, begin: int | None = None) -> Received:
    """Read the identity of a DICOM file; `begin` is where its data set begins, if known."""
    try:
        # Not within `refusing`: it changes the warnings of all threads.
        dataset = read_elements(content, (_STUDY, _SERIES, _CLASS, _OBJECT)).dataset
        values = [text(dataset, tag) for tag in (_STUDY, _SERIES, _OBJECT, _CLASS)]
    except Exception as error:  # parsers raise any exception on foreign bytes
        raise NotTakenError("not a DICOM object") from error
    names = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "SOPClassUID")
    for value, name in zip(values, names, strict=True):
        if not UID.fullmatch(value):
            raise NotTakenError(f"{name} is missing or not a UID")
    study, series, sop, kind = values
    if begin is None:  # after the group 0002, if its length is stated
        stated = content[128:132] == b"DICM" and content[132:140] == b"\x02\x00\x00\x00UL\x04\x00"
        begin = 144 + int.from_bytes(content[140:144], "little") if stated else 0
    return Received(study, series, sop, kind, hashlib.sha256(memoryview(content)[begin:]).hexdigest(), content)


def read_conditions(file: Path) -> Mapping[str, str]:
    """Read the values that `Rule` judges; those that are missing are empty."""
    tags = {**TEXTS, **NUMBERS}
    try:
        dataset = read_elements(file, tags.values()).dataset
        return {name: text(dataset, tag) for name, tag in tags.items()}
    except Exception:  # parsers raise any exception; then no rule fits, and without rules predicting says why
        return {}


class Incoming:
    """The folder of the objects that have arrived."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, series: str) -> Path:
        return self.path / series

    def write(self, received: Received) -> None:
        """Write an object; it is on the disk when this returns."""
        make_folder(self.folder(received.series))
        write_atomically(self.folder(received.series) / f"{received.name}.dcm", received.content)
