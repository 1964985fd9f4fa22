"""`nguide demo`: fit a model to drawn head CTs and predict new ones, beside the truth that was drawn.

Every stage is a command of nguide, printed as one would type it and then run.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
SLICES = 12  # many short scans teach more than few long ones, in the same 100 s on two cores
NEW_SCANS = 4  # two positive, two negative
COLUMNS = 72  # longer command lines are continued on the next line


def demo(
    context: Any,  # typer's; its class differs between releases
    out: Out = Path("demo-output"),
    scans: Annotated[int, typer.Option(min=40)] = 200,
    seed: Annotated[int, typer.Option(min=0, max=2**31)] = 1001,
) -> None:
    """Fit a model to drawn head CTs, predict new ones, and compare with what was drawn.

    It needs no data, no network and no GPU. Start it again to resume it.

    Args:
        out: Folder for everything.
        scans: Scans to draw.
        seed: Seed of the scans.
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
        "phantom folder {out}/scans --scans {scans} --slices {slices} --positive 0.5 --contrast 5 --seed {seed}",
        "scans/phantom.json",
    ),
    (
        "Fit a model: slices in order, features by a pretrained network that comes inside a package, an ensemble",
        "fit {out}/scans {out}/scans/labels.csv -o {out}/model",
        "model/bundle.json",
    ),
    (
        "Draw new scans, of other patients",
        "phantom folder {out}/new --scans {new} --slices {slices} --positive 0.5 --contrast 5 --seed {next}",
        "new/phantom.json",
    ),
    (
        "Predict them; results as pages, pictures and DICOM",
        "predict {out}/new/scans --model {out}/model --dicom -o {out}/predicted",
        "predicted/summary.json",
    ),
)
"""Title, command and last file of each stage; sizes suit two cores."""


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
    begin, command = time.monotonic(), context.find_root().command
    try:  # `main` would turn an interrupt into an exit code
        with command.make_context("nguide", list(stage.words)) as inner:
            command.invoke(inner)
    except typer.Exit as end:
        if end.exit_code:
            raise
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
    """Yield each prediction beside the truth that was drawn, and where to look."""
    from normal_guidance.scans.phantom.phantom_files import TRUTH

    truth = {scan["scan_id"]: scan["slice_labels"] for scan in read_json(out / "new" / TRUTH)["scans"]}
    right = 0
    yield "\nNew scans: drawn and predicted"
    for line in read_json(out / "predicted" / "summary.json")["scans"]:
        if line["state"] != "predicted":
            continue  # the command has printed why
        scan, positive = line["scan_id"], bool(line["positive"])
        drawn = [number for number, label in enumerate(truth[scan], start=1) if label]
        firsts = [number for number in drawn if number - 1 not in drawn]
        lasts = [number for number in drawn if number + 1 not in drawn]
        ranges = ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in zip(firsts, lasts, strict=True))
        noun = "slice" if len(drawn) == 1 else "slices"
        right += positive == bool(drawn)
        yield (
            f"- {scan}, {line['slices']} slices: {f'a hemorrhage in {noun} {ranges}' if drawn else 'no hemorrhage'}, "
            f"predicted {'positive' if positive else 'negative'} ({line['probability']:.2f}): "
            f"{'right' if positive == bool(drawn) else 'WRONG'}"
        )
        if positive:
            first, *others = line["key_slices"].split()
            shown = "shows it" if int(first) in drawn else "does NOT show one"
            yield f"  look first at slice {first}, which {shown}" + (f", then at {', '.join(others)}" if others else "")
    yield f"{right} of {len(truth)} right."


def _place_lines(out: Path) -> Iterator[str]:
    """Yield the files to look at, and the next commands."""
    yield "\nResults to look at"
    for what, where in (
        ("report", out / "model" / "report.html"),
        ("new scans", out / "predicted" / "index.html"),
        ("DICOM", out / "predicted" / "*" / "dicom"),
    ):
        yield f"  {what:<10} {where}"
    yield "\nThe same in the viewer, which prints the address to open"
    for shown in ("model", "predicted"):
        yield from (f"  {line}" for line in command_lines(["view", str(out / shown)]))
    try:
        from normal_guidance.clinic.viewer import server

        server.read_page(server.STATIC)
    except UserError as error:  # it names the next action
        yield f"  Not yet: {error}"
    yield "\nDrawn lesions are clearer than many real ones: this shows how it works, not how well on patients."
