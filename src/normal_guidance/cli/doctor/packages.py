"""The packages that the core and each extra need, their faults, and the commands that install them."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from normal_guidance.base.system import PACKAGE as PACKAGE

HOME = Path(__file__).parents[2]
"""The folder of the package."""

MODULES = {
    "fhir-resources": "fhir.resources",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "pylibjpeg-openjpeg": "openjpeg",
    "python-gdcm": "gdcm",
    "scikit-learn": "sklearn",
}
"""Packages whose module has another name."""

GONE = "is not installed"
"""The fault of a package that is not there."""


def clone() -> Path | None:
    """Return the clone of the repository that holds the package; None for an installed package."""
    root = HOME.parents[1]
    return root if (root / "pyproject.toml").is_file() and HOME.parent.name == "src" else None


def requirements() -> dict[str, dict[str, str]]:
    """Return the lowest version of every needed package, for the core ("") and for each extra."""
    root = clone()
    if root is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        groups = {"": project["dependencies"], **project["optional-dependencies"]}
        return {extra: dict(map(_parse, _expanded(lines, groups))) for extra, lines in groups.items()}
    needed: dict[str, dict[str, str]] = {}
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # copied without its metadata: the requirements are unknown
        return needed
    for line in lines:
        extra = re.search(r"extra == ['\"](\w+)", line)
        name, least = _parse(line)
        needed.setdefault(extra.group(1) if extra else "", {})[name] = least
    return needed


def _expanded(lines: Iterable[str], groups: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Requirements with the extras of this package that they name, as an installed package lists them."""
    for line in lines:
        ours = re.match(rf"{PACKAGE}\[([^]]*)\]", line)
        if ours is None:
            yield line
        else:
            for extra in ours[1].split(","):
                yield from _expanded(groups[extra.strip()], groups)


def _parse(line: str) -> tuple[str, str]:
    """Return name and lowest version of a requirement."""
    match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?", line)
    assert match is not None
    return match.group(1), match.group(2) or ""


def module_of(package: str) -> str:
    """Return the name of a package's module."""
    return MODULES.get(package, package.replace("-", "_"))


def wrong_packages(packages: Mapping[str, str], errors: Mapping[str, Any]) -> dict[str, str]:
    """Return the fault of each package that is missing, too old, or cannot be imported.

    Args:
        packages: names and lowest versions.
        errors: import errors by module; modules without an entry are only looked for.
    """
    wrong = {}
    for package, least in packages.items():
        module, version = module_of(package), version_of(package)
        error = errors.get("error") or errors.get(module)
        if version is None or not _is_there(module):
            wrong[package] = GONE
        elif least and numbers_of(version) < numbers_of(least):
            wrong[package] = f"{version} is too old; {least} or newer is needed"
        elif error:
            wrong[package] = f"{version} cannot be imported ({error})"
    return wrong


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparison."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def pip_install(*words: str) -> str:
    """Return the command that installs packages for the running Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def install_package(*extras: str) -> str:
    """Return the command that installs this package with extras, from the clone where there is one."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    root = clone()
    if root is None:
        return pip_install(f"{PACKAGE}{wanted}")
    pinned = root / "constraints.txt"
    return pip_install(*(["-c", str(pinned)] if pinned.is_file() else []), "-e", f"{root}{wanted}")
