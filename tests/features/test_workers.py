"""Workers give what a loop would give, in its order; one that dies or hangs costs its own task and no other."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from working import work

from normal_guidance.errors import UserError
from normal_guidance.features.workers import Failure, Pool, in_background

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def pool():
    with Pool(2, timeout=60.0) as pool:
        yield pool


@pytest.fixture(scope="module", params=[0, 2])
def either(request, pool):
    if request.param:
        return pool
    return Pool(0)


def test_results_come_in_order(either):
    assert list(either.map(work, (("square", n) for n in range(50)))) == [n * n for n in range(50)]
    assert list(either.map(work, [])) == []


def test_arrays_come_whole(either):
    shapes = [(3, 5), (1000, 1000), (0, 4)]
    for (array, note), shape in zip(either.map(work, [("array", shape) for shape in shapes]), shapes, strict=True):
        want = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        np.testing.assert_array_equal(array, want)
        assert (array.dtype, note) == (want.dtype, "note")
        array += 1  # its own, and may be written to


def test_errors_are_failures_of_their_task(either):
    tasks = [("square", 2), ("unreadable", "a report"), ("fail", "x"), ("square", 3)]
    assert list(either.map(work, tasks)) == [
        4,
        Failure("no_image", "a report"),
        Failure("failed", "KeyError: 'x'"),
        9,
    ]


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


def test_a_death_by_chance_costs_nothing(pool, tmp_path):
    assert list(pool.map(work, [("die_once", str(tmp_path / "died")), ("square", 2)])) == ["second", 4]
    assert (tmp_path / "died").exists()


def test_a_worker_that_hangs_is_ended():
    with Pool(2, timeout=2.0) as pool:
        begin = time.monotonic()
        got = list(pool.map(work, [("hang", 600), *(("square", n) for n in range(5))]))
        assert got[0] == Failure("failed", "the process that read it gave no answer within 2 s (2 attempts)")
        assert got[1:] == [0, 1, 4, 9, 16]
        assert time.monotonic() - begin < 30


def test_tasks_are_drawn_when_there_is_room(pool):
    """What bounds the memory: begun and not given out are at most two for each worker, or `ahead`."""
    for ahead, most in ((10**9, 4), (25, 3), (1, 1)):
        drawn = given = 0

        def draw():
            nonlocal drawn
            for n in range(12):
                drawn += 1
                assert drawn - given <= most  # noqa: B023
                yield "square", n

        for _ in pool.map(work, draw(), size=lambda task: 10, ahead=ahead):
            given += 1
        assert given == 12


def test_workers_have_one_thread_and_are_silent(pool, capfd):
    assert list(pool.map(work, [("threads", None)])) == ["1"]
    (number,) = pool.map(work, [("talk", "hello")])
    assert number != os.getpid()
    assert capfd.readouterr().out == ""


def test_workers_do_not_load_torch():
    """It takes seconds and hundreds of megabytes, in each of them."""
    with Pool(1) as pool:
        (modules,) = pool.map(work, [("modules", None)])
    assert "numpy" in modules
    assert "torch" not in modules


def test_a_task_that_cannot_be_loaded_is_an_error(tmp_path):
    """Were it a failure, every scan would be one."""
    (tmp_path / "passing.py").write_text("def work(task): return task")
    sys.path.insert(0, str(tmp_path))
    import passing

    (tmp_path / "passing.py").write_text("raise ImportError('no decoder here')")
    try:
        with Pool(1) as pool, pytest.raises(RuntimeError, match="cannot run its tasks: ImportError: no decoder here"):
            list(pool.map(passing.work, [1]))
    finally:
        sys.path.remove(str(tmp_path))


def test_workers_that_cannot_start_are_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Pool(1) as pool, pytest.raises(RuntimeError, match="ended with exit code 1 before its first task"):
        list(pool.map(work, [("square", 1)]))


def alive(number: int) -> bool:
    """Whether a process runs; one that ended and that nobody asked about does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    """Also in the midst of a task, and from a script without `if __name__ == "__main__"`."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(HERE)!r})
        from working import work
        from normal_guidance.features.workers import Pool
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


def test_stopping_ends_a_map_in_another_thread():
    with Pool(1) as pool:
        ahead = in_background(pool.map(work, [("square", 2), ("hang", 600)]), depth=1)
        assert next(ahead) == 4
        pool.stop()
        begin = time.monotonic()
        ahead.close()
        assert time.monotonic() - begin < 10


# ----------------------------------------------------------------------------------------------------
# In the background
# ----------------------------------------------------------------------------------------------------


def test_the_background_is_ahead_but_not_far():
    made = []

    def make():
        for n in range(10):
            made.append(n)
            yield n

    items = in_background(make(), depth=2)
    assert next(items) == 0
    wait_until(lambda: len(made) == 4)  # one given out, two waiting, one in hand
    time.sleep(0.05)
    assert len(made) == 4
    assert list(items) == list(range(1, 10))


def test_an_error_in_the_background_comes_to_the_front():
    def make():
        yield 1
        raise UserError("no room")

    items = in_background(make(), depth=2)
    assert next(items) == 1
    with pytest.raises(UserError, match="no room"):
        next(items)
