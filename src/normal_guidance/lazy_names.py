"""Names of a package that are imported when they are first used, so that a program waits only for what it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Mapping[str, str] | None = None, unlisted: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package.

    A wrong name is an AttributeError that suggests the nearest right one.

    Args:
        package: its `__name__`.
        homes: public name -> module that defines it, without the package's name.
        modules: public name -> module that it stands for, without the package's name.
        unlisted: names that `dir` leaves out, since a package that they need is not installed.
    """
    modules = modules or {}

    def get(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{modules[name]}")
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{_suggestion(name, names())}")

    def names() -> list[str]:
        return sorted({*homes, *modules} - {*unlisted})

    return get, names


def _suggestion(name: str, known: list[str]) -> str:
    from difflib import get_close_matches  # only where something went wrong

    if name.startswith("__"):
        return ""  # Python itself asks for such names
    folded = {one.lower().replace("_", ""): one for one in known}
    near = get_close_matches(name.lower().replace("_", ""), folded, n=1)
    return f"; did you mean {folded[near[0]]!r}?" if near else f"; it has {', '.join(known)}"
