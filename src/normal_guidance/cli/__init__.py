"""The command ``nguide``: one thin module per stage.

`normal_guidance.cli.commands` lists the commands, `normal_guidance.cli.endings` says how they end.  This file imports
nothing slow: `main` must handle signals before it imports the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normal_guidance.cli.commands import app

__all__ = ["app"]


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from normal_guidance.cli.commands import app

    return app
