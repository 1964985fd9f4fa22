"""The house keeps its plan: rooms that import one way, no circle, one name for each file and class, no growth."""

import ast
import importlib
import sys
from pathlib import Path
from types import FunctionType

import pytest

import normal_guidance as ng
from normal_guidance import clinic

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "normal_guidance"

SOURCE_LINES = 44_830
"""At most so many lines of Python in the package.  A feature pays for itself by what it replaces; whoever raises this
number says why in the same commit."""

# A room may import from itself and from those above; rooms in one row are siblings and may not import each other.
ROOMS = (
    ("base",),
    ("core",),
    ("show",),
    ("statistics",),
    ("scans.index",),
    ("scans.features", "scans.phantom"),
    ("sweep",),
    ("fit",),
    ("study", "clinic.predict"),
    ("clinic.dicom",),
    ("clinic.results",),
    ("clinic.viewer",),
    ("clinic.node",),
    ("front",),
    ("cli",),
)
RANK = {room: rank for rank, row in enumerate(ROOMS) for room in row}

# What these may import beside the standard library; triton comes with torch, on CUDA alone, in modules named *_triton.
THIRD_PARTY = {"base.errors": set(), "core": {"torch", "jaxtyping", "triton"}}


def module_name(file: Path, package: Path) -> str:
    """Such as core.bags; a package has its own name, and the top level has none."""
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room that a module lies in."""
    parts = module.split(".")
    return next((room for n in (2, 1) if (room := ".".join(parts[:n])) in RANK), None)


def imports(file: Path, modules: set[str], package: Path) -> list[tuple[int, str]]:
    """(line, module) of everything that a file imports, inside functions too; our own modules without the package."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: write the whole name of the module"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name) for name in names]
    own = f"{package.name}."
    return [(line, _module(name.removeprefix(own), modules) if name.startswith(own) else name) for line, name in found]


def _module(name: str, modules: set[str]) -> str:
    """A name of ours without what is defined in the module."""
    return ":" + (name if name in modules else name.rpartition(".")[0] or name)


def why_forbidden(importer: str, name: str) -> str | None:
    """The reason why a module may not import another."""
    if not name.startswith(":"):
        allowed = next((THIRD_PARTY[key] for key in (importer, importer.split(".")[0]) if key in THIRD_PARTY), None)
        top = name.split(".")[0]
        forbidden = allowed is not None and top not in allowed and top not in sys.stdlib_module_names
        return f"{importer} may not import {top}" if forbidden else None
    room, target = room_of(importer), room_of(name[1:])
    if target is None:
        return None if name == ":__version__" else f"import {name[1:]!r} from the module that defines it"
    if room in (None, target) or RANK[target] < RANK[room]:
        return None
    return f"{room} may not import {target}"


def violations(package: Path) -> list[str]:
    """Every import that points the wrong way, as "file:line: reason"."""
    files = sorted(package.rglob("*.py"))
    modules, wrong = {module_name(file, package) for file in files}, []
    for file in files:
        name = module_name(file, package)
        relative = file.relative_to(package).as_posix()
        if room_of(name) is None and file.name != "__init__.py":
            wrong.append(f"{relative}: lies in no room of ROOMS (tests/test_house.py)")
        for line, imported in imports(file, modules, package):
            if reason := why_forbidden(name, imported):
                wrong.append(f"{relative}:{line}: {reason}")
    return wrong


def circles(package: Path) -> list[str]:
    """Modules that import each other, in the order of the imports; faces of packages load lazily and do not count."""
    files = {module_name(file, package): file for file in package.rglob("*.py") if file.name != "__init__.py"}
    needs = {
        name: sorted({to[1:] for _, to in imports(file, {*files}, package) if to.startswith(":") and to[1:] in files})
        for name, file in files.items()
    }
    found, done = [], set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(" -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for other in needs[name]:
                walk(other, (*path, name))
            done.add(name)

    for name in sorted(needs):
        walk(name, ())
    return found


def repeated(package: Path) -> list[str]:
    """Names that two files, or two classes, have."""
    places: dict[str, list[str]] = {}
    for file in sorted(package.rglob("*.py")):
        where = file.relative_to(package).as_posix()
        if file.name != "__init__.py":
            places.setdefault(file.name, []).append(where)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(f"class {node.name}", []).append(where)
    return [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def lines(package: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in package.rglob("*.py"))


def test_imports_point_one_way():
    assert violations(PACKAGE) == []


def test_no_modules_import_each_other():
    assert circles(PACKAGE) == []


def test_no_name_is_given_twice():
    assert repeated(PACKAGE) == []


def test_the_source_does_not_grow():
    assert lines(PACKAGE) <= SOURCE_LINES, "a feature pays for itself by what it replaces (CONTRIBUTING.md)"


def write(package: Path, files: dict[str, str]) -> Path:
    for name, code in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(code)
    return package


@pytest.mark.parametrize(
    ("file", "code", "reason"),
    [
        ("core/a.py", "from normal_guidance.scans.index.b import Bags", "core/a.py:1: core may not import scans.index"),
        (
            "core/a.py",
            "def f():\n    import normal_guidance.scans.index.b",
            "core/a.py:2: core may not import scans.index",
        ),
        ("core/a.py", "import numpy as np", "core/a.py:1: core.a may not import numpy"),
        ("base/errors.py", "import torch", "base/errors.py:1: base.errors may not import torch"),
        ("study/a.py", "from normal_guidance.clinic.predict import x", "study/a.py:1: study may not import clinic.pre"),
        (
            "clinic/predict/a.py",
            "from normal_guidance.study.b import x",
            "clinic/predict/a.py:1: clinic.predict may not",
        ),
        ("scans/index/a.py", "from normal_guidance import Bags", "scans/index/a.py:1: import 'Bags' from the module"),
        ("loose.py", "", "loose.py: lies in no room"),
    ],
)
def test_the_guard_of_imports_can_fail(tmp_path, file, code, reason):
    others = {"scans/index/b.py": "", "clinic/predict/__init__.py": "x = 1", "study/b.py": "x = 1"}
    (wrong,) = violations(write(tmp_path / "normal_guidance", {**others, file: code}))
    assert wrong.startswith(reason)


def test_the_guard_of_circles_can_fail(tmp_path):
    first, second = "def f():\n    from normal_guidance.core.b import g", "import normal_guidance.core.a"
    package = write(tmp_path / "normal_guidance", {"core/a.py": first, "core/b.py": second, "core/c.py": second})
    assert circles(package) == ["core.a -> core.b -> core.a"]


def test_the_guards_of_names_and_of_growth_can_fail(tmp_path):
    files = {"core/a.py": "class Plan: ...", "sweep/b.py": "class Plan: ...\n", "fit/a.py": "", "fit/__init__.py": ""}
    package = write(tmp_path / "normal_guidance", files)
    assert repeated(package) == ["a.py: core/a.py, fit/a.py", "class Plan: core/a.py, sweep/b.py"]
    assert lines(package) == 2


def test_public_names_win_over_rooms_of_the_same_name():
    """Importing a room makes it an attribute of the package, in place of the function that users call."""
    for room in ("fit.bundle", "sweep.sweep", "clinic.predict.new_scans"):
        importlib.import_module(f"normal_guidance.{room}")
    for face, name in ((ng, "fit"), (ng, "sweep"), (ng, "predict"), (clinic, "predict")):
        assert isinstance(getattr(face, name), FunctionType), name
