"""One small run for all tests of this folder; nobody may change its folder."""

from small_bundle import bundle, tiny_encoder, trained  # noqa: F401
