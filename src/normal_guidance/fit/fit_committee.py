"""From scans and their labels to a committee (`committee.py`), with nothing to choose.

Every kind of places, penalty and turn is a setting.  All are fitted in folds by patient, and compared by the
log loss of the scans that they have not seen, paired by patient.  Places around the middle are what is usual in medical
scans: they stay unless another setting is clearly better, and clearly better than a look at the whole scan, too: what
tells scans apart without saying where says nothing about places.  The members of all settings that stay are averaged.
Slice labels are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import LARGEST_SEED
from normal_guidance.core.arrays import checked_whole
from normal_guidance.core.bags import Bags, ScanSet
from normal_guidance.core.bells import Places
from normal_guidance.fit.committee import COMPONENTS, LEARNED, Committee, Scaling, fit_scaling, prior_attention, shares
from normal_guidance.fit.evidence import TURNS, Fitted, Penalty, fit_evidence
from normal_guidance.scans.index.splits import fold_scans
from normal_guidance.statistics.differences import in_standard_errors
from normal_guidance.sweep.batches import LOADING_BATCH

FOLDS = 5
LEAST = 3  # the fewest positive and negative scans, of as many patients
ENOUGH = 400  # folds are drawn again until this many scans were predicted, at most `REPEATS` times
REPEATS = 5

# Half the width of the places in lengths of the median scan, 0 for a single slice; powers of the odds of one place
# (`fit_evidence`), each with the number of reaches, the shortest, that are tried.
REACHES = (0.0, 1 / 40, 1 / 20, 3 / 40, 1 / 10, 3 / 20)
POWERS = ((1.0, len(REACHES)), (4.0, 4), (1 / 8, 2))
RIDGES, LASSOS = (0.1, 0.3, 1.0, 3.0, 10.0), (0.5, 0.8)
CLEARLY = 2.0  # standard errors of a mean paired difference, above which a setting is clearly worse than another

HOPELESSLY = 5.0  # a kind of places that is worse by more standard errors after the first turn has no more turns

Kind = tuple[Places, float]  # places to look for, and the power of their odds


@dataclass(frozen=True)
class FoldPlan:
    """How a committee is fitted; `make_plan` decides it."""

    folds: int = FOLDS  # parts of the patients; each is predicted by members that were trained on the others
    repeats: int = 1  # how often patients are divided anew
    seed: int = 0  # of the division, the only chance in all of this
    components: int = COMPONENTS  # principal components that are kept of features that repeat each other


@dataclass(frozen=True)
class Setting:
    """What members of one kind have in common."""

    places: Places
    power: float
    penalty: Penalty
    turn: int  # how often weights and attention were fitted in turn

    @property
    def usual(self) -> bool:
        """Whether it looks for one block of slices around the middle of the scan, as most findings are."""
        return self.places.central and bool(self.places.reach) and self.power == 1.0


class KeptSettings(NamedTuple):
    kept: tuple[int, ...]  # the numbers of the settings that are in the committee
    unusual: bool  # whether the usual places were clearly worse than others
    shown: bool  # whether a setting that looks for places clearly knows more than how frequent positive scans are
    losses: Float64[Tensor, "settings"]  # mean log loss of each setting, out of fold


@dataclass(frozen=True, eq=False)
class CommitteeFit:
    """A fitted committee, and what its members say of scans that they have not seen."""

    committee: Committee
    plan: FoldPlan
    settings: tuple[Setting, ...]
    choice: KeptSettings
    folds: Int[Tensor, "repeats scans"]
    # Out of fold: by members that were not trained on the scan, of settings that were chosen without it.
    logits: Float64[Tensor, "scans"]
    attention: Float[Tensor, "slices"]


def make_plan(labels: Sequence[int], patient_ids: Sequence[str], *, seed: int = 0) -> FoldPlan:
    """Decide how to fit these scans; too few are refused."""
    seed = checked_whole("seed", seed, 0, LARGEST_SEED)
    patients = [
        {patient for patient, label in zip(patient_ids, labels, strict=True) if label == wanted} for wanted in (1, 0)
    ]
    least = min(map(len, patients))
    if least < LEAST:
        positive, named = sum(labels), len(set(patient_ids)) < len(labels)
        raise UserError(
            f"{positive} positive scans of {len(patients[0])} patients and {len(labels) - positive} negative ones of "
            f"{len(patients[1])}; at least {LEAST} patients of each are needed: add labelled scans of other patients"
            f"{', or correct the patient ids, which scans share' if named else ''}"
        )
    return FoldPlan(min(FOLDS, least), max(1, min(REPEATS, round(ENOUGH / len(labels)))), seed)


def fit_committee(
    scans: ScanSet,
    patient_ids: Sequence[str],
    plan: FoldPlan | None = None,
    *,
    device: torch.device | str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> CommitteeFit:
    """Fit a committee, on the CPU in the end; `watch` is called with the share that is done."""
    labels = scans.labels.tolist()
    plan = plan or make_plan(labels, patient_ids)
    scaling = fit_scaling(scans, plan.components)
    scaled = scale_scans(scans, scaling, device)
    penalties = [Penalty("ridge", strength) for strength in RIDGES]
    if scaling.rotation is None:
        penalties += [Penalty("lasso", strength) for strength in LASSOS]
    kinds = _kinds(scans.lengths)
    folds = torch.tensor([fold_scans(patient_ids, labels, plan.folds, plan.seed + n) for n in range(plan.repeats)])
    settings: list[Setting] = []
    fits: list[list[tuple[Fitted, int]]] = [[] for _ in folds]

    def fit(kind: Kind, repeat: int, first: int, **options: Any) -> Fitted:
        """Fit and keep the members of a few turns from the `first` on; return those of that one."""
        made = fit_evidence(scaled, folds[repeat], kind[0], penalties, power=kind[1], **options)
        for turn, fitted in enumerate(made, start=first):
            fits[repeat] += [(fitted, number) for number in range(len(penalties))]
            settings.extend(Setting(*kind, penalty, turn) for penalty in penalties if repeat == 0)
        return made[0]

    done, begun = 0.0, {}

    def advance(share: float) -> None:
        nonlocal done
        done += share
        if watch is not None:
            watch(done)

    for kind, repeat in product(kinds, range(plan.repeats)):
        begun[kind, repeat] = fit(kind, repeat, 1, turns=1)
        advance(1 / (TURNS * len(kinds) * plan.repeats))
    looking = [kind for kind in kinds if not kind[0].whole_scan]  # the whole scan has no attention to find in turns
    going = _promising(looking, settings, _logits(fits).mean(0), scans.labels, patient_ids)
    for kind, repeat in product(going, range(plan.repeats)):
        fit(kind, repeat, 2, turns=TURNS - 1, before=begun[kind, repeat])
        advance((1 - 1 / TURNS) / (len(going) * plan.repeats))
    logits = _logits(fits)
    choice = choose(settings, logits.mean(0), scans.labels, patient_ids)
    members = [[repeat[setting] for setting in choice.kept] for repeat in fits]
    own_logits, own_attention = _out_of_fold(settings, fits, logits, folds, scans, patient_ids)
    return CommitteeFit(
        committee=_assemble(scaling, [settings[number].places for number in choice.kept], members, choice.shown),
        plan=plan,
        settings=tuple(settings),
        choice=choice,
        folds=folds,
        logits=own_logits,
        attention=own_attention,
    )


def _logits(fits: Sequence[Sequence[tuple[Fitted, int]]]) -> Float64[Tensor, "repeats settings scans"]:
    return torch.stack([torch.stack([fitted.logits[column] for fitted, column in repeat]) for repeat in fits])


def _promising(
    kinds: Sequence[Kind],
    settings: Sequence[Setting],
    logits: Float64[Tensor, "settings scans"],
    labels: Int[Tensor, "scans"],
    patient_ids: Sequence[str],
) -> list[Kind]:
    """The kinds that are not hopelessly worse than the best kind, or than the best usual one if they are usual."""
    losses = F.binary_cross_entropy_with_logits(logits, labels.double().expand_as(logits), reduction="none")
    best: dict[Kind, int] = {}
    for number in losses.mean(1).argsort(descending=True).tolist():
        best[settings[number].places, settings[number].power] = number
    usual = [number for number in best.values() if settings[number].usual]
    leaders = [min(group, key=lambda number: losses[number].mean().item()) for group in (list(best.values()), usual)]

    def hopeless(number: int, leader: int) -> bool:
        return _excess(losses[number] - losses[leader], patient_ids) > HOPELESSLY

    return [
        kind
        for kind in kinds
        if not hopeless(best[kind], leaders[0]) or (settings[best[kind]].usual and not hopeless(best[kind], leaders[1]))
    ]


def _out_of_fold(
    settings: Sequence[Setting],
    fits: Sequence[Sequence[tuple[Fitted, int]]],
    logits: Float64[Tensor, "repeats settings scans"],
    folds: Int[Tensor, "repeats scans"],
    scans: ScanSet,
    patient_ids: Sequence[str],
) -> tuple[Float64[Tensor, "scans"], Float[Tensor, "slices"]]:
    """Logits and attention of each scan; the settings of a fold are chosen by the other folds' scans alone."""
    # The best of many settings by chance would look good on the scans that it was chosen by.
    own_logits = torch.zeros(len(folds), len(patient_ids), dtype=torch.float64)
    attention = torch.zeros(len(folds), int(scans.lengths.sum()))
    for repeat, fold_of_scan in enumerate(folds):
        fold_of_slice = fold_of_scan.repeat_interleave(scans.lengths)
        for fold in range(int(fold_of_scan.max()) + 1):
            others = fold_of_scan != fold
            ids = [patient for patient, other in zip(patient_ids, others.tolist(), strict=True) if other]
            choice = choose(settings, logits.mean(0)[:, others], scans.labels[others], ids)
            places = [settings[number].places for number in choice.kept]
            of_logit, of_attention = shares(places)
            own_logits[repeat, ~others] = of_logit @ logits[repeat][list(choice.kept)][:, ~others]
            slices = fold_of_slice == fold
            if choice.shown:
                own_fits = [fits[repeat][number] for number in choice.kept]
                every = torch.stack([fitted.attention[column][slices] for fitted, column in own_fits])
                attention[repeat, slices] = of_attention.float() @ every
            else:
                attention[repeat, slices] = prior_attention(places, scans.lengths[~others])
    return own_logits.mean(0), attention.mean(0)


def _kinds(lengths: Int[Tensor, "scans"]) -> list[Kind]:
    """The kinds of places and their powers; windows reach at least one slice."""
    median = lengths.double().median().item()
    reaches = list(dict.fromkeys(reach and max(1.0, reach * median) for reach in REACHES))
    kinds = [
        (Places(reach, central), power)
        for power, shortest in POWERS
        for central, reach in product((True, False), reaches[:shortest])
    ]
    return [*kinds, (Places(None, central=False), 1.0)]


def scale_scans(scans: ScanSet, scaling: Scaling, device: torch.device | str = "cpu") -> Bags:
    batches = torch.arange(len(scans.lengths)).split(LOADING_BATCH)
    rows = torch.cat([scaling(scans.rows(batch)).to(device) for batch in batches])
    return Bags(rows, scans.lengths.to(device), scans.labels.to(device))


def choose(
    settings: Sequence[Setting],
    logits: Float64[Tensor, "settings scans"],
    labels: Int[Tensor, "scans"],
    patient_ids: Sequence[str],
) -> KeptSettings:
    losses = F.binary_cross_entropy_with_logits(logits, labels.double().expand_as(logits), reduction="none")
    means = losses.mean(1)

    def clearly(differences: Float64[Tensor, "scans"]) -> bool:
        return _excess(differences, patient_ids) > CLEARLY

    def close_to(leader: int, candidates: Sequence[int]) -> list[int]:
        return [number for number in candidates if not clearly(losses[number] - losses[leader])]

    usual = [number for number, setting in enumerate(settings) if setting.usual]
    whole = [number for number, setting in enumerate(settings) if setting.places.whole_scan]
    looking = [number for number, setting in enumerate(settings) if not setting.places.whole_scan]
    best, best_usual, best_whole = (group[int(means[group].argmin())] for group in (looking, usual, whole))
    unusual = all(clearly(losses[other] - losses[best]) for other in (best_usual, best_whole))
    leader = best if unusual else best_usual
    kept = close_to(leader, looking if unusual else usual)
    if means[best_whole] <= means[leader] and clearly(_ignorance(labels) - losses[best_whole]):
        kept += close_to(best_whole, whole)
    return KeptSettings(tuple(kept), unusual, clearly(_ignorance(labels) - losses[leader]), means)


def _ignorance(labels: Int[Tensor, "scans"]) -> Float64[Tensor, "scans"]:
    """The log losses of one who knows nothing but how frequent positive scans are."""
    share = labels.double().mean()
    return F.binary_cross_entropy(share.expand(len(labels)), labels.double(), reduction="none")


def _excess(differences: Float64[Tensor, "scans"], patient_ids: Sequence[str]) -> float:
    """A mean difference in standard errors, with patients as the units."""
    number = {patient: index for index, patient in enumerate(dict.fromkeys(patient_ids))}
    of_scans = torch.tensor([number[patient] for patient in patient_ids])
    totals = torch.zeros(len(number), dtype=torch.float64).index_add_(0, of_scans, differences)
    return in_standard_errors(totals.sum().item(), (totals - totals.mean()).square().sum().sqrt().item())


def _assemble(
    scaling: Scaling, places: Sequence[Places], members: Sequence[Sequence[tuple[Fitted, int]]], shown: bool
) -> Committee:
    """The committee of the members of all repeats, settings and folds; `places` are those of the settings."""
    chosen = [member for repeat in members for member in repeat]
    used, folds = list(dict.fromkeys(places)), len(chosen[0][0].bias)
    kind = [used.index(sought) for _ in members for sought in places for _ in range(folds)]
    learned = {name: torch.cat([getattr(fitted, name)[:, column] for fitted, column in chosen]) for name in LEARNED}
    return Committee(scaling, used, torch.tensor(kind), **learned, shown=shown).eval()
