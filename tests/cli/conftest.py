"""One small run for all tests of this folder; nobody may change its folder."""

from small_bundle import trained  # noqa: F401  # a fixture
