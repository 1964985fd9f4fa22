"""Damage to any bytes, to NIfTI files, whose headers have their fields at fixed places, and to archives.

A mutator takes a random generator and the content, and returns other content; the same generator gives the same damage.
"""

from __future__ import annotations

import gzip
import io
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from random import Random

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
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        odd = random.choice((*ODD_BYTES, random.randbytes(random.randrange(1, 9))))
        start = _place(random, changed)
        changed[start : start + len(odd)] = odd
    return bytes(changed[: len(content)])


def truncate(random: Random, content: bytes) -> bytes:
    return content[: _place(random, content)]


def insert(random: Random, content: bytes) -> bytes:
    place = _place(random, content)
    return content[:place] + random.choice((random.randbytes(random.randrange(1, 64)), b"\0" * 64)) + content[place:]


def delete(random: Random, content: bytes) -> bytes:
    place = _place(random, content)
    return content[:place] + content[place + random.choice((1, 2, 4, 8, 128)) :]


def repeat(random: Random, content: bytes) -> bytes:
    start, size = _place(random, content), random.choice((2, 8, 32, 256))
    return content[: start + size] + content[start:]


def replace_all(random: Random, content: bytes) -> bytes:
    """Replaces the content."""
    others = (b"", b"\0" * 256, b"\0" * 128 + b"DICM", b"PK\x03\x04", b"<html></html>")
    return random.choice((*others, random.randbytes(300), content * 2))


BYTES: tuple[Mutator, ...] = (flip_bits, flip_bits, overwrite, overwrite, truncate, insert, delete, repeat, replace_all)


def _place(random: Random, content: bytes | bytearray) -> int:
    """A place anywhere, or near the beginning, where headers are."""
    return random.randrange(max(1, random.choice((len(content), min(len(content), 2048), min(len(content), 400)))))


def mutate(random: Random, content: bytes, mutators: tuple[Mutator, ...]) -> bytes:
    """Applies one or a few mutators after each other."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = random.choice(mutators)(random, content)
    return content


FIELDS = {
    "sizeof_hdr": (0, "<i", 1),
    "dim": (40, "<h", 8),
    "datatype": (70, "<h", 1),
    "bitpix": (72, "<h", 1),
    "pixdim": (76, "<f", 8),
    "vox_offset": (108, "<f", 1),
    "scl_slope": (112, "<f", 1),
    "scl_inter": (116, "<f", 1),
    "qform_code": (252, "<h", 1),
    "sform_code": (254, "<h", 1),
    "quatern": (256, "<f", 6),
    "srow": (280, "<f", 12),
    "magic": (344, "<i", 1),
    "extension": (348, "<i", 3),
}
"""Fields of NIfTI-1: the place, the type and the number of values."""

ODD_NUMBERS = {
    "<h": (-32768, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 128, 256, 512, 768, 1024, 1536, 1792, 2304, 4096, 32767),
    "<i": (-(2**31), -1, 0, 1, 4, 8, 16, 348, 540, 2**31 - 1),
    "<f": (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e-40, 1e-10, 1e10, 3e38, -3e38, 352.0, 1e6, 2.0**31),
    "<q": (-(2**63), -1, 0, 1, 2**15, 2**16, 2**20, 2**24, 2**31, 2**40, 2**62),
}


def change_nifti_field(random: Random, content: bytes) -> bytes:
    start, kind, count = FIELDS[random.choice(tuple(FIELDS))]
    start += random.randrange(count) * struct.calcsize(kind)
    return _put(content, start, kind, random.choice(ODD_NUMBERS[kind]))


def change_nifti_shape(random: Random, content: bytes) -> bytes:
    """Sets all sizes: volumes of many thousand slices, of one row, of billions of voxels."""
    if content[:4] == struct.pack("<i", 540):
        start, kind, sizes = 16, "<q", (1, 1, 1, 32, 2**16, 2**20, 2**24, 2**31, 2**33)
    else:
        start, kind, sizes = 40, "<h", (1, 1, 1, 2, 32, 1024, 32767)
    width = struct.calcsize(kind)
    for number in range(3):
        content = _put(content, start + (number + 1) * width, kind, random.choice(sizes))
    return content


def _put(content: bytes, start: int, kind: str, value: float) -> bytes:
    return content[:start] + struct.pack(kind, value) + content[start + struct.calcsize(kind) :]


NIFTI: tuple[Mutator, ...] = (
    *(change_nifti_field,) * 6,
    *(change_nifti_shape, change_nifti_shape, flip_bits, truncate, insert),
)


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


def bomb(name: bytes, head: bytes, gigabytes: int, declared: int | None = None) -> bytes:
    """An archive of some megabytes with one member: `head` and gigabytes of zeros; its size is `declared` wrongly."""
    zeros, size, check = b"\0" * 2**24, declared, 0
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH)  # it stands alone, and may be repeated
    packed += piece * (64 * gigabytes) + packer.flush()
    if size is None:
        size, check = len(head) + gigabytes * 2**30, zlib.crc32(head)
        for _ in range(64 * gigabytes):
            check = zlib.crc32(zeros, check)
    sizes = struct.pack("<III", check, len(packed), min(size, 2**32 - 1))
    fixed = struct.pack("<HHHHH", 20, 0, zipfile.ZIP_DEFLATED, 0, 0x21) + sizes + struct.pack("<HH", len(name), 0)
    local = b"PK\x03\x04" + fixed + name
    central = b"PK\x01\x02" + struct.pack("<H", 20) + fixed + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    start = len(local) + len(packed)
    return local + packed + central + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), start, 0)
