"""From scans and their labels to an ensemble (`ensemble.py`), with nothing to choose.

Patients are divided into folds.  Each fold is predicted by groups of models that were trained on the other folds but
one, and chosen on that one by log loss; every other fold is that one once.  A group has a model for each learning rate
and penalty, and the best few stay.  All groups of a kind are trained in one pass over the scans: a model's loss counts
the scans of its own training folds alone.  All models that stay, of all groups, are the ensemble.

Guided kinds attend: their attention is one bell, and usual findings are one block of slices.  Where a kind without
guidance predicts unseen scans clearly better than every guided one, that shape is wrong, and kinds without guidance
attend.  Scores come from all kinds that are not clearly worse than the best.  Slice labels are not used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import LARGEST_SEED
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.arrays import checked_whole
from normal_guidance.core.bags import Bags, ScanSet
from normal_guidance.core.layout import Layout
from normal_guidance.fit.ensemble import (
    Ensemble,
    MemberKind,
    Members,
    Scaling,
    fit_scalings,
    mean_attention,
    mean_logit,
    prior_attention,
)
from normal_guidance.scans.index.splits import fold_scans
from normal_guidance.statistics.differences import in_standard_errors, scan_auroc
from normal_guidance.sweep.batches import LOADING_BATCH, in_batches
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.engine import synchronize
from normal_guidance.sweep.stack import Parameters, Stack, descend, initial_momenta

FOLDS = 5
LEAST = 3  # the fewest positive and negative scans, of as many patients

KINDS = (
    MemberKind("whole_bells_ng", "together", scores=False),
    MemberKind("evidence_ng", "each", scores=False),
    MemberKind("ng", "components", hidden=32),
    MemberKind("whole_bells", "together", scores=False),
    MemberKind("evidence", "together"),
    MemberKind("mean", "together", attends=False),
)
RATES, PENALTIES = (0.1, 0.03), (0.01, 0.0)
KEPT = 2  # models of a group that stay, of one for each rate and penalty
STEPS, EPOCHS = 300, 40  # of each model at most, whichever is more
STEPS_AN_EPOCH = 5  # the fewest steps between evaluations
PATIENCE = 0.25  # the share of all epochs without a better validation loss after which a model is trained no more
USUALLY = 0.7  # the share of the longest time after which most fits have ended: models run out of patience
LEAVING = 0.25  # the share of models out of patience at which the others go on alone
CLEARLY = 2.0  # standard errors of a mean paired difference, above which a kind is clearly worse than another
SURELY = 3.0  # those above which guidance is given up: its shape is usual, and several kinds are compared


@dataclass(frozen=True)
class FoldPlan:
    """How an ensemble is fitted; `make_plan` decides it."""

    folds: int = FOLDS  # parts of the patients; each is predicted by models that were not trained on it
    seed: int = 0  # of the division, of initial weights and of the order of scans


class Choice(NamedTuple):
    """What each kind counts in, by its number."""

    attends: tuple[int, ...]
    scores: tuple[int, ...]
    usual: bool  # whether guided kinds attend; else one without guidance was clearly better
    shown: bool  # whether probability tells scans apart, by the whole interval of its AUROC


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """What models say of scans that they have not seen."""

    logits: Float[Tensor, "scans"]
    attention: Float[Tensor, "slices"]


@dataclass(frozen=True, eq=False)
class EnsembleFit(OutOfFold):
    """A fitted ensemble, and what it and its kinds say of scans that they have not seen."""

    # A fold's kinds are chosen without its scans.
    ensemble: Ensemble
    plan: FoldPlan
    choice: Choice
    kinds: tuple[OutOfFold, ...]  # in the order of `KINDS`
    losses: tuple[float, ...]  # their mean log losses


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
    folds = min(FOLDS, least)
    while folds > LEAST:  # patients with many scans may fill fewer folds
        with suppress(UserError):
            fold_scans(patient_ids, labels, folds, seed)
            break
        folds -= 1
    return FoldPlan(folds, seed)


def fit_ensemble(
    scans: ScanSet,
    patient_ids: Sequence[str],
    plan: FoldPlan | None = None,
    *,
    device: torch.device | str = "cpu",
    resume: Path | None = None,
    begin: Callable[[float], None] | None = None,
    watch: Callable[[float], object] = lambda share: None,
) -> EnsembleFit:
    """Fit an ensemble, on the CPU in the end.

    Args:
        resume: a folder for finished kinds, which another call with the same scans and plan goes on from.
        begin: called with the seconds that it will take at most on this machine, before the work.
        watch: called with the share that is done.
    """
    plan = plan or make_plan(scans.labels.tolist(), patient_ids)
    folds = torch.tensor(fold_scans(patient_ids, scans.labels.tolist(), plan.folds, plan.seed))
    scalings = fit_scalings(scans)
    training = [KindTraining(kind, scans, scalings[kind.form], folds, plan.seed, device) for kind in KINDS]
    files = [resume and resume / f"{kind.method}-{kind.form}.safetensors" for kind in KINDS]
    identity = _identity(scans, folds, scalings["together"], plan) if resume else ""
    kept = [_read(file, identity) for file in files]
    if begin is not None:
        begin(sum(each.seconds() for each, found in zip(training, kept, strict=True) if found is None))

    def report(number: int, share: float) -> None:
        watch((number + share) / len(KINDS))

    fitted, own = [], []
    for number, (each, file) in enumerate(zip(training, files, strict=True)):
        found = kept[number]
        if found is None:
            found = each.run(partial(report, number))
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_tensors(file, found, {"of": identity})
        members = Members(each.kind, scalings[each.kind.form], found)
        own.append(predict_out_of_fold(members.to(device), scans, folds))
        fitted.append(members.to("cpu"))
    choice = choose(KINDS, own, scans.labels, patient_ids)
    logits, attention = together(KINDS, own, folds, scans, patient_ids)
    counted = [
        Members(
            replace(kind, attends=number in choice.attends, scores=number in choice.scores), each.scaling, each.weights
        )
        for number, (kind, each) in enumerate(zip(KINDS, fitted, strict=True))
        if number in {*choice.attends, *choice.scores}
    ]
    return EnsembleFit(
        logits=logits,
        attention=attention,
        ensemble=Ensemble(counted, shown=choice.shown).eval(),
        plan=plan,
        choice=choice,
        kinds=tuple(own),
        losses=tuple(log_losses(each.logits, scans.labels).mean().item() for each in own),
    )


def _identity(scans: ScanSet, folds: Tensor, scaling: Scaling, plan: FoldPlan) -> str:
    """A name for what the models depend on beside their kind."""
    parts = (scans.labels, scans.lengths, folds, scaling.mean, scaling.scale)
    return sha256(
        b"".join(part.numpy().tobytes() for part in parts) + repr((plan, RATES, PENALTIES, KEPT, STEPS)).encode()
    ).hexdigest()


def _read(file: Path | None, identity: str) -> Parameters | None:
    if file is None or not file.is_file():
        return None
    tensors, about = read_tensors(file, "delete it, and fit again")
    return tensors if about == {"of": identity} else None


class DrawnScans(NamedTuple):
    """Scans of random features, to measure how long others of their sizes take."""

    lengths: Int[Tensor, "scans"]
    labels: Int[Tensor, "scans"]
    width: int
    dtype: torch.dtype = torch.float32

    def rows(self, scans: Int[Tensor, "chosen"]) -> Float[Tensor, "slices features"]:
        return torch.randn(int(self.lengths[scans].sum()), self.width, dtype=self.dtype)


def estimate_fit(scans: DrawnScans, patient_ids: Sequence[str], device: torch.device | str = "cpu") -> float:
    """The seconds that a fit of such scans usually takes on this machine."""
    plan = make_plan(scans.labels.tolist(), patient_ids)
    folds = torch.tensor(fold_scans(patient_ids, scans.labels.tolist(), plan.folds, plan.seed))
    scalings = fit_scalings(scans._replace(lengths=scans.lengths[:LOADING_BATCH], labels=scans.labels[:LOADING_BATCH]))
    kinds = [KindTraining(kind, scans, scalings[kind.form], folds, plan.seed, device) for kind in KINDS]
    return USUALLY * sum(kind.seconds() for kind in kinds)


class KindTraining:
    """All models of a kind, trained together: a group after the other, each with every rate and penalty."""

    def __init__(
        self,
        kind: MemberKind,
        scans: ScanSet,
        scaling: Scaling,
        folds: Int[Tensor, "scans"],
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.kind, self.seed, self.device = kind, seed, torch.device(device)
        self.scans, self.scaling, self.count = scans, scaling, len(scans.lengths)
        groups, plain = groups_of(folds), Config(kind.method, hidden=kind.hidden)
        seeds = [seed + number for number in range(len(groups.predicted))]  # initial weights of the groups
        self.configs = grid(plain, lr=RATES, l1=PENALTIES, seed=seeds)
        self.together = len(self.configs) // len(seeds)
        self.training, self.validation = (
            part.repeat_interleave(self.together, 0).float() for part in (groups.training, groups.validation)
        )
        self.batch = min(self.count, max(40, min(128, self.count // 20)))
        passes = math.ceil(STEPS_AN_EPOCH / (self.count // self.batch))
        self.steps = passes * (self.count // self.batch)
        self.epochs = max(EPOCHS, math.ceil(STEPS / self.steps))

    def seconds(self) -> float:
        """How long it takes at most, by the time of a step and of an evaluation."""
        self._begin(torch.arange(self.batch))
        times = []
        for _ in range(2):  # the first one also loads libraries
            for work in (lambda: self._step(torch.arange(self.batch)), self._validate):
                begin = time.perf_counter()
                work()
                synchronize(self.device)
                times.append(time.perf_counter() - begin)
        *_, step, evaluation = times
        return self.epochs * (self.steps * step + self.count / self.batch * evaluation)

    def run(self, watch: Callable[[float], object]) -> Parameters:
        """Train all models and return the weights of those kept, a group after the other."""
        self._begin(torch.arange(self.count))
        generator = torch.Generator().manual_seed(self.seed)
        losses = torch.full((len(self.configs),), math.inf, dtype=torch.float64, device=self.device)
        best, reached = {name: theta.clone() for name, theta in self.parameters.items()}, torch.zeros_like(losses)
        going = torch.arange(len(self.configs), device=self.device)
        whole = self.count // self.batch * self.batch
        for epoch in range(1, self.epochs + 1):
            for _ in range(self.steps * self.batch // whole):
                for batch in torch.randperm(self.count, generator=generator)[:whole].split(self.batch):
                    self._step(batch)
            now = self._validate()
            # A model out of patience has ended, though it waits for others: else its weights would depend on theirs.
            better = (now < losses[going]) & (epoch - 1 - reached[going] < PATIENCE * self.epochs)
            losses[going[better]], reached[going[better]] = now[better], float(epoch)
            for name, theta in self.parameters.items():
                best[name][going[better]] = theta[better]
            watch(epoch / self.epochs)
            staying = epoch - reached[going] < PATIENCE * self.epochs
            if not staying.any():
                break
            if staying.double().mean() < 1.0 - LEAVING:
                going = going[staying]
                for values in (self.parameters, self.momenta):
                    values.update({name: tensor[staying] for name, tensor in values.items()})
                for name in ("lr", "l1", "shares", "checks"):
                    setattr(self, name, getattr(self, name)[staying])
        kept = losses.unflatten(0, (-1, self.together)).argsort(stable=True, dim=1)[:, :KEPT]
        kept = (kept + self.together * torch.arange(len(kept), device=kept.device)[:, None]).flatten()
        del self.data, self.parameters, self.momenta, self.shares, self.checks  # their memory is the next kind's
        return {name: theta[kept].cpu() for name, theta in best.items()}

    def _begin(self, chosen: Int[Tensor, "chosen"]) -> None:
        """Scale the features of these scans, on the device, and make new models."""
        pool, lengths, parts = self.configs[0].spec.pool, self.scans.lengths[chosen], []
        scaling = self.scaling.to(self.device)
        for batch in chosen.split(LOADING_BATCH):
            rows = scaling(self.scans.rows(batch).to(self.device))
            if pool is not None:  # a pooling without parameters leaves one row of a scan
                rows = torch.stack([pool(scan) for scan in rows.split(self.scans.lengths[batch].tolist())])
            parts.append(rows)
        scaling.to("cpu")
        self.data = Bags(
            torch.cat(parts), lengths if pool is None else torch.ones_like(lengths), self.scans.labels[chosen]
        )
        self.stack = Stack.of(self.configs, self.scaling.inputs, self.device)
        self.parameters = self.stack.initial_parameters()
        self.momenta = initial_momenta(self.parameters, "sgd")
        self.lr, self.l1 = self.stack.lr, self.stack.l1
        validation = self.validation[:, chosen]
        self.shares = self.training[:, chosen].to(self.device)
        self.checks = (validation / validation.sum(1, keepdim=True).clamp_min(1.0)).to(self.device)

    def _step(self, batch: Int[Tensor, "batch"]) -> None:
        rows, layout = self._read(batch)
        targets = self.data.labels[batch].to(self.device)
        shares = self.shares[:, batch.to(self.device)]
        shares = shares / shares.sum(1, keepdim=True).clamp_min(1.0)
        weights = {name: theta.requires_grad_() for name, theta in self.parameters.items()}
        losses = self.stack.weighted_losses(weights, rows, layout, targets, shares)
        gradients = torch.autograd.grad(losses.sum(), list(weights.values()))
        config = self.configs[0]
        with torch.no_grad():
            self.parameters = {name: theta.detach() for name, theta in weights.items()}
            descend(
                self.parameters,
                gradients,
                self.momenta,
                lr=self.lr,
                l1=self.l1,
                momentum=config.momentum,
                clip_norm=config.clip_norm,
                unpenalized=config.spec.unpenalized,
            )

    @torch.no_grad()
    def _validate(self) -> Float64[Tensor, "models"]:
        """The log loss of each model's own validation scans."""
        losses = []
        for batch in in_batches(self.data.lengths, LOADING_BATCH):
            logits = self.stack.logits(self.parameters, *self._read(batch))
            losses.append(log_losses(logits, self.data.labels[batch].to(self.device)))
        return (self.checks * torch.cat(losses, 1)).sum(1)

    def _read(self, batch: Int[Tensor, "batch"]) -> tuple[Float[Tensor, "rows inputs"], Layout]:
        return self.data.rows(batch), Layout.packed(self.data.lengths[batch]).to(self.device)


class Groups(NamedTuple):
    """Groups of models, each with the fold that it predicts."""

    predicted: Int[Tensor, "groups"]
    training: Bool[Tensor, "groups scans"]  # the scans that it is trained on
    validation: Bool[Tensor, "groups scans"]  # and those that its models are chosen on


def groups_of(folds: Int[Tensor, "scans"]) -> Groups:
    pairs = torch.cartesian_prod(*(torch.arange(int(folds.max()) + 1),) * 2)
    predicted, chosen_on = pairs[pairs[:, 0] != pairs[:, 1]].T
    validation = folds == chosen_on[:, None]
    return Groups(predicted, (folds != predicted[:, None]) & ~validation, validation)


def log_losses(
    logits: Float[Tensor, "*models scans"], labels: Int[Tensor, "scans"]
) -> Float64[Tensor, "*models scans"]:
    targets = labels.double().expand_as(logits)
    return F.binary_cross_entropy_with_logits(logits.double(), targets, reduction="none")


@torch.no_grad()
def predict_out_of_fold(members: Members, scans: ScanSet, folds: Int[Tensor, "scans"]) -> OutOfFold:
    """Predict each fold by the members of its groups."""
    device = next(members.parameters()).device
    logits, attention = torch.zeros(len(folds)), torch.zeros(int(scans.lengths.sum()))
    of_slice = torch.arange(len(folds)).repeat_interleave(scans.lengths)
    count = len(members) // (int(folds.max()) + 1)
    for fold in range(int(folds.max()) + 1):
        of_fold = slice(fold * count, (fold + 1) * count)
        own = Members(members.kind, members.scaling, {name: w[of_fold] for name, w in members.weights.items()})
        numbers = (folds == fold).nonzero().flatten()
        for some in in_batches(scans.lengths[numbers], LOADING_BATCH):
            batch = numbers[some]
            layout = Layout.packed(scans.lengths[batch]).to(device)
            odds, log_attention = own(scans.rows(batch).to(device), layout)
            logits[batch] = mean_logit([odds]).cpu()
            attention[torch.isin(of_slice, batch)] = mean_attention([log_attention]).exp().float().cpu()
    return OutOfFold(logits, attention)


def choose(
    kinds: Sequence[MemberKind],
    own: Sequence[OutOfFold],
    labels: Int[Tensor, "scans"],
    patient_ids: Sequence[str],
    chosen: Bool[Tensor, "scans"] | None = None,
) -> Choice:
    """What each kind counts in, by the log losses of the `chosen` scans, or of all."""
    chosen = torch.ones(len(labels), dtype=torch.bool) if chosen is None else chosen
    labels, patients = labels[chosen], list(compress(patient_ids, chosen.tolist()))
    logits = torch.stack([each.logits[chosen] for each in own])
    losses = log_losses(logits, labels)
    means = losses.mean(1)

    def worse(number: int, other: int, errors: float = CLEARLY) -> bool:
        return excess(losses[number] - losses[other], patients) > errors

    def best(numbers: Sequence[int]) -> int:
        return min(numbers, key=lambda number: means[number].item())

    guided, free = (
        [number for number, kind in enumerate(kinds) if kind.attends and Config(kind.method).spec.guided is wanted]
        for wanted in (True, False)
    )
    usual = bool(guided) and not (free and worse(best(guided), best(free), SURELY))
    attends = guided if usual else free
    everyone = [number for number, kind in enumerate(kinds) if kind.scores or (number in attends and not usual)]
    scores = [number for number in everyone if not worse(number, best(everyone))]
    averaged = mean_logit([logits[number][None] for number in scores])
    return Choice(tuple(attends), tuple(scores), usual, scan_auroc(labels, patients, averaged).shown)


def together(
    kinds: Sequence[MemberKind],
    own: Sequence[OutOfFold],
    folds: Int[Tensor, "scans"],
    scans: ScanSet,
    patient_ids: Sequence[str],
) -> tuple[Float[Tensor, "scans"], Float[Tensor, "slices"]]:
    """Logits and attention of each scan; the kinds of a fold are chosen by the other folds' scans alone."""
    # The best of several kinds by chance would look good on the scans that it was chosen by.
    logits, attention = torch.zeros(len(folds)), prior_attention(scans.lengths)
    fold_of_slice = folds.repeat_interleave(scans.lengths)
    for fold in range(int(folds.max()) + 1):
        here, slices = folds == fold, fold_of_slice == fold
        choice = choose(kinds, own, scans.labels, patient_ids, ~here)
        logits[here] = mean_logit([own[number].logits[here][None] for number in choice.scores])
        if choice.shown:
            attention[slices] = torch.stack([own[number].attention[slices] for number in choice.attends]).mean(0)
    return logits, attention


def excess(differences: Float64[Tensor, "scans"], patient_ids: Sequence[str]) -> float:
    """A mean difference in standard errors, with patients as the units."""
    number = {patient: index for index, patient in enumerate(dict.fromkeys(patient_ids))}
    of_scans = torch.tensor([number[patient] for patient in patient_ids])
    totals = torch.zeros(len(number), dtype=torch.float64).index_add_(0, of_scans, differences)
    return in_standard_errors(totals.sum().item(), (totals - totals.mean()).square().sum().sqrt().item())
