"""The folder of predictions in progress, from which the same `nguide predict` goes on after a kill.

    OUT.job/
      lock                     held by the one process that may write
      config.json              model, options and scans; a start with others is refused
      SCAN.safetensors         a finished scan: its scores, its problems and the checksums of its files in OUT

The folder lies beside the results and is deleted when they are complete.  A finished scan is not predicted again,
unless its results in OUT or its own files have changed since.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.base.files import (
    difference,
    is_draft,
    lock_folder,
    make_folder,
    read_json,
    remove_left_drafts,
    write_json,
)
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.clinic.predict.new_scans import is_url
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.fit.bundle import Bundle
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.scans.index.problems import Problem, folder_name

CONFIG, SUMMARY, PREDICTION = "config.json", "summary.json", "prediction.json"
COMMAND = "command"  # the member of summary.json that says what was predicted with what


class Score(NamedTuple):
    """What a model says of a scan: the logit, and the log-attention of each head over the slices."""

    logit: float
    log_attention: Float[Tensor, "heads slices"]


class DoneScan(NamedTuple):
    """A scan that an earlier start has predicted: a score for each finding, its problems, and those of its results."""

    scores: tuple[Score, ...]
    problems: tuple[Problem, ...]
    of_writing: tuple[Problem, ...]


def identity_of(bundle: Bundle, scans: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """What a start must have in common with an earlier one to go on from it; paths are hashed, never written."""
    given = json.dumps([scan if is_url(scan) else str(Path(scan).resolve()) for scan in scans]).encode()
    return {
        "normal_guidance": __version__,
        "model": [model.identity.fingerprint for model in bundle.each],
        "options": dict(options),
        "scans": hashlib.sha256(given).hexdigest(),
    }


def completed(out: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary of results that are complete; None if there is work to do, and an error if `out` is not of it."""
    job = _folder(out)
    if (out / SUMMARY).is_file():
        before = read_json(out / SUMMARY, "delete the folder and predict again")
        if COMMAND in before:
            _refuse_another(out, before[COMMAND], identity)
            if job.exists():  # of a process that was killed in its last act: the summary is written after all else
                with lock_folder(job):
                    shutil.rmtree(job)
            return before
    elif (job / CONFIG).is_file():
        _refuse_another(out, read_json(job / CONFIG, "delete it and predict again"), identity)
        return None
    if out.exists() and not (out.is_dir() and all(map(is_draft, out.iterdir()))):
        raise UserError(f"{out} exists and is not empty; choose another folder (-o), or delete it first")
    return None


def _refuse_another(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if changes := difference(before, now):
        raise UserError(
            f"{out} holds predictions of another model, of other scans or with other options: {changes}; choose "
            "another folder (-o), or delete it first"
        )


def _folder(out: Path) -> Path:
    """The job's folder, the same for every name of the results' folder: a link to it must not lead to another lock."""
    path = out.resolve()
    return path.with_name(f"{path.name}.job")


@contextmanager
def open_prediction_job(out: Path, identity: Mapping[str, Any]) -> Iterator[PredictionJob]:
    """Locks the job of some results, new or begun; when the block ends well, the job is deleted."""
    path = _folder(out)
    with lock_folder(path):
        if (path / CONFIG).is_file():  # another process may have been here
            _refuse_another(out, read_json(path / CONFIG, "delete it and predict again"), identity)
        elif (out / SUMMARY).is_file():  # begun and completed while this one read its scans; do not delete its results
            shutil.rmtree(path)
            raise UserError(
                f"{out} was written by another process meanwhile, and is complete; open {out / 'index.html'}, or "
                "choose another folder (-o)"
            )
        else:
            write_json(path / CONFIG, identity)
        make_folder(out)
        remove_left_drafts(out)
        for folder in out.iterdir():  # of a scan that was written and not recorded; a kill leaves one at most
            if not (path / f"{folder.name}.safetensors").is_file() and (folder / PREDICTION).is_file():
                shutil.rmtree(folder)
        yield PredictionJob(path, out)
        shutil.rmtree(path)


@dataclass(frozen=True)
class PredictionJob:
    """The folder of a job: saves and reads finished scans."""

    path: Path
    out: Path

    def save(self, prediction: ScanPrediction, of_writing: Sequence[Problem]) -> None:
        """Records a scan whose results are written."""
        about = {
            "logits": [finding.logit for finding in prediction.each],
            "problems": [list(problem) for problem in prediction.problems],
            "of_writing": [list(problem) for problem in of_writing],
            "row": _fingerprint(prediction.row, prediction.root),
            "files": _checksums(self._results(prediction.row.scan_id)),
        }
        tensors = {str(place): result.log_attention.contiguous() for place, result in enumerate(prediction.each)}
        write_tensors(self._record(prediction.row.scan_id), tensors, about)

    def finished(self, row: ScanRow, root: Path) -> DoneScan | None:
        """What is known of a scan; None if it must be predicted, and then nothing is left of earlier results."""
        results = self._results(row.scan_id)
        if self._record(row.scan_id).is_file():
            try:
                tensors, about = read_tensors(self._record(row.scan_id), "delete it")
                if about["row"] == _fingerprint(row, root) and about["files"] == _checksums(results):
                    scores = tuple(Score(logit, tensors[str(place)]) for place, logit in enumerate(about["logits"]))
                    problems = (tuple(Problem(*line) for line in about[name]) for name in ("problems", "of_writing"))
                    return DoneScan(scores, *problems)
            except (KeyError, TypeError, ValueError):  # damaged; a UserError is a ValueError
                pass
        shutil.rmtree(results, ignore_errors=True)
        return None

    def keep_only(self, scans: Sequence[str]) -> None:
        """Deletes the results of scans that an earlier start found and this one did not."""
        known = {folder_name(scan) for scan in scans}
        for record in self.path.glob("*.safetensors"):
            if record.stem not in known:
                shutil.rmtree(self.out / record.stem, ignore_errors=True)

    def _record(self, scan: str) -> Path:
        return self.path / f"{folder_name(scan)}.safetensors"

    def _results(self, scan: str) -> Path:
        return self.out / folder_name(scan)


def _fingerprint(row: ScanRow, root: Path) -> str:
    """A hash of a scan's slices, and of the size and time of the files that hold them."""
    states = []
    for file in dict.fromkeys(row.files):
        path = root / file.partition("!")[0]
        if path.is_file():
            state = path.stat()
            states.append([state.st_size, state.st_mtime_ns])
    known = [row.scan_id, row.patient_id, row.files, row.frames, row.positions, row.rows, row.columns, states]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
