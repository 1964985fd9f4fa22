"""What commands tell of their progress: a line a minute in a log, a bar on a terminal."""

from io import StringIO

import pytest
from rich.console import Console

from normal_guidance.cli.scans import make_watched
from normal_guidance.cli.train import watch_run
from normal_guidance.scans.features.encoding import EncodingProgress
from normal_guidance.scans.index import indexing
from normal_guidance.scans.index.indexing import IndexProgress
from normal_guidance.show import progress_bar
from normal_guidance.show.progress_bar import watch
from normal_guidance.sweep.sweep import SweepProgress
from own_clock import OwnClock


def at(epoch: int, best: float = 0.75) -> SweepProgress:
    return SweepProgress(epoch, 100, 0, best, 1.5e6, epoch / 100)


SLICES = [EncodingProgress("encoding", second, 200, 0) for second in range(0, 200, 10)]
RESUMED = [EncodingProgress("encoding", slices, 2000, 500) for slices in (500, 500, 500, 500, 500, 500, 500, 1200)]
OTHER = EncodingProgress("other", 0, 10, 0)  # every stage has its own speed


@pytest.mark.parametrize(
    ("seen", "lines"),
    [
        (
            SLICES,
            [
                "encoding: 60 of 200 slices, 1 slices/s, 0:02:20 left",
                "encoding: 120 of 200 slices, 1 slices/s, 0:01:20 left",
                "encoding: 180 of 200 slices, 1 slices/s, 0:00:20 left",
            ],
        ),
        (
            [*RESUMED, *[OTHER] * 5],
            ["encoding: 500 of 2,000 slices", "other: 0 of 10 slices"],
        ),
        (
            [*RESUMED[:6], RESUMED[-1]],
            ["encoding: 1,200 of 2,000 slices, 12 slices/s, 0:01:09 left"],
        ),
        (
            [at(epoch) for epoch in range(14)],
            [
                "ng, seed 0: begins",
                "ng, seed 0: epoch 6 of 100, best validation AUROC 0.750, 1,500,000 slices/s, 0:15:40 left",
                "ng, seed 0: epoch 12 of 100, best validation AUROC 0.750, 1,500,000 slices/s, 0:14:40 left",
            ],
        ),
        (
            [at(3, float("-inf"))] * 7,
            ["ng, seed 0: begins", "ng, seed 0: epoch 3 of 100, best validation AUROC -, 1,500,000 slices/s"],
        ),
    ],
    ids=["encoding", "stages", "resumed", "training", "nothing selected"],
)
def test_a_log_gets_a_line_a_minute(monkeypatch, seen, lines):
    """One report every ten seconds."""
    clock = OwnClock(monkeypatch, progress_bar)
    console = Console(file=StringIO(), width=40)
    is_run = isinstance(seen[0], SweepProgress)
    with watch_run(console, "ng, seed 0") if is_run else watch(console, "encoding", EncodingProgress.shown) as update:
        for number, now in enumerate(seen):
            clock.now = 10.0 * number
            update(now)
    assert console.file.getvalue().splitlines() == lines


def test_a_terminal_gets_a_bar(monkeypatch, tmp_path):
    def index(*_, watch, **options):
        watch(IndexProgress(640, 3, None))
        watch(IndexProgress(1280, 7, 0.5))

    monkeypatch.setattr(indexing, "index", index)
    console = Console(file=StringIO(), force_terminal=True, width=160, _environ={"TERM": "xterm"})
    make_watched("rsna-pe", tmp_path, tmp_path, console)
    with watch_run(console, "ng, seed 0") as update:
        update(at(50))
    shown = console.file.getvalue()
    assert "1,280 files, 7 scans, 0:00:00 left" in shown
    assert "epoch 50 of 100, best validation AUROC 0.750" in shown
    assert "begins\n" not in shown
