"""One small run for all tests of this folder; nobody may change its folder."""

from pathlib import Path

import pytest

from small_bundle import bundle, copy_series, tiny_encoder, trained  # noqa: F401


@pytest.fixture
def copy(trained, tmp_path):  # noqa: F811
    def make(name: str, scan: int = 0, **changes) -> list[Path]:
        return copy_series(trained.manifest[scan], trained.manifest.root, tmp_path / name, **changes)

    return make
