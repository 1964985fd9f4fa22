"""With CHECK_SHAPES=1 conftest.py's import hook is on: a wrong shape fails in every test, doctests included."""

import importlib
import os
import pkgutil
import sys
from importlib.util import find_spec

import jaxtyping
import pytest
import torch

import normal_guidance
from normal_guidance.core.layout import Layout

pytestmark = pytest.mark.skipif(not os.environ.get("CHECK_SHAPES"), reason="CHECK_SHAPES is not set (make test-all)")


def test_wrong_shapes_are_errors():
    with pytest.raises(jaxtyping.TypeCheckError, match="bags longest"):
        Layout.from_mask(torch.ones(3, dtype=torch.bool))
    lengths, mask = torch.tensor([3, 4]), torch.ones(3, 4, dtype=torch.bool)  # two arguments that disagree
    with pytest.raises(jaxtyping.TypeCheckError, match="bags"):
        Layout(lengths=lengths, mask=mask, sizes=None, pad_index=None, unpad_index=None)


def test_every_module_is_checked():
    """A module that something imported before the hook stood would go unchecked, without a word."""
    names = [module.name for module in pkgutil.walk_packages(normal_guidance.__path__, "normal_guidance.")]
    for name in ["normal_guidance", *names]:
        if find_spec("triton") or not name.endswith("_triton"):
            loader = importlib.import_module(name).__spec__.loader
            assert type(loader).__module__.startswith("jaxtyping."), f"{name} was imported before conftest.py's hook"


def test_doctests_see_the_modules_that_tests_import(request):
    """pytest collects src/ by path; the classes there must be the package's own, or isinstance fails."""
    doctests = [item.dtest for item in request.session.items if isinstance(item, pytest.DoctestItem)]
    doctests = [doctest for doctest in doctests if doctest.globs]  # one that has run has none
    if not doctests:
        pytest.skip("no doctests in this run, or all have run; run pytest without paths")
    for doctest in doctests:
        module = sys.modules[doctest.globs["__name__"]]
        for name, value in doctest.globs.items():
            assert not isinstance(value, type) or getattr(module, name) is value, (doctest.name, name)
