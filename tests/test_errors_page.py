"""The page of errors: every public function has five errors of its own, and no mistake is accepted."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from documents import load_module
from installed import finished

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "errors_page.py"


@pytest.fixture(scope="module")
def errors_page() -> ModuleType:
    return load_module(SCRIPT)


SLOW = {"fit", "predict", "SliceFinder", "GuidanceCallback", "open_store", "train_model", "sweep"}
SLOW |= {"push_to_hub", "pull_from_hub"}
"""Functions whose mistakes need a fitted model, files or Lightning."""


def test_quick_functions_refuse_every_mistake(errors_page: ModuleType, unchecked: None) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", errors_page.SHARED, re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    for name in errors_page.MISTAKES.keys() - SLOW:
        said = [(call, *errors_page._said(call, names)) for call in errors_page.MISTAKES[name]]
        assert errors_page.problems({name: said}, []) == []


@pytest.mark.slow
def test_the_page_has_every_function(errors_page: ModuleType) -> None:
    """In a process of its own: here shapes are checked before our own checks are reached."""
    page = finished(sys.executable, SCRIPT).stdout
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(errors_page.MISTAKES)
    assert "| no-such-store is not a feature store" in page


def test_every_public_function_is_on_the_page(errors_page: ModuleType) -> None:
    assert set(errors_page.public_callables()) == set(errors_page.MISTAKES)


GOOD = [(f"f({number})", "UserError", f"x is {number}; give 0") for number in range(5)]


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (GOOD, []),
        (GOOD[:4], ["f: 4 different errors; show 5"]),
        ([*GOOD[:4], ("f(9)", "UserError", GOOD[0][2])], ["f: 4 different errors; show 5"]),
        ([*GOOD, ("f(9)", "nothing", "it was accepted")], ["f(9): nothing: it was accepted"]),
        ([*GOOD, ("f(9)", "KeyError", "'x'")], ["f(9): KeyError: 'x'"]),
        (
            [*GOOD, ("f(9)", "UserError", "'str' object has no attribute 'type'")],
            ["f(9): UserError: 'str' object has no attribute 'type'"],
        ),
        (
            [*GOOD, ("f()", "TypeError", "f() missing 1"), ("f(a=1)", "TypeError", "unexpected")],
            ["f: 2 calls are refused by Python: f(), f(a=1)"],
        ),
    ],
    ids=["good", "too few", "twice the same", "accepted", "another kind", "from inside", "Python's twice"],
)
def test_the_guard_of_the_page_can_fail(errors_page: ModuleType, said: list, wrong: list[str]) -> None:
    assert errors_page.problems({"f": said}, ["f"]) == wrong
    assert errors_page.problems({}, ["f"]) == ["f: no mistake is shown"]
