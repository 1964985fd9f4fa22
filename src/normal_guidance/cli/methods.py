"""`nguide methods`: the table of methods, as every other command names them."""


def methods() -> None:
    """List the methods of the paper by the names that the other commands take."""
    from rich.console import Console
    from rich.table import Table

    from normal_guidance.core.models import METHODS

    table = Table("name", "method", "guidance", "scan score", "parameters")
    for method in METHODS.values():
        count = sum(parameter.numel() for parameter in method.build(768).parameters())
        guided, scored = ("yes" if flag else "no" for flag in (method.guided, method.scores_scans))
        table.add_row(method.name, method.title, guided, scored, f"{count:,}")
    Console().print(table)
