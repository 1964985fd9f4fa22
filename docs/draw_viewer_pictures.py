"""Draws docs/images/viewer.png and docs/images/viewer-compare.png: photographs of `nguide view`, which need chromium.

Runs `nguide demo`, trains two methods on its features, and opens the model, then both methods side by side.

    .venv/bin/python docs/draw_viewer_pictures.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
NGUIDE = (sys.executable, "-m", "normal_guidance.cli")
SIZE = {"width": 1366, "height": 768}
STUDY = "--methods abmil,ng --lr 0.1,0.01 --l1 0,0.001 --epochs 40"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "demo -o demo")
        run(folder, "split demo/model.index --seeds 1 -o splits")
        run(folder, f"experiment demo/model.store --split splits/split-1.csv --index demo/model.index {STUDY} -o study")
        with sync_playwright() as tool:
            browser = tool.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE)
            with served(folder, "demo/model") as address:
                open_positive_scan(page, address)
                page.screenshot(path=IMAGES / "viewer.png")
            with served(folder, "study") as address:
                open_positive_scan(page, address)
                page.select_option("#method-a", "abmil")
                page.select_option("#method-b", "ng")
                page.get_by_text("Side by side").click()
                page.wait_for_timeout(3000)
                page.screenshot(path=IMAGES / "viewer-compare.png")
            browser.close()


def run(folder: Path, words: str) -> None:
    subprocess.run([*NGUIDE, *words.split()], cwd=folder, check=True)


@contextmanager
def served(folder: Path, shown: str) -> Iterator[str]:
    """The address at which `nguide view` shows a folder."""
    words = [*NGUIDE, "view", shown, "--index", "demo/model.index", "--store", "demo/model.store", "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield next(found[1] for line in server.stdout if (found := re.search(r"Open (http://\S+)", line)))
        server.terminate()


def open_positive_scan(page: Page, address: str) -> None:
    """The positive scan with the highest score, at its most attended slice, with time to draw it."""
    page.goto(address)
    page.select_option("#label", "1")
    page.wait_for_timeout(2000)


if __name__ == "__main__":
    main()
