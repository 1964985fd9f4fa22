"""What every test and every doctest runs under: checked shapes, two threads, fixed seeds.

It lies at the root, not in tests/, because the doctests in src/ need it too.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import hypothesis
import jaxtyping
import pytest
import torch
from jaxtyping import install_import_hook

# Must come before anything imports the package: modules that are already imported stay unchecked.
install_import_hook("normal_guidance", "beartype.beartype")

torch.set_num_threads(2)

# Doctests import what they are collected from; Triton comes with torch's CUDA builds only.
collect_ignore_glob = [] if find_spec("triton") else ["src/*_triton.py"]

# CI must not fail by chance; on a developer's machine new examples are welcome.
hypothesis.settings.register_profile("local", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch's global generator before every test; a test that wants the number asks for ``seed``."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch the run-time shape checks off, so that our own guards are reached, as they are in production."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
