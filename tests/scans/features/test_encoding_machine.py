"""Items are made ahead of their use, but not far, and whatever happens to their making is not lost."""

import threading
import time

import pytest

from normal_guidance.base.workers import Pool, in_background
from normal_guidance.scans.features.encoding_machine import in_threads
from working import wait_until, work


def test_the_background_is_ahead_but_not_far_and_stops_when_it_is_left():
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
    items = in_background((1 // number for number in (1, 0)), depth=2)
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError):
        next(items)
    items = in_background(iter(int, 1), depth=2)
    assert next(items) == 0
    items.close()


def test_stopping_ends_a_map_in_another_thread():
    with Pool(1) as pool:
        ahead = in_background(pool.map(work, [("square", 2), ("hang", 600)]), depth=1)
        assert next(ahead) == 4
        pool.stop()
        begin = time.monotonic()
        ahead.close()
        assert time.monotonic() - begin < 300, "it waited for the hang"


def test_threads_work_at_a_time_and_keep_the_order():
    together = threading.Barrier(2)

    def work_on(number):
        if number < 2:
            together.wait(timeout=60)  # both are under way, or this fails
        return 10 * number

    drawn = []
    items = in_threads(work_on, (drawn.append(n) or n for n in range(10)), threads=2)
    assert next(items) == 0
    assert drawn == [0, 1, 2], "the items are drawn as far as threads need them"
    assert list(items) == list(range(10, 100, 10))
    items = in_threads(lambda number: 1 // number, [1, 0, 1], threads=1)
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError):
        next(items)
