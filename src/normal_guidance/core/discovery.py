"""Finds what the files of a package define, so that adding a method or a regularizer is adding one file."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def one_per_file(package: ModuleType, attribute: str) -> dict[str, Any]:
    """What each module of a package calls `attribute`, by the module's name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: getattr(importlib.import_module(f"{package.__name__}.{name}"), attribute) for name in names}
