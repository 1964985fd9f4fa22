"""Headers of many files, read in worker processes in the order of the files; a crash refuses one file only.

Workers import this file and wait for what it imports, so torch stays out of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.workers import Death, Failure, Pool, StartError
from normal_guidance.scans.index.containers import CT, Mask, Refusal, is_nifti, locate
from normal_guidance.scans.index.dicom_slices import Header, exclusion, read_header

CHUNK = 64  # files sent to a worker at once: about 50 ms of work, so that sockets are idle and progress is smooth

AHEAD = 4
"""Chunks per worker that may be read ahead of the first unfinished one: some take longer, such as those with masks."""

PATIENCE = 300.0  # seconds for one chunk; a worker that needs longer hangs and is killed

MAX_FRAMES = 100_000  # most slices in one file; a higher number means damage


class HeaderRequest(NamedTuple):
    """A file to read."""

    file: str
    mask: bool = False
    any_modality: bool = False  # whether to accept images of any modality
    modalities: tuple[str, ...] = CT  # modalities to accept; NIfTI has no field for its own and counts as the first


HeaderResult = Header | Mask | Refusal


def read_all(root: Path, wanted: Iterable[HeaderRequest], workers: int = 0) -> Iterator[HeaderResult]:
    """Reads every file, in their order; with 0 workers, in this process."""
    files: deque[str] = deque()

    def draw() -> Iterator[HeaderRequest]:
        for request in wanted:
            files.append(request.file)
            yield request

    with Pool(workers, PATIENCE) as pool:
        try:
            for result in pool.map(partial(read_one, root), draw(), batch=CHUNK, batches=AHEAD):
                file = files.popleft()
                if isinstance(result, Failure):  # `read_one` returns all other refusals
                    assert result.death is not None, result
                    yield Refusal(file, "unreadable", f"the process that read it {_brief(result.death)}")
                else:
                    yield result
        except StartError as error:
            what = f"one {_brief(error.death)}" if error.death else str(error)
            raise UserError(f"worker processes cannot start: {what}; use --workers 0") from error


def _brief(death: Death) -> str:
    return f"died ({death.cause})" if death.cause else f"did not answer within {death.silence:g} s"


def read_one(root: Path, wanted: HeaderRequest) -> HeaderResult:
    """Reads a header, or returns why there is none; nothing that is wrong with the file raises an error."""
    try:
        return _read_mask(root, wanted.file) if wanted.mask else _read_header(root, wanted)
    except UnreadableError as error:
        return Refusal(wanted.file, error.kind, error.detail)
    except UserError:
        raise  # a missing package, which is not the file's fault
    except Exception as error:  # a bug of a parser, triggered by the file
        return Refusal(wanted.file, "unreadable", f"{type(error).__name__}: {error}")


def _read_header(root: Path, wanted: HeaderRequest) -> Header | Refusal:
    file, modality = wanted.file, wanted.modalities[0]
    content = locate(root, file)
    if is_nifti(file):
        from normal_guidance.scans.index.volumes import read_nifti_header

        # a file is a series of its own
        header = replace(read_nifti_header(content, file), series_uid=file, modality=modality)
        refused = None
    else:
        header = read_header(content, file)
        refused = exclusion(replace(header, modality="") if wanted.any_modality else header, wanted.modalities)
        header = header if header.modality else replace(header, modality=modality)
    if refused is None and header.frames > MAX_FRAMES:
        refused = UnreadableError("unreadable", f"{header.frames} frames are more than {MAX_FRAMES}")
    return header if refused is None else Refusal(file, refused.kind, refused.detail, header.series_uid)


def _read_mask(root: Path, file: str) -> Mask:
    from normal_guidance.scans.index.volumes import read_nifti, read_nifti_header

    if not is_nifti(file):
        raise UnreadableError("unreadable", "a mask is a NIfTI file: .nii or .nii.gz")
    content = locate(root, file)
    header = read_nifti_header(content, file)
    if header.frame_positions is None or header.frame_orientation is None:
        raise UnreadableError("unreadable", "the mask has no positions")
    positive = np.abs(read_nifti(content, file)).max(axis=(1, 2)) > 0
    return Mask(file, header.frame_orientation, header.frame_positions, tuple(positive.tolist()))
