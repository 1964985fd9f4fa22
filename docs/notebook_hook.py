"""Notebooks as pages of the site, with what they print and draw where EXECUTE_NOTEBOOKS is set, as `make docs` sets it.

mkdocs.yml names this file as a hook.  The notebooks are committed without outputs; executing them takes minutes.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File

FOLDER = "notebooks"


def on_files(files: Any, config: Any) -> Any:
    for path in sorted((Path(config.docs_dir) / FOLDER).glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if os.environ.get("EXECUTE_NOTEBOOKS"):
            execute(notebook)
        for name, content in as_page(notebook, path.stem).items():
            files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to a notebook lead to its page, but for the one on its page, which downloads it."""
    if page.file.src_uri.startswith(f"{FOLDER}/"):
        return markdown
    return re.sub(rf"(\]\((?:\.\./)*{FOLDER}/[\w-]+)\.ipynb\)", r"\1.md)", markdown)


def execute(notebook: Any) -> None:
    """Run all cells; the first error ends it.  A drawing needs the notebook's own backend."""
    from nbclient import NotebookClient

    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute(env=environment)


def as_page(notebook: Any, stem: str) -> dict[str, str | bytes]:
    """The page of a notebook and its pictures, by the names of their files."""
    lines: list[str] = []
    pictures: dict[str, str | bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            lines.append(cell.source)
            continue
        lines.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            shown = output.get("data", {})
            if "image/png" in shown:
                name = f"{stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(shown["image/png"])
                lines.append(f"![What the code above draws]({name})")
            elif "text/html" in shown:
                table = re.sub(r' (border="\d"|class="dataframe")', "", shown["text/html"])
                lines.append(f'<div class="output">{table}</div>' if table else "")
            elif text := shown.get("text/plain", output.get("text", "")):
                lines.append(f"```text\n{text.rstrip()}\n```")
    lines.append(f"[Download this notebook]({stem}.ipynb)")
    return {f"{stem}.md": "\n\n".join(lines) + "\n", **pictures}
