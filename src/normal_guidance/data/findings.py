"""Findings: what scans are labelled for, each with a name and, where known, a SNOMED CT code.

Most scans have one label.  Others have a label for each of several findings, as any hemorrhage and five kinds of it.
`label` and `slice_labels` are those of the first finding everywhere, so whatever takes one label takes the first.
Manifests and stores list their findings in their metadata, and keep the labels for the others in two columns each:
`label_NAME`, null where it is unknown, and `slice_labels_NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from normal_guidance.errors import UserError
from normal_guidance.files import read_json, write_json
from normal_guidance.typed_json import ContentError, read_as

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
"""A name is also that of a folder and of a part of columns' names."""

CODE = re.compile(r"[0-9]{6,18}")
"""An identifier of SNOMED CT."""

OPTION = "--findings"

FINDINGS = "findings.json"
"""In a folder of models, one for each finding in a folder of its name: the findings in order, and those left out."""

FORMAT = 1
"""Version of `FINDINGS`."""


@dataclass(frozen=True)
class Finding:
    """One finding.

    Args:
        name: up to 32 letters, digits, - and _.
        code: its SNOMED CT identifier; None if unknown.
        meaning: what SNOMED CT calls it; None if unknown.
    """

    name: str
    code: str | None = None
    meaning: str | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(f"finding {self.name!r}: a name has up to 32 letters, digits, - and _; give it another one")
        if self.code is not None and not CODE.fullmatch(self.code):
            raise UserError(
                f"finding {self.name}: code {self.code!r} is not an identifier of SNOMED CT, which has 6 to 18 digits; "
                "correct it, or leave it out"
            )

    def __str__(self) -> str:
        known = [*([self.meaning] if self.meaning else []), *([f"SNOMED CT {self.code}"] if self.code else [])]
        return f"{self.name} ({', '.join(known)})" if known else self.name

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Labels(NamedTuple):
    """The labels of a scan and of its slices, for its first finding and, by their names, for further ones."""

    label: int | None
    """None where it is unknown; a scan without a label for the first finding is left out."""
    slices: np.ndarray | None
    further: Mapping[str, Labels] | None = None
    """None for no others."""


def parse_findings(text: str) -> tuple[Finding, ...]:
    """Findings as users give them: names with commas between, each with =CODE where it is known."""
    words = [word.strip() for word in text.split(",")]
    if "" in words:
        raise UserError(f"{OPTION} {text!r}: a name is empty; give names with commas between, as any,epidural")
    pairs = [word.partition("=") for word in words]
    findings = [Finding(name.strip(), code.strip() if mark else None) for name, mark, code in pairs]
    return _unique(findings)


def read_findings(content: Any) -> tuple[Finding, ...]:
    """Findings as a manifest, a store or a model records them; raises a `ContentError` for anything else."""
    found = read_as(list[Finding], content, "findings")
    try:
        return _unique(found)
    except UserError as error:
        raise ContentError(str(error)) from error


def _unique(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    seen: set[str] = set()
    for one in findings:
        if one.name.casefold() in seen:  # some disks do not tell capitals apart
            raise UserError(f"finding {one.name!r} occurs twice; give each once")
        seen.add(one.name.casefold())
    return tuple(findings)


def choose_finding(findings: Sequence[Finding], name: str, where: str) -> Finding:
    """The finding of a name; another name is refused."""
    if not findings:
        raise UserError(f"{where} has no finding {name!r}, but one label without a name; leave it out")
    found = next((one for one in findings if one.name == name), None)
    if found is None:
        raise UserError(f"{where} has no finding {name!r}; it has {', '.join(one.name for one in findings)}")
    return found


def label_column(name: str) -> str:
    """The column of a further finding's labels."""
    return f"label_{name}"


def slices_column(name: str) -> str:
    """The column of a further finding's slice labels."""
    return f"slice_labels_{name}"


def with_findings(schema: pa.Schema, findings: Sequence[Finding]) -> pa.Schema:
    """A table's schema with the columns of all findings but the first, whose labels it has already."""
    for one in findings[1:]:
        schema = schema.append(pa.field(label_column(one.name), pa.int8()))
        schema = schema.append(pa.field(slices_column(one.name), pa.list_(pa.int8())))
    return schema


def further_columns(findings: Sequence[Finding], further: Mapping[str, Labels]) -> dict[str, Any]:
    """A scan's values in the columns that `with_findings` adds."""
    found: dict[str, Any] = {}
    for one in findings[1:]:
        labels = further.get(one.name, Labels(None, None))
        found |= {label_column(one.name): labels.label, slices_column(one.name): labels.slices}
    return found


def write_findings(folder: Path, findings: Sequence[Finding], skipped: Mapping[str, str] | None = None) -> None:
    """Write findings.json; `skipped` says why there is no model of a finding, by its name."""
    why = [{"name": name, "reason": reason} for name, reason in (skipped or {}).items()]
    about = {"format": FORMAT, "findings": [one.as_json() for one in findings], "skipped": why}
    write_json(folder / FINDINGS, about)


def findings_in(folder: Path) -> tuple[Finding, ...]:
    """The findings that a folder has models of, in order; none for any other folder."""
    path = folder / FINDINGS
    if not path.is_file():
        return ()
    again = "copy the folder again, or fit again"
    content = read_json(path, again)
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path}: format {content.get('format')!r:.60}, but this version reads format {FORMAT}; fit again"
        )
    try:
        found = read_findings(read_as(_Content, content).findings)
    except ContentError as error:
        raise UserError(f"{path} is damaged: {error}; {again}") from error
    except UserError as error:  # a finding's own checks
        raise UserError(f"{path}: {error}") from error
    if not found:
        raise UserError(f"{path} is damaged: it lists no finding; {again}")
    return found


@dataclass(frozen=True)
class _Skipped:
    name: str
    reason: str


@dataclass(frozen=True)
class _Content:
    """The types of findings.json."""

    format: int
    findings: list[Any]
    skipped: list[_Skipped]


def refuse_several(folder: Path) -> None:
    """Refuses a folder with models of several findings, where one is wanted."""
    found = findings_in(folder)
    if found:
        names = ", ".join(one.name for one in found)
        raise UserError(f"{folder} holds a model of each of the findings {names}; give one: {folder / found[0].name}")
