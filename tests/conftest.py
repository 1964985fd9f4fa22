"""What tests of several folders share: one small experiment, trained once, and one small phantom."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.figure import Figure

from normal_guidance.study.experiment import Study
from normal_guidance.study.figures import training
from normal_guidance.study.reproduction import reproduce, reproduce_sensitivity
from normal_guidance.sweep import run as runs
from normal_guidance.sweep.sweep import sweep
from small_study import make_phantom, make_study, small_grid, small_sensitivity

REAL_CLOCK = time.monotonic


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """No test replaces the clock of all threads, which a server in one of them would wait for; see `own_clock`."""
    yield
    assert time.monotonic is REAL_CLOCK, "this test replaced time.monotonic; use own_clock.OwnClock"


class Studies:
    """The scripts of docs/studies, a folder and not a package; each is imported when it is named."""

    def __getattr__(self, name: str) -> ModuleType:
        return import_module(name)


@pytest.fixture(scope="session")
def studies() -> Iterator[Studies]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "docs" / "studies"))
        yield Studies()


@pytest.fixture(scope="session")
def small_experiment(tmp_path_factory) -> Study:
    """Four methods and both references on two splits, and the sensitivity of one; nobody may change its folder."""
    study = make_study(tmp_path_factory.mktemp("experiment"), ["centered_gaussian", "mean", "abmil", "ng"])
    reproduce(study, make_grid=small_grid)
    reproduce_sensitivity(replace(study, methods=("ng",)), make_grid=small_sensitivity)
    return study


@pytest.fixture(scope="session")
def phantom(tmp_path_factory) -> Path:
    """The folder of a phantom with its index and a store."""
    folder = tmp_path_factory.mktemp("phantom")
    make_phantom(folder)
    return folder


@pytest.fixture
def trained(monkeypatch) -> list[tuple[str, int]]:
    """(method, seed) of every sweep that really trains; the scan reference is mean pooling."""
    counted = []

    def counting(configs, *arguments, **options):
        counted.append((configs[0].method, configs[0].seed))
        return sweep(configs, *arguments, **options)

    monkeypatch.setattr(runs, "sweep", counting)
    return counted


@pytest.fixture
def copied(small_experiment, tmp_path) -> Study:
    """The same in a folder that a test may change."""
    folder = Path(shutil.copytree(small_experiment.folder, tmp_path / "copied"))
    return replace(small_experiment, folder=folder)


@pytest.fixture
def unrendered(monkeypatch) -> None:
    """Figures are made, but not drawn; those of training, the most by far, are empty."""
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: file.write(b"\x89PNG\r\n\x1a\n"))
    monkeypatch.setattr(training, "plot_learning_curves", lambda history, method: Figure())
    monkeypatch.setattr(training, "plot_grid", lambda history: Figure())


@pytest.fixture
def double() -> Iterator[None]:
    """Make float64 the default: `fit` takes its dtype from the features, but losses of integers from the default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
