"""Damage to any bytes, to NIfTI files, whose headers have their fields at fixed places, and to archives.

A mutator takes a random generator and the content, and returns other content; the same generator gives the same damage.
"""

from __future__ import annotations

import gzip
import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable
from random import Random

import nibabel
import numpy as np

Mutator = Callable[[Random, bytes], bytes]

ODD_BYTES = (b"\x00", b"\x01", b"\x7f", b"\x80", b"\xfe", b"\xff", b"\xff\xff", b"\x00\x00\x00\x80", b"\xff" * 4)
"""Numbers that reveal errors by one, of signs and of sizes."""


def flip_bits(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16, 64))):
        if changed:
            changed[_place(random, changed)] ^= 1 << random.randrange(8)
    return bytes(changed)


def overwrite(random: Random, content: bytes) -> bytes:
    for _ in range(random.choice((1, 1, 2, 8))):
        odd, start = random.choice((*ODD_BYTES, random.randbytes(random.randrange(1, 9)))), _place(random, content)
        content = content[:start] + odd[: len(content) - start] + content[start + len(odd) :]
    return content


def truncate(random: Random, content: bytes) -> bytes:
    return content[: _place(random, content)]


def splice(random: Random, content: bytes) -> bytes:
    """Puts in, takes out or repeats some bytes."""
    start, size = _place(random, content), random.choice((1, 2, 4, 8, 32, 128, 256))
    new = random.choice((b"", content[start : start + size] * 2, random.randbytes(random.randrange(1, 64)), b"\0" * 64))
    return content[:start] + new + content[start + random.choice((0, size)) :]


def replace_all(random: Random, content: bytes) -> bytes:
    """Replaces the content."""
    others = (b"", b"\0" * 256, b"\0" * 128 + b"DICM", b"PK\x03\x04", b"<html></html>")
    return random.choice((*others, random.randbytes(300), content * 2))


BYTES: tuple[Mutator, ...] = (*(flip_bits, overwrite) * 2, *(splice,) * 3, truncate, replace_all)


def _place(random: Random, content: bytes | bytearray) -> int:
    """A place anywhere, or near the beginning, where headers are."""
    return random.randrange(max(1, random.choice((len(content), min(len(content), 2048), min(len(content), 400)))))


def mutate(random: Random, content: bytes, mutators: tuple[Mutator, ...]) -> bytes:
    """Applies one or a few mutators after each other."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = random.choice(mutators)(random, content)
    return content


HEADERS = {348: nibabel.nifti1.header_dtype, 540: nibabel.nifti2.header_dtype}
"""The fields of NIfTI-1 and of NIfTI-2, by the number with which a file begins."""

FIELDS = (
    *("sizeof_hdr", "dim", "datatype", "bitpix", "pixdim", "vox_offset", "scl_slope", "scl_inter", "qform_code"),
    *("sform_code", "quatern_b", "quatern_d", "qoffset_x", "srow_x", "srow_y", "srow_z", "magic"),
)
"""Those that readers use."""

SIZES = (1, 1, 1, 2, 32, 1024, 32767, 2**16, 2**20, 2**24, 2**31, 2**33)
WHOLE_NUMBERS = (
    *(*range(-1, 9), 16, 64, 128, 256, 348, 512, 540, 768, 1024, 1536, 1792, 2304, 4096, 2**20, 2**24, 2**40, 2**62),
    *(sign * 2**bits + less for bits in (15, 31, 63) for sign, less in ((1, -1), (-1, 0))),
)
NUMBERS = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e-40, 1e-10, 1e10, 3e38, -3e38, 352.0, 1e6, 2.0**31)


def change_nifti(random: Random, content: bytes) -> bytes:
    """Changes a field, or all sizes: volumes of many thousand slices, of one row, of billions of voxels."""
    header = HEADERS.get(int.from_bytes(content[:4], "little"))
    if header is None or len(content) < header.itemsize:
        return flip_bits(random, content)
    sizes = random.random() < 0.25
    kind, start = header.fields["dim" if sizes else random.choice(FIELDS)][:2]
    values = np.frombuffer(content[start : start + kind.itemsize], "i4" if kind.base.kind == "S" else kind.base).copy()
    for place in (1, 2, 3) if sizes else (random.randrange(len(values)),):
        odd = random.choice(SIZES if sizes else NUMBERS if kind.base.kind == "f" else WHOLE_NUMBERS)
        values[place] = np.array(odd).astype(values.dtype)
    return content[:start] + values.tobytes() + content[start + kind.itemsize :]


NIFTI: tuple[Mutator, ...] = (*(change_nifti,) * 8, flip_bits, truncate, splice)


def mutate_nifti(random: Random, content: bytes) -> bytes:
    """Damages a volume; a packed one is unpacked and packed again, or damaged as it is."""
    if content[:2] != b"\x1f\x8b":
        return mutate(random, content, NIFTI)
    if random.random() < 0.3:
        return mutate(random, content, BYTES)
    inside = mutate(random, gzip.decompress(content), NIFTI)
    padding = random.choice((0, 0, 0, 2**24))  # zeros take no room, and make sizes that are lies believable
    return gzip.compress(inside + b"\0" * padding, 1, mtime=0)


HOSTILE = (
    *("../evil.dcm", "../../evil.dcm", "a/../../evil.dcm", "..\\evil.dcm", "/tmp/evil.dcm", "//host/evil.dcm"),
    *("C:\\evil.dcm", "c:evil.dcm", "\\\\host\\share\\evil.dcm", "..", ".", "./", "a//b.dcm", "a/./b.dcm", "a/.."),
    *("~/evil.dcm", "x.zip!y.dcm", "deep.zip", "a!b.dcm", "!", "a\nb.dcm", "a\rb", "\x1b[31m.dcm", "ä日本.dcm"),
    *("=1+1.dcm", "x" * 5000, " ", "CON", "nul.dcm", ".hidden", "%2e%2e/evil.dcm", "a/b/c/d/e/f/g/h/" * 50 + "1.dcm"),
    *("\u202egpj.dcm", "1.dcm/", "1.dcm/2"),
)
"""Names of members."""

NAMES = (
    *(*HOSTILE, "../outside/secret.dcm", "z.zip!../outside/secret.dcm", "z.zip!../../outside/secret.dcm", "z.zip!"),
    *("z.zip", "", "a\0b", "\ud800", "y" * 300, "z.zip!" + "y" * 1500, "link", "link/secret.dcm", "z.zip!/etc/passwd"),
    "z.zip/1.dcm",
)
"""Names that a reader may receive."""


METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def zip_of(members: Iterable[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive without today's date; a member given as ZipInfo has its own method."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # two members of one name
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in members:
                info = name
                if isinstance(info, str):
                    info = zipfile.ZipInfo(info)
                    info.compress_type = method
                archive.writestr(info, content)
    return buffer.getvalue()


def hostile_zip(random: Random, members: dict[str, bytes]) -> bytes:
    """An archive of these members and some hostile ones; sometimes it is damaged, too."""
    first = next(iter(members.values()))
    hostile = [_hostile_member(random, first) for _ in range(random.randrange(5))]
    content = zip_of([*members.items(), *hostile], zipfile.ZIP_DEFLATED)
    change = random.random()
    if change < 0.3:
        return mutate(random, content, BYTES)
    return lie(random, content) if change < 0.6 else content


def _hostile_member(random: Random, content: bytes) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(random.choice(HOSTILE))
    info.compress_type = random.choice(METHODS)
    kind = random.randrange(8)
    if kind == 0:  # a symbolic link, as Unix packs it
        info.create_system, info.external_attr = 3, 0o120777 << 16
        content = b"../../outside/secret.dcm"
    elif kind == 1:
        info.external_attr = random.choice((0o010666 << 16, 0o060666 << 16, 0x10))  # a pipe, a device, a folder
    elif kind == 2 and info.compress_type == zipfile.ZIP_BZIP2:
        content = b"\0" * 2**26  # some hundred bytes of archive
    elif kind == 3:
        content = zip_of([("../evil.dcm", content)])
    return info, content


def lie(random: Random, content: bytes) -> bytes:
    """Changes a field of a member in the archive's directory, of its own header, or of the directory's end."""
    signature, size, fields = random.choice(
        (
            (b"PK\x01\x02", 46, (6, 8, 10, 16, 20, 24, 28, 30, 32, 34, 38, 42)),
            (b"PK\x03\x04", 30, (4, 6, 8, 14, 18, 22, 26, 28)),
            (b"PK\x05\x06", 22, (4, 6, 8, 10, 12, 16, 20)),
        )
    )
    places = [place for place in range(len(content) - size) if content[place : place + 4] == signature]
    if not places:
        return mutate(random, content, BYTES)
    place = random.choice(places) + random.choice(fields)
    value = random.choice((0, 1, 2, 8, 9, 12, 14, 20, 93, 99, 0x41, 0x800, 0xFFFF, 2**20, 2**30, 2**31, 2**32 - 1))
    return content[:place] + struct.pack("<I", value)[: random.choice((2, 4))] + content[place + 4 :]
