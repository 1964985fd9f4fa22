"""Items are made ahead of their use, but not far, and whatever happens to their making is not lost."""

import time

import pytest
from working import wait_until, work

from normal_guidance.data.worker_pool import Pool
from normal_guidance.errors import UserError
from normal_guidance.features.prefetch import in_background


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


def test_stopping_ends_a_map_in_another_thread():
    with Pool(1) as pool:
        ahead = in_background(pool.map(work, [("square", 2), ("hang", 600)]), depth=1)
        assert next(ahead) == 4
        pool.stop()
        begin = time.monotonic()
        ahead.close()
        assert time.monotonic() - begin < 300, "it waited for the hang"
