"""Localization metrics of 1.8 million slices x 32 configurations beside scikit-learn's loop; a table, then a JSON line.

    python benchmarks/bench_metrics.py [--device cpu|cuda] [--slices 1800000] [--configurations 32] [--commit HASH] ...

Scans are as long as chest CT (63-1083 slices, mean about 246).  Each positive one has one block of 29 positive slices;
scores are normal noise, half a standard deviation higher in the block.  Two cases: `rsna-pe`, where 2,211 of 7,279
scans are positive as in the RSNA PE data and the others are left out, and `all`, where every scan is positive and all
slices are ranked, which is the one that the goals are for.

ours      `core.metrics.localization`: AUROC and AUPRC of every positive scan, all configurations in one call; from the
          packed scores on the device to the results on the device, counting and leaving out of scans included.  The
          first call and the fastest of all.
measures  `statistics.localization.localization_measures`: hits, peak errors, overlaps, of one configuration.
sklearn   `roc_auc_score` and `average_precision_score` for one positive scan after another, on the CPU, for the first
          `--sklearn-configurations` only; the time for all configurations is extrapolated from them, and marked "~".
differ    The largest difference of any of these scans' AUROC or AUPRC between ours and scikit-learn.
peak      GiB that the first call of `ours` took beyond what was there before it: of torch's memory on CUDA, of the
          whole process on the CPU (Linux only).

Goal: the slowest call of `ours`, the first included, in under 2 s on CUDA and 60 s on two cores.  It needs torch,
numpy and scikit-learn; a row is printed when it is known.  On a busy machine set OMP_WAIT_POLICY=passive.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_sweep import chest_lengths, goal, say, timed, verdicts
from normal_guidance.core.metrics import Localization, localization
from normal_guidance.statistics.localization import localization_measures
from report import machine

SEED = 2026
SLICES, CONFIGURATIONS = 1_800_000, 32
GOAL_SECONDS = {"cuda": 2.0, "cpu": 60.0}
POSITIVE = {"rsna-pe": 2211 / 7279, "all": 1.0}
"""Share of positive scans by case."""
BLOCK = 29
"""Positive slices of a positive scan: the mean block of the RSNA PE data."""
SHIFT = 0.5
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Row:
    """One case; seconds, and GiB of memory."""

    case: str
    scans: int
    positive_scans: int
    slices: int
    ranked_slices: int
    configurations: int
    first_s: float
    best_s: float
    median_s: float
    seconds_all: tuple[float, ...]
    peak_gib: float
    scores_gib: float
    measures_s: float
    sklearn_configurations: int
    sklearn_s: float
    sklearn_extrapolated_s: float
    ratio: float
    """The extrapolated time over the best of ours."""
    differ: float
    mean_auroc: float


def make_lengths(slices: int) -> Tensor:
    """As many chest scans as fit into so many slices."""
    lengths = chest_lengths(slices // 200 + 1, torch.Generator().manual_seed(SEED))
    return lengths[lengths.cumsum(0) <= slices]


def make_labels(lengths: Tensor, positive: float) -> Tensor:
    """One block, anywhere, in each of the first scans of a random order."""
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(lengths), generator=generator)[: max(1, round(positive * len(lengths)))]
    begin = (torch.rand(len(lengths), generator=generator) * (lengths - BLOCK + 1)).long()
    first = (lengths.cumsum(0) - lengths + begin)[chosen]
    labels = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    labels[(first[:, None] + torch.arange(BLOCK)).flatten()] = 1
    return labels


def make_scores(labels: Tensor, configurations: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(SEED)
    scores = torch.randn(configurations, len(labels), device=device, generator=generator)
    return scores.add_(SHIFT * labels.to(device))


def sklearn_loop(scores: Tensor, labels: Tensor, lengths: Tensor, kept: Tensor) -> tuple[float, Tensor]:
    """Seconds, and AUROC and AUPRC as (2, configurations, kept)."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    bounds = lengths.cumsum(0)
    spans = [(int(bounds[scan] - lengths[scan]), int(bounds[scan])) for scan in kept.tolist()]
    truth, rows = labels.numpy(), scores.numpy()
    begin = time.perf_counter()
    found = [
        [[metric(truth[start:stop], row[start:stop]) for start, stop in spans] for row in rows]
        for metric in (roc_auc_score, average_precision_score)
    ]
    return time.perf_counter() - begin, torch.tensor(found, dtype=torch.float64)


def forget_peak(device: torch.device) -> float:
    """Starts the peak anew, and says what is in use now, in GiB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**30
    if not STATUS.exists():
        return math.nan
    STATUS.with_name("clear_refs").write_text("5")  # proc(5): resets VmHWM
    return process_gib("VmRSS")


def peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return process_gib("VmHWM") if STATUS.exists() else math.nan


def process_gib(name: str) -> float:
    (size,) = (line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(size) / 2**20


def time_ours(scores: Tensor, labels: Tensor, lengths: Tensor, repeats: int) -> tuple[list[float], float, Localization]:
    """Seconds of every call, GiB of the first, and its result."""
    device, found = scores.device, []
    before = forget_peak(device)
    seconds = [timed(device, lambda: found.append(localization(scores, labels, lengths)))]
    peak = peak_gib(device) - before
    seconds += [timed(device, lambda: localization(scores, labels, lengths)) for _ in range(repeats - 1)]
    return seconds, peak, found[0]


def run_case(case: str, lengths: Tensor, options: argparse.Namespace) -> Row:
    device = torch.device(options.device)
    labels = make_labels(lengths, POSITIVE[case])
    scores = make_scores(labels, options.configurations, device)
    labels_there, lengths_there = labels.to(device), lengths.to(device)
    seconds, peak, found = time_ours(scores, labels_there, lengths_there, options.repeats)
    attention = scores[0].exp()
    measuring = [
        timed(device, lambda: localization_measures(attention, labels_there, lengths_there))
        for _ in range(options.repeats)
    ]
    compared = min(options.sklearn_configurations, options.configurations)
    kept = found.kept.cpu()
    looping, reference = sklearn_loop(scores[:compared].cpu(), labels, lengths, kept)
    ours = torch.stack([found.auroc[:compared], found.auprc[:compared]]).cpu()
    extrapolated = looping * options.configurations / compared
    return Row(
        case=case,
        scans=len(lengths),
        positive_scans=len(kept),
        slices=len(labels),
        ranked_slices=int(lengths[kept].sum()),
        configurations=options.configurations,
        first_s=seconds[0],
        best_s=min(seconds),
        median_s=statistics.median(seconds),
        seconds_all=tuple(seconds),
        peak_gib=peak,
        scores_gib=scores.nbytes / 2**30,
        measures_s=min(measuring),
        sklearn_configurations=compared,
        sklearn_s=looping,
        sklearn_extrapolated_s=extrapolated,
        ratio=extrapolated / min(seconds),
        differ=(ours - reference).abs().max().item(),
        mean_auroc=found.mean_auroc.mean().item(),
    )


COLUMNS = (
    f"{'case':<9}{'positive':>9}{'of scans':>9}{'ranked slices':>14}{'x':>4}{'first s':>9}{'best s':>9}{'peak':>7}"
    f"{'measures s':>12}{'sklearn s':>11}{'for':>4}{'for all':>10}{'ratio':>8}{'differ':>9}{'AUROC':>8}"
)


def line(row: Row) -> str:
    about_all = f"~{row.sklearn_extrapolated_s:.1f}"
    return (
        f"{row.case:<9}{row.positive_scans:>9,}{row.scans:>9,}{row.ranked_slices:>14,}{row.configurations:>4}"
        f"{row.first_s:>9.3f}{row.best_s:>9.3f}{row.peak_gib:>7.2f}{row.measures_s:>12.3f}{row.sklearn_s:>11.2f}"
        f"{row.sklearn_configurations:>4}{about_all:>10}{'~' + format(row.ratio, '.0f'):>8}{row.differ:>9.0e}"
        f"{row.mean_auroc:>8.4f}"
    )


def goals(rows: list[Row], device: str) -> list[dict[str, Any]]:
    """For the full size alone."""
    kind = torch.device(device).type
    return [
        goal("seconds at most", f"{row.case} on {kind}", max(row.seconds_all), GOAL_SECONDS[kind])
        for row in rows
        # The last scan that would not fit any more is missing.
        if row.slices > 0.999 * SLICES and row.configurations >= CONFIGURATIONS
    ]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the localization metrics of all configurations at once.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1; cpu unless given")
    parser.add_argument("--slices", type=int, default=SLICES, help="of all scans together, at most")
    parser.add_argument("--configurations", type=int, default=CONFIGURATIONS)
    parser.add_argument("--sklearn-configurations", type=int, default=2, help="that scikit-learn is given")
    parser.add_argument("--repeats", type=int, default=5, help="calls of ours")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--commit", help="to report where the code has come without its repository")
    options = parser.parse_args(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no CUDA device here; use --device cpu")
    if options.slices < 1083:
        parser.error(f"--slices {options.slices}: the longest scan alone has 1083")
    for name in ("configurations", "sklearn_configurations", "repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: it must be 1 or more")
    return options


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    about = machine(options.device, options.commit)
    say(", ".join(f"{key} {value}" for key, value in about.items()))
    started = time.perf_counter()
    lengths = make_lengths(options.slices)
    say(f"{int(lengths.sum()):,} slices of {len(lengths):,} scans ({int(lengths.min())}-{int(lengths.max())} slices)")
    say(COLUMNS)
    rows = []
    for case in POSITIVE:
        rows.append(run_case(case, lengths, options))
        say(line(rows[-1]))
    found = goals(rows, options.device)
    for text in verdicts(found):
        say(text)
    report = {"benchmark": "metrics", "machine": about, "options": {**vars(options), "seed": SEED}}
    seconds = round(time.perf_counter() - started, 1)
    say(json.dumps({**report, "rows": [asdict(row) for row in rows], "goals": found, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
