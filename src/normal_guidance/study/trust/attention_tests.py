"""The four tests of attention: shuffle slices, randomise weights, delete and insert slices, alarm if inverted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor, nn

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import bag_of_rows, place_in_bag, sum_per_bag
from normal_guidance.core.bags import LabelledScans, ScanSet
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.show.text_tables import digits
from normal_guidance.statistics.differences import (
    LEVEL,
    MIN_DEFINED,
    ROUNDING,
    Estimate,
    measure,
    multiplicities,
    resample,
    student_quantile,
)
from normal_guidance.statistics.localization import highest_first, moved_round, rank_correlation
from normal_guidance.statistics.split_results import MethodResults, SplitResults, patients_of
from normal_guidance.sweep.batches import in_batches

Model = Callable[[Tensor, Tensor], Any]
"""Packed features (slices, features) and lengths (scans,) -> `Prediction`, like objects, or (logit, attention).

Attention of several heads, (heads, slices), is averaged.
"""

BATCH = 64  # scans that go through the model together


class ScanPredictions(NamedTuple):
    """A model's predictions for all scans."""

    logit: Float64[Tensor, "scans"]  # NaN from a model without a scan score
    scores: Float64[Tensor, "slices"]  # rank a scan's slices: log-attention where the model gives it, or else attention
    attention: Float64[Tensor, "slices"]  # adds up to 1 in every scan

    @property
    def scores_scans(self) -> bool:
        return not bool(self.logit.isnan().any())


class SliceSelection(NamedTuple):
    """Slices to show, by their numbers among all slices of all scans: scan after scan, in the order to show them."""

    slices: Int64[Tensor, "chosen"]
    lengths: Int64[Tensor, "scans"]


def predict_scans(
    model: Model, scans: ScanSet, shown: SliceSelection | None = None, *, batch_size: int = BATCH
) -> ScanPredictions:
    """Predict every scan, whole or only the slices `shown` in their order, on the model's device and in its dtype."""
    lengths = scans.lengths.cpu()
    if shown is None:
        shown = SliceSelection(torch.arange(int(lengths.sum())), lengths)
    # The first slice of every scan, and the number of all slices.
    starts, shown_starts = ([0, *each.cumsum(0).tolist()] for each in (lengths, shown.lengths))
    parts = []
    module = model if isinstance(model, nn.Module) else nn.Module()
    training = module.training
    module.eval()  # dropout and the like would be taken for an effect of the change
    try:
        with torch.no_grad():
            for batch in in_batches(lengths, batch_size):
                first, behind = int(batch[0]), int(batch[-1]) + 1
                local = shown.slices[shown_starts[first] : shown_starts[behind]] - starts[first]
                rows = scans.rows(batch)
                rows, sizes = rows[local.to(rows.device)], shown.lengths[batch]
                rows = rows.to(next(module.parameters(), rows))
                parts.append(_checked(model(rows, sizes.to(rows.device)), sizes, len(rows)))
    finally:
        module.train(training)
    return ScanPredictions(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def _checked(output: Any, lengths: Int[Tensor, "scans"], slices: int) -> ScanPredictions:
    """A model's output as predictions on the CPU; an output of another kind, shape or range is an error."""
    if hasattr(output, "logit") and hasattr(output, "attention"):
        logit, attention = output.logit, output.attention
    elif isinstance(output, tuple | list) and len(output) == 2:
        logit, attention = output
    else:
        raise UserError(
            f"the model returned {type(output).__name__}; wrap it in a function that returns (logit, attention), one "
            "logit per scan and one number per slice"
        )
    logit, attention = torch.as_tensor(logit).cpu().double().flatten(), torch.as_tensor(attention).cpu().double()
    if attention.ndim == 2:
        attention = attention.mean(0)
    if logit.shape != lengths.shape or attention.shape != (slices,):
        raise UserError(
            f"the model returned {len(logit)} logits and attention of shape {tuple(attention.shape)} for "
            f"{len(lengths)} scans with {slices} slices; return one logit per scan and one number per slice, packed "
            "without padding (normal_guidance.pack)"
        )
    if not (attention.isfinite() & (attention >= 0)).all():
        raise UserError(
            "the model's attention is negative or not finite; return attention, not its logarithm or logits"
        )
    total = sum_per_bag(attention, lengths)
    if (total <= 0).any():
        raise UserError(
            "the model's attention is 0 on all slices of a scan; return attention above 0 on at least one slice"
        )
    scores = output.slice_scores.cpu().double() if hasattr(output, "slice_scores") else attention
    return ScanPredictions(logit, scores, attention / total[bag_of_rows(lengths)])


DRAWS = 500  # resampled sets of scans; the standard error from 500 of them is itself off by about 3 %

SEED = 0

LEAST_PATIENTS = 5  # patients with positive scans, and with negative ones, that an interval needs to mean anything


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)  # stands for a number that could not be measured


@dataclass(frozen=True, eq=False)
class Varied:
    """A number on the scans as they are, and on every resampled set of them."""

    value: float
    drawn: Float64[np.ndarray, "draws"]

    def __sub__(self, other: Varied) -> Varied:
        return Varied(self.value - other.value, self.drawn - other.drawn)

    @classmethod
    def weighted(cls, parts: Mapping[Varied, float]) -> Varied:
        """The weighted sum of numbers; `parts` gives the weight of each."""
        drawn = np.sum([weight * part.drawn for part, weight in parts.items()], axis=0)
        return cls(math.fsum(weight * part.value for part, weight in parts.items()), drawn)


class Bootstrap:
    """Resamples of one set of scans, the same for every number, so that differences are paired."""

    def __init__(self, scans: LabelledScans) -> None:
        self.labels = scans.labels.cpu().numpy()
        self.scan_ids, self.patient_ids = tuple(scans.scan_ids), tuple(scans.patient_ids)
        patients = np.array(self.patient_ids)
        counts = [len(np.unique(patients[self.labels == label])) for label in (0, 1)]
        if min(counts) < LEAST_PATIENTS:
            raise UserError(
                f"{counts[1]} patients have positive scans and {counts[0]} have negative ones; the tests need "
                f"{LEAST_PATIENTS} of each; give more scans"
            )
        self.freedom = min(counts) - 1
        self._patients = patients_of([self._results({"none": None})])
        (self._weights,) = multiplicities(self._patients.positive, DRAWS, SEED, DRAWS)

    def aurocs(self, scores: Mapping[str, Float64[Tensor, "scans"]]) -> dict[str, Varied]:
        split = self._results({name: of_scans.numpy() for name, of_scans in scores.items()})
        values, drawn = measure([split])["scan_auroc"], resample([split], DRAWS, SEED)["scan_auroc"]
        return {name: Varied(values[name], drawn[name]) for name in scores}

    def mean(self, values: Float64[Tensor, "scans"]) -> Varied:
        """Mean over the scans that have a value (not NaN)."""
        return self.means({"it": values})["it"]

    def means(
        self, values: Mapping[str, Float64[Tensor, "scans"]], among: Bool[np.ndarray, "scans"] | None = None
    ) -> dict[str, Varied]:
        """Means of many numbers at once, each over the scans that have a value and are in `among`."""
        numbers = np.stack([of_scans.numpy() for of_scans in values.values()], axis=1)
        counted = np.isfinite(numbers) & (True if among is None else among[:, None])
        sums = np.zeros((2, len(self._patients.ids), len(values)))
        np.add.at(sums[0], self._patients.of_scans[0], np.where(counted, numbers, 0.0))
        np.add.at(sums[1], self._patients.of_scans[0], counted)
        with np.errstate(invalid="ignore"):
            once = sums[0].sum(0) / sums[1].sum(0)
            drawn = (self._weights @ sums[0]) / (self._weights @ sums[1])
        return {name: Varied(float(once[i]), drawn[:, i]) for i, name in enumerate(values)}

    def estimate(self, varied: Varied) -> Estimate:
        """The number with its interval, by Student's t times the bootstrap's standard error."""
        defined = varied.drawn[np.isfinite(varied.drawn)]
        if not math.isfinite(varied.value) or len(defined) < MIN_DEFINED * DRAWS:
            return Estimate(varied.value, math.nan, math.nan)
        value = 0.0 if abs(varied.value) < ROUNDING else varied.value
        reach = student_quantile(LEVEL, self.freedom) * float(defined.std(ddof=1))
        return Estimate(value, value - reach, value + reach)

    def _results(self, scores: Mapping[str, np.ndarray | None]) -> SplitResults:
        nowhere = np.full(len(self.labels), np.nan)
        measured = {name: MethodResults(nowhere, nowhere, of_scans) for name, of_scans in scores.items()}
        return SplitResults(self.scan_ids, self.patient_ids, self.labels.astype(np.int64), measured)


# Deletion and insertion (Petsiuk, Das, Saenko, "RISE", 2018): the score without the most attended slices, or with these
# alone, beside as many others; a moved order keeps attention's shape.  Attention that is tied to the logit wins by the
# logit by construction, even on noise; by scan AUROC, noise does not.

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)  # shares of a scan's slices, or of its attention, to remove or to keep
REPEATS = 3  # random orders, over which scores are averaged
SCORE_ROUNDING = 1e-6  # a share of attention counts as reached if no more than this is missing

By = Literal["slices", "attention"]
Kind = Literal["deletion", "insertion"]
Score = Literal["auroc", "logit"]
Orders = Mapping[str, Sequence[Int64[Tensor, "slices"]]]
"""Name -> one or several orders: the slices' numbers, scan after scan, the first to remove first."""

CONTROLS = {"random": "as many random slices", "moved": "the same attention moved along the scan"}  # what to beat


def make_orders(
    whole: ScanPredictions,
    lengths: Int[Tensor, "scans"],
    untrained: Sequence[ScanPredictions],
    generator: torch.Generator,
) -> Orders:
    """Make the order by attention, and the orders to compare it with."""

    def order(scores: Tensor) -> Tensor:
        return highest_first(scores, lengths, generator)

    along, size = place_in_bag(lengths), lengths[bag_of_rows(lengths)]
    orders = {
        "attended": [order(whole.scores)],
        "least attended": [order(-whole.scores)],
        "middle": [order(-(along - (size - 1) / 2).abs())],
        "random": [order(torch.rand(len(along), generator=generator)) for _ in range(REPEATS)],
        "moved": [order(whole.scores[moved_round(lengths, generator)]) for _ in range(REPEATS)],
    }
    return orders | ({"untrained": [order(fresh.scores) for fresh in untrained]} if untrained else {})


def count_slices(
    predictions: ScanPredictions, lengths: Int[Tensor, "scans"], share: float, by: By, order: Int64[Tensor, "slices"]
) -> Int64[Tensor, "scans"]:
    """How many slices make up a share of the slices, or the fewest that hold a share of attention; at least one."""
    if by == "slices":
        return (share * lengths + 0.5).floor().long().clamp(min=1)
    held = predictions.attention[order]
    running = held.cumsum(0)
    before = (running - held)[lengths.cumsum(0) - lengths]
    short = running - before[bag_of_rows(lengths)] < share - SCORE_ROUNDING
    return 1 + sum_per_bag(short, lengths)


@dataclass(frozen=True, eq=False)
class Curves:
    """Scan scores by share, for each order: the logit of positive scans in standard deviations, and scan AUROC."""

    kind: Kind
    shares: tuple[float, ...]
    logit: Mapping[str, Sequence[Varied]]
    auroc: Mapping[str, Sequence[Varied]]
    whole_logit: Varied  # of whole scans, where deletion begins and insertion ends
    whole_auroc: Varied

    def gap(self, score: Score, against: str, order: str = "attended") -> Varied:
        """Mean distance between two curves: how much more the score owes to the slices of `order`."""
        curves, removing = (self.logit if score == "logit" else self.auroc), self.kind == "deletion"
        # The trapezoidal rule; the curves meet where nothing is removed, and where everything is kept.
        at = np.array([0.0, *self.shares] if removing else [*self.shares, 1.0])
        half = np.diff(at) / 2 / (at[-1] - at[0])
        weights = np.append(half, 0) + np.insert(half, 0, 0)
        weights = weights[1:] if removing else -weights[:-1]
        distances = [other - point for point, other in zip(curves[order], curves[against], strict=True)]
        return Varied.weighted(dict(zip(distances, weights, strict=True)))


def worth(curves: Mapping[Kind, Curves], against: str) -> Varied:
    """What attended slices are worth beyond others, in scan AUROC: the mean of the gaps by deletion and insertion."""
    # Deletion alone shows little in weak data: the rest of a negative scan has lost its highest noise, too.
    return Varied.weighted({each.gap("auroc", against): 1 / len(curves) for each in curves.values()})


def draw_curves(
    model: Model,
    scans: ScanSet,
    whole: ScanPredictions,
    orders: Orders,
    bootstrap: Bootstrap,
    *,
    by: By = "slices",
    watch: Callable[[float], None] | None = None,
) -> dict[Kind, Curves]:
    """Both curves of every order, from 2 x shares x orders passes over the scans; `watch` receives the share done."""
    lengths = scans.lengths.cpu()
    scale = float(whole.logit.std()) or 1.0
    counts = [count_slices(whole, lengths, share, by, orders["attended"][0]) for share in SHARES]
    kinds: tuple[Kind, ...] = ("deletion", "insertion")
    repeats = [(name, repeat, order) for name, several in orders.items() for repeat, order in enumerate(several)]
    steps = list(product(kinds, repeats, enumerate(counts)))
    logits: dict[Kind, dict[str, Tensor]] = {kind: {"whole": whole.logit / scale} for kind in kinds}
    for done, (kind, (name, repeat, order), (number, count)) in enumerate(steps, start=1):
        # The slices without the first of an order (at least one is left), or these alone, as they lie in the scan.
        count = torch.minimum(count, lengths - 1 if kind == "deletion" else lengths)
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[order[place_in_bag(lengths) < count[bag_of_rows(lengths)]]] = True
        shown = ~chosen if kind == "deletion" else chosen
        selection = SliceSelection(shown.nonzero().squeeze(1), sum_per_bag(shown, lengths))
        logits[kind][f"{name}/{repeat}/{number}"] = predict_scans(model, scans, selection).logit / scale
        if watch is not None:
            watch(done / len(steps))

    def averaged(numbers: Mapping[str, Varied]) -> dict[str, list[Varied]]:
        return {
            name: [
                Varied.weighted({numbers[f"{name}/{repeat}/{i}"]: 1 / len(several) for repeat in range(len(several))})
                for i in range(len(SHARES))
            ]
            for name, several in orders.items()
        }

    curves = {}
    for kind, of_kind in logits.items():
        aurocs, means = bootstrap.aurocs(of_kind), bootstrap.means(of_kind, bootstrap.labels == 1)
        curves[kind] = Curves(kind, SHARES, averaged(means), averaged(aurocs), means["whole"], aurocs["whole"])
    return curves


Verdict = Literal["passes", "fails", "cannot be told"]
PASSES: Verdict = "passes"
FAILS: Verdict = "fails"
UNDECIDED: Verdict = "cannot be told"

TRACE = 0.03  # scan AUROC: where attention is worth less than this, by its whole interval, it fails, significant or not

Numbers = dict[str, Estimate | float]


@dataclass(frozen=True)
class TrustResult:
    """The result of one test: the verdict, its main number, a difference from a control, and further numbers."""

    name: str
    verdict: Verdict
    number: Estimate
    control: str  # what the number is a difference from, in words; by chance, the difference is 0
    more: Mapping[str, Estimate | float]
    meaning: str
    action: str

    @property
    def title(self) -> str:
        return TESTS[self.name][0]

    @property
    def measured(self) -> str:
        """What the number measures, in words."""
        return TESTS[self.name][1]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "verdict": self.verdict,
            "measured": self.measured,
            **asdict(self.number),
            "reference": 0.0,
            "reference_words": self.control,
            "meaning": self.meaning,
            "action": self.action,
            "more": {name: asdict(n) if isinstance(n, Estimate) else n for name, n in self.more.items()},
        }


TESTS = {
    "shuffle": (
        "Shuffle slices",
        "how far attention goes with the slices, minus how far it stays at the positions (rank correlations)",
    ),
    "randomize": (
        "Randomise weights",
        "scan AUROC that attended slices are worth beyond those that untrained models attend to",
    ),
    "deletion": (
        "Delete and insert",
        "scan AUROC that attended slices, removed and kept alone, are worth beyond other slices",
    ),
    "inverted": (
        "Inverted attention",
        "scan AUROC that attended slices are worth beyond other slices; an alarm below 0",
    ),
}
"""Title of each test, and what its number measures."""

WORDS: dict[tuple[str, Verdict], tuple[str, str]] = {
    ("shuffle", PASSES): (
        "Attention goes with the slices when their order changes: it comes from the image more than from the position.",
        "Nothing.",
    ),
    ("shuffle", FAILS): (
        "Attention stays at its positions whatever slices lie there: it shows where findings usually are, and nothing "
        "about this scan.",
        "Do not show this attention as evidence. Compare with the centred Gaussian, which needs no model; train "
        "without position, or with guidance of another shape.",
    ),
    ("shuffle", UNDECIDED): (
        "The test showed neither that attention goes with the slices nor that it stays at the positions.",
        "If attention is equal on all slices, it points nowhere. Otherwise test more scans.",
    ),
    ("randomize", PASSES): (
        "Training decides where the model looks, and the slices it looks at separate positive from negative scans.",
        "Nothing.",
    ),
    ("randomize", FAILS): (
        "Attention is not worth more than that of an untrained model",
        "Do not show this attention as evidence. If scan AUROC is high, only the classifier has learnt: train with "
        "another lambda, learning rate or head. If it is at chance, train first.",
    ),
    ("randomize", UNDECIDED): (
        "The test showed neither that attention differs from that of untrained models nor that it does not",
        "Test more scans; or give a function that makes the model with untrained weights (`untrained=`).",
    ),
    ("deletion", PASSES): (
        "The slices that attention points at are those that separate positive from negative scans.",
        "Nothing.",
    ),
    ("deletion", FAILS): (
        "Attended slices separate positive from negative scans no better than other slices do, so attention does not "
        "explain the scan's score.",
        "Do not show this attention as evidence. Try guidance or a head whose attention is its evidence.",
    ),
    ("deletion", UNDECIDED): (
        "The test showed neither that attended slices matter more than others nor that they do not.",
        "Test more scans.",
    ),
    ("inverted", PASSES): ("Attention does not point away from the evidence.", "Nothing."),
    ("inverted", FAILS): (
        "ALARM: attention points away from the evidence.",
        "Do not show this attention: the least attended slices are nearer to the finding. Look for a wrong sign "
        "between scores and attention. If there is none, train again with another seed or with guidance.",
    ),
    ("inverted", UNDECIDED): (
        "The test showed neither that attention points away from the evidence nor that it does not.",
        "Test more scans, or give slice labels of some.",
    ),
}
"""The meaning of each test's verdict, and what to do."""


def decide(number: Estimate, *, fails_below: float = TRACE, passes_above: float = 0.0) -> Verdict:
    """The verdict by the whole interval of a number, by default whether it is above 0 and more than a trace."""
    if number.high < fails_below:  # of NaN, nothing is true
        return FAILS
    return PASSES if number.low > passes_above else UNDECIDED


# Test 1: slices in another order.  Attention that comes from the image goes with the slices.
# A model that looks at neighbours finds none of them among shuffled slices.  So the verdict is about scans that are
# only shifted cyclically: the scan begins at another slice, and its end is followed by its beginning.

SHUFFLES = 3  # random orders of every scan
POSITION_FREE = 1e-3  # mean share of attention that may move by rounding; above it, the order of slices counts
MOSTLY = 0.5  # from this rank correlation on, the greater part of attention agrees


def judge_shuffling(
    model: Model, scans: ScanSet, whole: ScanPredictions, generator: torch.Generator, bootstrap: Bootstrap
) -> TrustResult:
    """Judge whether attention goes with the slices or stays at the positions, by rank correlations with whole scans."""
    lengths = scans.lengths.cpu()
    # follows: slice by slice, shifted; 1 if position does not count.  moves: the same, shuffled; 1 if neighbours do not
    # count either.  stays: position by position, shuffled; 1 if only position counts, 0 by chance.  error: the share of
    # attention that lies on other slices than before, shuffled: the equivariance error.
    values: dict[str, list[Tensor]] = {name: [] for name in ("follows", "moves", "stays", "error")}
    logits = []
    for _ in range(SHUFFLES):
        moved = moved_round(lengths, generator)
        shuffled = highest_first(torch.rand(len(moved), generator=generator), lengths, generator)
        for name, order in (("follows", moved), ("moves", shuffled)):
            back = order.argsort()  # order[p] is the slice at position p
            changed = predict_scans(model, scans, SliceSelection(order, lengths))
            values[name].append(rank_correlation(whole.scores, changed.scores[back], lengths))
        values["stays"].append(rank_correlation(whole.scores, changed.scores, lengths))
        values["error"].append(sum_per_bag((changed.attention[back] - whole.attention).abs() / 2, lengths))
        logits.append(changed.logit)
    means = {name: bootstrap.mean(torch.stack(each).nanmean(0)) for name, each in values.items()}
    numbers = {name: bootstrap.estimate(mean) for name, mean in means.items()}
    difference, stays, error = bootstrap.estimate(means["follows"] - means["stays"]), numbers["stays"], numbers["error"]
    more: Numbers = {
        "goes with the slices, scan moved round": numbers["follows"],
        "goes with the slices, shuffled": numbers["moves"],
        "stays at the places, shuffled (position alone)": stays,
        "share of attention that shuffling moves (equivariance error)": error,
    }
    note = ""
    if whole.scores_scans:
        aurocs = bootstrap.aurocs({"whole": whole.logit} | {f"{i}": each for i, each in enumerate(logits)})
        before = aurocs.pop("whole")
        lost = bootstrap.estimate(before - Varied.weighted(dict.fromkeys(aurocs.values(), 1 / len(aurocs))))
        more["scan AUROC lost by shuffling"] = lost
        note = " The order of slices changes attention, but shuffling was not shown to lower scan AUROC."
        if error.value < POSITION_FREE:
            note = " The model ignores the order of slices."
        elif lost.low > 0:
            note = f" The order of slices counts: without it, {digits(lost.value)} of scan AUROC is lost."
    verdict = FAILS if difference.known and stays.low > MOSTLY else decide(difference, fails_below=0.0)
    control, (meaning, action) = "attention that has nothing to do with the scan", WORDS["shuffle", verdict]
    return TrustResult("shuffle", verdict, difference, control, more, f"{meaning}{note}", action)


# Test 2: untrained weights.  Attention that is as good with these does not come from training.
# Reference: Adebayo et al., "Sanity Checks for Saliency Maps", 2018.

UNTRAINED = 19  # untrained models: a further one has a higher scan AUROC than all of them with a probability of 5 %
COMPARED = 3  # untrained models whose attention is compared: each costs as much as a curve

LEARNT = 0.05  # scan AUROC: where the whole interval lies below the best untrained model plus this, nothing was learnt

Untrained = Callable[[int], Model]  # makes the same model with untrained weights, from a seed

CONTROL = "untrained models' attention"


def untrained_copies(model: nn.Module) -> Untrained:
    """Return a function that copies a module with each layer reset (`reset_parameters`) or shuffled."""

    def fresh(seed: int) -> nn.Module:
        made = copy.deepcopy(model)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for module in made.modules():
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
                    continue
                for parameter in module.parameters(recurse=False):
                    flat = parameter.flatten()
                    parameter.copy_(flat[torch.randperm(len(flat)).to(flat.device)].view_as(parameter))
        return made

    return fresh


def judge_randomizing(
    whole: ScanPredictions,
    others: Sequence[ScanPredictions],
    scans: LabelledScans,
    curves: Mapping[Kind, Curves] | None,
    bootstrap: Bootstrap,
) -> TrustResult:
    """Judge attention against that of untrained models: the worst verdict of three checks."""
    if not others:
        meaning = "The model is a plain function, so there is no untrained version of it to compare with."
        action = "Give a function that makes the same model with untrained weights from a seed (`untrained=`)."
        return TrustResult("randomize", UNDECIDED, NO_ESTIMATE, CONTROL, {}, meaning, action)
    lengths, compared = scans.lengths.cpu(), others[:COMPARED]
    alike, chance = (
        bootstrap.estimate(
            bootstrap.mean(torch.stack([rank_correlation(a.scores, b.scores, lengths) for a, b in pairs]).nanmean(0))
        )
        for pairs in ([(whole, other) for other in compared], list(combinations(compared, 2)))
    )
    more: Numbers = {
        "rank correlation with untrained models": alike,
        "rank correlation among untrained models": chance,
    }
    # Attention that is equal everywhere has no correlation.
    ranking = FAILS if alike.low > MOSTLY else PASSES if alike.high < MOSTLY else UNDECIDED
    reasons: dict[str, Verdict] = {"it ranks slices as untrained models do": ranking}
    gap = NO_ESTIMATE
    if curves is not None:
        gap = bootstrap.estimate(worth(curves, "untrained"))
        learnt = bootstrap.estimate(curves["deletion"].whole_auroc)
        best = max(auroc(other.logit, scans.labels.cpu()).item() for other in others)
        more |= {"scan AUROC": learnt, f"highest scan AUROC of {len(others)} untrained models": best}
        separates = FAILS if learnt.high < best + LEARNT else UNDECIDED
        if learnt.low > 0.5 and learnt.value > best:
            separates = PASSES
        reasons["untrained models separate positive from negative scans as well"] = separates
        reasons["slices that untrained models attend to are worth as much"] = decide(gap)
    if scans.slice_labels is not None:
        labels = scans.slice_labels.cpu()
        aurocs = [localization(each.scores, labels, lengths).mean_auroc.item() for each in (whole, *compared)]
        more["localization AUROC"] = aurocs[0]
        more["localization AUROC of untrained models"] = sum(aurocs[1:]) / len(compared)
    verdicts = {*reasons.values(), *([] if curves is not None else [UNDECIDED])}
    verdict = next((worst for worst in (FAILS, UNDECIDED) if worst in verdicts), PASSES)
    meaning, action = WORDS["randomize", verdict]
    if verdict != PASSES:
        why = [reason for reason, of_reason in reasons.items() if of_reason == verdict]
        text = "; ".join(why)
        if verdict == UNDECIDED:
            text = f"undecided: whether {'; whether '.join(why)}" if why else "the model has no scan score"
        meaning = f"{meaning} ({text})."
    return TrustResult("randomize", verdict, gap, CONTROL, more, meaning, action)


# Tests 3 and 4, from the curves: whether attended slices matter, and whether attention points away from evidence.

AWAY = 0.05  # localization AUROC this far below .5 points away; in thousands of scans, less would be significant, too

SCORES: dict[Score, str] = {"auroc": "scan AUROC", "logit": "logit of positive scans"}


def judge_deletion(curves: Mapping[Kind, Curves] | None, bootstrap: Bootstrap) -> TrustResult:
    """Judge by scan AUROC against the harder control; the logit of positive scans is reported only."""
    if curves is None:  # a method without a logit, such as the centred Gaussian
        meaning = "The model has no scan score, so removing slices cannot lower it."
        action = "Test a model that scores scans."
        return TrustResult("deletion", UNDECIDED, NO_ESTIMATE, CONTROLS["random"], {}, meaning, action)
    control, number = _control(curves, bootstrap, harder=True)
    verdict = decide(number)
    more: Numbers = {
        f"{kind}, {SCORES[score]}, beside {order}": bootstrap.estimate(each.gap(score, order))
        for kind, each in curves.items()
        for score in SCORES
        for order in each.auroc
        if order != "attended"
    }
    meaning, action = WORDS["deletion", verdict]
    if verdict == PASSES:
        if not bootstrap.estimate(curves["deletion"].gap("auroc", "random")).low > 0:
            meaning += (
                " They are sufficient, but the model was not shown to need them: other slices hold evidence, too."
            )
        if not bootstrap.estimate(worth(curves, "middle")).low > 0:
            meaning += " However, slices from the middle of the scan were not shown to be worth less."
    return TrustResult("deletion", verdict, number, CONTROLS[control], more, meaning, action)


def judge_alarm(
    curves: Mapping[Kind, Curves] | None, whole: ScanPredictions, scans: LabelledScans, bootstrap: Bootstrap
) -> TrustResult:
    """Judge without slice labels; where there are slice labels, they confirm the verdict, or decide an open one."""
    number, verdict, control = NO_ESTIMATE, UNDECIDED, "random"
    more: Numbers = {}
    if curves is not None:
        # The alarm must hold against every control, as must its absence.  The logit alone gives false alarms: max
        # pooling's rises or falls with the sign of its weights when slices are removed, in negative scans as much.
        control, number = _control(curves, bootstrap, harder=True)
        easier, highest = _control(curves, bootstrap, harder=False)
        if bootstrap.estimate(curves["deletion"].whole_auroc).low > 0.5:  # at chance, no slice is evidence
            if highest.high < 0:
                control, number, verdict = easier, highest, FAILS
            elif number.low > 0:
                verdict = PASSES
        lost = curves["deletion"].gap("logit", "random")
        more["logit of positive scans lost, beyond random slices"] = bootstrap.estimate(lost)
    by_labels = ""
    if scans.slice_labels is not None:
        measured = localization(whole.scores, scans.slice_labels.cpu(), scans.lengths.cpu())
        per_scan = torch.full((len(scans.lengths),), torch.nan, dtype=torch.float64)
        per_scan[measured.kept] = measured.auroc
        located = bootstrap.estimate(bootstrap.mean(per_scan))
        if located.known:
            more["localization AUROC"] = located
            labels = decide(located, fails_below=0.5 - AWAY, passes_above=0.5)
            agree = "slice labels confirm it" if labels == verdict else "slice labels do not confirm it"
            if verdict == UNDECIDED and labels != UNDECIDED:
                verdict, agree = labels, "by slice labels alone"
            if verdict != UNDECIDED:
                by_labels = f" ({agree}: localization AUROC {digits(located.value)})"
    meaning, action = WORDS["inverted", verdict]
    meaning = f"{meaning.removesuffix('.')}{by_labels}."
    return TrustResult("inverted", verdict, number, CONTROLS[control], more, meaning, action)


def _control(curves: Mapping[Kind, Curves], bootstrap: Bootstrap, *, harder: bool) -> tuple[str, Estimate]:
    """The control against which attention is worth least (harder) or most."""
    numbers = {name: bootstrap.estimate(worth(curves, name)) for name in CONTROLS}
    name = (min if harder else max)(numbers, key=lambda name: numbers[name].value)
    return name, numbers[name]
