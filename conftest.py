"""What every test and every doctest runs under: few threads, fixed seeds, checked shapes with CHECK_SHAPES=1
(`make test-all`; the checks double the time of small tests); and which tests are slow.

It lies at the root, not in tests/, because the doctests in src/ need it too.
"""

import gc
import os
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import hypothesis
import jaxtyping
import pytest
import torch
from jaxtyping import install_import_hook

SHAPES_ARE_CHECKED = bool(os.environ.get("CHECK_SHAPES"))
if SHAPES_ARE_CHECKED:
    # Must come before anything imports the package: modules that are already imported stay unchecked.
    install_import_hook("normal_guidance", "beartype.beartype")

    # pytest imports the packages above a doctest's file itself, and not by the hook, unless they are imported already.
    import normal_guidance

    for _ in pkgutil.walk_packages(normal_guidance.__path__, "normal_guidance.", onerror=lambda name: None):
        pass  # walking imports packages; one whose extra is not installed has no tests here

    # In a scan that is traced for a file, the number of slices is a symbol, not an int.
    export = torch.export.export

    def export_unchecked(*args: Any, **options: Any) -> Any:
        before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            return export(*args, **options)
        finally:
            jaxtyping.config.update("jaxtyping_disable", before)

    torch.export.export = export_unchecked

    # A canvas has no shapes to check, and drawing a scan calls it 30,000 times.
    from normal_guidance.scans.phantom.drawing import Canvas

    for _name, _checked in list(vars(Canvas).items()):
        if hasattr(_checked, "__wrapped__"):
            setattr(Canvas, _name, _checked.__wrapped__)

# Test processes side by side have one thread each, as have the programs that they start: where threads outnumber cores,
# each step waits for one that is not running, and small ones take up to six times as long.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

# Doctests import what they are collected from; Triton comes with torch's CUDA builds only.
collect_ignore_glob = [] if find_spec("triton") else ["src/*_triton.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests, too, and more examples (make test-all)")


def pytest_configure(config: pytest.Config) -> None:
    """Fixed examples in CI, which must not fail by chance; new ones on a developer's machine."""
    hypothesis.settings.register_profile(
        "chosen",
        deadline=None,
        max_examples=50 if config.getoption("--slow") else 10,
        derandomize=bool(os.environ.get("CI")),
    )
    hypothesis.settings.load_profile("chosen")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --slow, tests marked slow are left out; `slow(but=("x", "y"))` keeps the cases with these ids."""
    kept = {(case, _function(item)) for item in items for case in _kept(item)}
    here = {(item.callspec.id, _function(item)) for item in items if _kept(item)}
    if kept - here and not config.args_source == pytest.Config.ArgsSource.ARGS:
        raise pytest.UsageError(f"slow(but=...) names a case that is not there: {sorted(kept - here)}")
    if not config.getoption("--slow"):
        slow = [item for item in items if _is_slow(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not _is_slow(item)]


def _kept(item: pytest.Item) -> tuple[str, ...]:
    """The ids of the cases that are not slow."""
    mark = item.get_closest_marker("slow")
    but = () if mark is None else mark.kwargs.get("but", ())
    return (but,) if isinstance(but, str) else tuple(but)


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _is_slow(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("slow")
    case = getattr(item, "callspec", None)
    return mark is not None and (case is None or case.id not in _kept(item))


def pytest_collection_finish() -> None:
    """What is imported and collected, a million objects, stays: whole collections, which look at each, skip it."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True)
def few_steps_in_doctests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that fit a model show how to call it: an eighth of the steps is enough for them."""
    if isinstance(request.node, pytest.DoctestItem) and request.node.name.startswith("normal_guidance.fit."):
        from normal_guidance.fit import fit_ensemble

        monkeypatch.setattr(fit_ensemble, "STEPS", 36)
        monkeypatch.setattr(fit_ensemble, "EPOCHS", 6)
