"""Workers return the results of a loop, in its order; one that dies or hangs loses its own task and no other."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from normal_guidance.base import workers as worker_pool
from normal_guidance.base.errors import UserError
from normal_guidance.base.workers import Death, Failure, Pool, StartError
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


def test_errors_are_failures_of_their_task(either):
    tasks = [("square", 2), ("unreadable", "a report"), ("fail", "x"), ("square", 3)]
    assert list(either.map(work, tasks)) == [4, Failure("no_image", "a report"), Failure("failed", "KeyError: 'x'"), 9]


def test_the_users_mistakes_end_it(either):
    with pytest.raises(UserError, match="install it"):
        list(either.map(work, [("mistake", "install it")]))


@pytest.mark.parametrize(
    ("death", "how"),
    [
        (("exit", 3), "ended with exit code 3"),
        (("kill", "SIGSEGV"), "was killed by SIGSEGV"),
        (("kill", "SIGKILL"), "was killed by SIGKILL (out of memory?)"),
    ],
)
def test_a_worker_that_dies_costs_its_task_only(pool, death, how):
    tasks = [("square", 1), ("square", 2), death, ("square", 3), ("square", 4)]
    got = list(pool.map(work, tasks))
    assert got == [1, 4, Failure("failed", f"the process that read it {how} (2 attempts)"), 9, 16]


@pytest.mark.parametrize("batch", [1, 5])
def test_a_death_by_chance_costs_nothing(pool, tmp_path, batch):
    tasks = [("square", 1), ("die_once", str(tmp_path / "died")), ("square", 2)]
    assert list(pool.map(work, tasks, batch=batch)) == [1, "second", 4]
    assert (tmp_path / "died").exists()


def test_deaths_cost_nothing_of_their_batch(pool):
    """The batch is tried again task by task, so that each of them is alone with its worker."""
    tasks = [("square", n) for n in range(12)]
    tasks[2] = tasks[4] = ("exit", 3)
    tasks[11] = ("kill", "SIGSEGV")
    got = list(pool.map(work, tasks, batch=5))
    words = {2: "ended with exit code 3", 4: "ended with exit code 3", 11: "was killed by SIGSEGV"}
    assert got == [
        Failure("failed", f"the process that read it {words[n]} (2 attempts)") if n in words else n * n
        for n in range(12)
    ]
    assert [got[n].death for n in words] == [Death("exit code 3"), Death("exit code 3"), Death("SIGSEGV")]


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


def test_workers_do_not_load_torch():
    """Importing it takes seconds and hundreds of megabytes in each worker."""
    with Pool(1) as pool:
        (modules,) = pool.map(work, [("modules", None)])
    assert "numpy" in modules
    assert "torch" not in modules


def test_workers_that_are_started_ahead_have_imported_what_they_are_told():
    """At most one worker per task starts early; a failing import is reported by the task that needs it."""
    with Pool(2, timeout=60.0) as pool:
        pool.start(1, ["normal_guidance.no_such_module", "wave"])
        (first,) = started = list(pool._started)
        assert first.ready is False
        (modules,) = pool.map(work, [("modules", None)])
        assert pool._started == started
        assert "wave" in modules
        pool.start(9)
        assert len(pool._started) == 2
        assert list(pool.map(work, [("square", 3)])) == [9]
    assert first.process.poll() is not None


def test_a_task_that_cannot_be_loaded_is_an_error(tmp_path):
    """As a `Failure`, it would repeat for every scan."""
    (tmp_path / "passing.py").write_text("def work(task): return task")
    sys.path.insert(0, str(tmp_path))
    import passing

    (tmp_path / "passing.py").write_text("raise ImportError('no decoder here')")
    try:
        with Pool(1) as pool, pytest.raises(StartError, match="cannot run its tasks: ImportError: no decoder here"):
            list(pool.map(passing.work, [1]))
    finally:
        sys.path.remove(str(tmp_path))


def test_workers_that_cannot_start_are_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Pool(1) as pool, pytest.raises(StartError, match="ended with exit code 1 before its first task"):
        list(pool.map(work, [("square", 1)]))


def test_workers_that_hang_when_they_start_are_an_error(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(worker_pool, "START_TIMEOUT", 0.3)
    with Pool(1) as pool, pytest.raises(StartError, match=r"gave no answer within 0.3 s before its first task"):
        list(pool.map(work, [("square", 1)]))


def test_a_task_whose_import_hangs_is_ended(monkeypatch, tmp_path):
    (tmp_path / "waiting.py").write_text("def work(task): return task")
    monkeypatch.syspath_prepend(tmp_path)
    import waiting

    (tmp_path / "waiting.py").write_text("import time; time.sleep(600)")
    with Pool(1) as pool:
        assert list(pool.map(work, [("square", 2)])) == [4]  # the worker has started, and another will not be needed
        monkeypatch.setattr(worker_pool, "START_TIMEOUT", 3.0)
        monkeypatch.setattr(worker_pool, "ATTEMPTS", 1)
        (failure,) = pool.map(waiting.work, [1])
    assert failure.death == Death(silence=3.0)


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
