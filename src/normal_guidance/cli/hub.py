"""`nguide hub`: models to and from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normal_guidance.cli.command import Command, Group
from normal_guidance.cli.json_output import AsJson, print_json

hub_app = typer.Typer(
    help="Share models on the Hugging Face Hub, and fetch them.",
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Repository = Annotated[str, typer.Argument(help="Repository on the Hub.", metavar="OWNER/NAME")]


@hub_app.command(cls=Command)
def push(
    model: Annotated[Path, typer.Argument(help="Folder of nguide fit, of a bundle, or of a run.", metavar="MODEL")],
    repository: Repository,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        Path | None,
        typer.Option("--dry-run", metavar="DIR", help="Write the files to this new folder, and upload nothing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a model with a model card: weights (safetensors), bundle.json, README.md; no code, no patient data."""
    from normal_guidance.fit.hub import push_to_hub

    files = push_to_hub(model, repository, private=private, dry_run=dry_run)
    if as_json:
        print_json({"repository": repository, "uploaded": dry_run is None, "folder": dry_run, "files": files})
        return
    where = repository if dry_run is None else f"{dry_run}; nothing was uploaded"
    typer.echo(f"{', '.join(files)}: written to {where}")


@hub_app.command(cls=Command)
def pull(
    repository: Repository,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model; it must be new or empty.")],
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag. Default: the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download a model that nguide hub push uploaded, and check it; no code is taken."""
    from normal_guidance.fit.hub import pull_from_hub

    bundle = pull_from_hub(repository, out, revision)
    if as_json:
        print_json({"folder": out, "model": bundle.identity.as_json()})
        return
    typer.echo(f"{out}: {bundle.identity}, made for {bundle.expects}")
    typer.echo(f"Next: nguide predict {'SCAN' if bundle.encoder else 'FEATURES'} --model {out} -o OUT")
