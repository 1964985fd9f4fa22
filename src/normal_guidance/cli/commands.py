"""The commands of ``nguide``.

A command's module imports torch, pandas and the like inside its function, so that ``nguide --help`` answers at once.
To add one, write a function into the file of its group and add it to the list at the end of this file.
"""

import os
from typing import Annotated, Any

import typer

from normal_guidance import __version__
from normal_guidance.base.system import keep_freed_memory
from normal_guidance.cli import endings
from normal_guidance.cli.clinic import node, predict, view
from normal_guidance.cli.command import OTHER_COMMANDS, CommandGroup, add_command
from normal_guidance.cli.demo import demo
from normal_guidance.cli.doctor import doctor
from normal_guidance.cli.features import encode, store_app, weights_app
from normal_guidance.cli.model import bundle, export, fit, hub_app
from normal_guidance.cli.scans import audit, describe, index, phantom, split
from normal_guidance.cli.study import experiment, reproduce
from normal_guidance.cli.train import methods, sweep, trust

# Must be set before torch is imported.  OpenMP's threads spin while they wait; where cores are shared (containers,
# clusters) that made the demo take 7 minutes instead of 30 seconds.  The price: about 15 % on an idle machine (LOG.md).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


class Commands(CommandGroup):
    """The commands; every known way to end becomes one red line on stderr, without a traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if args and args[0] in OTHER_COMMANDS:
                error.message = f"No such command {args[0]!r}: {OTHER_COMMANDS[args[0]]}."  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:  # Any: the class differs between releases of typer
        with endings.outermost() as outermost:
            try:
                return super().invoke(ctx)
            except BaseException as error:
                ending = endings.ending_of(error)
                if ending is None or not outermost:
                    raise
                endings.print_ending(ending, error, lambda line: typer.secho(line, fg=typer.colors.RED, err=True))
                raise typer.Exit(ending.code) from error


app = typer.Typer(
    name="nguide",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    # A traceback that prints local variables could print a patient's data.
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"nguide {__version__}")
        raise typer.Exit()
    return wanted


@app.callback()
def nguide(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find the slices that matter in a 3D medical scan when only the whole scan carries a label."""
    keep_freed_memory()


for command in (
    *(demo, phantom, index, split, audit, describe, encode, fit, methods, sweep, experiment, reproduce),
    *(trust, bundle, export, predict, node, view, doctor),
):
    add_command(app, command)
app.add_typer(hub_app, name="hub")
app.add_typer(store_app, name="store")
app.add_typer(weights_app, name="weights")
