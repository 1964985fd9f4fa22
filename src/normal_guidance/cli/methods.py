"""`nguide methods`: list the methods by the names that the other commands take."""

from __future__ import annotations

from normal_guidance.cli.json_output import AsJson, print_json


def methods(as_json: AsJson = False) -> None:
    """List the methods by the names that the other commands take; the paper's come first."""
    from normal_guidance.core.models import BEYOND, EVERY_METHOD

    found = [
        {
            "name": method.name,
            "title": method.title,
            "guided": method.guided,
            "scores_scans": method.scores_scans,
            "parameters": sum(parameter.numel() for parameter in method.build(768).parameters()),
            "when": method.when,
        }
        for method in EVERY_METHOD.values()
    ]
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "method", "guidance", "scan score", "parameters")
    for one in found:
        guided, scored = ("yes" if one[flag] else "no" for flag in ("guided", "scores_scans"))
        table.add_row(str(one["name"]), str(one["title"]), guided, scored, f"{one['parameters']:,}")
    console = Console()
    console.print(table)
    console.print("nguide fit needs no choice of method. The heads that the paper lacks are for research:")
    for method in BEYOND.values():
        if not method.guided:
            console.print(f"{method.name}, {method.name}_ng: {method.when}", soft_wrap=True)
