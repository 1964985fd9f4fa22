"""The cache holds what was used last, within its limit, whatever is put into it."""

from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.clinic.viewer.images import Cache

uses = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40) | st.none()))


@given(uses, st.integers(1, 60))
def test_the_cache_is_the_longest_tail_of_uses_that_fits(uses, limit):
    cache, order = Cache(limit, size=lambda size: size), {}
    for key, size in uses:
        if size is None:
            value = cache.get(key)
            assert value == order.get(key)
            if key in order:
                order[key] = order.pop(key)
            continue
        cache.put(key, size)
        order.pop(key, None)
        order[key] = size
        while sum(order.values()) > limit and len(order) > 1:
            order.pop(next(iter(order)))
        assert cache.bytes == sum(order.values())
        assert len(cache) == len(order)


def test_what_is_larger_than_the_limit_is_kept_alone():
    cache = Cache(10, size=len)
    cache.put("small", "abc")
    cache.put("large", "x" * 50)
    assert (cache.get("small"), cache.get("large"), cache.bytes) == (None, "x" * 50, 50)
    cache.put("next", "y")
    assert (cache.get("large"), cache.bytes) == (None, 1)
