"""The commit that the running code comes from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
"""The folder of this package."""


def source_version(package: Path = PACKAGE) -> dict[str, Any] | None:
    """Return the commit of the git checkout that holds a package, and whether files differ from it.

    None for a package that is not in a checkout of its own: one installed inside another project's checkout is not
    tracked there.  Where the code comes without its repository, for instance in a container, the variable NGUIDE_COMMIT
    names the commit.  The variable wins over git, because a stale repository may lie beside a copied tree; the result
    then says "told".
    """
    if told := os.environ.get("NGUIDE_COMMIT"):
        return {"id": told, "dirty": None, "told": True}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        return subprocess.run(command, cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.CalledProcessError):  # no git, no checkout, or one without its history
        return None
