"""Items made by threads ahead of their use."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS = 0.2
"""Longest time before the thread notices that it should stop."""


def in_background(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """Yields the same items, which a thread makes up to `depth` ahead."""
    made: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stopping = threading.Event()

    def put(good: bool, item: Any) -> None:
        while not stopping.is_set():
            with suppress(queue.Full):
                made.put((good, item), timeout=POLL_SECONDS)
                return

    def make() -> None:
        try:
            for item in items:
                put(True, item)
                if stopping.is_set():
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            good, item = made.get()
            if not good:
                break
            yield item
    finally:
        stopping.set()
        thread.join()
    if item is not None:
        raise item


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """The function's result for each item, in their order; `threads` of them are made at a time."""
    begun: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            begun.append(pool.submit(function, item))
            if len(begun) > threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
