"""Phantom scans with predictions, and a server in front of them."""

from pathlib import Path

import pytest

from normal_guidance.clinic.viewer.gallery import Gallery, open_gallery
from normal_guidance.clinic.viewer.server import FILES
from normal_guidance.scans.index.manifest import Manifest, read_manifest
from small_viewer import Served, rows_of, write_predictions

SEEDS = (1001, 2001)


@pytest.fixture(scope="session")
def manifest(phantom) -> Manifest:
    return read_manifest(phantom / "index")


@pytest.fixture(scope="session")
def study(manifest, tmp_path_factory) -> Path:
    """Three methods on two splits; MHNG has four heads.  Centered Gaussian knows test scans only, as it does."""
    folder = tmp_path_factory.mktemp("viewed") / "study"
    for seed in SEEDS:
        write_predictions(folder / "ng" / str(seed), rows_of(manifest))
        write_predictions(folder / "mhng" / str(seed), rows_of(manifest, heads=4, shift=-6.0))
        fixed = [row | {"probability": float("nan")} for row in rows_of(manifest) if row["part"] == "test"]
        write_predictions(folder / "centered_gaussian" / str(seed), fixed)
    return folder


@pytest.fixture(scope="session")
def gallery(study, phantom) -> Gallery:
    return open_gallery(study, phantom / "index", phantom / "store")


@pytest.fixture(scope="session")
def blank_page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("static")
    for name, _ in FILES.values():
        (folder / name).write_text(f"this is {name}")
    return folder


@pytest.fixture(scope="module")
def served(gallery, blank_page):
    with Served(gallery, blank_page) as server:
        yield server


@pytest.fixture
def serve(blank_page):
    running = []

    def start(gallery: Gallery, static: Path | None = blank_page, **options: object) -> Served:
        running.append(Served(gallery, static, **options))
        return running[-1].__enter__()

    yield start
    for server in running:
        server.__exit__()
