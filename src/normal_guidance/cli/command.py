"""The class of every command."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from normal_guidance.cli import endings


class Command(TyperCommand):
    """A command whose name and options `endings` knows, so that it can say how to go on."""

    def invoke(self, ctx: Any) -> Any:  # Any: the class differs between releases of typer
        endings.begin(ctx.command_path.removeprefix(ctx.find_root().command_path).strip(), ctx.params)
        return super().invoke(ctx)
