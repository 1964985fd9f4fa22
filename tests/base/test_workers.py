"""Workers return the results of a loop, in its order; one that dies or hangs loses its own task and no other.

The guard of foreign files: sizes are bounded before anything is allocated, and a process that dies is one line.
"""

import io
import os
import subprocess
import sys
import textwrap
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normal_guidance.base import workers
from normal_guidance.base.errors import UserError
from normal_guidance.base.tables import read_columns
from normal_guidance.base.workers import (
    FREE_BYTES,
    RATIO,
    Death,
    Failure,
    Pool,
    StartError,
    ask,
    excess,
    parquet_columns,
    read_array,
)
from normal_guidance.scans.index.labels import read_labels
from small_files import npy
from working import wait_until, work

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pool():
    with Pool(2, timeout=60.0) as pool:
        yield pool


@pytest.fixture(scope="module", params=[0, 2], ids="workers={}".format)
def either(request, pool):
    if request.param:
        return pool
    return Pool(0)


def test_results_come_in_order(either):
    for batch in (1, 7, 100):
        tasks = (("square", n) for n in range(50))
        assert list(either.map(work, tasks, batch=batch)) == [n * n for n in range(50)]
        assert list(either.map(work, [], batch=batch)) == []


def test_arrays_come_whole(either):
    shapes = [(3, 5), (1000, 1000), (0, 4)]
    tasks = [("array", shape) for shape in shapes]
    arrays = [*either.map(work, tasks), *either.map(work, tasks, batch=2)]
    for (array, note), shape in zip(arrays, shapes + shapes, strict=True):
        want = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        np.testing.assert_array_equal(array, want)
        assert (array.dtype, note) == (want.dtype, "note")
        array += 1  # its own, and may be written to


def test_errors_are_failures_of_their_task_and_the_users_mistakes_end_it(either):
    tasks = [("square", 2), ("unreadable", "a report"), ("fail", "x"), ("square", 3)]
    assert list(either.map(work, tasks)) == [4, Failure("no_image", "a report"), Failure("failed", "KeyError: 'x'"), 9]
    with pytest.raises(UserError, match="install it"):
        list(either.map(work, [("mistake", "install it")]))


DEATHS = {
    1: (("exit", 3), "ended with exit code 3"),
    3: (("exit", 3), "ended with exit code 3"),
    6: (("kill", "SIGSEGV"), "was killed by SIGSEGV"),
    11: (("kill", "SIGKILL"), "was killed by SIGKILL (out of memory?)"),
}


@pytest.mark.parametrize("batch", [1, 5])
def test_deaths_cost_nothing_but_their_own_tasks(pool, batch):
    """The batch is tried again task by task, so that each of them is alone with its worker."""
    got = list(pool.map(work, [DEATHS[n][0] if n in DEATHS else ("square", n) for n in range(12)], batch=batch))
    for n, result in enumerate(got):
        words = f"the process that read it {DEATHS[n][1]} (2 attempts)" if n in DEATHS else ""
        assert result == (Failure("failed", words) if words else n * n)
    assert [got[n].death for n in DEATHS] == [Death(cause) for cause in (*["exit code 3"] * 2, "SIGSEGV", "SIGKILL")]


@pytest.mark.parametrize("batch", [1, 5])
def test_a_death_by_chance_costs_nothing(pool, tmp_path, batch):
    tasks = [("square", 1), ("die_once", str(tmp_path / "died")), ("square", 2)]
    assert list(pool.map(work, tasks, batch=batch)) == [1, "second", 4]
    assert (tmp_path / "died").exists()


def test_a_worker_that_hangs_is_ended():
    with Pool(2, timeout=2.0) as pool:
        begin = time.monotonic()
        got = list(pool.map(work, [("hang", 600), *(("square", n) for n in range(5))]))
        assert got[0] == Failure("failed", "the process that read it gave no answer within 2 s (2 attempts)")
        assert got[1:] == [0, 1, 4, 9, 16]
        assert time.monotonic() - begin < 600, "nobody waited for the hang"


def test_tasks_are_drawn_when_there_is_room(pool):
    """The batches that are begun and not yet returned stay below `batches` per worker and `ahead`."""
    for ahead, options, most in (
        (10**9, {}, 2 * 2),
        (25, {}, 3),
        (1, {}, 1),
        (10**9, {"batch": 2}, 2 * 2 * 2),
        (10**9, {"batches": 3}, 3 * 2),
        (25, {"batch": 2, "batches": 3}, 2 * 2),
    ):
        drawn = given = 0

        def draw():
            nonlocal drawn
            for n in range(12):
                drawn += 1
                assert drawn - given <= most  # noqa: B023
                yield "square", n

        for _ in pool.map(work, draw(), size=lambda task: 10, ahead=ahead, **options):
            given += 1
        assert given == 12


def test_workers_have_one_thread_and_are_silent(pool, capfd):
    assert list(pool.map(work, [("threads", None)])) == ["1"]
    (number,) = pool.map(work, [("talk", "hello")])
    assert number != os.getpid()
    assert capfd.readouterr().out == ""


def test_workers_that_are_started_ahead_have_imported_what_they_are_told():
    """At most one worker per task starts early; a failing import is reported by the task that needs it."""
    with Pool(2, timeout=60.0) as pool:
        pool.start(1, ["normal_guidance.no_such_module", "wave"])
        (first,) = started = list(pool._started)
        assert first.ready is False
        (modules,) = pool.map(work, [("modules", None)])
        assert pool._started == started
        assert {"wave", "numpy"} <= set(modules)
        assert "torch" not in modules  # importing it takes seconds and hundreds of megabytes in each worker
        pool.start(9)
        assert len(pool._started) == 2
        assert list(pool.map(work, [("square", 3)])) == [9]
    assert first.process.poll() is not None


@pytest.fixture
def other_here(monkeypatch, tmp_path):
    """A task whose module says something else in the workers."""

    def make(name: str, there: str):
        (tmp_path / f"{name}.py").write_text("def work(task): return task")
        monkeypatch.syspath_prepend(tmp_path)
        task = import_module(name).work
        (tmp_path / f"{name}.py").write_text(there)
        return task

    return make


def test_a_task_that_cannot_be_loaded_is_an_error(other_here):
    """A `Failure` would repeat for every scan."""
    task = other_here("passing", "raise ImportError('no decoder here')")
    with Pool(1) as pool, pytest.raises(StartError, match="cannot run its tasks: ImportError: no decoder here"):
        list(pool.map(task, [1]))


@pytest.mark.parametrize(
    ("script", "timeout", "how"),
    [("exit 1", 300.0, "ended with exit code 1"), ("exec sleep 600", 0.3, "gave no answer within 0.3 s")],
)
def test_workers_that_end_or_hang_when_they_start_are_an_error(monkeypatch, tmp_path, script, timeout, how):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(workers, "START_TIMEOUT", timeout)
    with Pool(1) as pool, pytest.raises(StartError, match=f"{how} before its first task"):
        list(pool.map(work, [("square", 1)]))


def test_a_task_whose_import_hangs_is_ended(monkeypatch, other_here):
    task = other_here("waiting", "import time; time.sleep(600)")
    with Pool(1) as pool:
        assert list(pool.map(work, [("square", 2)])) == [4]  # the worker has started, and another will not be needed
        monkeypatch.setattr(workers, "START_TIMEOUT", 1.0)
        monkeypatch.setattr(workers, "ATTEMPTS", 1)
        (failure,) = pool.map(task, [1])
    assert failure.death == Death(silence=1.0)


def alive(number: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    """Workers end with the parent, also during a task, and from a script without `if __name__ == "__main__"`."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(HERE)!r})
        from working import work
        from normal_guidance.base.workers import Pool
        list(Pool(1).map(work, [("hang_and_tell", {str(tmp_path / "worker")!r})]))
        """)
    )
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")])
    wait_until(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text())
    worker = int((tmp_path / "worker").read_text())
    assert alive(worker)
    process.kill()
    process.wait()
    wait_until(lambda: not alive(worker))


def test_sizes_are_bounded_by_what_is_stored():
    assert excess(FREE_BYTES, 0) == ""
    assert "more than the 268,435,456 that 1 stored" in excess(FREE_BYTES + 1, 1)
    assert excess(RATIO * 10**7, 10**7) == ""
    assert excess(RATIO * 10**7 + 1, 10**7) == (
        "declares 1,000,000,001 bytes, more than the 1,000,000,000 that 10,000,000 stored bytes may unpack to"
    )


def test_sizes_are_bounded_by_the_free_memory(monkeypatch):
    monkeypatch.setattr(workers, "machine_memory", lambda: (10**10, 10**9))
    assert excess(10**9, 10**9) == ""
    assert excess(10**9 + 1, 10**9) == "needs 1,000,000,001 bytes of memory, of which 1,000,000,000 are free"
    monkeypatch.setattr(workers, "machine_memory", lambda: (None, None))  # unknown
    assert excess(10**12, 10**12) == ""


def read(content: bytes) -> np.ndarray:
    return read_array(io.BytesIO(content), len(content), len(content))


@pytest.mark.parametrize(
    "array", [np.ones((3, 4), "<f4"), np.asfortranarray(np.eye(3)), np.array("é"), np.zeros((2, 0))]
)
def test_arrays_come_back(array):
    np.testing.assert_array_equal(read(npy(array)), array, strict=True)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("(1000000000, 6)", r"declares 24,000,000,000 bytes \(float32, shape \(1000000000, 6\)\), but 48 follow"),
        ("(3, 3)", "declares 36 bytes .* but 48 follow"),
        ("(-3, -4)", r"declares the shape \(-3, -4\)"),
        ("(9223372036854775807, 9223372036854775807)", "but 48 follow"),
    ],
)
def test_headers_that_lie_are_refused(shape, message):
    content = npy(np.ones((3, 4), np.float32))
    header = content[10:128].replace(b"(3, 4), }", f"({shape[1:]}, }}".encode()).rstrip().ljust(117) + b"\n"
    with pytest.raises(ValueError, match=message):
        read(content[:8] + len(header).to_bytes(2, "little") + header + content[128:])


@pytest.fixture
def short(monkeypatch):
    """A process of its own for this test, with a second for an answer."""
    monkeypatch.setattr(workers, "PATIENCE", 1.0)
    workers._process.cache_clear()
    yield
    workers._process(workers.os.getpid()).close()
    workers._process.cache_clear()


def test_a_process_that_dies_or_hangs_is_one_line(short):
    assert ask(work, ("square", 3)) == 9
    with pytest.raises(ValueError, match=r"the process that read it was killed by SIGSEGV$"):
        ask(work, ("kill", "SIGSEGV"))
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"the process that read it gave no answer within 1 s$"):
        ask(work, ("hang", 600))
    assert time.monotonic() - begin < 300
    with pytest.raises(ValueError, match="MemoryError"):
        ask(work, ("allocate", 3 * 2**30))
    assert ask(work, ("square", 4)) == 16


def test_parquet_on_which_pyarrow_aborts_is_one_line(tmp_path):
    """One bit of a column's nesting: pyarrow throws where nothing catches, so another process looks first."""
    path = tmp_path / "labels.parquet"
    pq.write_table(pa.table({"scan_id": ["a", "b"], "label": [0, 1]}), path)
    damaged = path.read_bytes().replace(b"%\x02\x18\x05label", b"%\x00\x18\x05label")
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"the process that read it was killed by SIGABRT|level"):
        ask(parquet_columns, path)
    with pytest.raises(UserError, match=r"labels.parquet cannot be read .*; copy it again"):
        read_columns(path, pa.schema({"scan_id": pa.string()}), "copy it again")
    with pytest.raises(OSError, match="level"):  # under a seal that fits
        parquet_columns(path, scan=True)
    with pytest.raises(UserError, match=r"labels.parquet"):
        read_labels(path, "--labels", ["scan_id", "label"], ["scan_id"])
