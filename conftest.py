"""What every test and every doctest runs under: checked shapes, few threads, fixed seeds.

It lies at the root, not in tests/, because the doctests in src/ need it too.
"""

import gc
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

# Test processes side by side have one thread each, as have the programs that they start: where threads outnumber cores,
# each step waits for one that is not running, and small ones take up to six times as long.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

# Doctests import what they are collected from; Triton comes with torch's CUDA builds only.
collect_ignore_glob = [] if find_spec("triton") else ["src/*_triton.py"]


def pytest_collection_finish() -> None:
    """What is imported and collected, a million objects, stays: whole collections, which look at each, skip it."""
    gc.collect()
    gc.freeze()


# CI must not fail by chance; on a developer's machine new examples are welcome.
hypothesis.settings.register_profile("local", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch's global generator before every test; a test that wants the number asks for ``seed``."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def one_dnn() -> Iterator[None]:
    """Where a CPU lacks bfloat16, a product in it makes torch do without oneDNN for good, and convolutions are slow."""
    yield
    torch.backends.mkldnn.enabled = True


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch the run-time shape checks off, so that our own guards are reached, as they are in production."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
