"""The notebooks: committed without outputs, and they run; their pages have what they print and draw."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from documents import load_module

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'normal-guidance[docs]'")
pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'normal-guidance[docs]'")

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
hook = load_module(DOCS / "notebook_hook.py")


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_there_are_three() -> None:
    assert NAMES == ["compare-methods", "fit-own-scans", "own-loop"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_is_committed_without_outputs(path: Path) -> None:
    cells = read(path).cells
    assert cells[0].source.startswith("# ")
    for cell in cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            assert max(map(len, cell.source.splitlines())) <= 120
            ast.parse(cell.source)


def test_a_page_has_text_code_and_outputs() -> None:
    made = nbformat.v4
    outputs = [
        made.new_output("display_data", data={"image/png": "iVBORw==", "text/plain": "<Figure>"}),
        made.new_output("execute_result", data={"text/html": '<table class="dataframe">', "text/plain": "table"}),
        made.new_output("display_data", data={"text/html": "", "text/plain": "a bar that has gone"}),
        made.new_output("stream", text="said\n"),
    ]
    cells = [made.new_markdown_cell("# Title"), made.new_code_cell("f()", outputs=outputs)]
    page = hook.as_page(made.new_notebook(cells=cells), "own")
    assert page.pop("own-1.png") == b"\x89PNG"
    assert page.pop("own.md").split("\n\n") == [
        "# Title",
        "```python\nf()\n```",
        "![What the code above draws](own-1.png)",
        '<div class="output"><table></div>',
        "",
        "```text\nsaid\n```",
        "[Download this notebook](own.ipynb)\n",
    ]
    assert not page


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_runs_and_draws(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'normal-guidance[docs]'")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    notebook = read(path)
    hook.execute(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
