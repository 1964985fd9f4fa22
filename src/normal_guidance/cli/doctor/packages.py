"""Which packages are needed, by the core and by each extra, what is wrong with those here, and how to install them."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "normal-guidance"
HOME = Path(__file__).parents[2]
"""The folder of the package."""

MODULES = {
    "pillow": "PIL",
    "pylibjpeg-openjpeg": "openjpeg",
    "python-gdcm": "gdcm",
    "scikit-learn": "sklearn",
}
"""Packages that are imported by another name than their own."""

GONE = "is not installed"
"""What is wrong with a package that is not there."""


def clone() -> Path | None:
    """The clone of the repository that the package lies in, if it does."""
    root = HOME.parents[1]
    return root if (root / "pyproject.toml").is_file() and HOME.parent.name == "src" else None


def requirements() -> dict[str, dict[str, str]]:
    """The lowest version of every package that is needed, of the core ("") and of each extra.

    Example:
        >>> sorted(requirements()[""])[:3], requirements()["ray"]
        (['jaxtyping', 'matplotlib', 'numpy'], {'ray': '2.40'})
    """
    root = clone()
    if root is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        groups = {"": project["dependencies"], **project["optional-dependencies"]}
        return {extra: dict(map(_parse, lines)) for extra, lines in groups.items()}
    needed: dict[str, dict[str, str]] = {}
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # copied without its metadata: nobody says what it needs
        return needed
    for line in lines:
        extra = re.search(r"extra == ['\"](\w+)", line)
        name, least = _parse(line)
        needed.setdefault(extra.group(1) if extra else "", {})[name] = least
    return needed


def _parse(line: str) -> tuple[str, str]:
    """Name and lowest version.

    Example:
        >>> _parse("torch>=2.11"), _parse("pydicom>=3.0; extra == 'dicom'"), _parse("pandas-stubs")
        (('torch', '2.11'), ('pydicom', '3.0'), ('pandas-stubs', ''))
    """
    match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?", line)
    assert match is not None
    return match.group(1), match.group(2) or ""


def module_of(package: str) -> str:
    """What a package is imported as.

    Example:
        >>> module_of("scikit-learn"), module_of("efficientnet-lite-pytorch")
        ('sklearn', 'efficientnet_lite_pytorch')
    """
    return MODULES.get(package, package.replace("-", "_"))


def wrong_packages(packages: Mapping[str, str], errors: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with each that is missing, too old, or cannot be imported.

    Args:
        packages: with their lowest versions.
        errors: of modules that were imported; those of others are looked for, and not imported.
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
    """Of an installed package."""
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
    """For comparing.

    Example:
        >>> numbers_of("2.13.0+cpu") >= numbers_of("2.11"), numbers_of("0.2.5") >= numbers_of("0.2.30")
        (True, False)
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def pip_install(*words: str) -> str:
    """The command that installs something for the Python that runs this."""
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def install_package(extra: str = "") -> str:
    """The command that installs the package with an extra: from the clone, where there is one."""
    wanted = f"[{extra}]" if extra else ""
    root = clone()
    if root is None:
        return pip_install(f"{PACKAGE}{wanted}")
    pinned = root / "constraints.txt"
    return pip_install(*(["-c", str(pinned)] if pinned.is_file() else []), "-e", f"{root}{wanted}")
