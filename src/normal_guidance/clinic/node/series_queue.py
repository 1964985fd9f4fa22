"""The queue on disk: what has arrived, what was predicted, what was sent.  It survives a kill at any instant.

    state       means                                         is set by
    receiving   slices arrive                                 the receiver or the watcher, with each new slice
    ready       complete: nothing arrived for a while         the predicting thread
    predicted   results are written and wait to be sent       the predicting thread
    sent        every destination has all files               a sending thread
    done        ... and has confirmed them, if that is asked  a sending thread, or a report of storage commitment
    ignored     no rule takes it                              the predicting thread
    refused     the model was not made for it                 the predicting thread
    failed      it cannot be predicted                        the predicting thread

A new slice of a series in any state makes it `receiving` again, and the next result replaces the earlier one.  Files
are written before the row that names them, so a row never names a file that is not there.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import FORMAT, check_format
from normal_guidance.clinic.node.incoming import Received, hash_of

RECEIVING, READY, PREDICTED, SENT = "receiving", "ready", "predicted", "sent"
DONE, IGNORED, REFUSED, FAILED = "done", "ignored", "refused", "failed"
UNFINISHED = (RECEIVING, READY, PREDICTED, SENT)
FINISHED = (DONE, IGNORED, REFUSED, FAILED)
STATES = (*UNFINISHED, *FINISHED)

OPEN, RELEASED, ABORTED = "open", "released", "aborted"
"""How the last association that sent slices of a series stands."""


_TABLES = """
CREATE TABLE IF NOT EXISTS series (
    key TEXT PRIMARY KEY, study_uid TEXT NOT NULL, series_uid TEXT NOT NULL, state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '', detail TEXT NOT NULL DEFAULT '', association TEXT NOT NULL,
    peer TEXT NOT NULL, files INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, arrivals INTEGER NOT NULL DEFAULT 0,
    round INTEGER NOT NULL DEFAULT 0, digest TEXT NOT NULL DEFAULT '', predicted_files INTEGER NOT NULL DEFAULT 0,
    arrived REAL NOT NULL, changed REAL NOT NULL, latency REAL, purged INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS series_state ON series (state, arrived);
CREATE TABLE IF NOT EXISTS objects (
    name TEXT PRIMARY KEY, series TEXT NOT NULL, sop_uid TEXT NOT NULL, sop_class TEXT NOT NULL,
    digest TEXT NOT NULL, bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS objects_series ON objects (series);
CREATE TABLE IF NOT EXISTS dispatches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, series TEXT NOT NULL, destination TEXT NOT NULL, state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, next REAL NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '',
    transaction_uid TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS dispatches_next ON dispatches (destination, state, next);
CREATE INDEX IF NOT EXISTS dispatches_series ON dispatches (series);
CREATE TABLE IF NOT EXISTS accepted (dispatch INTEGER NOT NULL, file TEXT NOT NULL, PRIMARY KEY (dispatch, file));
"""

WAITING, ACCEPTED, CONFIRMED = "waiting", "accepted", "confirmed"
"""States of a dispatch: to be sent, accepted by the destination, confirmed by storage commitment."""

Stored = Literal["new", "known", "conflict", "full"]
"""What became of an object: stored, there already, refused because its UID has other content, or no room."""


class QueuedSeries(NamedTuple):
    """A row of the table."""

    key: str
    study_uid: str
    series_uid: str
    state: str
    reason: str
    detail: str
    association: str
    peer: str
    files: int
    bytes: int
    attempts: int
    arrivals: int  # objects that ever arrived, new ones only: a number that changes with each
    round: int  # results so far
    digest: str  # of the slices of the last result
    predicted_files: int  # number of the slices of the last result
    arrived: float
    changed: float
    latency: float | None  # seconds from the last slice to the last file that was accepted
    purged: int  # whether its files were deleted after they were done with


class Dispatch(NamedTuple):
    """The results of one series on their way to one destination."""

    number: int  # A number that no other has, so that new slices cancel it for good
    series: str
    destination: str
    state: str
    attempts: int
    next: float
    reason: str
    transaction_uid: str


@dataclass(frozen=True)
class Limits:
    """The most that may wait: series that are not finished, and the bytes of their files."""

    series: int = 1000
    bytes: int = 100 * 2**30


class SeriesQueue:
    """The tables behind one lock; each method is one transaction, on the disk when it returns."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path, self.limits = path, limits
        self._lock = threading.RLock()
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            # 0: the file is new.  An older one may hold series, which must not be lost.
            check_format(path, version or FORMAT, "name another folder once that has sent what waits in it")
            self._database.executescript(f"{_TABLES} PRAGMA user_version={FORMAT};")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} cannot be read ({error}); move its folder away and start again") from error

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """A transaction, or a part of the one that this thread has begun."""
        with self._lock:
            if self._database.in_transaction:
                yield
                return
            with self._database:  # commits; after an error it rolls back
                self._database.execute("BEGIN IMMEDIATE")
                yield

    def _change(self, query: str, *values: object) -> int:
        """Make one change, and return how many rows it changed."""
        with self._transaction():
            return self._database.execute(query, values).rowcount

    def _all(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def _series(self, rest: str, *values: object) -> list[QueuedSeries]:
        return [QueuedSeries(*row) for row in self._all(f"SELECT * FROM series {rest}", *values)]

    def _dispatches(self, rest: str, *values: object) -> list[Dispatch]:
        return [Dispatch(*row) for row in self._all(f"SELECT dispatches.* FROM dispatches {rest}", *values)]

    def judge(self, received: Received) -> Stored:
        """Say what should become of an object, before it is written."""
        known = self._all("SELECT digest, series FROM objects WHERE name = ?", received.name)
        if known:
            return "known" if known[0] == (received.digest, received.series) else "conflict"
        held = self._all(f"SELECT count(*), coalesce(sum(bytes), 0) FROM series WHERE state IN {_list(UNFINISHED)}")[0]
        begun = self._all(f"SELECT 1 FROM series WHERE key = ? AND state IN {_list(UNFINISHED)}", received.series)
        if held[1] + len(received.content) > self.limits.bytes or (not begun and held[0] >= self.limits.series):
            return "full"
        return "new"

    def add(self, received: Received, peer: str, association: str = OPEN) -> Stored:
        """Record an object whose file is written."""
        now, size = time.time(), len(received.content)
        with self._transaction():
            verdict = self.judge(received)
            if verdict in ("conflict", "known"):
                return verdict
            self._change(
                "INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?)",
                *(received.name, received.series, received.sop_uid, received.sop_class, received.digest, size),
            )
            self._change(
                "INSERT INTO series (key, study_uid, series_uid, state, association, peer, arrived, changed) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET state = excluded.state, reason = '', "
                "detail = '', association = excluded.association, peer = excluded.peer, attempts = 0, "
                "arrived = excluded.arrived, changed = excluded.changed, latency = NULL, purged = 0",
                *(received.series, received.study_uid, received.series_uid, RECEIVING, association, peer, now, now),
            )
            query = "UPDATE series SET files = files + 1, bytes = bytes + ?, arrivals = arrivals + 1 WHERE key = ?"
            self._change(query, size, received.series)
            of_series = "SELECT number FROM dispatches WHERE series = ?"
            self._change(f"DELETE FROM accepted WHERE dispatch IN ({of_series})", received.series)
            self._change("DELETE FROM dispatches WHERE series = ?", received.series)
        return "new"

    def set_association(self, keys: Iterable[str], association: str) -> int:
        """Record how the association that sent these series stands; returns how many of them are being received."""
        query = "UPDATE series SET association = ? WHERE key = ? AND state = ?"
        with self._transaction():
            return sum(self._change(query, association, key, RECEIVING) for key in keys)

    def abort_open(self) -> None:
        """Count associations that were open when the node ended as aborted."""
        self._change("UPDATE series SET association = ? WHERE association = ?", ABORTED, OPEN)

    def holds(self, sop_class: str, sop_uid: str) -> bool:
        """Whether an object is safely stored."""
        query = "SELECT 1 FROM objects WHERE name = ? AND sop_uid = ? AND sop_class = ?"
        return bool(self._all(query, hash_of(sop_uid), sop_uid, sop_class))

    def names(self) -> set[str]:
        return {name for (name,) in self._all("SELECT name FROM objects")}

    def in_state(self, *states: str) -> list[QueuedSeries]:
        """The series in these states, the oldest first, but after them those whose prediction ended the program."""
        return self._series(f"WHERE state IN {_list(states)} ORDER BY attempts, arrived")

    def series(self, key: str) -> QueuedSeries | None:
        return next(iter(self._series("WHERE key = ?", key)), None)

    def digest(self, key: str) -> str:
        """A hash of the objects of a series that are here."""
        rows = self._all("SELECT name, digest FROM objects WHERE series = ? ORDER BY name", key)
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def move(self, series: QueuedSeries, state: str, reason: str = "", detail: str = "") -> bool:
        """Change the state of a series, unless a slice has arrived since `series` was read; whether it was changed."""
        query = "UPDATE series SET state = ?, reason = ?, detail = ?, changed = ? WHERE key = ? AND arrivals = ?"
        return self._change(query, state, reason, detail, time.time(), series.key, series.arrivals) == 1

    def count_attempt(self, series: QueuedSeries, more: int = 1) -> None:
        """Count an attempt at a prediction before it begins, as it may end the program; -1 takes it back."""
        self._change("UPDATE series SET attempts = max(0, attempts + ?) WHERE key = ?", more, series.key)

    def predicted(self, series: QueuedSeries, digest: str, destinations: Sequence[str]) -> bool:
        """Record results that are written; whether no slice has arrived since `series` was read."""
        with self._transaction():
            if not self.move(series, PREDICTED if destinations else DONE):
                return False
            query = "UPDATE series SET round = round + 1, digest = ?, predicted_files = files WHERE key = ?"
            self._change(query, digest, series.key)
            query = "INSERT INTO dispatches (series, destination, state) VALUES (?, ?, ?)"
            for name in destinations:
                self._change(query, series.key, name, WAITING)
        return True

    def next_dispatch(self, destination: str, now: float) -> Dispatch | None:
        """The results that wait longest for a destination and are due."""
        rows = self._dispatches(
            "JOIN series s ON s.key = series WHERE destination = ? AND dispatches.state = ? AND next <= ? "
            "ORDER BY next, s.arrived LIMIT 1",
            *(destination, WAITING, now),
        )
        return next(iter(rows), None)

    def unconfirmed(self, destination: str, before: float) -> list[Dispatch]:
        """Dispatches whose storage commitment is to be asked for."""
        return self._dispatches("WHERE destination = ? AND state = ? AND next <= ?", destination, ACCEPTED, before)

    def accepted(self, dispatch: Dispatch) -> set[str]:
        """The files that the destination has accepted."""
        return {file for (file,) in self._all("SELECT file FROM accepted WHERE dispatch = ?", dispatch.number)}

    def accept(self, dispatch: Dispatch, file: str) -> None:
        """Record a file that the destination has accepted; not if new slices have cancelled its sending."""
        query = "INSERT OR IGNORE INTO accepted SELECT number, ? FROM dispatches WHERE number = ?"
        self._change(query, file, dispatch.number)

    def sent(self, dispatch: Dispatch, commit: bool) -> None:
        """Record that the destination has all files."""
        query = "UPDATE dispatches SET state = ?, reason = '', next = 0 WHERE number = ?"
        with self._transaction():
            self._change(query, ACCEPTED if commit else CONFIRMED, dispatch.number)
            self._finish(dispatch.series)

    def postpone(self, dispatch: Dispatch, until: float, reason: str) -> None:
        """Record an attempt that failed, and when the next is due."""
        query = "UPDATE dispatches SET attempts = attempts + 1, next = ?, reason = ? WHERE number = ?"
        self._change(query, until, reason, dispatch.number)

    def asked(self, dispatch: Dispatch, transaction: str, until: float) -> None:
        """Record that storage commitment was asked for; without an answer it is asked again at `until`."""
        query = "UPDATE dispatches SET transaction_uid = ?, next = ?, reason = '' WHERE number = ?"
        self._change(query, transaction, until, dispatch.number)

    def confirm(self, transaction: str, missing: Sequence[str]) -> Dispatch | None:
        """Record a report of storage commitment; with missing objects, all files are sent again."""
        query = "UPDATE dispatches SET state = ?, reason = ?, next = 0, transaction_uid = '' WHERE number = ?"
        with self._transaction():
            known = self._dispatches("WHERE transaction_uid = ? AND state = ?", transaction, ACCEPTED)
            if not known:
                return None
            dispatch, state, reason = known[0], CONFIRMED, ""
            if missing:
                state, reason = WAITING, f"the destination does not hold {len(missing)} of the results"
                self._change("DELETE FROM accepted WHERE dispatch = ?", dispatch.number)
            self._change(query, state, reason, dispatch.number)
            self._finish(dispatch.series)
        return dispatch

    def _finish(self, key: str) -> None:
        """Move a series on when all destinations have its results."""
        states = {state for (state,) in self._all("SELECT state FROM dispatches WHERE series = ?", key)}
        if WAITING in states or not states:
            self._change("UPDATE series SET state = ? WHERE key = ? AND state = ?", PREDICTED, key, SENT)
            return
        now, state = time.time(), SENT if ACCEPTED in states else DONE
        query = "UPDATE series SET state = ?, changed = ?, latency = coalesce(latency, ? - arrived) WHERE key = ?"
        self._change(f"{query} AND state IN {_list((PREDICTED, SENT))}", state, now, now, key)

    def finished_before(self, moment: float) -> list[QueuedSeries]:
        """Finished series whose files are still here, and that did not change since."""
        return self._series(f"WHERE state IN {_list(FINISHED)} AND purged = 0 AND changed <= ?", moment)

    def purge(self, series: QueuedSeries) -> bool:
        """Forget the objects of a series before its files are deleted; whether no slice has arrived since."""
        query = "UPDATE series SET purged = 1, files = 0, bytes = 0 WHERE key = ? AND arrivals = ?"
        with self._transaction():
            purged = self._change(f"{query} AND state IN {_list(FINISHED)}", series.key, series.arrivals) == 1
            if purged:
                self._change("DELETE FROM objects WHERE series = ?", series.key)
        return purged

    def by_state(self) -> dict[str, int]:
        """The number of series in each state."""
        return {**dict.fromkeys(STATES, 0), **dict(self._all("SELECT state, count(*) FROM series GROUP BY state"))}

    def held_bytes(self) -> int:
        """The bytes of the files that are not finished."""
        query = f"SELECT coalesce(sum(bytes), 0) FROM series WHERE state IN {_list(UNFINISHED)}"
        return int(self._all(query)[0][0])

    def late_dispatches(self) -> list[Dispatch]:
        """Dispatches whose last attempt, at sending or at asking for commitment, failed."""
        return self._dispatches("WHERE reason != '' AND state != ?", CONFIRMED)

    def recent(self, states: Sequence[str], most: int) -> list[QueuedSeries]:
        """The series that entered one of these states last."""
        return self._series(f"WHERE state IN {_list(states)} ORDER BY changed DESC LIMIT ?", most)

    def latencies(self, since: float) -> list[float]:
        """Seconds from the last slice to the last file sent, of results that were sent since then."""
        query = "SELECT latency FROM series WHERE latency IS NOT NULL AND changed >= ?"
        return [latency for (latency,) in self._all(query, since)]


def _list(states: Sequence[str]) -> str:
    """Our own words as a list in SQL."""
    return "(" + ", ".join(f"'{state}'" for state in states) + ")"
