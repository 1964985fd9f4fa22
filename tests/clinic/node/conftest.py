"""Nodes of the small run's model, which calls every scan positive, and senders' files."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from normal_guidance.fit.bundle import load_bundle, write_bundle
from small_bundle import use_tiny
from small_node import always_positive, quick_loops, running_node, small_archive


def pytest_itemcollected(item: pytest.Item) -> None:
    """Connections that a node refuses or cuts leave sockets that pynetdicom does not close."""
    item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def trained(trained, tmp_path_factory):
    trained.bundle = tmp_path_factory.mktemp("bundle") / "bundle"
    write_bundle(always_positive(load_bundle(trained.run)), trained.bundle)
    return trained


@pytest.fixture
def bundle(trained, monkeypatch):
    use_tiny(monkeypatch)
    quick_loops(monkeypatch)
    return load_bundle(trained.bundle)


@pytest.fixture
def state(tmp_path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def node(bundle, state):
    return partial(running_node, state, bundle)


@pytest.fixture
def archive():
    """An archive on this machine: `to` is its name as a destination, `got` what it received."""
    with small_archive() as (port, got):
        yield SimpleNamespace(to=[f"ARCHIVE@127.0.0.1:{port}"], got=got)


@pytest.fixture
def series(copy):
    """Writes a series with UIDs of its own and returns its files."""

    def make(number: int = 1, scan: int = 0, slices: int | None = None, **tags):
        root = "1.2.826.0.1.3680043.9.7"
        known = {"StudyInstanceUID": f"{root}.{number}", "SeriesInstanceUID": f"{root}.{number}.1", **tags}
        return copy(f"series-{number}", scan, slices=slices, **known)

    return make
