"""Connections that end: uvicorn closes only those that have been answered, and a client may never ask."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 30.0
"""A connection is closed if its next request has not come so long after it was opened or last answered."""

ANSWER_SECONDS = 300.0
"""A connection is closed if an answer takes longer: its client does not read.  Decoders have 120 s."""

MOST_CONNECTIONS = 256
"""Connections at a time; a browser makes six for a page.  One more closes the one that has waited longest."""


class BoundedProtocol(H11Protocol):
    """HTTP with a limit to the time that a connection may wait, and to the number of connections."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._give(IDLE_SECONDS)
        opened = [
            one for one in self.connections if isinstance(one, BoundedProtocol) and not one.transport.is_closing()
        ]
        if len(opened) > MOST_CONNECTIONS:
            waiting = [one for one in opened if not one._is_answering()]
            min(waiting, key=BoundedProtocol._end).transport.abort()  # this one waits, too

    def data_received(self, data: bytes) -> None:
        was_answering = self._is_answering()
        super().data_received(data)
        if self._is_answering() and not was_answering:  # half a request gains no time
            self._give(ANSWER_SECONDS)

    def on_response_complete(self) -> None:
        self._give(IDLE_SECONDS)  # first: a request that already waits begins in the next line
        super().on_response_complete()
        if self._is_answering():
            self._give(ANSWER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _give(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _end(self) -> float:
        return self._deadline.when() if self._deadline is not None else 0.0
