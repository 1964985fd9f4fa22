"""Hostile archives: members with names that lead elsewhere, with a wrong size, or that are not files."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
import zlib
from random import Random

from mutations import BYTES, mutate

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


def hostile_zip(random: Random, members: dict[str, bytes]) -> bytes:
    """An archive of these members and some hostile ones; sometimes it is damaged, too."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # two members of one name
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # without today's date
            for _ in range(random.randrange(5)):
                _add(random, archive, next(iter(members.values())))
    content = buffer.getvalue()
    change = random.random()
    if change < 0.3:
        return mutate(random, content, BYTES)
    return lie(random, content) if change < 0.6 else content


def _add(random: Random, archive: zipfile.ZipFile, content: bytes) -> None:
    info = zipfile.ZipInfo(random.choice(HOSTILE))
    info.compress_type = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    kind = random.randrange(8)
    if kind == 0:  # a symbolic link, as Unix packs it
        info.create_system, info.external_attr = 3, 0o120777 << 16
        content = b"../../outside/secret.dcm"
    elif kind == 1:
        info.external_attr = random.choice((0o010666 << 16, 0o060666 << 16, 0x10))  # a pipe, a device, a folder
    elif kind == 2 and info.compress_type == zipfile.ZIP_BZIP2:
        content = b"\0" * 2**26  # some hundred bytes of archive
    elif kind == 3:
        nested = io.BytesIO()
        with zipfile.ZipFile(nested, "w") as inner:
            inner.writestr(zipfile.ZipInfo("../evil.dcm"), content)
        content = nested.getvalue()
    archive.writestr(info, content)


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


def bomb(random: Random) -> bytes:
    """An archive of some megabytes with a member of more than three gigabytes, which declares `declared` bytes."""
    declared = random.choice((100, 2**16, 2**29))
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = (packer.compress(b"\0" * 2**24) + packer.flush(zlib.Z_FULL_FLUSH)) * 200 + packer.flush()
    name, sizes = b"1.dcm", struct.pack("<III", 0, len(packed), declared)
    fixed = struct.pack("<HHHHH", 20, 0, zipfile.ZIP_DEFLATED, 0, 0x21) + sizes + struct.pack("<HH", len(name), 0)
    local = b"PK\x03\x04" + fixed + name
    central = b"PK\x01\x02" + struct.pack("<H", 20) + fixed + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    start = len(local) + len(packed)
    return local + packed + central + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), start, 0)
