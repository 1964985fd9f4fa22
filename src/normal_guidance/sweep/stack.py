"""Many configurations of one model, computed together: stacked parameters, and `vmap` over configurations.

The model is the plain module of a method, written for one configuration.  Configurations are independent: the
gradient of the sum of their losses holds the gradient of each, so ordinary autograd does the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from normal_guidance.core.attention_term import AttentionTerm
from normal_guidance.core.guidance import DivergenceName
from normal_guidance.core.layout import Layout
from normal_guidance.core.method import Loss
from normal_guidance.core.prediction import ClassWeights, Prediction, set_epoch
from normal_guidance.sweep.config import Config, OptimizerName

Parameters = dict[str, Tensor]  # name -> (configurations, *shape of the parameter)
CLIP_EPSILON = 1e-6  # the epsilon of `torch.nn.utils.clip_grad_norm_`
BETA_2, ADAM_EPSILON = 0.999, 1e-8  # those of `torch.optim.AdamW`

SQUARE, STEPS = ".square", "steps"  # in AdamW's momenta: a parameter's second moment, each configuration's steps


def initial_model(config: Config, features: int) -> nn.Module:
    """The model with torch's default initialisation under the configuration's seed."""
    with torch.random.fork_rng(devices=[]):  # leaves the caller's generator unchanged
        torch.manual_seed(config.seed)
        return config.spec.build(features)


def _divergences(configs: Sequence[Config]) -> tuple[DivergenceName, ...]:
    """The divergences that any configuration uses: one term each; a regularizer without a divergence has one term."""
    if configs[0].spec.regularizer is None:
        return ()
    if "divergence" not in configs[0].term_options:
        return (configs[0].divergence,)
    return tuple(sorted({config.divergence for config in configs}))


def _weights(configs: Sequence[Config], divergences: Sequence[DivergenceName]) -> list[list[float]]:
    alone = len(divergences) == 1
    return [[c.guidance_weight * (alone or c.divergence == name) for name in divergences] for c in configs]


@dataclass(frozen=True, eq=False)
class Stack:
    """The model's structure, and the values that differ between configurations, one row each."""

    configs: tuple[Config, ...]
    skeleton: nn.Module  # the model that holds the structure and the buffers; its own parameters are not used
    lr: Float[Tensor, "configs"]  # `begin_epoch` updates it
    l1: Float[Tensor, "configs"]
    divergences: tuple[DivergenceName, ...]  # the divergences of the terms on attention: `_divergences`
    terms: tuple[AttentionTerm, ...]  # those terms, of weight 1, to be multiplied by the weight of each configuration
    classify: Loss  # the loss of scans, or of slices for the supervised reference
    # lambda in the column of the configuration's divergence, 0 in the others; `begin_epoch` updates it
    guidance_weights: Float[Tensor, "configs divergences"]

    @classmethod
    def of(
        cls,
        configs: Sequence[Config],
        features: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Stack:
        first, divergences = configs[0], _divergences(configs)
        terms = [replace(first, guidance_weight=1.0, divergence=name).regularizer() for name in divergences]
        column = partial(torch.tensor, device=device, dtype=dtype)
        return cls(
            configs=tuple(configs),
            skeleton=initial_model(first, features).to(device, dtype).requires_grad_(False),
            lr=column([config.lr for config in configs]),
            l1=column([config.l1 for config in configs]),
            divergences=divergences,
            terms=tuple(term for term in terms if term is not None),
            classify=first.spec.loss,
            guidance_weights=column(_weights(configs, divergences)).reshape(len(configs), len(divergences)),
        )

    def begin_epoch(self, number: int) -> None:
        """Set lambda, lr and the model's random numbers for this epoch, from 1, in place: graphs read them there."""
        set_epoch(self.skeleton, number)
        if self.configs[0].schedule != "constant":
            self.lr.copy_(torch.tensor([config.rate(number) for config in self.configs], dtype=self.lr.dtype))
        if self.configs[0].warmup:
            weights = torch.tensor(_weights(self.configs, self.divergences)).to(self.guidance_weights)
            self.guidance_weights.copy_(weights.reshape(self.guidance_weights.shape) * self.configs[0].ramp(number))

    @property
    def on_slices(self) -> bool:
        return self.configs[0].on_slices

    def initial_parameters(self) -> Parameters:
        """The initial weights of each configuration, the same for all that share a seed."""
        classifier = self.skeleton.classifier
        assert isinstance(classifier, nn.Linear)
        of_seed = {config.seed: config for config in self.configs}
        models = {seed: initial_model(config, classifier.in_features) for seed, config in of_seed.items()}
        stacked, _ = stack_module_state([models[config.seed] for config in self.configs])
        return {name: theta.detach().to(self.lr) for name, theta in stacked.items()}

    def logits(
        self, parameters: Parameters, features: Tensor, layout: Layout
    ) -> Float[Tensor, "configs targets"] | Float[Tensor, "configs bags longest"]:
        """The logits of the targets: scans, or slices in the layout's own shape."""

        def of_config(theta: Parameters) -> Tensor:
            return self._logit(functional_call(self.skeleton, theta, (features, layout)))

        return vmap(of_config)(parameters)

    def _logit(self, prediction: Prediction) -> Tensor:
        return prediction.slice_scores if self.on_slices else prediction.logit

    def losses(
        self,
        parameters: Parameters,
        features: Tensor,
        layout: Layout,
        labels: Int[Tensor, "targets"] | Int[Tensor, "bags longest"],
        class_weights: ClassWeights = None,
    ) -> tuple[Float[Tensor, "configs"], Float[Tensor, "configs targets"] | Float[Tensor, "configs bags longest"]]:
        """The loss of classification and regularizer, without L1 (`descend` adds it), and the logits of the targets."""

        def of_config(theta: Parameters, weights: Tensor) -> tuple[Tensor, Tensor]:
            prediction: Prediction = functional_call(self.skeleton, theta, (features, layout))
            loss = self.classify(prediction, labels, class_weights)
            attention = prediction.log_attention
            for weight, term in zip(weights.unbind(), self.terms, strict=True):
                value = term(attention, lengths=layout, from_logits=True, labels=labels, features=features)
                loss = loss + weight * value
            return loss, self._logit(prediction)

        return vmap(of_config)(parameters, self.guidance_weights)

    def weighted_losses(
        self,
        parameters: Parameters,
        features: Tensor,
        layout: Layout,
        labels: Int[Tensor, "bags"],
        shares: Float[Tensor, "configs bags"],
    ) -> Float[Tensor, "configs"]:
        """The losses of configurations that learn from scans of their own: `shares` are the weights of scans."""

        def of_config(theta: Parameters, share: Tensor, weights: Tensor) -> Tensor:
            prediction: Prediction = functional_call(self.skeleton, theta, (features, layout))
            each = F.binary_cross_entropy_with_logits(prediction.logit, labels.to(share), reduction="none")
            attention = prediction.log_attention
            for weight, term in zip(weights.unbind(), self.terms, strict=True):
                value = term.per_bag(attention, lengths=layout, from_logits=True, labels=labels, features=features)
                each = each + weight * value.reshape(len(labels), -1).mean(1)
            return (share * each).sum()

        return vmap(of_config)(parameters, shares, self.guidance_weights[: len(shares)])


def initial_momenta(parameters: Parameters, optimizer: OptimizerName) -> Parameters:
    """Zeros for what the optimizer remembers: a velocity of each parameter, or AdamW's two moments and its steps."""
    momenta = {name: torch.zeros_like(theta) for name, theta in parameters.items()}
    if optimizer == "adamw":
        first = next(iter(parameters.values()))
        momenta |= {name + SQUARE: torch.zeros_like(theta) for name, theta in parameters.items()}
        momenta[STEPS] = first.new_zeros(len(first), dtype=torch.float64)  # 1 - beta^steps needs the digits
    return momenta


def adamw_rates(
    momenta: Mapping[str, Tensor], lr: Float[Tensor, "configs"], beta_1: float
) -> tuple[Float[Tensor, "configs"], Float[Tensor, "configs"]]:
    """Count step t of AdamW.  Return lr / (1 - beta_1^t) and sqrt(1 - beta_2^t), as its moments start at 0."""
    steps = momenta[STEPS].add_(1.0)
    return (lr / (1.0 - beta_1**steps)).to(lr.dtype), (1.0 - BETA_2**steps).sqrt().to(lr.dtype)


def descend(
    parameters: Parameters,
    gradients: Sequence[Tensor],
    momenta: Parameters,
    *,
    lr: Float[Tensor, "configs"],
    l1: Float[Tensor, "configs"],
    momentum: float,
    clip_norm: float,
    unpenalized: Collection[str] = (),
    copies: Mapping[str, Tensor] = MappingProxyType({}),
    optimizer: OptimizerName = "sgd",
    weight_decay: float = 0.0,
) -> Float[Tensor, "configs"]:
    """Step SGD with momentum or AdamW in place, each configuration with its own values; return the L1 term before."""
    # `gradients` lack the L1 term: its gradient, alpha/2 sign(theta), is added here, before the norm is taken, to all
    # but the `unpenalized` parameters.  They may have a lower precision than the parameters.  `copies` are parameters
    # in a lower precision, to be brought up to date; `momentum` is AdamW's beta_1.

    def per_config(values: Tensor) -> Tensor:
        return values.flatten(1).sum(1) if values.ndim > 1 else values

    def column(values: Tensor, like: Tensor) -> Tensor:
        return values.reshape(-1, *[1] * (like.ndim - 1))

    full = [
        gradient.to(theta.dtype) + (0 if name in unpenalized else column(0.5 * l1, theta) * theta.sign())
        for gradient, (name, theta) in zip(gradients, parameters.items(), strict=True)
    ]
    squares = torch.stack([per_config(gradient.square()) for gradient in full]).sum(0)
    counted = [theta for name, theta in parameters.items() if name not in unpenalized]
    size = torch.stack([per_config(theta.abs()) for theta in counted]).sum(0)
    scale = (clip_norm / (squares.sqrt() + CLIP_EPSILON)).clamp_max(1.0)
    rate, root = adamw_rates(momenta, lr, momentum) if optimizer == "adamw" else (lr, None)
    for (name, theta), gradient in zip(parameters.items(), full, strict=True):
        slope, decay = column(scale, theta) * gradient, 0.0 if name in unpenalized else weight_decay
        if root is None:
            moved = momentum * momenta[name] + (slope + decay * theta if decay else slope)
            step = column(rate, theta) * moved
        else:
            moved = momentum * momenta[name] + (1.0 - momentum) * slope
            square = momenta[name + SQUARE]
            square.copy_(BETA_2 * square + (1.0 - BETA_2) * slope.square())
            step = column(rate, theta) * moved / (square.sqrt() / column(root, theta) + ADAM_EPSILON)
            step = step + decay * column(lr, theta) * theta if decay else step
        momenta[name].copy_(moved)
        theta.copy_(theta - step)
    for name, copy in copies.items():
        copy.copy_(parameters[name])
    return 0.5 * l1 * size


def balanced_weights(labels: Int[Tensor, "targets"]) -> Float[Tensor, "two"]:
    """Weights of negative and positive targets, inverse to their number; the mean over all with a known label is 1."""
    counts = torch.stack([(labels == 0).sum(), (labels == 1).sum()]).double()
    return counts.sum() / (2.0 * counts.clamp_min(1.0))  # a sample for an estimate may lack a class
