"""`nguide methods`: list the methods and regularizers by the names that the other commands take."""

from __future__ import annotations

from collections.abc import Mapping

from normal_guidance.cli.json_output import AsJson, print_json


def methods(as_json: AsJson = False) -> None:
    """List the methods by the names that the other commands take: the paper's, ours, then those of the field."""
    from normal_guidance.core.methods import BEYOND, EVERY_METHOD, NAMED
    from normal_guidance.core.regularizers import REGULARIZERS

    sizes = {
        name: sum(parameter.numel() for parameter in method.build(768).parameters())
        for name, method in NAMED.items()
        if method.model == name
    }
    found = [
        {
            "name": method.name,
            "title": method.title,
            "model": method.model,
            "regularizer": method.regularizer,
            "guided": method.guided,
            "scores_scans": method.scores_scans,
            "parameters": sizes[method.model],
            "when": method.when,
        }
        for method in EVERY_METHOD.values()
    ]
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "method", "regularizer", "scan score", "parameters")
    for one in found:
        if one["name"] in NAMED:
            scored = "yes" if one["scores_scans"] else "no"
            table.add_row(*(str(one[key] or "") for key in ("name", "title", "regularizer")), scored, _count(one))
    console = Console()
    console.print(table)
    console.print("nguide fit needs no choice of method. The heads that the paper lacks are for research:")
    for method in BEYOND.values():
        if method.regularizer is None:
            console.print(f"{method.name}, {method.name}_ng: {method.when}", soft_wrap=True)
    console.print("Every method with trained attention takes a regularizer, as --regularizer entropy or abmil_entropy:")
    for term in REGULARIZERS.values():
        console.print(f"{term.name}: {term.about}", soft_wrap=True)


def _count(one: Mapping[str, object]) -> str:
    return f"{one['parameters']:,}"
