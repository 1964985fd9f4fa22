"""The folder of an encoding in progress: what the job is, and which parts of it are done.

    STORE.job/
      lock                     held by the one process that may write
      config.json              what the job is; a start with other data or options is an error
      statistics.jsonl         mean and sd of training scans, one line each
      unit-00000.safetensors   the features of some consecutive scans, and their problems
      problems.csv             only if no scan could be encoded
      again/                   the same for a store that lacks scans: units with those that can be read now
      before/                  that store, for the moment in which the new one takes its place

The folder lies beside the future store and is deleted when the store is written.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float32
from torch import Tensor

from normal_guidance.base.errors import UserError, reading, shorten
from normal_guidance.base.files import (
    difference,
    lock_folder,
    make_folder,
    read_json,
    read_json_as,
    remove_left_drafts,
    write_json,
)
from normal_guidance.base.records import parse_json, read_as
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.scans.features.preprocessing import Statistics
from normal_guidance.scans.features.store import AGAIN
from normal_guidance.scans.index.manifest import Values
from normal_guidance.scans.index.problems import Problem

CONFIG, STATISTICS, REPORT = "config.json", "statistics.jsonl", "report.json"

VALUES = "values.json"  # in a store that lacks scans: the values of those that it has, for the next start

TAKEN_UP, BEFORE = "again", "before"


class Encoded(NamedTuple):
    """The result of encoding a unit, that is, some consecutive scans."""

    features: Float32[Tensor, "slices width"]  # slices of the scans that could be encoded, scan after scan
    failed: list[str]  # ids of the other scans
    problems: list[Problem]
    values: Mapping[str, Values]  # by scan


@dataclass(frozen=True)
class UnitFile:
    failed: list[str]
    problems: list[tuple[str, str, str, str, str]]
    values: dict[str, Values]


@dataclass(frozen=True)
class ValuesFile:
    """The content of `VALUES`."""

    values: dict[str, Values]


@dataclass(frozen=True)
class EncodingReport:
    """What is read of a store's report.json; a store that `nguide encode` did not make has no identity."""

    identity: dict[str, Any] | None = None
    failed: dict[str, int] = field(default_factory=dict)


_Line = tuple[str, tuple[float, ...] | None, tuple[float, ...] | None]
"""A line of statistics.jsonl: scan, mean, sd; null for a scan that could not be measured."""


@dataclass(frozen=True)
class EncodingJob:
    """The folder of a job: saves and reads its units and statistics."""

    path: Path

    @property
    def begun(self) -> bool:
        """Whether anything is done; a job that failed before that may start again with other options."""
        return bool(self.units()) or any((self.path / name).exists() for name in (STATISTICS, TAKEN_UP, BEFORE))

    @property
    def before(self) -> Path:
        """Where a store goes that a fuller one replaces."""
        return self.path / BEFORE

    def units(self) -> set[int]:
        """Numbers of the units that are done."""
        return {int(file.stem.removeprefix("unit-")) for file in self.path.glob("unit-*.safetensors")}

    def save_unit(self, number: int, unit: Encoded) -> None:
        about = {"failed": unit.failed, "problems": unit.problems, "values": values_json(unit.values)}
        write_tensors(self._unit(number), {"features": unit.features.contiguous()}, about)

    def unit(self, number: int) -> Encoded:
        path, again = self._unit(number), "delete it and encode again"
        tensors, about = read_tensors(path, again)
        with reading(path, again, wrong="is damaged"):
            unit, features = read_as(UnitFile, about), tensors["features"]
        if features.ndim != 2 or features.dtype != torch.float32:
            raise UserError(f"{path} holds {features.dtype} of shape {tuple(features.shape)}, not features; {again}")
        return Encoded(features, unit.failed, [Problem(*fields) for fields in unit.problems], unit.values)

    def statistics(self, channels: int) -> dict[str, Statistics | None]:
        """Mean and sd of the scans that were measured, None for those that could not be."""
        known, whole = read_statistics(self.path, channels)  # a killed process may have left half a line
        if (self.path / STATISTICS).exists():
            os.truncate(self.path / STATISTICS, whole)
        return known

    def add_statistics(self, scans: Mapping[str, Statistics | None]) -> None:
        with (self.path / STATISTICS).open("ab") as file:
            file.write(statistics_lines(scans))

    def take_up(self) -> EncodingJob:
        """The part of the job that takes up the scans that a store lacks."""
        make_folder(self.path / TAKEN_UP)
        remove_left_drafts(self.path / TAKEN_UP)
        return EncodingJob(self.path / TAKEN_UP)

    def forget(self) -> None:
        """Deletes what is done, so that the next start tries all scans again."""
        for folder in (self.path / TAKEN_UP, self.before):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (*map(self._unit, self.units()), self.path / STATISTICS):
            file.unlink(missing_ok=True)

    def remove(self) -> None:
        """Deletes the folder: the store is written."""
        self.forget()  # before config.json, without which a killed process's units would be nobody's
        shutil.rmtree(self.path)

    def _unit(self, number: int) -> Path:
        return self.path / f"unit-{number:05d}.safetensors"


def read_statistics(folder: Path, channels: int) -> tuple[dict[str, Statistics | None], int]:
    """The lines of a job's or store's statistics.jsonl up to the first that is damaged, and their bytes."""
    known: dict[str, Statistics | None] = {}
    whole, path = 0, folder / STATISTICS
    for text in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        content, _, checksum = text.rpartition(b" ")
        if checksum != b"%08x\n" % zlib.crc32(content):
            break
        with reading(path, "delete it and encode again", wrong="is damaged"):
            scan, mean, sd = read_as(_Line, parse_json(content))
            if (mean, sd) != (None, None) and not len(mean or ()) == len(sd or ()) == channels:
                raise ValueError(f"scan {shorten(scan)!r} has not {channels} means and sds")
            known[scan] = Statistics(mean, sd) if mean and sd else None
        whole += len(text)
    return known, whole


def statistics_lines(scans: Mapping[str, Statistics | None]) -> bytes:
    lines = [json.dumps([scan, *(measured or (None, None))]).encode() for scan, measured in scans.items()]
    return b"".join(b"%b %08x\n" % (line, zlib.crc32(line)) for line in lines)


def values_json(values: Mapping[str, Values]) -> dict[str, Any]:
    return {scan: asdict(of_scan) for scan, of_scan in values.items()}


def job_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.job")


def recorded_identity(out: Path) -> dict[str, Any] | None:
    """The identity of a store's job, from the store if it is complete or else from the job; None without either."""
    if (out / REPORT).exists():
        return read_json_as(out / REPORT, EncodingReport, AGAIN, exact=False).identity
    job = EncodingJob(job_folder(out))
    return read_json(job.path / CONFIG) if job.begun else None


@contextmanager
def open_job(out: Path, identity: Mapping[str, Any]) -> Iterator[EncodingJob]:
    """Locks the job of a store, new or already begun; a job begun with another identity is an error."""
    job = EncodingJob(job_folder(out))
    with lock_folder(job.path):
        remove_left_drafts(out.parent, out.name)
        if job.before.exists() and not out.exists():
            job.before.replace(out)
        shutil.rmtree(job.before, ignore_errors=True)
        if job.begun:
            refuse_another(job.path, read_json(job.path / CONFIG), identity)
        else:
            write_json(job.path / CONFIG, identity)
        yield job


def refuse_another(where: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises an error if two identities differ, and names the first difference."""
    if changed := difference(before, now):
        raise UserError(
            f"{where} was begun with other data or options: {changed}; give another folder (-o), the data and options "
            "it was begun with, or delete it"
        )
