"""A clock that a test moves."""

from types import ModuleType, SimpleNamespace

import pytest


class OwnClock:
    """The time that some modules read; everybody else keeps the real one.

    `time.monotonic` itself is never replaced: a server in another thread would wait for as long as the two differ.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *modules: ModuleType, now: float = 0.0) -> None:
        self.now = now
        for module in modules:
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
