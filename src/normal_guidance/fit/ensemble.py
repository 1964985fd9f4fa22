r"""An ensemble: members of several kinds, whose attention and probabilities are averaged.

Members of a kind have one method (`core.methods`) and one scaling of the features; each has weights of its own.  Kinds
count alike, whatever their number of members:

$$ a_j = \operatorname{mean}_{k} \operatorname{mean}_{m \in k} a_{mj}, \quad
   \mathrm{logit} = \operatorname{logit} \big( \operatorname{mean}_{k} \operatorname{mean}_{m \in k} p_m \big) $$

A kind may count in one of the two alone.  Where members were not shown to tell scans apart, attention is the prior:
findings usually lie around the middle of a scan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap

from normal_guidance.base.records import Between, read_as
from normal_guidance.core.arrays import refuse_alike
from normal_guidance.core.bags import ScanSet
from normal_guidance.core.layout import Layout, as_rows
from normal_guidance.core.prediction import BagsLike, Prediction
from normal_guidance.sweep.batches import LOADING_BATCH, in_batches
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.stack import Parameters, initial_model

Form = Literal["together", "each", "components"]

VARIANCE = 100.0  # of a slice's scaled features together, whatever their number: learning rates then suit all encoders
COMPONENTS = 64  # the most principal components that members with a hidden layer see
CENTRAL_WIDTH = 0.2  # standard deviation of the prior, in lengths of the scan
AT_ONCE = 2**24  # numbers of members x slices, or of their windows, that are computed together; one is never divided


class Scaling(nn.Module):
    """Scales rows of features: $(h - \\mathrm{mean}) \\cdot \\mathrm{scale}$, then a rotation if there is one."""

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
        self.register_buffer("mean", mean.float())
        self.register_buffer("scale", scale.float())
        self.register_buffer("rotation", None if rotation is None else rotation.float().contiguous())

    @property
    def inputs(self) -> int:
        """Numbers of a slice after scaling."""
        return len(self.mean) if self.rotation is None else self.rotation.shape[1]

    def forward(self, rows: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows inputs"]:
        scaled = (rows.to(self.mean.dtype) - self.mean) * self.scale
        return scaled if self.rotation is None else scaled @ self.rotation


def fit_scalings(scans: ScanSet) -> dict[Form, Scaling]:
    """Scale all features by one number, each feature by its own, or all and then rotate them to their main axes."""
    mean, covariance = moments(scans)
    variances = covariance.diagonal().clamp_min(0.0)
    refuse_alike(variances.sqrt(), mean, "features", "check what made them: the window and normalisation, or the files")
    varies = variances.sqrt() > (1e-6 * (mean.square() + variances).sqrt()).clamp_min(1e-30)
    total = variances[varies].sum().clamp_min(1e-60)
    each = torch.where(varies, (VARIANCE / varies.sum() / variances).sqrt(), 0.0)
    together = torch.where(varies, (VARIANCE / total).sqrt(), 0.0)
    rotation = None
    if len(mean) > COMPONENTS:
        vectors = torch.linalg.eigh(covariance * together * together[:, None]).eigenvectors[:, -COMPONENTS:].flip(1)
        largest = vectors.abs().argmax(0)  # a component and its negative are the same: one sign on every machine
        rotation = vectors * vectors[largest, torch.arange(COMPONENTS)].sign()
    return {
        "together": Scaling(mean, together),
        "each": Scaling(mean, each),
        "components": Scaling(mean, together, rotation),
    }


def moments(scans: ScanSet) -> tuple[Float64[Tensor, "features"], Float64[Tensor, "features features"]]:
    """Mean and covariance of the features of all slices, in one pass over the scans."""
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
    return shift + mean, products / count - mean.outer(mean)


@dataclass(frozen=True)
class MemberKind:
    """What the members of a kind have in common, and what they count in."""

    method: str  # a name in `EVERY_METHOD`
    form: Form  # of the features that its members see
    attends: bool = True
    scores: bool = True
    hidden: Annotated[int, Between(1.0)] | None = None  # units of the method's hidden layer, if not its usual number


class Members(nn.Module):
    """The members of a kind: a model whose parameters have one more dimension, the members."""

    def __init__(self, kind: MemberKind, scaling: Scaling, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.kind, self.scaling = kind, scaling
        if (kind.hidden or 0) > max((size for values in weights.values() for size in values.shape), default=0):
            raise ValueError(f"no weights are of {kind.hidden} hidden units")  # before a model of that size is made
        self.model = initial_model(Config(kind.method, hidden=kind.hidden), scaling.inputs)
        known = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        shapes = {name: values.shape[1:] for name, values in weights.items()}
        if shapes != known or len({*map(len, weights.values())}) != 1:
            raise ValueError(f"the weights of {kind.method} do not fit {scaling.inputs} inputs")
        for name, values in weights.items():
            owner, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(owner), last, nn.Parameter(values.float(), requires_grad=False))

    @property
    def weights(self) -> Parameters:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def __len__(self) -> int:
        return len(next(self.model.parameters()))

    def forward(
        self, rows: Float[Tensor, "rows features"], layout: Layout
    ) -> tuple[Float[Tensor, "members bags"], Float[Tensor, "members *slices"]]:
        """The logits of all members, and the logarithms of their attention in the layout's form."""
        scaled = self.scaling(rows)

        def of_member(weights: Parameters) -> tuple[Tensor, Tensor]:
            prediction: Prediction = functional_call(self.model, weights, (scaled.view(*layout.row_shape, -1), layout))
            return prediction.logit, prediction.slice_scores

        together = None
        if not torch.compiler.is_exporting():
            together = max(1, AT_ONCE // max(layout.mask.numel(), layout.longest**2))
        logit, log_attention = vmap(of_member, chunk_size=together)(self.weights)
        return logit, log_attention


class Ensemble(nn.Module):
    """Averages its members."""

    def __init__(self, kinds: Sequence[Members], *, shown: bool = True) -> None:
        super().__init__()
        self.kinds, self.shown = nn.ModuleList(kinds), shown  # shown: whether members tell scans apart

    def __len__(self) -> int:
        return sum(map(len, self._kinds))

    @property
    def _kinds(self) -> list[Members]:
        return list(self.kinds)  # type: ignore[arg-type]

    @property
    def features(self) -> int:
        """Features of a slice."""
        return len(self._kinds[0].scaling.mean)

    def forward(self, features: Float[Tensor, "*slices features"], bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.features)
        made = [(members.kind, *members(rows, layout)) for members in self._kinds]
        logit = mean_logit([logits for kind, logits, _ in made if kind.scores])
        if self.shown:
            log_attention = mean_attention([log_a for kind, _, log_a in made if kind.attends])
        else:
            log_attention = layout.restore(log_prior(layout)).to(logit.dtype)
        return Prediction(logit, log_attention.exp(), log_attention.unsqueeze(-2))

    def untrained(self, seed: int) -> Ensemble:
        """The same with weights of other inputs and random signs: evidence of the same size, and wrong."""
        generator, kinds = torch.Generator().manual_seed(seed), []
        for members in self._kinds:
            inputs = members.scaling.inputs
            shift = int(torch.randint(1, max(2, inputs), (1,), generator=generator))
            signs = 2.0 * torch.randint(0, 2, (inputs,), generator=generator) - 1.0
            wrong = {
                name: values.roll(shift, -1) * signs.to(values)
                if values.ndim > 2 and values.shape[-1] == inputs
                else values
                for name, values in members.weights.items()
            }
            kinds.append(Members(members.kind, members.scaling, wrong))
        return Ensemble(kinds, shown=self.shown).eval()

    def as_json(self) -> dict[str, Any]:
        """What `from_json` needs beside the state dict."""
        return {"shown": self.shown, "kinds": [{**asdict(each.kind), "members": len(each)} for each in self._kinds]}

    @staticmethod
    def from_json(about: Mapping[str, Any], state: Mapping[str, Tensor]) -> Ensemble:
        known, kinds = read_as(EnsembleFile, dict(about), "ensemble"), []
        for number, kind in enumerate(known.kinds):
            own = _part(state, f"kinds.{number}.")
            scaling = Scaling(own["scaling.mean"], own["scaling.scale"], own.get("scaling.rotation"))
            plain = MemberKind(kind.method, kind.form, kind.attends, kind.scores, kind.hidden)
            kinds.append(Members(plain, scaling, _part(own, "model.")))
            if len(kinds[-1]) != kind.members:
                raise ValueError(f"{kind.members} members of {kind.method}, but {len(kinds[-1])} in the weights")
        if not all(any(getattr(kind, role) for kind in known.kinds) for role in ("attends", "scores")):
            raise ValueError("no members for attention, or none for probability")
        made = Ensemble(kinds, shown=known.shown).eval()
        if made.state_dict().keys() != state.keys() or {len(each.scaling.mean) for each in kinds} != {made.features}:
            raise ValueError(f"the weights are not those of {len(kinds)} kinds of members with the same features")
        return made


@dataclass(frozen=True)
class MemberKindOfFile(MemberKind):
    """A kind as bundle.json holds it."""

    members: Annotated[int, Between(1.0)] = 1


@dataclass(frozen=True)
class EnsembleFile:
    """The types of `Ensemble.as_json`."""

    shown: bool
    kinds: tuple[MemberKindOfFile, ...]


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}


def mean_logit(kinds: Sequence[Float[Tensor, "_ scans"]]) -> Float[Tensor, "scans"]:
    """The logit of the mean probability of kinds, each the mean of its members."""
    positive, negative = (
        torch.logsumexp(torch.stack([_log_mean(F.logsigmoid(sign * logits.double())) for logits in kinds]), 0)
        for sign in (1, -1)
    )
    return (positive - negative).float()


def mean_attention(kinds: Sequence[Float[Tensor, "_ *slices"]]) -> Float[Tensor, "*slices"]:
    """The logarithm of the mean attention of kinds, each the mean of its members."""
    return _log_mean(torch.stack([_log_mean(log_attention) for log_attention in kinds]))


def _log_mean(logs: Float[Tensor, "several *shape"]) -> Float[Tensor, "*shape"]:
    return torch.logsumexp(logs - torch.tensor(float(len(logs))).log(), 0)


def log_prior(layout: Layout) -> Float64[Tensor, "bags longest"]:
    """The logarithm of a normal around the middle of each scan."""
    place = torch.arange(layout.longest, device=layout.mask.device, dtype=torch.float64) + 0.5
    return layout.log_softmax(-0.5 * ((place / layout.lengths[:, None] - 0.5) / CENTRAL_WIDTH).square())


def prior_attention(lengths: Int[Tensor, "bags"]) -> Float[Tensor, "slices"]:
    """Where findings usually lie, before a scan is seen."""
    layouts = (Layout.packed(lengths[batch]) for batch in in_batches(lengths, len(lengths)))
    return torch.cat([layout.restore(log_prior(layout).exp()).float() for layout in layouts])
