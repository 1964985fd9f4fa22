"""One small run for all tests of this folder; nobody may change its folder."""

import pytest

from small_bundle import make_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("trained"))
