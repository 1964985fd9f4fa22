"""The progress of a command: a live bar on a terminal, elsewhere at most one line a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from normal_guidance.base.system import time_text

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.show.text_tables import Grid
    from normal_guidance.sweep.sweep import SweepProgress


P = TypeVar("P")
LINE_SECONDS = 60.0  # the least time between two lines outside a terminal, so that a log file stays readable
FILE_WIDTH = 140  # columns for tables outside a terminal, which has no width of its own


def make_console(*, stderr: bool = False) -> Console:
    """Return standard output, wide enough for tables also in a file; stderr where stdout is for JSON."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=FILE_WIDTH, stderr=stderr)


def say(console: Console, text: str) -> None:
    """Print one line as it is: no colours, no line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_grid(console: Console, grid: Grid) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table(*grid.header, title=grid.title or None)
    for row in grid.rows:
        table.add_row(*row)
    console.print(table)


class Shown(NamedTuple):
    """The content of a bar or a line about a job."""

    title: str
    share: float | None  # the share of the work that is done, from 0 to 1; None where it is unknown
    note: str
    slices: int = 0  # those of all the work, where the line tells the speed


@contextmanager
def watch(console: Console, title: str, show: Callable[[P], Shown]) -> Iterator[Callable[[P], None]]:
    """Yield a function that receives the progress of a job and shows it, with the time left once it is known."""
    begun: dict[str, tuple[float, float]] = {}  # when each stage was first seen: a resumed job does not begin at 0

    def timed(now: P) -> Shown:
        shown = show(now)
        share, clock = shown.share or 0.0, time.monotonic()
        first, begin = begun.setdefault(shown.title, (share, clock))
        if share <= first or clock <= begin:
            return shown
        speed = (share - first) / (clock - begin)
        pace = f", {speed * shown.slices:,.0f} slices/s" if shown.slices else ""
        return shown._replace(note=f"{shown.note}{pace}, {time_text((1 - share) / speed)} left")

    if not console.is_terminal:
        last = time.monotonic()

        def print_line(now: P) -> None:
            nonlocal last
            shown = timed(now)
            if time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                say(console, f"{shown.title}: {shown.note}")

        yield print_line
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=None, note="begins")

        def update(now: P) -> None:
            shown = timed(now)
            total = None if shown.share is None else 1.0
            bars.update(task, description=shown.title, total=total, completed=shown.share or 0.0, note=shown.note)

        yield update


@contextmanager
def watch_run(console: Console, title: str) -> Iterator[Callable[[SweepProgress], None]]:
    """Yield a function for `run_sweep(watch=...)`; the caller reports the run's result."""

    def show(now: SweepProgress) -> Shown:
        best = f"{now.best_val_auroc:.3f}" if now.best_val_auroc > 0 else "-"
        epochs = f"epoch {now.epoch} of {now.epochs}, best validation AUROC {best}"
        return Shown(title, now.done, f"{epochs}, {now.slices_per_second:,.0f} slices/s")

    if not console.is_terminal:
        say(console, f"{title}: begins")
    with watch(console, title, show) as update:
        yield update
