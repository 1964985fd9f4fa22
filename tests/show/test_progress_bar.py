"""Who calls from Python sees a bar on a terminal and in a notebook, and nothing elsewhere."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from rich import console

from normal_guidance.show.progress_bar import Shown, show_job


class Cell:
    """The cell of a notebook, and all that it has shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, text: str, display_id: bool) -> Cell:
        assert display_id
        self.update(text)
        return self

    def update(self, text: str) -> None:
        self.shown.append(text)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = Cell()
    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=made.display))
    return made


def work(progress: bool) -> None:
    with show_job("<fit>", progress=progress) as (_, watch):
        for share in (0.0, 0.5):
            watch(Shown("<fit>", share, f"{share:.0%}"))
        raise KeyboardInterrupt


def test_a_notebook_gets_a_bar_that_goes_when_the_job_ends(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        work(progress=True)
    first, begun, half, last = cell.shown
    assert first == last == ""
    assert begun == "<progress value=0.000></progress> &lt;fit&gt;: 0%"
    assert half.startswith("<progress value=0.500></progress> &lt;fit&gt;: 50%")
    assert capsys.readouterr() == ("", "")


def test_nobody_is_disturbed_elsewhere(cell: Cell, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        work(progress=False)
    monkeypatch.setattr(console, "_is_jupyter", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        work(progress=True)
    assert cell.shown == []
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt):
        work(progress=True)
    assert "50%" in capsys.readouterr().err
