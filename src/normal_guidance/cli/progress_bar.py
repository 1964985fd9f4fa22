"""How far a run is: a live bar on a terminal, elsewhere a plain line when it begins and at most one a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.training.progress import SweepProgress

LINE_SECONDS = 60.0
"""Outside a terminal, lines about one run are at least so far apart: a log file stays readable."""

FILE_WIDTH = 140
"""Columns for tables outside a terminal, where nothing says how many there are."""


def make_console(*, stderr: bool = False) -> Console:
    """Standard output, with room for a table also where it is no terminal; stderr where stdout is for JSON."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=FILE_WIDTH, stderr=stderr)


def say(console: Console, text: str) -> None:
    """One line as it is: no colours by chance, no breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def watch_run(console: Console, title: str) -> Iterator[Callable[[SweepProgress], None]]:
    """Lends a function for `run_sweep(watch=...)`; what came of the run is for the caller to say.

    Example:
        >>> from rich.console import Console
        >>> with watch_run(Console(), "ng, seed 0") as watch:
        ...     pass
        ng, seed 0: begins
    """
    left = _Pace()
    if not console.is_terminal:
        say(console, f"{title}: begins")
        yield _Lines(console, title, left)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=1.0, note="begins")
        yield lambda now: bars.update(task, completed=now.done, note=describe(now, left(now.done)))


def describe(now: SweepProgress, left: float | None) -> str:
    """Epoch, best validation AUROC so far, speed, and the time left if it can be told."""
    best = f"{now.best_val_auroc:.3f}" if now.best_val_auroc > 0 else "-"
    parts = [
        f"epoch {now.epoch} of {now.epochs}",
        f"best validation AUROC {best}",
        f"{now.slices_per_second:,.0f} slices/s",
        *([] if left is None else [f"{timedelta(seconds=round(left))} left"]),
    ]
    return ", ".join(parts)


class _Pace:
    """The time left, from the share done since the first look: a resumed run does not begin at 0."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None

    def __call__(self, done: float) -> float | None:
        now = time.monotonic()
        self.first = self.first or (done, now)
        done_before, begin = self.first
        return (1 - done) * (now - begin) / (done - done_before) if done > done_before else None


class _Lines:
    def __init__(self, console: Console, title: str, left: _Pace) -> None:
        self.console, self.title, self.left = console, title, left
        self.last = time.monotonic()

    def __call__(self, now: SweepProgress) -> None:
        left = self.left(now.done)
        if time.monotonic() - self.last >= LINE_SECONDS:
            self.last = time.monotonic()
            say(self.console, f"{self.title}: {describe(now, left)}")
