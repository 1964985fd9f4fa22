"""What the paper calls ceilings: cells that beat them, block tables, the reference's width, the oracle."""

from __future__ import annotations

import math

import torch.nn.functional as F

from measured.data import slice_auroc, test_set
from measured.text import digits, table
from normal_guidance.core.metrics import auroc
from normal_guidance.core.models import METHODS
from normal_guidance.evaluation.published import published, published_seed
from normal_guidance.simulate.phantom.plan import ANATOMIES
from normal_guidance.simulate.semi_synthetic import SEEDS, bayes_scan_scores
from normal_guidance.statistics.scores import METRICS, Metric

DATASETS = ("head-ct", "chest-ct", "abdomen-ct")


def ceilings() -> str:
    """Every cell of the paper's tables in which a method reaches the ceiling."""
    rows = []
    for metric in METRICS:
        for dataset in ("semi-synthetic", *DATASETS):
            ceiling = published(metric, "ceiling", dataset)
            for method in METHODS:
                cell = published(metric, method, dataset)
                if cell and ceiling and cell.mean >= ceiling.mean:
                    relation = "beats" if cell.mean > ceiling.mean else "equals"
                    rows.append((_title(metric), dataset, method, digits(cell.mean), digits(ceiling.mean), relation))
    return table(["table", "data", "method", "method's", "ceiling's", ""], rows)


def _title(metric: Metric) -> str:
    return metric.replace("_auroc", " AUROC").replace("_auprc", " AUPRC")


FRACTIONS = {"head-ct": 0.350, "chest-ct": 0.093, "abdomen-ct": 0.119}
"""Mean share of a scan in a block, as the paper's third block table prints it."""


def blocks() -> str:
    """Blocks a scan x share of a block = share of positive slices, which is mean pooling's AUPRC."""
    swapped = FRACTIONS | {"chest-ct": FRACTIONS["abdomen-ct"], "abdomen-ct": FRACTIONS["chest-ct"]}
    rows = []
    for dataset in DATASETS:
        counts = ANATOMIES[dataset.removesuffix("-ct")].bags_by_blocks
        per_scan = sum((i + 1) * n for i, n in enumerate(counts)) / sum(counts)
        mean_pooling = published("localization_auprc", "mean", dataset)
        assert mean_pooling is not None
        both = (digits(per_scan * one[dataset]) for one in (FRACTIONS, swapped))
        rows.append((dataset, digits(per_scan, 2), *both, digits(mean_pooling.mean)))
    header = ["data", "blocks a positive scan", "x share, rows as printed", "rows exchanged"]
    return table([*header, "mean pooling's AUPRC"], rows)


def receptive_field() -> str:
    """Slice AUROC of a running sum of the shifted feature, blocks of 12: other widths, and even ones off centre."""
    rows = []
    for width, before in ((10, 4), (11, 5), (12, 5), (12, 6), (13, 6), (14, 6), (15, 7)):
        found = []
        for seed in SEEDS:
            bags = test_set(seed).bags
            padded = F.pad(bags.layout.pad(bags.features[:, 0].double()), (before, width - 1 - before))
            found.append(slice_auroc(bags.layout.restore(padded.unfold(1, width, 1).sum(2)), bags))
        rows.append((width, f"j-{before}..j+{width - 1 - before}", *(digits(value, 4) for value in found)))
    return table(["R", "covers", *map(str, SEEDS)], rows)


def oracle() -> str:
    rows = []
    for seed in SEEDS:
        bags = test_set(seed).bags
        exact = bayes_scan_scores(bags)
        negatives = int((bags.labels == 0).sum())
        pair = 1 / (negatives * (len(bags) - negatives))
        found = [auroc(scores, bags.labels).item() for scores in (exact, exact.float(), exact.exp().float())]
        printed = published_seed("scan_auroc", "ceiling", "semi-synthetic", seed) or math.nan
        rows.append((seed, *(digits(value, 6) for value in found), digits(printed, 5), f"{pair:.1e}"))
    return table(
        ["seed", "float64, log", "rounded to float32", "likelihood ratio, float32", "published", "a pair"], rows
    )
