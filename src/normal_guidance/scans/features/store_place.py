"""Whether a folder is a feature store: told without torch, so that a wrong folder is refused at once."""

from pathlib import Path

from normal_guidance.base.errors import UserError

ABOUT = "store.json"  # the file that makes a folder a feature store


def is_store(folder: Path) -> bool:
    """Whether a folder is a feature store."""
    return (folder / ABOUT).is_file()


def check_store(folder: Path) -> None:
    """Refuse what is not a feature store."""
    if folder.is_file():
        raise UserError(
            f"{folder} is a file, not a feature store; if it holds features, import it: nguide store import {folder} "
            "-o STORE"
        )
    if is_store(folder):
        return
    if (folder / "manifest.parquet").is_file():
        raise UserError(f"{folder} is an index, not a feature store; encode its scans: nguide encode {folder} -o STORE")
    raise UserError(f"{folder} is not a feature store: {ABOUT} is missing; give a folder made by nguide encode")
