"""A cache that is bounded in bytes: of hundreds of scans, only the last ones stay in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Keep the values used last, up to the limit; the newest is kept even if it alone exceeds the limit."""

    def __init__(self, limit: int, size: Callable[[Value], int]) -> None:
        self.limit, self.bytes = limit, 0
        self._size = size
        self._held: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key]

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            self._drop(key)
            self._held[key] = value
            self.bytes += self._size(value)
            while self.bytes > self.limit and len(self._held) > 1:
                self._drop(next(iter(self._held)))

    def _drop(self, key: Key) -> None:
        if key in self._held:
            self.bytes -= self._size(self._held.pop(key))
