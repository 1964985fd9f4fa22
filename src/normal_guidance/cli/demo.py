"""`nguide demo`: run the whole chain on drawn head CTs, from DICOM files to a report on new scans.

Every stage is a command of nguide, printed as one would type it and then run.
"""

from __future__ import annotations

import io
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.base.files import difference, make_folder, read_json, write_json
from normal_guidance.cli.command import Out

if TYPE_CHECKING:
    from rich.console import Console

MARK = "demo.json"  # the file that marks the folder as a demo and records its options
SLICES = 20  # the slices of a scan are few enough for two minutes on two cores
NEW_SCANS = 2  # one positive, one negative
COLUMNS = 72  # longer command lines are continued on the next line


def demo(
    context: Any,  # typer's; its class differs between releases
    out: Out = Path("demo-output"),
    scans: Annotated[int, typer.Option(min=40)] = 120,
    seed: Annotated[int, typer.Option(min=0, max=2**31)] = 1001,
) -> None:
    """Run the whole chain on drawn head CTs: index, encode, fit a model, predict new scans, report.

    It needs no data, no network and no GPU. Start it again to resume it.

    Args:
        out: Folder for everything.
        scans: Scans to draw.
        seed: Seed of scans, split and initial weights.
    """
    from rich.console import Console

    begin = time.monotonic()
    console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
    _open(out, {"scans": scans, "seed": seed})
    console.print(
        "Head CTs drawn by a program, half of them with a hemorrhage: no patient, no network, no GPU.\n"
        f"Each step is a command that you can type yourself. Everything goes to {out}."
    )
    planned = stages(out, scans, seed)
    for number, stage in enumerate(planned, start=1):
        _run_stage(context, console, stage, f"{number}/{len(planned)}")
    for line in (*_new_scan_lines(out), *_place_lines(out)):
        console.print(line)
    console.print(f"\nAll of it took {time.monotonic() - begin:.0f} s.")


class Stage(NamedTuple):
    """One command, and the file that it writes last."""

    title: str
    words: tuple[str, ...]
    made: Path


STAGES = (
    (
        "Draw head CTs and write them as DICOM",
        "phantom folder {out}/scans --scans {scans} --slices {slices} --positive 0.5 --contrast 2 --seed {seed}",
        "scans/phantom.json",
    ),
    (
        "Find the scans, put their slices in order, join their labels",
        "index folder {out}/scans --table {out}/scans/labels.csv -o {out}/index",
        "index/manifest.parquet",
    ),
    (
        "Split them by patient: a quarter is kept to test the model on",
        "split {out}/index --seeds {seed} --proportions 2:1:1 -o {out}/splits",
        "splits/split-{seed}.csv",
    ),
    (
        "Encode every slice with a pretrained network, whose weights come inside a package",
        "encode {out}/index --encoder efficientnet-lite0 --offline --device cpu --window head "
        "--split {out}/splits/split-{seed}.csv -o {out}/store",
        "store/store.json",
    ),
    (
        "Fit a model to scan labels alone, with nothing to choose, and test it",
        "fit {out}/store --split {out}/splits/split-{seed}.csv -o {out}/model",
        "model/bundle.json",
    ),
    (
        "Draw new scans, of other patients",
        "phantom folder {out}/new --scans {new} --slices {slices} --positive 0.5 --contrast 2 --seed {next}",
        "new/phantom.json",
    ),
    (
        "Predict them; results as pages, pictures and DICOM",
        "predict {out}/new/scans --model {out}/model --offline --device cpu --dicom -o {out}/predicted",
        "predicted/summary.json",
    ),
)
"""Title, command and last file of each stage; sizes suit two cores, not the best result."""


def stages(out: Path, scans: int, seed: int) -> list[Stage]:
    """Return the stages in order; a path is one word, even with spaces."""
    values = {"out": out, "scans": scans, "slices": SLICES, "seed": seed, "new": NEW_SCANS, "next": seed + 1}
    return [
        Stage(title, tuple(word.format(**values) for word in command.split()), out / made.format(**values))
        for title, command, made in STAGES
    ]


def _open(out: Path, options: Mapping[str, Any]) -> None:
    """Take an empty folder, or one of a demo with the same options; refuse others."""
    make_folder(out)
    now = {"normal_guidance": __version__, **options}
    if not (out / MARK).exists():
        if any(out.iterdir()):
            raise UserError(f"{out} holds other things; choose another folder (-o), or delete it first")
        write_json(out / MARK, now)
    if changed := difference(read_json(out / MARK), now):
        raise UserError(f"{out} holds another demo: {changed}; choose another folder (-o), or delete it first")


def _run_stage(context: Any, console: Console, stage: Stage, number: str) -> None:
    """Run a stage, unless its result exists."""
    console.print(f"\n{number}  {stage.title}", style="bold")
    for line in command_lines(stage.words):
        console.print(f"     {line}", style="cyan")
    if stage.made.exists():
        console.print(f"     done before: {stage.made}")
        return
    begin = time.monotonic()
    printed, command, code = io.StringIO(), context.find_root().command, 0
    with console.status(stage.words[0]), redirect_stdout(printed):
        try:  # `main` would turn an interrupt into an exit code
            with command.make_context("nguide", list(stage.words)) as inner:
                command.invoke(inner)
        except typer.Exit as end:
            code = end.exit_code
    for line in f"\n{printed.getvalue()}".partition("\n# ")[0].splitlines():  # without pages
        if line and not line.endswith(": begins") and not line.startswith("Next: "):
            console.print(f"     {line}")
    if code:
        raise typer.Exit(code)
    console.print(f"     {time.monotonic() - begin:.0f} s", style="dim")


def command_lines(words: Sequence[str]) -> list[str]:
    """Return a command as lines to paste into a shell; long ones break before an option."""
    program = "nguide"
    if not shutil.which(program):  # `make` calls it from .venv, which need not be on the path
        path = Path(sys.executable).with_name(program)
        program = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    lines = [program]
    for word in map(shlex.quote, words):
        if word.startswith("-") and len(lines[-1]) > COLUMNS:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def _new_scan_lines(out: Path) -> Iterator[str]:
    """Yield the predictions beside the truth that was drawn."""
    from normal_guidance.scans.phantom.phantom_files import TRUTH

    truth = {scan["scan_id"]: scan["slice_labels"] for scan in read_json(out / "new" / TRUTH)["scans"]}
    yield "\nNew scans: drawn and predicted\n"
    for line in read_json(out / "predicted" / "summary.json")["scans"]:
        if line["state"] != "predicted":
            continue  # the command has printed why
        drawn = [number for number, label in enumerate(truth[line["scan_id"]], start=1) if label]
        firsts = [number for number in drawn if number - 1 not in drawn]
        lasts = [number for number in drawn if number + 1 not in drawn]
        ranges = ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in zip(firsts, lasts, strict=True))
        right = "right" if bool(line["positive"]) == bool(drawn) else "wrong"
        side = {None: "", 0: f", negative: {right}", 1: f", positive: {right}"}[line["positive"]]
        ends = f"slices {line['interval_first_slice']} to {line['interval_last_slice']}"
        yield f"- {line['scan_id']}, {line['slices']} slices: " + (
            f"a hemorrhage in slices {ranges}" if drawn else "no hemorrhage"
        )
        yield f"  probability {line['probability']:.2f}{side}; key slices {line['key_slices']}"
        if line["interval_meaning"]:
            yield f"  the interval, {ends}, {line['interval_meaning']}"


def _place_lines(out: Path) -> Iterator[str]:
    """Yield the files to look at, and the next commands."""
    yield "\nResults to look at"
    for what, where in (
        ("report", out / "model" / "report.html"),
        ("new scans", out / "predicted" / "index.html"),
        ("pictures", out / "predicted" / "*" / "strip.png"),
        ("DICOM", out / "predicted" / "*" / "dicom"),
    ):
        yield f"  {what:<10} {where}"
    yield "\nThe same in the viewer, which prints the address to open"
    for words in (
        ["view", str(out / "model"), "--index", str(out / "index"), "--store", str(out / "store")],
        ["view", str(out / "predicted")],
    ):
        yield from (f"  {line}" for line in command_lines(words))
    try:
        from normal_guidance.clinic.viewer import server

        server.read_page(server.STATIC)
    except UserError as error:  # it names the next action
        yield f"  Not yet: {error}"
    yield "\nEvery method of the paper beside each other, on the same features"
    words = ["experiment", str(out / "store"), "--split", str(out / "splits"), "--index", str(out / "index")]
    yield from (f"  {line}" for line in command_lines([*words, "-o", str(out / "study")]))
    yield "\nOne small set of phantoms: it shows how everything fits together, not how well it works on patients."
