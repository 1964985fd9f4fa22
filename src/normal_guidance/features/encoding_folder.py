"""The folder of an encoding that is under way: what it is, and what of it is done.

    STORE.job/
      lock                     held by the one process that may write
      config.json              what the job is; started again as anything else, it is refused
      statistics.jsonl         mean and sd of training scans, a line each
      unit-00000.safetensors   the features of some consecutive scans, and what was odd about them
      problems.csv             only if no scan could be encoded

It lies beside the store that it becomes, and is gone when that is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Float32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from normal_guidance.data.problems import Problem
from normal_guidance.errors import UserError
from normal_guidance.features.preprocessing import Statistics
from normal_guidance.files import read_json, write_atomically, write_json
from normal_guidance.folders import difference, lock_folder

FORMAT = 1
"""Version of the layout on disk; a job of another version is refused."""

CONFIG, STATISTICS, REPORT = "config.json", "statistics.jsonl", "report.json"


class Encoded(NamedTuple):
    """What came of a unit: some consecutive scans."""

    features: Float32[Tensor, "slices width"]
    """Of the scans that could be encoded, one below the other."""
    failed: list[str]
    """The others."""
    problems: list[Problem]


@dataclass(frozen=True)
class EncodingJob:
    """A locked folder whose config.json says what the job is."""

    path: Path

    @property
    def begun(self) -> bool:
        """Whether anything is done: a job that failed at once may begin again as another."""
        return bool(self.units()) or (self.path / STATISTICS).exists()

    def units(self) -> set[int]:
        """Numbers of the units that are done."""
        return {int(file.stem.removeprefix("unit-")) for file in self.path.glob("unit-*.safetensors")}

    def save_unit(self, number: int, unit: Encoded) -> None:
        """Keeps a unit, once and for all."""
        about = {"failed": json.dumps(unit.failed), "problems": json.dumps(unit.problems)}
        write_atomically(self._unit(number), save({"features": unit.features.contiguous()}, about))

    def unit(self, number: int) -> Encoded:
        """A unit that is done."""
        path = self._unit(number)
        try:
            with safe_open(path, framework="pt") as file:
                about: dict[str, str] = file.metadata()
                features: Tensor = file.get_tensor("features")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is damaged ({error}); delete it, and encode again") from error
        problems = [Problem(*fields) for fields in json.loads(about["problems"])]
        return Encoded(features, json.loads(about["failed"]), problems)

    def statistics(self) -> dict[str, Statistics | None]:
        """Mean and sd of the scans that were measured, None for those that could not be."""
        known: dict[str, Statistics | None] = {}
        whole = 0
        path = self.path / STATISTICS
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            try:
                scan, mean, sd = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            known[scan] = None if mean is None else Statistics(tuple(mean), tuple(sd))
            whole += len(line)
        if path.exists():
            os.truncate(path, whole)  # a process was killed in the midst of a line
        return known

    def add_statistics(self, scans: Mapping[str, Statistics | None]) -> None:
        """Keeps the mean and sd of some scans."""
        lines = [json.dumps([scan, *(one or (None, None))]) for scan, one in scans.items()]
        with (self.path / STATISTICS).open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def remove(self) -> None:
        """Deletes the folder: the store is complete."""
        shutil.rmtree(self.path)

    def _unit(self, number: int) -> Path:
        return self.path / f"unit-{number:05d}.safetensors"


def job_folder(out: Path) -> Path:
    """Where the job of a store lies.

    Example:
        >>> job_folder(Path("stores/head"))
        PosixPath('stores/head.job')
    """
    return out.with_name(f"{out.name}.job")


def recorded_identity(out: Path) -> dict[str, Any] | None:
    """What the job of this store was begun as, or, where the store is complete, was; None if there is neither."""
    if (out / REPORT).exists():
        identity = read_json(out / REPORT).get("identity")
        return identity if isinstance(identity, dict) else None
    job = EncodingJob(job_folder(out))
    return read_json(job.path / CONFIG) if job.begun else None


@contextmanager
def open_job(out: Path, identity: Mapping[str, Any]) -> Iterator[EncodingJob]:
    """Locks the job of a store, new or begun before; if it was begun as something else, it is refused."""
    job = EncodingJob(job_folder(out))
    with lock_folder(job.path):
        for draft in (*job.path.glob(".*.partial"), *out.parent.glob(f".{out.name}.*.partial")):
            # What a killed process had begun to write, and nobody will ever finish.
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
        if job.begun:
            refuse_another(job.path, read_json(job.path / CONFIG), identity)
        else:
            write_json(job.path / CONFIG, identity)
        yield job


def refuse_another(where: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses what is not the same as before, and says where it differs.

    Example:
        >>> refuse_another(Path("head.job"), {"encoder": {"name": "a"}}, {"encoder": {"name": "b"}})
        Traceback (most recent call last):
        normal_guidance.errors.UserError: head.job was begun with other data or options: encoder.name was 'a', now it
        is 'b'; give another folder (-o), the data and options it was begun with, or delete it
    """
    found = difference(before, now)
    if found:
        raise UserError(
            f"{where} was begun with other data or options: {found}; give another folder (-o), the data and options it "
            "was begun with, or delete it"
        )
