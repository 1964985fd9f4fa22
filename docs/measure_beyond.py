"""Measures what docs/results/beyond.md says is measured: points (docs/beyond/points.py) on the paper's seeds.

    .venv/bin/python docs/measure_beyond.py --list                              axes, points, and what is lacking
    .venv/bin/python docs/measure_beyond.py --device cuda --precision tf32 --jobs 6 --seconds 540
    .venv/bin/python docs/measure_beyond.py --only form,width --seeds 1001      some of it
    .venv/bin/python docs/measure_beyond.py --tables                            tables of what is there, no training
    .venv/bin/python docs/measure_beyond.py --write                             the same into the page, with figures

Every job and seed leaves a small file in --runs; started again, only what is lacking is done.  A trial on a CPU:

    .venv/bin/python docs/measure_beyond.py --sizes 640,160,160 --features 16 --epochs 5 --runs results/beyond-trial
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import get_args

from beyond.points import AXES, Protocol, jobs_of, points_of
from beyond.results import read_all
from beyond.working import Setting, Task, lacking, work

from normal_guidance.errors import UserError
from normal_guidance.simulate.semi_synthetic import SEEDS
from normal_guidance.training.engine import Precision
from normal_guidance.training.sweep import Execution

RUNS = Path(__file__).parent / "results/runs/study"
"""What the page is made of."""


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        return _main(chosen)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    whole = Protocol()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(AXES), help="axes, joined by commas")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="joined by commas")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=get_args(Precision))
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--epochs", type=int, default=whole.epochs)
    parser.add_argument("--patience", type=int, default=whole.patience)
    parser.add_argument("--batch-size", type=int, default=whole.batch_size)
    parser.add_argument(
        "--train-above-val",
        action=argparse.BooleanOptionalAction,
        default=whole.train_above_val,
        help="select only epochs whose training AUROC is above validation's, as the paper does",
    )
    parser.add_argument("--seconds", type=float, help="stop after so many; what is under way then is left")
    parser.add_argument("--sizes", help="training, validation and test scans of a trial, joined by commas")
    parser.add_argument("--features", type=int, help="features of a trial")
    parser.add_argument("--list", action="store_true", help="train nothing, count points")
    parser.add_argument("--tables", action="store_true", help="train nothing, print the tables")
    parser.add_argument("--write", action="store_true", help="train nothing, write tables and figures into the page")
    return parser


def _main(chosen: argparse.Namespace) -> int:
    axes = _among(chosen.only.split(","), list(AXES), "axis")
    seeds = [int(seed) for seed in _among(chosen.seeds.split(","), list(map(str, SEEDS)), "seed")]
    protocol = Protocol(
        epochs=chosen.epochs,
        patience=chosen.patience,
        batch_size=chosen.batch_size,
        train_above_val=chosen.train_above_val,
        sizes=_sizes(chosen.sizes),
        features=chosen.features,
    )
    if chosen.tables or chosen.write:
        return _show(chosen.runs, protocol, write=chosen.write)
    if chosen.jobs < 1:
        raise UserError(f"--jobs {chosen.jobs}: give at least 1 process")
    setting = Setting(
        folder=chosen.runs,
        protocol=protocol,
        execution=Execution(device=chosen.device, precision=chosen.precision),
        processes=chosen.jobs,
        deadline=None if chosen.seconds is None else time.time() + chosen.seconds,
    )
    if chosen.list:
        return _list(axes, seeds, setting)
    tasks = [Task(job, seed) for job in jobs_of(*axes) for seed in seeds]
    missing = lacking(tasks, setting)
    print(f"{len(tasks)} tasks, {len(tasks) - len(missing)} done before", flush=True)
    failed = work(missing, setting, lambda text: print(text, flush=True))
    left = len(lacking(tasks, setting))
    print(f"{len(tasks) - left} of {len(tasks)} done, {len(failed)} failed", flush=True)
    return 1 if failed else 0


def _among(names: list[str], known: list[str], what: str) -> list[str]:
    for name in names:
        if name not in known:
            raise UserError(f"{what} {name!r} is unknown; choose among {', '.join(known)}")
    return names


def _sizes(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    try:
        train, val, test = map(int, text.split(","))
    except ValueError as error:
        raise UserError(f"--sizes {text!r}: give three whole numbers, such as 640,160,160") from error
    return train, val, test


def _list(axes: list[str], seeds: list[int], setting: Setting) -> int:
    seen = 0
    for axis in axes:
        jobs, points = jobs_of(axis), points_of(axis)
        every = jobs_of(*axes[: axes.index(axis) + 1])  # a job is done with the first axis that needs it
        missing = len(lacking([Task(job, seed) for job in every[seen:] for seed in seeds], setting))
        print(
            f"{axis:12} {len(points):3} points of {len(jobs):3} jobs, {len(every) - seen:3} new: "
            f"{(len(every) - seen) * len(seeds):3} tasks, {missing:3} lacking"
        )
        seen = len(every)
    return 0


def _show(folder: Path, protocol: Protocol, *, write: bool) -> int:
    from beyond.page import sections, write_page  # figures and tables: not where things are only trained

    found = read_all(folder, jobs_of(*AXES), list(SEEDS), protocol)
    if write:
        write_page(found, protocol)
    else:
        for name, made in sections(found, protocol).items():
            print(f"## {name}\n\n{made}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
