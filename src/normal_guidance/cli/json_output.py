"""The option ``--json``: standard output holds one JSON document and nothing else; progress goes to stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else to standard output.")]


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a document; a command that also writes it to a file writes the same."""
    typer.echo(json.dumps(valid_json(value), indent=indent, allow_nan=False))


def valid_json(value: Any) -> Any:
    """Return the value as strict JSON: null for NaN and infinity, text for paths."""
    if isinstance(value, Mapping):
        return {str(name): valid_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
