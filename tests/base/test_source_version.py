"""The commit of the running code: the package's own checkout, or the one that NGUIDE_COMMIT names."""

import subprocess
from pathlib import Path

import pytest

from normal_guidance.base.system import source_version


def test_a_checkout_is_the_package_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NGUIDE_COMMIT", raising=False)

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    ours, theirs = tmp_path / "src" / "ours", tmp_path / ".venv" / "theirs"
    for package in (ours, theirs):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    assert source_version(ours) is None
    git("init", "-q")
    git("add", "src")
    git("commit", "-q", "-m", "one")
    assert source_version(ours) == {"id": git("rev-parse", "HEAD"), "dirty": False}
    assert source_version(theirs) is None  # installed inside a checkout that is not its own
    (ours / "new.py").write_text("")
    assert source_version(ours) == {"id": git("rev-parse", "HEAD"), "dirty": True}


def test_a_commit_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGUIDE_COMMIT", "abc123")
    assert source_version(tmp_path) == {"id": "abc123", "dirty": None, "told": True}
    # It wins over git, which may tell of a stale repository beside a copied tree.
    assert source_version() == {"id": "abc123", "dirty": None, "told": True}
