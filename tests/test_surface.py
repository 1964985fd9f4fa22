"""Nothing that a user sees is lost: commands, options, names, choices and files are those of tests/surface.json.

A change of the surface is made on purpose: `python tests/test_surface.py` writes the file again, and the difference
stands in the commit.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "normal_guidance"
KEPT = Path(__file__).with_name("surface.json")

CHOICES = {
    "methods": "core.methods:METHODS",
    "methods beyond the paper": "core.methods:BEYOND",
    "methods of the field": "core.methods:FIELD",
    "regularizers": "core.regularizers:REGULARIZERS",
    "divergences": "core.guidance:DIVERGENCES",
    "negatives": "core.guidance:NEGATIVES",
    "sources": "scans.index.indexing:SOURCES",
    "import formats": "scans.features.convert:IMPORT_FORMATS",
    "export formats": "scans.features.convert:EXPORT_FORMATS",
    "encoders": "scans.features.encoders:ENCODERS",
    "phantoms": "scans.phantom.phantom_files:LAYOUTS",
    "oddities": "scans.phantom.drafts:ODDITIES",
    "compressions": "scans.phantom.phantom_files:COMPRESSIONS",
    "destinations": "clinic.node.sending:KINDS",
}
"""What a user chooses between -> the table in the code."""

FILES = (
    *("manifest.parquet", "index.parquet", "history.parquet", "predictions.parquet", "store.json", "config.json"),
    *("report.json", "scores.json", "bundle.json", "findings.json", "prediction.json", "summary.json", "trust.json"),
    *("phantom.json", "problems.csv", "slices.csv", ".job", "queue.sqlite", "audit.jsonl"),
)
"""Files that users and other programs open; .job ends the folder of an encoding that is not done."""


def command_tree(command: Any, name: str) -> dict[str, Any]:
    """Every command under ``name``: its help and its parameters."""
    group = getattr(command, "commands", None)
    if group is not None:
        below = [command_tree(each, f"{name} {word}") for word, each in sorted(group.items())]
        return {path: each for tree in below for path, each in tree.items()}
    parameters = {parameter.name: parameter_facts(parameter) for parameter in command.params}
    return {name: {"help": " ".join((command.help or "").split()), "parameters": parameters}}


def parameter_facts(parameter: Any) -> dict[str, Any]:
    default = parameter.default
    return {
        "options": [*parameter.opts, *parameter.secondary_opts],
        "kind": getattr(parameter.type_descriptor.annotation, "__name__", "")
        if hasattr(parameter, "type_descriptor")
        else "",
        "flag": bool(getattr(parameter, "is_flag", False)),
        "default": default if default is None or isinstance(default, bool | int | float | str) else str(default),
        "required": parameter.required,
        "several": parameter.multiple or parameter.nargs != 1,
        "help": " ".join((getattr(parameter, "help", None) or "").split()),
    }


def documented_names() -> list[str]:
    """The names of docs/reference, without the modules that they lie in."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    return sorted({line.rpartition(".")[2] for line in lines if line.startswith("::: ")})


def choices(place: str) -> list[str]:
    module, _, table = place.partition(":")
    return sorted(getattr(importlib.import_module(f"normal_guidance.{module}"), table))


def source() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py")))


def surface() -> dict[str, Any]:
    """All that a user of this version can name."""
    import normal_guidance
    from normal_guidance import clinic as clinical
    from normal_guidance import figures
    from normal_guidance.cli import endings
    from normal_guidance.cli.commands import app

    text = source()
    return {
        "commands": command_tree(typer.main.get_command(app), "nguide"),
        "names": sorted(normal_guidance.__all__),
        "names for new scans": sorted(clinical.__all__),
        "figures": sorted(figures.__all__),
        "documented": documented_names(),
        "choices": {title: choices(place) for title, place in CHOICES.items()},
        "exit codes": sorted({str(ending.code) for ending in endings.ENDINGS}),
        "variables": sorted(set(re.findall(r"NGUIDE_[A-Z]+", text))),
        "files": [name for name in FILES if name in text],
    }


def lost(before: Any, now: Any, path: str = "") -> list[str]:
    """What ``before`` holds and ``now`` does not, or has otherwise."""
    if isinstance(before, dict) and isinstance(now, dict):
        gone = [f"{path}/{key}: gone" for key in before if key not in now]
        return gone + [line for key in before if key in now for line in lost(before[key], now[key], f"{path}/{key}")]
    if isinstance(before, list) and isinstance(now, list) and all(isinstance(each, str) for each in before):
        return [f"{path}: {each} is gone" for each in before if each not in now]
    return [] if before == now else [f"{path}: {before!r} was {now!r}"]


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return surface()


def test_nothing_that_a_user_sees_is_lost(now):
    before = json.loads(KEPT.read_text(encoding="utf-8"))
    assert lost(before, now) == []
    assert lost(now, before) == [], "something is new: python tests/test_surface.py writes surface.json again"


def test_the_guard_can_fail(now):
    less = copy.deepcopy(now)
    del less["commands"]["nguide fit"]["parameters"]["seed"]
    less["choices"]["sources"].remove("folder")
    less["commands"]["nguide view"]["parameters"]["port"]["default"] = 1
    less["names"].remove("fit")
    assert sorted(line.partition(": ")[0] for line in lost(now, less)) == [
        "/choices/sources",
        "/commands/nguide fit/parameters/seed",
        "/commands/nguide view/parameters/port/default",
        "/names",
    ]


if __name__ == "__main__":
    KEPT.write_text(json.dumps(surface(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
