"""Draws docs/images/tutorials: runs each tutorial and keeps the picture that it makes.

Those of PHOTOGRAPHED are photographs of a page that the tutorial leaves; they need chromium.

    .venv/bin/python docs/draw_tutorial_pictures.py [NAME ...]
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from documents import PHOTOGRAPHED, TUTORIALS, run_tutorial  # noqa: E402

IMAGES = ROOT / "docs" / "images" / "tutorials"
NUMBERED = {"read-a-report"}
MOST_WIDTH, MOST_HEIGHT = 1000, 2400
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
    if name in PHOTOGRAPHED:
        photograph(folder / PHOTOGRAPHED[name], folder / f"{name}.png", numbered=name in NUMBERED)
    with Image.open(folder / f"{name}.png") as image:
        small = without_margin(image.convert("RGB"))
        small.thumbnail((MOST_WIDTH, 10_000))
        IMAGES.mkdir(parents=True, exist_ok=True)
        small.quantize(64).save(IMAGES / f"{name}.png", optimize=True)


def without_margin(image: Image.Image) -> Image.Image:
    """The picture without the empty part below."""
    ground = Image.new("RGB", image.size, image.getpixel((image.width - 1, image.height - 1)))
    *_, bottom = ImageChops.difference(image, ground).getbbox()
    return image.crop((0, 0, image.width, min(image.height, bottom + 16)))


def photograph(page: Path, picture: Path, numbered: bool) -> None:
    """A picture of a page, with the number of each heading before it if the text refers to them."""
    if numbered:
        numbers, text = itertools.count(1), page.read_text(encoding="utf-8")
        page = page.with_name("numbered.html")
        page.write_text(
            re.sub(r"<h2[^>]*>", lambda found: found[0] + BADGE.format(next(numbers)), text), encoding="utf-8"
        )
    subprocess.run(
        [
            *(
                "chromium",
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--window-size={MOST_WIDTH},{MOST_HEIGHT}",
            ),
            *(f"--screenshot={picture}", page.as_uri()),
        ],
        check=True,
        capture_output=True,
    )


if __name__ == "__main__":
    main()
