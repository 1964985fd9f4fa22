"""The package as users get it: wheel and sdist, and environments that hold the wheel and nothing of the clone."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from normal_guidance.clinic.viewer.server import STATIC

ROOT = Path(__file__).resolve().parents[1]
NAME = "normal-guidance"


def finished(*words: object, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, which must end with this code."""
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def build(folder: Path) -> Path:
    """The sdist, and the wheel that is built from it; the path of the wheel."""
    if not (STATIC / "index.html").is_file():
        pytest.skip("THE PACKAGE IS NOT TESTED: the viewer's page is not built, make viewer (needs npm)")
    if find_spec("hatchling") is None:
        pytest.fail("hatchling is not installed; make install")
    finished(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def requirements(wheel_metadata: metadata.PackageMetadata, *extras: str) -> Iterator[Requirement]:
    """What a package needs here, without extras or with these."""
    for line in wheel_metadata.get_all("Requires-Dist") or []:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield one


def closure(needed: Iterable[Requirement]) -> set[str]:
    """The names of the needed packages and of all that they need in turn."""
    names, waiting, seen = set(), [*needed], set()
    while waiting:
        one = waiting.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in seen:
            continue
        seen.add(key)
        names.add(key[0])
        waiting += requirements(metadata.distribution(one.name).metadata, *one.extras)
    return names


def link_packages(names: Iterable[str], folder: Path) -> None:
    """Let a folder of modules hold these packages of the running Python, as links."""
    for name in names:
        for file in metadata.distribution(name).files or []:
            top = Path(str(file.locate())).parents[len(file.parts) - 1]
            if file.parts[0] != ".." and "__pycache__" not in file.parts:
                _link(top, file.parts, folder)


def _link(source: Path, parts: tuple[str, ...], folder: Path) -> None:
    """Link a file, or the outermost of its folders that is no namespace: packages share those (google, fhir)."""
    there, here = source / parts[0], folder / parts[0]
    is_shared = there.is_dir() and there.suffix != ".dist-info" and not (there / "__init__.py").exists()
    if is_shared and len(parts) > 2:
        here.mkdir(exist_ok=True)
        _link(there, parts[1:], here)
    elif there.exists() and not here.exists():
        here.symlink_to(there)


class Environment:
    """A virtual environment with the wheel alone, and a way to run what it holds as a user would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"

    def pip(self, *words: str) -> None:
        """Run this Python's pip for the environment."""
        command = (sys.executable, "-m", "pip", "--python", self.python, *words, "--disable-pip-version-check")
        finished(*command, env=outside())

    def modules(self) -> Path:
        """The folder of installed modules."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(self.run("-c", code).stdout.strip())

    def run(self, *words: str, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run its Python; the exit code must be as given."""
        return finished(self.python, *words, code=code, cwd=cwd or self.folder, env=outside())

    def nguide(self, *words: str, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the installed script."""
        return self.run(str(self.python.with_name("nguide")), *words, cwd=cwd, code=code)


def outside() -> dict[str, str]:
    """The environment variables without those that lead to the clone."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
