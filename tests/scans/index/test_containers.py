"""Files are found in folders and archives, sorted, and nothing leads out of the root."""

import os
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.index import containers
from normal_guidance.scans.index.containers import list_files, locate
from normal_guidance.scans.index.problems import KINDS, Problem
from small_files import put


def zipped(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def listed(root: Path) -> tuple[list[str], list[Problem]]:
    problems: list[Problem] = []
    files = list(list_files(root, problems.append))
    assert {problem.kind for problem in problems} <= set(KINDS)
    return files, problems


def read_bytes(root: Path, file: str) -> bytes:
    found = locate(root, file)
    return found if isinstance(found, bytes) else found.read_bytes()


def assert_refused(root: Path, file: str, kind: str, *words: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        locate(root, file)
    assert caught.value.kind == kind
    assert all(word in caught.value.detail for word in (file, *words))


def test_files_in_folders_and_archives_come_sorted_and_read_back(tmp_path):
    expected = {
        "a!b.dcm": b"0",
        "a-1.dcm": b"1",
        "a.dcm": b"2",
        "a/2.dcm": b"3",
        "a/B/1.dcm": b"4",
        "a/z.zip!deep/1.dcm": b"5",
        "a/z.zip!deep/2.dcm": b"",
        "c.ZIP!1.dcm": b"6",
        "ü.dcm": b"7",
    }
    for name, content in expected.items():
        if ".zip!" not in name.lower():
            put(tmp_path / name, content)
    zipped(tmp_path / "a/z.zip", {"deep/2.dcm": b"", "deep/": b"", "deep/1.dcm": b"5"})
    zipped(tmp_path / "c.ZIP", {"1.dcm": b"6"}, zipfile.ZIP_STORED)
    (tmp_path / "empty").mkdir()

    files, problems = listed(tmp_path)
    assert files == sorted(expected)
    assert problems == []
    assert {file: read_bytes(tmp_path, file) for file in files} == expected
    assert locate(tmp_path, "a.dcm") == tmp_path / "a.dcm"
    assert locate(tmp_path, "c.ZIP!1.dcm") == b"6"


def test_links_that_lead_out_of_the_root_are_reported(tmp_path):
    put(tmp_path / "outside/secret.dcm")
    root = tmp_path / "root"
    put(root / "1.dcm")
    (root / "file").symlink_to(tmp_path / "outside/secret.dcm")
    (root / "folder").symlink_to("../outside")
    (root / "z.zip").symlink_to(zipped(tmp_path / "outside/z.zip", {"1.dcm": b"1"}))
    files, problems = listed(root)
    assert files == ["1.dcm"]
    assert {problem.file: problem.kind for problem in problems} == dict.fromkeys(
        ("file", "folder", "z.zip"), "unsafe_path"
    )
    for file in ("file", "folder/secret.dcm", "z.zip!1.dcm"):
        assert_refused(root, file, "unsafe_path", "link")


def test_links_inside_the_root_are_followed_and_what_cannot_be_read_is_reported(tmp_path, monkeypatch):
    put(tmp_path / "a/1.dcm", b"1")
    put(tmp_path / "closed/1.dcm")
    for name, target in (("b.dcm", "a/1.dcm"), ("loop", "."), ("folder", "a"), ("broken", "nowhere")):
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe.dcm")  # reading one would wait for ever
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff.dcm", os.O_CREAT))
    scandir = os.scandir

    def deny(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    files, problems = listed(tmp_path)
    assert files == ["a/1.dcm", "b.dcm"]
    assert read_bytes(tmp_path, "b.dcm") == b"1"
    assert {problem.kind for problem in problems} == {"unreadable"}
    details = {problem.file.encode(): problem.detail for problem in problems}
    assert details.pop(b"pipe.dcm") == "a pipe, a socket or a device"
    assert "Permission denied" in details.pop(b"closed")
    assert details.pop(b"broken")
    assert list(details.values()) == ["the name is not UTF-8"]
    assert_refused(tmp_path, "pipe.dcm", "unreadable")
    with pytest.raises(UserError, match="is not a folder; name the folder"):
        listed(tmp_path / "nowhere")


def test_names_that_lead_out_are_never_read_and_missing_files_are_named(tmp_path):
    zipped(tmp_path / "z.zip", {"../x": b"secret", "1.dcm": b"1"})
    put(tmp_path.parent / "x.dcm", b"secret")
    for file in ("../x.dcm", "a/../../x.dcm", "/etc/passwd", "", "C:\\x", "..\\x", "z.zip!../x", "a\0b"):
        assert_refused(tmp_path, file, "unsafe_path")
    assert_refused(tmp_path, "1.dcm", "unreadable", "not there")
    assert_refused(tmp_path, "z.zip!2.dcm", "unreadable", "no such member")
    assert_refused(tmp_path, "y.zip!2.dcm", "unreadable", "not there")
    for name in ("x" * 300, "y/" * 3000, "\ud800.dcm"):  # that no disk has
        with pytest.raises(UnreadableError, match=r"unreadable: .*not a valid file name"):
            locate(tmp_path, name)


def set_bytes(content: bytes, signature: bytes, offset: int, value: bytes) -> bytes:
    start = content.rindex(signature) + offset
    return content[:start] + value + content[start + len(value) :]


def encrypted(content: bytes) -> bytes:
    return set_bytes(set_bytes(content, b"PK\x01\x02", 8, b"\1"), b"PK\x03\x04", 6, b"\1")


def second_called(name: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(b"2.dcm", name)


def declared(content: bytes) -> bytes:
    return set_bytes(content, b"PK\x01\x02", 24, (2**28 + 1).to_bytes(4, "little"))


UNSAFE = ("../x.dcm", "/abs.dcm", "a/../../y.dcm", "..\\z.dcm", "C:/w.dcm")
DEFLATE, BZIP2, LZMA = zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA
ONE, TWO = {"1.dcm": b"1"}, {"1.dcm": b"1", "2.dcm": b"2"}


@pytest.mark.parametrize(
    ("members", "method", "damage", "files", "refused", "detail", "read"),
    [
        (dict.fromkeys((*UNSAFE, "1.dcm"), b"1"), DEFLATE, bytes, ["1.dcm"], UNSAFE, "leads out", ""),
        (ONE, DEFLATE, encrypted, [], ["1.dcm"], "the member is encrypted", "encrypted"),
        # The decompressors of these have no limit on the output.
        (ONE, BZIP2, bytes, [], ["1.dcm"], "packed by method 12", "with deflate"),
        (ONE, LZMA, bytes, [], ["1.dcm"], "packed by method 14", "with deflate"),
        (TWO, DEFLATE, second_called(b"1.dcm"), ["1.dcm"], ["1.dcm"], "two members", None),
        # zipfile cuts a name at its first zero byte.
        (TWO, DEFLATE, second_called(b"\0.dcm"), ["1.dcm"], [""], "the member has no name", None),
        (ONE, DEFLATE, declared, [], ["1.dcm"], "the member declares 268,435,457 bytes, more than", "268,435,457"),
    ],
    ids=["unsafe", "encrypted", "bzip2", "lzma", "twice", "nameless", "declared"],
)
def test_members_that_cannot_be_used_are_reported(tmp_path, members, method, damage, files, refused, detail, read):
    kind = "unsafe_path" if refused == UNSAFE else "unreadable"
    content = damage(zipped(tmp_path / "z.zip", members, method).read_bytes())
    put(tmp_path / "z.zip", content)
    put(tmp_path / "b.dcm")
    found, problems = listed(tmp_path)
    assert found == ["b.dcm", *(f"z.zip!{name}" for name in files)]
    assert sorted(problem.file for problem in problems) == sorted(f"z.zip!{name}" for name in refused)
    for problem in problems:
        assert (problem.kind, problem.action) == (kind, "left out")
        assert detail in problem.detail
        if read is not None:
            assert_refused(tmp_path, problem.file, kind, read)


def test_bombs_are_reported_and_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "MEMBER_BYTES", 100_000)
    zipped(tmp_path / "z.zip", {"bomb.dcm": bytes(100_001), "good.dcm": bytes(100_000)})
    files, [problem] = listed(tmp_path)
    assert files == ["z.zip!good.dcm"]
    assert (problem.file, problem.kind) == ("z.zip!bomb.dcm", "unreadable")
    assert "100,001 bytes" in problem.detail
    assert_refused(tmp_path, "z.zip!bomb.dcm", "unreadable", "100,001 bytes")
    assert len(read_bytes(tmp_path, "z.zip!good.dcm")) == 100_000


def test_a_member_that_declares_less_than_it_inflates_to_takes_no_memory(tmp_path):
    """The member declares a hundred bytes and holds a gigabyte: 64 times 16 MiB of zeros, each packed to a few KiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = (packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)) * 64 + packer.flush()
    path = zipped(tmp_path / "z.zip", {"1.dcm": packed}, zipfile.ZIP_STORED)
    content = path.read_bytes()
    for signature, method, size in ((b"PK\x03\x04", 8, 22), (b"PK\x01\x02", 10, 24)):
        content = set_bytes(content, signature, method, DEFLATE.to_bytes(2, "little"))
        content = set_bytes(content, signature, size, (100).to_bytes(4, "little"))
    path.write_bytes(content)
    tracemalloc.start()
    try:
        assert_refused(tmp_path, "z.zip!1.dcm", "unreadable", "CRC")
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_damaged_archives_are_reported(tmp_path):
    put(tmp_path / "a.zip", b"no archive")
    put(tmp_path / "b.dcm")
    whole = zipped(tmp_path / "c.zip", {"1.dcm": os.urandom(1000)}).read_bytes()
    put(tmp_path / "c.zip", whole[:500])
    files, problems = listed(tmp_path)
    assert files == ["b.dcm"]
    assert [(problem.file, problem.kind) for problem in problems] == [("a.zip", "unreadable"), ("c.zip", "unreadable")]
    assert_refused(tmp_path, "a.zip!1.dcm", "unreadable")
    put(tmp_path / "c.zip", whole[:100] + bytes([whole[100] ^ 0xFF]) + whole[101:])
    assert listed(tmp_path)[0] == ["b.dcm", "c.zip!1.dcm"]
    assert_refused(tmp_path, "c.zip!1.dcm", "unreadable")
    # One that was replaced is read anew.
    zipped(tmp_path / "z.zip", {"1.dcm": b"old"})
    assert read_bytes(tmp_path, "z.zip!1.dcm") == b"old"
    zipped(tmp_path / "z.zip", {"1.dcm": b"newer"})
    assert read_bytes(tmp_path, "z.zip!1.dcm") == b"newer"
