"""Fixtures of the training tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def double() -> Iterator[None]:
    """Make float64 the default: `fit` takes its dtype from the features, but losses of integers from the default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
