"""Files in folders and in zip archives, with one kind of name; archives are never extracted to disk.

    scans/A17/003.dcm            a file below the root
    scans/B02.zip!B02/003.dcm    a member of an archive below the root

Names are not trusted: a name that leads out of the root is refused, both when files are listed and when they are read.
A file that cannot be used is reported and left out, and never stops the others.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.files import is_draft
from normal_guidance.base.workers import member_problem
from normal_guidance.scans.index.problems import Problem, Report

MEMBER_BYTES = 2**30
"""Largest member of an archive that is read, by the size that it declares; a larger one may be a zip bomb."""

PIECE = 2**20  # bytes of a member that are unpacked at once

ARCHIVES = 4  # archives kept open, so that reading a scan does not parse its archive's directory for every slice

SEPARATOR = "!"  # stands between an archive and its member

LEFT = "left out"  # the action for every problem found here

LEADS_OUT = ", out of the folder: such links are not followed"
"""How the detail of a link that leads out of its root ends."""

_SUFFIX = ".zip"


def list_files(root: Path, report: Report | None = None) -> Iterator[str]:
    """Lists all regular files below `root` as relative posix paths, sorted; files in archives as 'a.zip!member'."""
    # Links to files below the root count as files; links to folders below it are not followed: their files are listed.
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; name the folder that holds the scans")
    report = report or (lambda problem: None)
    real_root = root.resolve()
    pending = [""]
    while pending:  # no recursion: folders may be nested deeper than Python's stack
        name = pending.pop()
        if not name or name.endswith("/"):
            pending.extend(sorted(_entries(root, real_root, name, report), reverse=True))
        elif name.endswith(SEPARATOR):
            yield from list_members(root / name[:-1], name, report)
        else:
            yield name


def locate(root: Path, file: str) -> Path | bytes:
    """The path of a file in a folder, or the bytes of a member; raises UnreadableError for an unsafe or missing one."""
    start = file.lower().find(_SUFFIX + SEPARATOR)
    end = len(file) if start < 0 else start + len(_SUFFIX)
    archive, member = file[:end], None if start < 0 else file[end + 1 :]
    if _is_unsafe(archive) or (member is not None and _is_unsafe(member)):
        raise UnreadableError("unsafe_path", f"{file}: leads out of its folder")
    path = root / archive
    try:
        below, there = _is_below(path, root.resolve()), path.is_file()
    except (OSError, ValueError) as error:  # too long for the disk, or not UTF-8
        raise UnreadableError("unreadable", f"{file!a}: not a valid file name: {error}") from error
    if not below:
        raise UnreadableError("unsafe_path", f"{file}: a link leads out of {root}")
    if not there:
        raise UnreadableError("unreadable", f"{file}: {archive} is not there, or not a file")
    return path if member is None else _read_member(path, member, file)


def _entries(root: Path, real_root: Path, folder: str, report: Report) -> Iterator[str]:
    """Lists one folder: folders end with '/' and archives with '!', so that they sort as their files do."""
    try:
        entries = list(os.scandir(root / folder))
    except OSError as error:
        report(Problem("", folder.rstrip("/"), "unreadable", f"the folder cannot be listed: {error.strerror}", LEFT))
        return
    for entry in entries:
        name = folder + entry.name
        if is_draft(Path(name)):  # of a process that writes beside the scans, or was killed
            continue
        link = entry.is_symlink()
        if name != name.encode(errors="replace").decode():
            report(Problem("", ascii(name), "unreadable", "the name is not UTF-8", LEFT))
        elif link and not _is_below(Path(entry.path), real_root):
            report(Problem("", name, "unsafe_path", f"a link to {os.readlink(entry.path)}{LEADS_OUT}", LEFT))
        elif link and not os.path.exists(entry.path):
            report(Problem("", name, "unreadable", "a link that leads nowhere", LEFT))
        elif entry.is_dir(follow_symlinks=False):
            yield f"{name}/"
        elif entry.is_file():
            yield f"{name}{SEPARATOR}" if name.lower().endswith(_SUFFIX) else name
        elif not entry.is_dir():  # a link to a folder below the root
            report(Problem("", name, "unreadable", "a pipe, a socket or a device", LEFT))


def _is_below(path: Path, real_root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(real_root)


def _is_unsafe(name: str) -> bool:
    """Whether a path is absolute or has a step upwards, by the rules of any operating system."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    return not parts or "\0" in name or ".." in parts or parts[0] == "/" or parts[0][1:2] == ":"


def list_members(path: Path, prefix: str, report: Report) -> Iterator[str]:
    """Lists the readable members of an archive after a prefix such as 'scans/A17.zip!'; the others are reported."""
    try:
        infos = _archive(path).infolist()
    except Exception as error:  # zipfile raises much besides BadZipFile when an archive is damaged
        report(Problem("", prefix[:-1], "unreadable", f"the archive cannot be read: {error}", LEFT))
        return
    seen: set[str] = set()
    for info in sorted(infos, key=lambda info: info.filename):
        if info.filename.endswith("/"):  # a folder; `is_dir` fails for a member without a name
            continue
        problem = _problem_of_member(info)
        if problem is None and info.filename in seen:
            problem = "unreadable", "the archive has two members with this name"
        if problem is None:
            yield prefix + info.filename
        else:
            report(Problem("", prefix + info.filename, *problem, LEFT))
        seen.add(info.filename)


def _problem_of_member(info: zipfile.ZipInfo) -> tuple[str, str] | None:
    if info.filename and _is_unsafe(info.filename):
        return "unsafe_path", "the member's name leads out of its archive"
    problem = member_problem(info)
    if problem:
        return "unreadable", problem
    if info.file_size > MEMBER_BYTES:
        return "unreadable", f"the member declares {info.file_size:,} bytes, more than {MEMBER_BYTES:,}"
    return None


def _read_member(path: Path, member: str, file: str) -> bytes:
    try:
        archive = _archive(path)
        info = archive.getinfo(member)
        problem = _problem_of_member(info)
        if problem is None:
            buffer = io.BytesIO()
            with archive.open(info) as content:
                shutil.copyfileobj(content, buffer, PIECE)  # `archive.read` ignores the declared size
            return buffer.getvalue()
    except KeyError as error:
        raise UnreadableError("unreadable", f"{file}: the archive has no such member") from error
    except Exception as error:  # wrong checksum, unknown compression, damage of any kind
        raise UnreadableError("unreadable", f"{file}: {error}") from error
    kind, detail = problem
    raise UnreadableError(kind, f"{file}: {detail}")


def _archive(path: Path) -> zipfile.ZipFile:
    """An open archive; a replaced archive is opened again, and every process opens its own."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise OSError("a pipe, a socket or a device")  # opening a pipe would block for ever
    return _open_archive(path, state.st_mtime_ns, state.st_size, os.getpid())


@lru_cache(maxsize=ARCHIVES)
def _open_archive(path: Path, modified: int, size: int, process: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


NIFTI = (".nii", ".nii.gz")  # endings of NIfTI files

CT = ("CT",)  # the modality of images that nothing is known about


class Mask(NamedTuple):
    """The slices of a mask volume, and which of them have a nonzero voxel."""

    file: str
    orientation: tuple[float, ...]
    positions: tuple[tuple[float, float, float], ...]  # the centre of every slice's first pixel
    positive: tuple[bool, ...]


class Refusal(NamedTuple):
    """The reason why a file is not a slice."""

    file: str
    kind: str
    detail: str
    series_uid: str = ""


def is_nifti(file: str) -> bool:
    """Whether a file is NIfTI, by its name."""
    return file.lower().endswith(NIFTI)
