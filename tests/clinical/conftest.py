"""One small run for all tests of this folder; nobody may change its folder."""

import pytest

from normal_guidance.clinical.bundle import load_bundle
from small_bundle import make_run, use_tiny


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def tiny_encoder(monkeypatch) -> None:
    """The encoder that the run was trained with: small, and found by its name."""
    use_tiny(monkeypatch)


@pytest.fixture
def bundle(trained):
    return load_bundle(trained.run)
