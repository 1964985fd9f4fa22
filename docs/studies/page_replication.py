"""The measurements of docs/replication, one function an item; all together take about a minute on two cores.

They are drawn from fixed seeds, or read from the published numbers.  Two tables, `selection` and `heads`, were
computed from the histories and predictions of finished runs, by docs/measured/selection.py of commit 6493fd7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, median, pstdev, stdev
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from make_page import short, table
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.bells import VARIANCE_FLOOR
from normal_guidance.core.guidance import DIVERGENCES, NormalGuidance, normal_reference
from normal_guidance.core.layout import Layout
from normal_guidance.core.methods import METHODS, build_model
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.core.prediction import classification
from normal_guidance.scans.phantom.drafts import UNEXTENDED, WRONG_INTERCEPT
from normal_guidance.scans.phantom.plan import ANATOMIES, plan
from normal_guidance.scans.phantom.rendering import render
from normal_guidance.statistics.split_results import METRICS, Metric
from normal_guidance.study.drawn import (
    SEEDS,
    SemiSynthetic,
    bayes_scan_scores,
    semi_synthetic_part,
    shifted_mean,
)
from normal_guidance.study.references import published, published_choice, published_seed
from normal_guidance.sweep.config import L1_STRENGTHS
from normal_guidance.sweep.loop import predict_bags


def digits(value: float, places: int = 3) -> str:
    """.689 for 0.689, as the paper's readers see it."""
    return f"{value:.{places}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.{places}f}"


def share(flags: Tensor) -> str:
    return f"{flags.double().mean():.0%}"


# ----------------------------------------------------------------------------------------------------
# Data and encoder
# ----------------------------------------------------------------------------------------------------


def order() -> str:
    """D(r, a) of a bell whose slices are not in spatial order."""
    j = torch.arange(1.0, 41)
    bell = (-0.5 * ((j - 20.5) / 5) ** 2).softmax(0)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.stack([bell[torch.randperm(40, generator=generator)] for _ in range(200)])
    orders = {
        "in order": bell,
        "reversed": bell.flip(0),
        "two neighbours exchanged": bell[torch.cat([torch.arange(14), torch.tensor([15, 14]), torch.arange(16, 40)])],
        "every second slice, then the others": torch.cat([bell[::2], bell[1::2]]),
        "shuffled (mean of 200)": shuffled,
    }
    return table(
        ["slices", "forward KL"],
        [(name, digits(NormalGuidance()(torch.atleast_2d(a)).item(), 4)) for name, a in orders.items()],
    )


def repairs() -> str:
    """What the encoder would see of scans whose stored values are taken as their headers say."""
    rows = []
    for anatomy, encoding, (low, high) in (
        ("head", WRONG_INTERCEPT, (-100, 300)),
        ("abdomen", UNEXTENDED, (-math.inf, math.inf)),
    ):
        hu = render(plan(anatomy, 1, seed=0, slices=12)[0], 96).astype(np.float64)
        read = encoding.store(hu).astype(np.float64) + encoding.intercept
        right, wrong = hu.clip(low, high), read.clip(low, high)
        shown = (anatomy, f"{right.mean():.0f}", f"{wrong.mean():.0f}", f"{(right != wrong).mean():.0%}")
        rows.append((*shown, digits(np.corrcoef(right.ravel(), wrong.ravel())[0, 1], 2)))
    return table(["phantom", "mean HU", "without repair", "pixels changed", "correlation"], rows)


class TestSet(NamedTuple):
    """A semi-synthetic test set, with the attention of max pooling; of the features the first one only."""

    bags: Bags
    counts: Tensor


@cache
def test_set(seed: int) -> TestSet:
    bags = semi_synthetic_part(seed, "test")
    counts = predict_bags(build_model("max"), bags).attention
    small = Bags(bags.features[:, :1].clone(), bags.lengths, bags.labels, bags.slice_labels)
    return TestSet(small, counts)


def slice_auroc(scores: Tensor, bags: Bags) -> float:
    assert bags.slice_labels is not None
    return localization(scores, bags.slice_labels, bags.lengths).mean_auroc.item()


def draws() -> str:
    return table(
        ["seed", "positive", "max pooling", "published"],
        [
            (
                seed,
                int(test_set(seed).bags.labels.sum()),
                digits(slice_auroc(test_set(seed).counts, test_set(seed).bags), 16),
                digits(published_seed("localization_auroc", "max", "semi-synthetic", seed) or math.nan, 16),
            )
            for seed in SEEDS
        ],
    )


def gray() -> str:
    """One gray channel through summed filters, beside three equal channels through the filters as they are."""
    torch.manual_seed(0)
    layer, image = torch.nn.Conv2d(3, 768, 16, stride=16), torch.randn(4, 1, 224, 224)
    three = layer(image.expand(-1, 3, -1, -1))
    one = F.conv2d(image, layer.weight.sum(1, keepdim=True), layer.bias, stride=16)
    change = (one - three).abs().max() / three.abs().max()
    return table(["", "largest difference / largest value"], [("summed filters, float32", f"{change:.0e}")])


# ----------------------------------------------------------------------------------------------------
# Guidance
# ----------------------------------------------------------------------------------------------------


LENGTHS = (40, 246, 1083, 1727)
"""Slices of a scan: the middle of head CT, the mean and the longest of chest CT, the longest of abdomen CT."""


def bells(slices: int, width: float, number: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, bells of one width at random places, and their variances, in float64."""
    generator = torch.Generator().manual_seed(1)
    centre = 1 + torch.rand(number, 1, generator=generator, dtype=torch.float64) * (slices - 1)
    j = torch.arange(1, slices + 1, dtype=torch.float64)
    a = (-0.5 * ((j - centre) / width) ** 2).softmax(1)
    mean = (j * a).sum(1, keepdim=True)
    return j, a, ((j - mean).square() * a).sum(1, keepdim=True)


def textbook_moments(j: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """E[J] and E[J^2] - E[J]^2, in the precision of the arguments."""
    mean = (j * a).sum(1, keepdim=True)
    return mean, (j * j * a).sum(1, keepdim=True) - mean * mean


def variance() -> str:
    rows = []
    for slices in LENGTHS:
        for width in (0.5, 1.0, 3.0, 30.0):
            j, a, truth = bells(slices, width)
            row: list[object] = [slices, width]
            for dtype in (torch.float32, torch.bfloat16):
                _, found = textbook_moments(j.to(dtype), a.to(dtype))
                row += [share((found - truth).abs() > 0.1 * truth), share(found <= 0)]
            rows.append(row)
    header = ["S", "sd of the bell", "float32: more than 10 % off", "zero or less"]
    return table([*header, "bfloat16: more than 10 % off", "zero or less"], rows)


def sum_of_reference(j: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """The sum of r, computed as the density divided by its own sum, which is floored at 1e-6."""
    var = var.clamp_min(VARIANCE_FLOOR)
    density = (-(j - mean).square() / (2 * var)).exp() / (2 * math.pi * var).sqrt()
    return (density / density.sum(1, keepdim=True).clamp_min(1e-6)).sum(1)


def reference() -> str:
    rows = []
    for slices in LENGTHS:
        for width in (0.3, 0.5, 1.0):
            j, a, _ = bells(slices, width)
            j, a = j.float(), a.float()
            mean, var = textbook_moments(j, a)
            centred = ((j - mean).square() * a).sum(1, keepdim=True)
            off = [(sum_of_reference(j, mean, v) - 1).abs() > 1e-3 for v in (var, centred)]
            off.append((normal_reference(a).sum(1) - 1).abs() > 1e-3)
            rows.append((slices, width, *(f"{one.double().mean():.1%}" for one in off)))
    header = ["S", "sd of the bell", "exp, then divide; E[J²] - E[J]²", "exp, then divide; centred", "ours"]
    return table(header, rows)


def clamp() -> str:
    generator, spreads, rows = torch.Generator().manual_seed(0), (1, 2, 3, 5), []
    for slices in (40, 246, 1000, 1727):
        lost = [(sd * torch.randn(500, slices, generator=generator)).softmax(1) < 1e-6 for sd in spreads]
        per_bag = lost[-1].double().mean(1)
        spread = f"{per_bag.quantile(0.05):.0%} to {per_bag.quantile(0.95):.0%}"
        rows.append((slices, *(share(one) for one in lost), spread))
    return table(["S", *(f"logits of sd {sd}" for sd in spreads), "sd 5: 5th to 95th percentile of scans"], rows)


def uniform() -> str:
    rows = []
    for slices in LENGTHS:
        a = torch.full((1, slices), 1 / slices, dtype=torch.float64)
        rows.append((slices, *(short(NormalGuidance(divergence=kind)(a).item()) for kind in DIVERGENCES)))
    return table(["S", *(kind.replace("_", " ").replace("kl", "KL") for kind in DIVERGENCES)], rows)


def class_token() -> str:
    """What the class token pays to itself before training, and what it adds to the loss."""
    rows = []
    torch.manual_seed(1001)
    model = build_model("mhng")
    for slices, scans in ((20, 64), (60, 64), (246, 16), (1083, 4)):
        layout = Layout.packed([slices] * scans)
        with torch.no_grad():
            log_row = model(torch.randn(slices * scans, 768), layout).log_attention
        own = 1 - log_row.exp().unflatten(1, (scans, slices)).sum(-1)
        on, off = (NormalGuidance(renormalize=way)(log_row, lengths=layout, from_logits=True) for way in (True, False))
        rows.append((slices, digits(own.mean().item(), 4), *(digits(value.item(), 4) for value in (on, off))))
    return table(["S", "share that the class token keeps", "D, renormalize on", "D, off"], rows)


# ----------------------------------------------------------------------------------------------------
# Models and training
# ----------------------------------------------------------------------------------------------------


def gaussian_forms(lengths: Tensor) -> dict[str, Tensor]:
    """Scores of the centred Gaussian: three precisions of the density at positions 1..S, and the published form."""
    centre = (lengths.double() / 2).repeat_interleave(lengths)
    j = torch.cat([torch.arange(1, size + 1, dtype=torch.float64) for size in lengths.tolist()])
    log = -0.5 * (j - centre) ** 2
    published_form = CenteredGaussian(published=True)(torch.zeros(int(lengths.sum()), 1), lengths).slice_scores
    return {
        "log-density": log,
        "float64": log.exp(),
        "float32": log.float().exp(),
        "float64, linspace(1, S-1, S)": published_form,
    }


def gaussian() -> str:
    rows = []
    for anatomy, slices in (("head", 32), ("chest", 64), ("chest", 246), ("chest", 600), ("abdomen", 319)):
        scans = plan(anatomy, 400, seed=0, positive=1.0, slices=slices)
        lengths = torch.tensor([scan.slices for scan in scans])
        labels = torch.cat([torch.from_numpy(scan.slice_labels).long() for scan in scans])
        found = [localization(s, labels, lengths).mean_auroc.item() for s in gaussian_forms(lengths).values()]
        rows.append((anatomy, f"{lengths.min()}-{lengths.max()}", *map(digits, found)))
    for seed in SEEDS:
        bags = test_set(seed).bags
        found = [slice_auroc(scores, bags) for scores in gaussian_forms(bags.lengths).values()]
        rows.append((f"semi-synthetic {seed}", "20-60", *(digits(value, 4) for value in found)))
    return table(["blocks of", "S", *gaussian_forms(torch.tensor([4]))], rows)


def smoothing() -> str:
    """Ten steps with D^-1 A beside D^-1/2 A D^-1/2: the weights that the end slices get."""
    adjacency = torch.diag(torch.ones(39, dtype=torch.float64), 1)
    adjacency = adjacency + adjacency.T
    degree, operators = adjacency.sum(1), []
    for matrix in (adjacency / degree[:, None], adjacency / (degree[:, None] * degree).sqrt()):
        weights = torch.eye(40, dtype=torch.float64)
        for _ in range(10):
            weights = 0.5 * torch.eye(40, dtype=torch.float64) + 0.5 * matrix @ weights
        operators.append(weights)
    change = (operators[0] - operators[1]).abs().sum(1)
    return table(
        ["", "end slice", "5th slice", "middle slice"],
        [
            ("sum of the weights, D^-1 A", *(digits(operators[0].sum(1)[i].item()) for i in (0, 4, 20))),
            ("sum of the weights, D^-1/2 A D^-1/2", *(digits(operators[1].sum(1)[i].item()) for i in (0, 4, 20))),
            ("sum of the weights' differences", *(digits(change[i].item()) for i in (0, 4, 20))),
        ],
    )


def parameters() -> str:
    rows = []
    for method in ("mean", "abmil", "smap", "transmil", "smtp"):
        torch.manual_seed(1001)
        named = dict(build_model(method).named_parameters())
        counts = {name: p.numel() for name, p in named.items()}
        matrices = sum(n for name, n in counts.items() if named[name].ndim > 1 and "token" not in name)
        rows.append((METHODS[method].title, f"{sum(counts.values()):,}", f"{sum(counts.values()) - matrices:,}"))
    return table(["model", "parameters", "of these no weights (biases, norms, class token, alpha)"], rows)


def norm(parameters: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))


def clipping() -> str:
    rows: list[Sequence[object]] = []
    for method in ("ng", "mhng"):
        torch.manual_seed(1001)
        model, bags = build_model(method), shifted_mean(64, 1001)
        weights = list(model.parameters())
        moving = sum(int((p != 0).sum()) for p in weights)  # L1 has no gradient at 0
        norms = []
        for guidance in (None, NormalGuidance()):
            model.zero_grad()
            prediction = model(bags.features, bags.layout)
            loss = classification(prediction, bags.labels)
            if guidance is not None:
                loss = loss + guidance(prediction.log_attention, lengths=bags.layout, from_logits=True)
            loss.backward()
            norms.append(norm(weights))
        alphas = [short(alpha / 2 * math.sqrt(moving)) for alpha in L1_STRENGTHS[:-1]]
        rows.append((METHODS[method].title.split(" + ")[0], *alphas, *(digits(value, 2) for value in norms)))
    return table(["", *(f"α = {short(alpha)}" for alpha in L1_STRENGTHS[:-1]), "BCE", "BCE + guidance"], rows)


def batches() -> str:
    """Scans that an epoch leaves out; CT's training sets are four sixths of the scans, to the nearest."""
    sizes = {
        "semi-synthetic": 10_000,
        "head-ct": 21_744 * 4 // 6,
        "chest-ct": 7_279 * 4 // 6,
        "abdomen-ct": 4_711 * 4 // 6,
    }
    rows = [(name, f"{n:,}", n // 64, n % 64, f"{n % 64 / n:.2%}") for name, n in sizes.items()]
    return table(["training set", "scans", "batches of 64", "left out of an epoch", "share"], rows)


# ----------------------------------------------------------------------------------------------------
# Selection
# ----------------------------------------------------------------------------------------------------


def difficulty() -> str:
    """How well the Bayes oracle ranks the scans of each set: how hard the set happens to be."""
    rows = []
    for seed in SEEDS:
        found = []
        for part in SemiSynthetic._fields:
            bags = semi_synthetic_part(seed, part)
            found.append(auroc(bayes_scan_scores(bags), bags.labels).item())
        rows.append((seed, *(digits(value, 4) for value in found)))
    return table(["seed", "training set", "validation set", "test set"], rows)


def margin() -> str:
    """Standard error of an AUROC by Hanley and McNeil's formula, half of the scans being positive."""
    rows = []
    for name, scans, area in (("validation", 2500, 0.7545), ("test", 1000, 0.7545)):
        n, both, lone = scans / 2, area / (2 - area), 2 * area**2 / (1 + area)
        square = (area * (1 - area) + (n - 1) * (both + lone - 2 * area**2)) / n**2
        rows.append((name, f"{scans:,}", digits(area, 4), digits(math.sqrt(square), 4)))
    return table(["set", "scans", "scan AUROC", "standard error"], rows)


# ----------------------------------------------------------------------------------------------------
# Evaluation
# ----------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------
# Ceilings
# ----------------------------------------------------------------------------------------------------


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


SECTIONS: dict[str, Callable[[], str]] = {
    section.__name__: section
    for section in (
        *(order, repairs, draws, gray),
        *(variance, reference, clamp, uniform, class_token),
        *(gaussian, smoothing, parameters, clipping, batches),
        *(difficulty, margin),
        *(ties, spreads, seeds),
        *(ceilings, blocks, receptive_field, oracle),
    )
}
