"""Ties, standard deviations, and the single seeds behind the published means."""

from __future__ import annotations

from statistics import fmean, median, pstdev, stdev

import torch
from torch import Tensor

from measured.data import test_set
from measured.text import digits, short, table
from normal_guidance.core.metrics import localization
from normal_guidance.core.models import METHODS
from normal_guidance.evaluation.published import published, published_choice, published_seed
from normal_guidance.simulate.phantom.plan import plan
from normal_guidance.simulate.semi_synthetic import SEEDS


def broken_ties(scores: Tensor, lengths: Tensor, *, descending: bool) -> Tensor:
    """Ranks by a stable sort, so that equal scores are ordered by their index, up or down."""
    ranks = []
    for one in scores.split(lengths.tolist()):
        place = torch.empty(len(one), dtype=torch.float64)
        place[one.argsort(stable=True, descending=descending)] = torch.arange(len(one), dtype=torch.float64)
        ranks.append(-place if descending else place)
    return torch.cat(ranks)


def ties() -> str:
    rows = []
    cases = [(f"semi-synthetic {seed}", *test_set(seed)) for seed in SEEDS]
    for name, bags, counts in cases:
        for method, scores in (("max", counts), ("mean", torch.zeros_like(counts))):
            rows.append((method, name, *_three_ways(scores, bags.slice_labels, bags.lengths)))
    scans = plan("head", 400, seed=0, positive=1.0)
    lengths = torch.tensor([scan.slices for scan in scans])
    labels = torch.cat([torch.from_numpy(scan.slice_labels).long() for scan in scans])
    rows.append(("mean", "blocks of head phantoms", *_three_ways(torch.zeros(len(labels)), labels, lengths)))
    return table(["method", "scans", "one half", "later slice first", "earlier slice first"], rows)


def _three_ways(scores: Tensor, labels: Tensor | None, lengths: Tensor) -> list[str]:
    assert labels is not None
    ways = [scores, *(broken_ties(scores, lengths, descending=down) for down in (False, True))]
    return [digits(localization(way, labels, lengths).mean_auroc.item(), 4) for way in ways]


def spreads() -> str:
    """Which sd the paper prints, told from the values of single seeds."""
    rows = []
    for metric in ("localization_auroc", "scan_auroc"):
        for method in (*METHODS, "ceiling"):
            values = [published_seed(metric, method, "semi-synthetic", seed) for seed in SEEDS]
            printed = published(metric, method, "semi-synthetic")
            known = [value for value in values if value is not None]
            if printed is None or len(known) < 3:
                continue
            both = {"population": pstdev(known), "sample": stdev(known)}
            fits = [kind for kind, sd in both.items() if abs(round(sd, 3) - printed.sd) < 5e-4]
            shown = [digits(printed.sd), *(digits(sd, 4) for sd in both.values())]
            rows.append((metric.replace("_auroc", ""), method, *shown, " or ".join(fits) or "neither"))
    return table(["AUROC", "method", "printed sd", "population", "sample", "printed is"], rows)


def seeds() -> str:
    """Single seeds behind the semi-synthetic means, and the learning rates that were chosen."""
    rows = []
    for method in METHODS:
        values = [published_seed("localization_auroc", method, "semi-synthetic", seed) for seed in SEEDS]
        known = [value for value in values if value is not None]
        choices = [published_choice(method, "semi-synthetic", seed) for seed in SEEDS]
        if len(known) == 3 and None not in choices:
            chosen = ", ".join(short(choice.lr) for choice in choices if choice)
            shown = [*(digits(v, 4) for v in known), digits(fmean(known)), digits(median(known))]
            rows.append((method, *shown, digits(max(known) - min(known)), chosen))
    return table(["method", *map(str, SEEDS), "mean", "median", "range", "chosen lr"], rows)
