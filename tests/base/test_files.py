"""A file or folder is complete or absent, whatever fails while it is written."""

import os
import stat
import subprocess
import sys

import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import folder_atomically, read_parquet, write_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail(*_):
    raise KeyboardInterrupt  # not even an Exception


def test_an_old_file_is_replaced_and_survives_a_failure(tmp_path):
    path = tmp_path / "a"
    write_atomically(str(path), lambda file: file.write(b"old"))
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new")

    def half(file):
        file.write(b"half")
        file.flush()
        assert path.read_bytes() == b"new"  # the half-written file is not visible
        fail()

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor):
        mode = os.fstat(descriptor).st_mode
        calls.append("sync folder" if stat.S_ISDIR(mode) else f"sync {os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def traced_replace(source, target):
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    write_atomically(tmp_path / "a", b"one")
    assert calls == ["sync 3 bytes", "rename", "sync folder"]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    """Files from `tempfile` are readable by their owner only, also after a rename."""
    code = (
        "import os, sys; os.umask(0o022)\n"
        "from normal_guidance.base.files import folder_atomically, write_atomically\n"
        "with folder_atomically(sys.argv[1]) as draft: write_atomically(draft / 'a', b'')\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "run"], check=True)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "run" / "a").stat().st_mode) == 0o644


def test_a_folder_appears_when_it_is_complete_and_is_gone_when_it_fails(tmp_path):
    path = tmp_path / "deep" / "run"

    def write(then):
        with folder_atomically(path) as draft:
            write_atomically(draft / "a", b"one")
            assert not path.exists()
            then()

    with pytest.raises(KeyboardInterrupt):
        write(fail)
    assert names(path.parent) == []
    write(lambda: None)
    assert (path / "a").read_bytes() == b"one"
    assert names(path.parent) == ["run"]


def test_an_empty_folder_is_filled_and_nothing_is_overwritten(tmp_path, monkeypatch):
    path = tmp_path / "run"
    path.mkdir()
    monkeypatch.chdir(path)
    with folder_atomically(".") as draft:
        write_atomically(draft / "a", b"one")
    assert names(path) == ["a"]
    for there, message in ((path, "run is a folder that is not empty; choose"), (path / "a", "a is a file; choose")):
        with pytest.raises(UserError, match=message), folder_atomically(there):
            pass
    assert (path / "a").read_bytes() == b"one"
    assert names(tmp_path) == ["run"]


def test_the_slower_of_two_runs_is_refused(tmp_path):
    path = tmp_path / "run"

    def race():
        with folder_atomically(path) as slow:
            write_atomically(slow / "a", b"slow")
            with folder_atomically(path) as fast:
                write_atomically(fast / "a", b"fast")

    with pytest.raises(UserError, match="not empty"):
        race()
    assert (path / "a").read_bytes() == b"fast"
    assert names(tmp_path) == ["run"]


def test_parquet_in_a_folder_called_like_a_column_has_its_own_columns_only(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "split=7"
    folder.mkdir()
    pq.write_table(pa.table({"scan": ["A", "B"], "label": [0, 1]}), folder / "t.parquet")
    assert read_parquet(folder / "t.parquet").to_pydict() == {"scan": ["A", "B"], "label": [0, 1]}
