"""`nguide trust`: test whether the attention of a trained model can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.completion import one_of
from normal_guidance.cli.json_output import AsJson, print_json, valid_json
from normal_guidance.cli.training_options import Device

if TYPE_CHECKING:
    from rich.table import Table

    from normal_guidance.study.trust.attention_tests import By
    from normal_guidance.study.trust.examine import Trust

PARTS = ("val", "test")
BY = ("slices", "attention")


def trust(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run that nguide sweep or nguide experiment wrote, or of a model of nguide fit.",
            metavar="RUN",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for trust.json, trust.md and trust.png.")],
    store: Annotated[
        Path | None,
        typer.Option(help="Folder of the run's feature store. Default: the path that a run records; a model needs it."),
    ] = None,
    split: Annotated[
        Path | None,
        typer.Option(
            help="Table (.csv, .parquet) with scan_id and part. Default: the run's, or the store's own parts."
        ),
    ] = None,
    part: Annotated[
        str,
        typer.Option(
            help="Scans to test on: test, or val for a run; a model of nguide fit was trained on val.",
            autocompletion=one_of(PARTS),
        ),
    ] = "test",
    group: Annotated[str, typer.Option(help="Name of the winner, where the run has several.")] = "",
    by: Annotated[
        str, typer.Option(help="Remove by share of slices or of attention.", autocompletion=one_of(BY))
    ] = "slices",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Test a model's attention: shuffle slices, randomise weights, delete and insert slices, alarm if inverted.

    Each test reports a number, its value by chance, an interval and a verdict: passes, fails, or cannot be told. No
    slice labels are needed. The exit code is 0 whatever the verdicts.
    """
    from normal_guidance.base.files import make_folder, write_atomically, write_json
    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.cli.training_options import choose_execution
    from normal_guidance.fit.bundle import BUNDLE
    from normal_guidance.scans.index.manifest import refuse_several
    from normal_guidance.study.figures.deletion import draw_trust
    from normal_guidance.study.trust.examine import examine_bundle, examine_run, trust_page

    chosen, where = _by(by), choose_execution(device, "auto").device
    console = make_console(stderr=as_json)
    with console.status("Testing") as status:  # shown on a terminal only

        def watch(done: float) -> None:
            status.update(f"Testing: {done:.0%}")

        refuse_several(run)
        if (run / BUNDLE).is_file():
            found = examine_bundle(run, store=store, split=split, part=part, by=chosen, device=where, watch=watch)
        else:
            found = examine_run(
                run, store=store, split=split, part=part, group=group, by=chosen, device=where, watch=watch
            )
    make_folder(out)
    if found.curves is not None:
        draw_trust(found.curves, out / "trust.png", by=found.by)
    page = trust_page(found, picture=None if found.curves is None else "trust.png")
    write_atomically(out / "trust.md", page.encode())
    written = valid_json({"run": run, "part": part, **found.as_json()})
    write_json(out / "trust.json", written)
    if as_json:
        print_json(written)
        return
    console.print(_table(found))
    for note in found.notes:
        say(console, note)
    for finding in found.findings:
        todo = "" if finding.verdict == "passes" else f" What to do: {finding.action}"
        say(console, f"{finding.title}: {finding.verdict}. {finding.meaning}{todo}")
    say(console, f"Details: {out / 'trust.md'}")


def _by(text: str) -> By:
    match text:
        case "slices" | "attention":
            return text
    raise UserError(f"--by {text} is unknown; choose one of {', '.join(BY)}")


def _table(found: Trust) -> Table:
    from rich.table import Table

    from normal_guidance.study.trust.examine import verdict_table

    grid = verdict_table(found)
    table = Table(*grid.header, title=grid.title)
    for row in grid.rows:
        table.add_row(*row)
    return table
