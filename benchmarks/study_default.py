"""What `nguide fit` makes beside every single method, on many kinds of data; a line of JSON for each part.

    python benchmarks/study_default.py SETS --sets head,prostate --methods ensemble,ng --repeats 3 --out OUT

SETS is a folder with one feature store for each set, in a folder of its name: what `nguide encode -o SETS/NAME` or
`nguide store import -o SETS/NAME` makes.  Every set is divided into five folds by patient, `--repeats` times.  A fold
is predicted by an ensemble of the other four, or by the best by validation AUROC of a method's 32 configurations,
trained on four fifths of the other four folds and chosen on the last.  A set `semi/VARIANT/SEED` is drawn, and its own
test part is predicted.

Jobs run side by side in `--jobs` processes, in the order of the options; those left when `--minutes` are over are not
begun.  OUT gets results.jsonl (a line for each job: scan scores and localization of the predicted scans) and
attention-N.npz, the slice scores of each job.  Finished jobs in OUT are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normal_guidance.core.arrays import bag_of_rows, place_in_bag
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import DISTINCT, ENSEMBLE, EVERY_METHOD
from normal_guidance.core.metrics import localization
from normal_guidance.core.prediction import Prediction
from normal_guidance.fit.fit_ensemble import KINDS, fit_ensemble, make_plan
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.splits import fold_scans
from normal_guidance.sweep.config import Config, Execution, fitting_batch, grid_of_method
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.run import winner_model
from normal_guidance.sweep.sweep import Winner, sweep
from report import machine, names

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "studies"))
from variants import semi_synthetic

FOLDS = 5
SEMI = "semi/"
METHODS = [ENSEMBLE, *(name for name in DISTINCT if EVERY_METHOD[name].scores_scans)]


@dataclass(frozen=True)
class Job:
    """A method on one fold of one division of a set; drawn sets have one fold."""

    set: str
    repeat: int
    method: str
    fold: int
    seed: int = 0
    """Draws initial weights and the ensemble's division."""
    weights: str = "1"
    """Lambdas of a regularized method, of which validation chooses one."""
    least_width: float = 0.0
    """The least standard deviation of guidance's reference, in slices."""

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(asdict(self).values())


@cache
def load(folder: str, name: str) -> tuple[Bags, tuple[str, ...]]:
    """A set and its patients."""
    bags = open_store(Path(folder) / name).bags()
    return bags, bags.patient_ids


def parts(folder: str, job: Job) -> tuple[Bags, Bags, Tensor, list[str]]:
    """Training scans, scans to predict, the numbers of these, and the patients of the training scans."""
    if job.set.startswith(SEMI):
        _, variant, seed = job.set.split("/")
        drawn = semi_synthetic(int(seed), variant)
        both = Bags(*(torch.cat([getattr(part, name) for part in (drawn.train, drawn.val)]) for name in PARTS))
        return both, drawn.test, torch.arange(len(drawn.test)), [str(number) for number in range(len(both))]
    bags, patients = load(folder, job.set)
    folds = torch.tensor(fold_scans(patients, bags.labels.tolist(), FOLDS, job.repeat))
    train, test = (chosen.nonzero().flatten() for chosen in (folds != job.fold, folds == job.fold))
    return take(bags, train), take(bags, test), test, [patients[number] for number in train.tolist()]


LONG = ("scans", "logits", "localization", "attention_sd")
"""Columns with a number for each scan."""

PARTS = ("features", "lengths", "labels", "slice_labels")


def take(bags: Bags, scans: Tensor) -> Bags:
    starts = bags.lengths.cumsum(0) - bags.lengths
    spans = [torch.arange(start, start + size) for start, size in zip(starts[scans], bags.lengths[scans], strict=True)]
    rows = torch.cat(spans)
    return Bags(bags.features[rows], bags.lengths[scans], bags.labels[scans], bags.slice_labels[rows])


def run(folder: str, job: Job, device: str) -> tuple[dict[str, Any], np.ndarray]:
    """The row of a job and its slice scores."""
    begin = time.perf_counter()
    train, test, scans, patients = parts(folder, job)
    loaded = time.perf_counter()
    if job.method == ENSEMBLE:
        found, about = by_ensemble(train, patients, test, job.seed, device)
    else:
        found, about = by_method(train, patients, test, job, device)
    scores = found.slice_scores.flatten().float()
    located = localization(scores, test.slice_labels, test.lengths).auroc
    row = asdict(job) | {
        "loading_s": round(loaded - begin, 2),
        "seconds": round(time.perf_counter() - loaded, 2),
        "scans": scans.tolist(),
        "logits": [float(f"{x:.9g}") for x in found.logit.tolist()],  # a float32 as it is: ranks count, however close
        "localization": [None if x != x else round(x, 5) for x in located.tolist()],
        "attention_sd": [round(x, 2) for x in attention_sds(found, test).tolist()],
        **about,
    }
    return row, scores.half().numpy()


def attention_sds(found: Prediction, test: Bags) -> Tensor:
    """The standard deviation of each scan's attention, in slices."""
    weights = found.attention.reshape(-1, len(test.features)).double().mean(0).cpu()
    scans, places = bag_of_rows(test.lengths), place_in_bag(test.lengths).double()

    def sums(values: Tensor) -> Tensor:
        return torch.zeros(len(test), dtype=torch.float64).index_add_(0, scans, values)

    total = sums(weights)
    means = sums(weights * places) / total
    return (sums(weights * (places - means[scans]) ** 2) / total).sqrt()


def by_ensemble(
    train: Bags, patients: Sequence[str], test: Bags, seed: int, device: str
) -> tuple[Prediction, dict[str, Any]]:
    plan = make_plan(train.labels.tolist(), patients, seed=seed)
    found = fit_ensemble(train, patients, plan, device=device)
    about = {
        "members": len(found.ensemble),
        "attends": [KINDS[number].method for number in found.choice.attends],
        "scores": [KINDS[number].method for number in found.choice.scores],
        "usual": found.choice.usual,
        "shown": found.choice.shown,
    }
    return predict_bags(found.ensemble, test), about


def by_method(
    train: Bags, patients: Sequence[str], test: Bags, job: Job, device: str
) -> tuple[Prediction, dict[str, Any]]:
    folds = torch.tensor(fold_scans(patients, train.labels.tolist(), FOLDS, job.repeat))
    own, val = (take(train, chosen.nonzero().flatten()) for chosen in (folds != 0, folds == 0))
    base = Config(job.method, batch_size=fitting_batch(len(own)), seed=job.seed)
    if base.spec.guided:
        base = replace(base, least_width=job.least_width)
    lambdas = [float(weight) for weight in job.weights.split("/")]
    result = sweep(grid_of_method(base, guidance_weight=lambdas), own, val, Execution(device))
    winner = max(result.winners, key=Winner.rank)
    model = winner_model(winner.config, train.width, winner.weights)
    chosen = {name: getattr(winner.config, name) for name in ("lr", "l1", "guidance_weight")}
    about = {**chosen, "epoch": winner.epoch, "val_auroc": winner.val_auroc}
    return predict_bags(model, test), about


def work(folder: str, job: Job, device: str) -> tuple[dict[str, Any], np.ndarray | None]:
    """In a process of its own; an error is a row, too."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        return run(folder, job, device)
    except Exception as error:
        return asdict(job) | {"failed": f"{type(error).__name__}: {error}"[:500]}, None


def make_jobs(
    sets: Sequence[str], methods: Sequence[str], repeats: int, seeds: int, weights: str, least_width: float
) -> list[Job]:
    found = []
    for repeat, method, name, seed in product(range(repeats), methods, sets, range(seeds)):
        lambdas = weights if method in EVERY_METHOD and EVERY_METHOD[method].regularizer else "1"
        if name.startswith(SEMI):
            found += [Job(name, 0, method, 0, seed, lambdas, least_width)] if repeat == 0 else []
        else:
            found += [Job(name, repeat, method, fold, seed, lambdas, least_width) for fold in range(FOLDS)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="SETS")
    parser.add_argument("--sets", type=lambda text: text.split(","), required=True)
    parser.add_argument("--methods", type=names(METHODS), default=METHODS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--weights", default="1", help="lambdas of regularized methods, as 0.1/1/10")
    parser.add_argument("--least-width", type=float, default=0.0, help="least sd of guidance's reference, in slices")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results, begin = options.out / "results.jsonl", time.monotonic()
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    plain = asdict(Job("", 0, "", 0))
    known = {tuple(row.get(name, plain[name]) for name in plain) for row in done if "failed" not in row}
    wanted = make_jobs(
        options.sets, options.methods, options.repeats, options.seeds, options.weights, options.least_width
    )
    jobs = [job for job in wanted if job.key not in known]
    attention: dict[str, np.ndarray] = {}
    failed = 0
    with (
        results.open("a") as lines,
        ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        waiting = iter(jobs)
        first = islice(waiting, options.jobs)
        running = {pool.submit(work, options.folder, job, options.device) for job in first}
        while running:
            for future in as_completed(running):
                running.discard(future)
                row, scores = future.result()
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                failed += "failed" in row
                if scores is not None:
                    attention["/".join(str(row[name]) for name in plain)] = scores
                print({name: row[name] for name in row if name not in LONG}, flush=True)
                if time.monotonic() - begin < 60 * options.minutes and (job := next(waiting, None)) is not None:
                    running.add(pool.submit(work, options.folder, job, options.device))
                break
    number = len(list(options.out.glob("attention-*.npz")))
    np.savez_compressed(options.out / f"attention-{number}.npz", **attention)
    left = sum(1 for _ in waiting)
    about = machine(options.device, options.commit)
    print(
        json.dumps(
            {"benchmark": "study_default", "machine": about, "done": len(attention), "failed": failed, "left": left}
        )
    )


if __name__ == "__main__":
    main()
