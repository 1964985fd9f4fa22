"""The progress of a job: a live bar on a terminal or in a notebook, elsewhere at most one line a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from normal_guidance.base.system import time_text

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.show.text_tables import Grid


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

    if console.is_jupyter:
        with _in_notebook() as write:
            yield lambda now: write(timed(now))
        return
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
def _in_notebook() -> Iterator[Callable[[Shown], None]]:
    """A bar that a notebook draws itself, since rich needs ipywidgets for one; it goes when the job ends."""
    shown_by = import_module("IPython.display")  # every notebook has it, and nothing else needs it
    cell = shown_by.display(shown_by.HTML(""), display_id=True)

    def write(shown: Shown) -> None:
        share = "" if shown.share is None else f"value={shown.share:.3f}"
        cell.update(shown_by.HTML(f"<progress {share}></progress> {escape(f'{shown.title}: {shown.note}')}"))

    try:
        yield write
    finally:
        cell.update(shown_by.HTML(""))


@contextmanager
def show_job(title: str, *, progress: bool) -> Iterator[tuple[Callable[[str], None], Callable[[Shown], None]]]:
    """Yield what receives lines and the progress, shown where a person looks on: on a terminal, in a notebook."""
    from rich.console import Console

    console = Console(stderr=True)
    if not progress or not (console.is_terminal or console.is_jupyter):
        yield (lambda line: None), (lambda shown: None)
        return
    with watch(console, title, lambda now: now) as update:
        yield partial(say, console), update
