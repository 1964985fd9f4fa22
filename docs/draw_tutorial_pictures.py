"""Draws docs/images/tutorials: runs each tutorial and keeps the picture that it makes.

The picture of read-a-report is a photograph of the page, with a number at each heading; it needs chromium.

    .venv/bin/python docs/draw_tutorial_pictures.py [NAME ...]
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from documents import TUTORIALS, run_tutorial  # noqa: E402

IMAGES = ROOT / "docs" / "images" / "tutorials"
MOST_WIDTH = 1000
BADGE = '<span style="background:#c00;color:#fff;border-radius:1em;padding:0 .5em;margin-right:.4em">{}</span>'


def main() -> None:
    """Draw the pictures of the named tutorials, or all."""
    names = sys.argv[1:] or sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "index")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            run_tutorial(TUTORIALS / f"{name}.md", Path(folder))
            keep(name, Path(folder))


def keep(name: str, folder: Path) -> None:
    """Keep a tutorial's picture, in few colours and at most so wide."""
    if name == "read-a-report":
        photograph(folder / "model" / "report.html", folder / f"{name}.png")
    with Image.open(folder / f"{name}.png") as image:
        small = image.convert("RGB")
        small.thumbnail((MOST_WIDTH, 10_000))
        IMAGES.mkdir(parents=True, exist_ok=True)
        small.quantize(64).save(IMAGES / f"{name}.png", optimize=True)


def photograph(page: Path, picture: Path) -> None:
    """A picture of a page, with the number of each heading before it."""
    numbers = itertools.count(1)
    text = page.read_text(encoding="utf-8")
    numbered = page.with_name("numbered.html")
    numbered.write_text(
        re.sub(r"<h2[^>]*>", lambda found: found[0] + BADGE.format(next(numbers)), text), encoding="utf-8"
    )
    subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,2400"),
            *(f"--screenshot={picture}", numbered.as_uri()),
        ],
        check=True,
        capture_output=True,
    )


if __name__ == "__main__":
    main()
