r"""A committee: many linear models of evidence, whose log-odds and attention are averaged.

A member has weights w and a bias c.  A slice's evidence is $e_j = w^\top z_j$ of its scaled features, in log-odds.
Attention is the posterior of the places that a finding may have, and the scan's log-odds are those of Bayes' rule
(`core.bells`), brought to scale by a gain g:

$$ \mathrm{logit} = \frac{g}{t} \log \sum_c \pi_c e^{t s_c} + c $$

A sharpness t of 1 takes evidence as it is.  It is lower where evidence may be noise, and 0 where it is no better than
noise.  A gain of n makes the odds those of findings in n places.

Members that see the whole scan as one place have no part in the attention; in the log-odds, all of them together count
as much as all others (`shares`).  Where members were not shown to tell scans apart, attention is the prior.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from normal_guidance.base.records import read_as
from normal_guidance.core.bags import ScanSet
from normal_guidance.core.bells import Places, ScanPlaces
from normal_guidance.core.layout import Layout, as_rows
from normal_guidance.core.prediction import BagsLike, Prediction
from normal_guidance.sweep.batches import LOADING_BATCH, in_batches

COMPONENTS = 256  # principal components that are kept of features that repeat each other, at most
SLICES_A_COMPONENT = 10  # fewer slices than this for each component would make components of noise
REPEATING = 0.5  # features repeat each other where their effective number is below this share of them


class Scaling(nn.Module):
    """Scales rows of features: $(h - \\mathrm{mean}) \\cdot \\mathrm{scale}$, then a rotation if there is one.

    Encoders make features of very different size that mostly repeat each other.  Variance 1 mends the first, principal
    components mend the second; features that do not repeat each other stay, because L1 can choose among them.
    """

    mean: Tensor
    scale: Tensor
    rotation: Tensor | None

    def __init__(
        self,
        mean: Float[Tensor, "features"],
        scale: Float[Tensor, "features"],
        rotation: Float[Tensor, "features inputs"] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        self.register_buffer("rotation", rotation)

    @property
    def features(self) -> int:
        """Features of a slice before scaling."""
        return len(self.mean)

    @property
    def inputs(self) -> int:
        """Numbers of a slice after scaling."""
        return len(self.mean) if self.rotation is None else self.rotation.shape[1]

    def forward(self, rows: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows inputs"]:
        scaled = (rows.to(self.mean.dtype) - self.mean) * self.scale
        return scaled if self.rotation is None else scaled @ self.rotation


def fit_scaling(scans: ScanSet, components: int = COMPONENTS) -> Scaling:
    """Scale features, or principal components of those that repeat each other, to variance 1; constant ones to 0."""
    count, mean, covariance = _moments(scans)
    deviation = covariance.diagonal().clamp_min(0.0).sqrt()
    varies = deviation > (1e-6 * (mean.square() + deviation.square()).sqrt()).clamp_min(1e-30)
    scale = torch.where(varies, 1.0 / deviation, 0.0)
    values, vectors = torch.linalg.eigh(covariance * scale * scale[:, None])
    values = values.clamp_min(0.0)
    components = max(1, min(components, count // SLICES_A_COMPONENT))
    if effective_number(values) >= REPEATING * int((scale > 0).sum()) or components >= scans.width:
        return Scaling(mean.float(), scale.float())
    first = values.argsort(descending=True)[:components]
    first = first[values[first] > 1e-6 * values.max()]
    largest = vectors[:, first].abs().argmax(0)  # a component and its negative are the same: one sign on every machine
    signs = vectors[largest, first].sign()
    return Scaling(mean.float(), scale.float(), (vectors[:, first] * signs / values[first].sqrt()).float())


def effective_number(variances: Float[Tensor, "components"]) -> float:
    """How many equal variances would be as spread out as these: (sum v)^2 / sum v^2."""
    squares = variances.square().sum().item()
    return variances.sum().item() ** 2 / squares if squares else 0.0


def _moments(scans: ScanSet) -> tuple[int, Float[Tensor, "features"], Float[Tensor, "features features"]]:
    """Number of slices, mean and covariance of their features, in one pass over the scans."""
    width, count = scans.width, 0
    total, products = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    shift: Tensor | None = None
    for batch in torch.arange(len(scans.lengths)).split(LOADING_BATCH):
        rows = scans.rows(batch).double()
        if shift is None:
            shift = rows.mean(0)  # close to the mean, so that the products are about the variance alone
        rows = rows - shift
        count += len(rows)
        total += rows.sum(0)
        products += rows.T @ rows
    assert shift is not None
    mean = total / count
    return count, shift + mean, products / count - mean.outer(mean)


AT_ONCE = 2**24  # numbers of members x slices, with padding, that are computed together; one member is never divided
LEAST_SHARPNESS = 0.05  # log-odds of less sharp members are computed with this


LEARNED = ("weights", "bias", "gain", "sharpness")  # what each member has of its own, beside its kind of places


class Committee(nn.Module):
    """Averages its members; c, g and t are `bias`, `gain` and `sharpness`, w is a row of `weights`."""

    kind: Tensor
    weights: Tensor
    bias: Tensor
    gain: Tensor
    sharpness: Tensor

    def __init__(
        self,
        scaling: Scaling,
        places: Sequence[Places],
        kind: Int[Tensor, "members"],  # the number of each member's places
        *,
        weights: Float[Tensor, "members inputs"],
        bias: Float[Tensor, "members"],
        gain: Float[Tensor, "members"],
        sharpness: Float[Tensor, "members"],
        shown: bool = True,  # whether members tell scans apart; else attention is the prior
    ) -> None:
        super().__init__()
        self.scaling, self.places, self.shown = scaling, tuple(places), shown
        self._kinds: list[int] = kind.tolist()  # an exported graph depends on them, and cannot read a tensor
        self.register_buffer("kind", kind)
        for name, values in zip(LEARNED, (weights, bias, gain, sharpness), strict=True):
            self.register_buffer(name, values.float())

    def __len__(self) -> int:
        return len(self.kind)

    def forward(self, features: Float[Tensor, "*slices features"], bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.scaling.features)
        scaled = self.scaling(rows)
        of_logit, of_attention = (share.to(rows.device) for share in shares(self._places))
        logit = torch.zeros(layout.bags, dtype=torch.float64, device=rows.device)
        attention = torch.zeros(layout.bags, layout.longest, dtype=torch.float64, device=rows.device)
        together = len(self) if torch.compiler.is_exporting() else max(1, AT_ONCE // layout.mask.numel())
        for number, places in enumerate(self.places):
            kind = [member for member, other in enumerate(self._kinds) if other == number]
            here = places.of(layout)
            for some in torch.tensor(kind, dtype=torch.int64, device=rows.device).split(together):
                evidence = layout.pad((scaled @ self.weights[some].T).T)
                log_a, odds = attend(here, here.windows(evidence), self.sharpness[some])
                logit += (self.gain[some] * odds + self.bias[some]) @ of_logit[some]
                attention += (log_a.exp() * of_attention[some][:, None]).sum(1)
        if not self.shown:
            attention = _prior(self._places, layout)
        log_attention = layout.restore(layout.hide(attention.clamp_min(1e-300).log())[:, None])
        return Prediction(logit.float(), layout.restore(attention).float(), log_attention.float())

    @property
    def looks(self) -> bool:
        """Whether attention depends on the scan; else it is the prior, which all scans of a length share."""
        _, of_attention = shares(self._places)
        return self.shown and bool(((self.sharpness > 0) & (of_attention.to(self.sharpness.device) > 0)).any())

    def prior(self, lengths: Int[Tensor, "bags"]) -> Float[Tensor, "slices"]:
        """The attention without any evidence: where members expect a finding before they look at the scan."""
        return prior_attention(self._places, lengths.to(self.kind.device))

    @property
    def _places(self) -> list[Places]:  # of each member
        return [self.places[kind] for kind in self._kinds]

    def of(self, members: Sequence[int]) -> Committee:
        chosen = torch.tensor(list(members), dtype=torch.int64, device=self.kind.device)
        learned = {name: getattr(self, name)[chosen] for name in LEARNED}
        return Committee(self.scaling, self.places, self.kind[chosen], **learned, shown=self.shown)

    def untrained(self, seed: int) -> Committee:
        """The same with weights of other inputs and random signs: evidence of the same size, and wrong."""
        made, generator = self.of(range(len(self))), torch.Generator().manual_seed(seed)
        inputs = made.weights.shape[1]
        shift = int(torch.randint(1, max(2, inputs), (1,), generator=generator))
        signs = 2.0 * torch.randint(0, 2, (inputs,), generator=generator) - 1.0
        made.weights.copy_(made.weights.roll(shift, 1) * signs.to(made.weights.device))
        return made.eval()

    def as_json(self) -> dict[str, Any]:
        """What `from_json` needs beside the state dict."""
        return {"members": len(self), "places": [asdict(places) for places in self.places], "shown": self.shown}

    @staticmethod
    def from_json(about: Mapping[str, Any], state: Mapping[str, Tensor]) -> Committee:
        known = read_as(CommitteeFile, dict(about), "committee")
        scaling = Scaling(state["scaling.mean"], state["scaling.scale"], state.get("scaling.rotation"))
        learned = {name: state[name] for name in LEARNED}
        committee = Committee(scaling, known.places, state["kind"], **learned, shown=known.shown)
        if len(committee) != known.members:
            raise ValueError(f"{known.members} members, but {len(committee)} in the weights")
        return committee.eval()


@dataclass(frozen=True)
class CommitteeFile:
    """The types of `Committee.as_json`."""

    members: int
    places: tuple[Places, ...]
    shown: bool


def shares(places: Sequence[Places]) -> tuple[Float64[Tensor, "members"], Float64[Tensor, "members"]]:
    """The share of each member in the log-odds and in the attention, by the places that it looks for."""
    divided = ([kind.whole_scan is whole for kind in places] for whole in (False, True))
    groups = [torch.tensor(group, dtype=torch.float64) / sum(group) for group in divided if any(group)]
    return torch.stack(groups).mean(0), groups[0]


def prior_attention(places: Sequence[Places], lengths: Int[Tensor, "bags"]) -> Float[Tensor, "slices"]:
    """The mean attention of members that look for these places, without any evidence."""
    layouts = (Layout.packed(lengths[batch]) for batch in in_batches(lengths, len(lengths)))
    return torch.cat([layout.restore(_prior(places, layout)).float() for layout in layouts])


def _prior(places: Sequence[Places], layout: Layout) -> Float64[Tensor, "bags longest"]:
    localizing = [kind for kind in places if not kind.whole_scan] or places  # those that `shares` gives a part
    nothing = torch.zeros(layout.bags, 1, layout.longest, dtype=torch.float64, device=layout.mask.device)
    attention = nothing[:, 0]
    for kind, members in Counter(localizing).items():
        attention = attention + members / len(localizing) * kind.of(layout).attend(nothing)[:, 0].exp()
    return attention


def attend(
    places: ScanPlaces, windows: Float64[Tensor, "bags members longest"], sharpness: Float[Tensor, "*bags members"]
) -> tuple[Float64[Tensor, "bags members longest"], Float64[Tensor, "bags members"]]:
    """The log-attention of members that look for the same kind of places, and the scans' log-odds but for g and c."""
    t = sharpness.double()
    least = t.clamp_min(LEAST_SHARPNESS)  # as t falls to 0, log-odds become the mean of evidence under the prior
    return places.attend(t[..., None] * windows), places.log_odds(least[..., None] * windows) / least
