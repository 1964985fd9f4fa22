"""The commands of ``nguide``.

A command's module imports torch, pandas and the like inside its function, so that ``nguide --help`` answers at once.
To add one, write a function into the file of its group and add it to the panels at the end of this file.
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

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            param.hidden = True  # the help ends with them, so that it can begin with the commands
        return params

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
    epilog="nguide COMMAND --help explains a command. Also: --version, --install-completion (the TAB key).",
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


PANELS: dict[str, dict[Any, str]] = {
    "Start here": {
        fit: "Fit a model to scans and a table of labels, and say what it can do",
        predict: "Predict new scans: probability, attention along the slices, key slices",
        view: "Look at models, predictions and scans in the browser",
        demo: "Run the whole chain on drawn head CTs: draw, fit, predict, show",
    },
    "Step by step: scans to features": {
        index: "Find scans, order their slices, join their labels, report problems",
        split: "Divide scans into train, val and test, by patient",
        audit: "Check that parts share no patient, scan or slice",
        describe: "Describe indexed scans: lengths, and where findings lie",
        encode: "Turn indexed scans into a store of features",
        store_app: "Show, verify, import and export stores of features",
        weights_app: "List, import and check the pretrained weights of encoders",
        phantom: "Draw CT scans with lesions, as DICOM, with their truth",
    },
    "Methods and studies": {
        methods: "List the methods by name",
        sweep: "Train methods over a grid, all configurations at once",
        experiment: "Train methods on every split, compare them, write the report",
        reproduce: "Repeat the paper's study, or a public one",
        trust: "Test whether a model's attention can be trusted",
    },
    "Models at work": {
        bundle: "Copy a model without patient data, with another threshold if asked",
        export: "Write a model as ONNX or as PyTorch's exported program",
        hub_app: "Share models on the Hugging Face Hub, and fetch them",
        node: "Run a DICOM node: series in, results into the archive",
        doctor: "Check this installation, and say how to mend it",
    },
}
"""The panels of ``nguide --help``: each command, or group of commands, with its line there."""

GROUPS = {store_app: "store", weights_app: "weights", hub_app: "hub"}

for panel, listed in PANELS.items():
    for command, about in listed.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=GROUPS[command], short_help=about, rich_help_panel=panel)
        else:
            add_command(app, command, about=about, panel=panel)
