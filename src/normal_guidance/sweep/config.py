"""Configurations: a point of a grid with its training protocol, and the paper's grids."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import checked_whole, is_number, is_whole
from normal_guidance.core.attention_term import AttentionTerm
from normal_guidance.core.bells import SliceReference
from normal_guidance.core.guidance import DIVERGENCES, DivergenceName, NegativesName, NormalGuidance
from normal_guidance.core.method import Method
from normal_guidance.core.methods import EVERY_METHOD, NAMED, SLICE_REFERENCE, near_miss, refuse_removed
from normal_guidance.core.regularizers import REGULARIZERS

OptimizerName = Literal["sgd", "adamw"]
ScheduleName = Literal["constant", "cosine"]

LEARNING_RATES = (0.1, 0.01, 0.001, 0.0001)
L1_STRENGTHS = (1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 0.0)
"""The paper's grid has every pair of the two: 32 configurations."""

GUIDANCE_WEIGHTS = (0.1, 1.0, 10.0)
"""Lambda in the paper's sensitivity study."""

PATIENCE = 50
"""Epochs without a new high of validation AUROC after which training stops."""

PAPER: dict[str, Any] = {"epochs": 1000, "batch_size": 64, "patience": None, "train_above_val": True}
"""The paper's protocol, where the defaults of `Config` may differ from it."""

AXES = ("lr", "l1", "guidance_weight", "divergence", "seed")
"""Fields that may differ between configurations trained together; they share all others, the protocol."""


RANGES: tuple[tuple[str, int | float, int | float], ...] = (
    ("lr", 0.0, math.inf),
    ("l1", 0.0, math.inf),
    ("guidance_weight", 0.0, math.inf),
    ("least_width", 0.0, math.inf),
    ("momentum", 0.0, 1.0),
    ("clip_norm", 1e-12, math.inf),
    ("weight_decay", 0.0, math.inf),
    ("epochs", 1, math.inf),
    ("batch_size", 1, math.inf),
    ("modes", 1, math.inf),
    ("warmup", 0, math.inf),
    ("seed", 0, 2**63 - 1),
)
"""Least and greatest value of each field; all are finite, and whole numbers where the least is one."""

CHOICES: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("optimizer", get_args(OptimizerName)),
    ("schedule", get_args(ScheduleName)),
    ("class_weights", (False, True)),
)
"""Fields that take one of a few values."""

OPTIONAL = (
    *("receptive_field", "modes", "negatives", "warmup", "least_width"),
    *("optimizer", "weight_decay", "schedule", "class_weights"),
)
"""Fields that a run folder holds only where they are set, so that folders from before these fields stay valid."""

GUIDES = ("renormalize", "modes", "negatives", "warmup", "least_width")
"""Fields of the protocol that concern regularized methods only, all but `warmup` guided ones only."""


@dataclass(frozen=True)
class Config:
    """One configuration: a point of a grid, `lr` and `l1`, with its training protocol; `paper_config` has the paper's.

    Args:
        method: a name in `EVERY_METHOD`; regularized methods add their term.  Or `SLICE_REFERENCE`, the
            supervised reference, the only one trained and selected on slice labels: see `on_slices`.
        lr: learning rate.
        l1: alpha, the strength of L1 on all trainable parameters except those of `Method.unpenalized`.
        guidance_weight: lambda, the weight of guidance or of another regularizer; not comparable across divergences,
            regularizers or scan lengths.
        divergence: a name in `DIVERGENCES`.
        renormalize: see `NormalGuidance`.
        modes: number of bells of the reference: see `NormalGuidance`.
        negatives: how negative scans are guided, a name in `NEGATIVES`.
        least_width: the least standard deviation of the reference, in slices: see `NormalGuidance`.
        warmup: epochs in which lambda rises from 0 to its value in equal steps; 0: lambda is constant.
        momentum: of SGD, or beta_1 of AdamW.
        clip_norm: the greatest norm of a step's gradient, L1 included; longer ones are scaled down to it.
        patience: stop after so many epochs in which validation AUROC reached no new high; None trains all epochs.
        train_above_val: the paper's rule: only an epoch whose training AUROC is above its validation AUROC can be
            selected, and of equals the first.  Otherwise the highest validation AUROC of all epochs is, and of equals
            the lowest validation loss.
        seed: seed of the initial weights; in a sweep, the first configuration's also orders the scans.
        receptive_field: R of the supervised reference: required for it, and refused for other methods.
        optimizer: "sgd", with momentum, or "adamw" (Loshchilov and Hutter, 2019) with torch's other defaults.
        weight_decay: as in `torch.optim.SGD` (added to the clipped gradient) or `torch.optim.AdamW` (decoupled from
            it), on the parameters that L1 concerns.
        schedule: "constant", or "cosine": from epoch to epoch lr falls along half a cosine, from its value in the first
            epoch to 0 after the last one of `epochs`.
        class_weights: weight the cross-entropy of positive and negative training scans inversely to their number, with
            a mean weight of 1; slices, for the supervised reference.  Guidance and validation are not weighted.

    Example:
        >>> Config("mhng", lr=0.1, l1=1e-3).regularizer()
        NormalGuidance(weight=1.0, divergence='forward_kl', renormalize=True)
    """

    method: str
    lr: float = 0.01
    l1: float = 0.0
    guidance_weight: float = 1.0
    divergence: DivergenceName = "forward_kl"
    renormalize: bool = True
    epochs: int = 1000
    batch_size: int = 64
    momentum: float = 0.9
    clip_norm: float = 1.0
    patience: int | None = PATIENCE
    train_above_val: bool = False
    seed: int = 0
    receptive_field: int | None = None
    modes: int = 1
    negatives: NegativesName = "own"
    warmup: int = 0
    optimizer: OptimizerName = "sgd"
    weight_decay: float = 0.0
    schedule: ScheduleName = "constant"
    class_weights: bool = False
    least_width: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise UserError(f"method: got {type(self.method).__name__}; give the name of one, such as 'abmil'")
        self._check_reference()
        refuse_removed(self.method)
        if not self.on_slices and (self.method not in EVERY_METHOD or not EVERY_METHOD[self.method].scores_scans):
            trainable = ", ".join(name for name, method in NAMED.items() if method.scores_scans)
            raise UserError(
                f"method {self.method!r} cannot be trained{near_miss(self.method)}; choose one of {trainable}"
            )
        NormalGuidance(
            self.guidance_weight, self.divergence, negatives=self.negatives
        )  # raises an error for wrong values
        for name, least, most in RANGES:
            value = getattr(self, name)
            if not is_number(value):
                raise UserError(f"{name} is {value!r}; give a number")
            if not least <= value <= min(most, sys.float_info.max):
                limits = f"at least {least}, and finite" if math.isinf(most) else f"from {least} to {most}"
                raise UserError(f"{name} is {value}; it must be {limits}")
            if isinstance(least, int) and not is_whole(value):
                raise UserError(f"{name} is {value}; it must be a whole number")
            # 1 and 1.0 are the same configuration; numpy's numbers could not be saved.
            object.__setattr__(self, name, type(least)(value))
        for name, known in CHOICES:
            if not any(getattr(self, name) == one for one in known):
                choices = ", ".join(map(str, known))
                raise UserError(f"{name} {getattr(self, name)!r} is unknown; choose one of {choices}")
        if self.optimizer == "adamw" and self.momentum == 1.0:
            raise UserError("momentum is 1.0; of adamw it is beta_1, which must be below 1")
        if self.patience is not None:
            object.__setattr__(self, "patience", checked_whole("patience", self.patience))

    def _check_reference(self) -> None:
        """Check that two fields together ask for slice labels, so that one typing error cannot."""
        width = self.receptive_field
        if self.on_slices and not (is_whole(width) and width >= 1):
            raise UserError(
                f"receptive_field is {width}; give {SLICE_REFERENCE} the mean length of the training scans' positive "
                "blocks, a whole number of at least 1"
            )
        if not self.on_slices and width is not None:
            raise UserError(
                f"receptive_field is {width}, but method {self.method!r} has none; leave it out, or train "
                f"{SLICE_REFERENCE!r}"
            )

    @property
    def on_slices(self) -> bool:
        """Whether it learns slice labels; only the supervised reference does."""
        return self.method == SLICE_REFERENCE

    @property
    def spec(self) -> Method:
        """The method to train: a row of `EVERY_METHOD`, or the supervised reference of this receptive field.

        Example:
            >>> Config("slice_reference", receptive_field=12).spec.build(8).convolution
            Conv1d(8, 8, kernel_size=(12,), stride=(1,), groups=8)
        """
        if self.receptive_field is None:
            return EVERY_METHOD[self.method]
        build = partial(SliceReference, receptive_field=self.receptive_field)
        return Method(SLICE_REFERENCE, "Supervised reference", build, scores_scans=False)

    def as_json(self) -> dict[str, object]:
        """Return the fields as run folders hold them; `OPTIONAL` ones only if they differ from their default.

        Example:
            >>> "receptive_field" in Config("ng").as_json(), Config("ng", modes=2).as_json()["modes"]
            (False, 2)
        """
        unset = {field.name for field in fields(self) if field.name in OPTIONAL and self._is_default(field)}
        return {name: value for name, value in asdict(self).items() if name not in unset}

    def _is_default(self, field: Field[object]) -> bool:
        return getattr(self, field.name) == field.default

    @property
    def term_options(self) -> tuple[str, ...]:
        """The fields that the method's regularizer takes."""
        name = self.spec.regularizer
        return () if name is None else REGULARIZERS[name].options

    def regularizer(self, epoch: int | None = None) -> AttentionTerm | None:
        """Return the term of a regularized method in an epoch, counted from 1; without an epoch, after the warm-up.

        Example:
            >>> Config("ng", warmup=10).regularizer(epoch=3).weight
            0.3
        """
        name = self.spec.regularizer
        if name is None:
            return None
        weight = self.guidance_weight * (1.0 if epoch is None else self.ramp(epoch))
        return REGULARIZERS[name].term(weight, **{option: getattr(self, option) for option in self.term_options})

    def without_idle_guides(self) -> Config:
        """Return the same with those of `GUIDES` at their defaults that have no effect on the method.

        Example:
            >>> Config("abmil", modes=2).without_idle_guides().modes, Config("ng", modes=2).without_idle_guides().modes
            (1, 2)
        """
        idle = {*GUIDES} - {*self.term_options} - ({"warmup"} if self.spec.regularizer else set())
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self) if field.name in idle}
        return replace(self, **defaults)

    def ramp(self, epoch: int) -> float:
        """Return the share of lambda that counts in an epoch, counted from 1."""
        return min(1.0, epoch / self.warmup) if self.warmup else 1.0

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 1.

        Example:
            >>> [round(Config("ng", lr=0.1, schedule="cosine", epochs=4).rate(epoch), 4) for epoch in (1, 2, 3, 4)]
            [0.1, 0.0854, 0.05, 0.0146]
        """
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * (epoch - 1) / self.epochs))


def paper_config(method: str, **fields: Any) -> Config:
    """Return a configuration of the paper's protocol, but for the given fields."""
    return Config(method, **{**PAPER, **fields})


def fitting_batch(scans: int) -> int:
    """Return the batch size for so many training scans: 64, or fewer where an epoch would have less than four steps."""
    size = 64
    while size > 8 and 4 * size > scans:
        size //= 2
    return max(1, min(size, scans))


def grid(
    base: Config,
    *,
    lr: Sequence[float] = LEARNING_RATES,
    l1: Sequence[float] = L1_STRENGTHS,
    guidance_weight: Sequence[float] | None = None,
    divergence: Sequence[DivergenceName] | None = None,
    seed: Sequence[int] | None = None,
) -> tuple[Config, ...]:
    """Return every combination of the given values, with `base` for the rest; without values, the paper's 32.

    Example:
        >>> len(grid(Config("ng"))), len(grid(Config("ng"), guidance_weight=[0.1, 1.0, 10.0]))
        (32, 96)
    """
    if not isinstance(base, Config):
        raise UserError(f"base: got {type(base).__name__}; give Config(METHOD), such as Config('ng')")
    given = {"lr": lr, "l1": l1, "guidance_weight": guidance_weight, "divergence": divergence, "seed": seed}
    for name, values in given.items():
        left_out = values is None and name not in ("lr", "l1")
        if not left_out and (isinstance(values, str) or not isinstance(values, Sequence) or not len(values)):
            raise UserError(f"{name} is {values!r}; give a list of values, such as [{getattr(base, name)!r}]")
    axes = {
        "divergence": divergence or [base.divergence],
        "guidance_weight": guidance_weight or [base.guidance_weight],
        "seed": seed or [base.seed],
        "l1": l1,
        "lr": lr,
    }
    return tuple(
        Config(**{**asdict(base), **dict(zip(axes, values, strict=True))}) for values in product(*axes.values())
    )


def grid_of_method(base: Config, **axes: Any) -> tuple[Config, ...]:
    """Return `grid` of the given axes, without those that have no effect on the method."""
    known = {"lr", "l1", "seed", *base.term_options, *(["guidance_weight"] if base.spec.regularizer else [])}
    return grid(base, **{axis: axes[axis] for axis in axes if axis in known})


def sensitivity_grid(
    base: Config, *, lr: Sequence[float] = LEARNING_RATES, l1: Sequence[float] = L1_STRENGTHS
) -> tuple[Config, ...]:
    """Return the grid for each divergence and each of the paper's lambdas."""
    return grid(base, lr=lr, l1=l1, divergence=list(DIVERGENCES), guidance_weight=GUIDANCE_WEIGHTS)


def check_together(configs: Sequence[Config]) -> None:
    """Refuse configurations that cannot be trained together: they may differ in `AXES` only."""
    if isinstance(configs, Config) or not isinstance(configs, Sequence):
        raise UserError(f"configs: got {type(configs).__name__}; give a list of Config, such as grid(Config('ng'))")
    if not configs:
        raise UserError("configs: there is no configuration to train; give at least one")
    wrong = next((one for one in configs if not isinstance(one, Config)), None)
    if wrong is not None:
        raise UserError(f"configs: got {type(wrong).__name__} in the list; give a list of Config")
    for field in fields(Config):
        values = {getattr(config, field.name) for config in configs}
        if field.name not in AXES and len(values) > 1:
            raise UserError(
                f"configurations of one sweep differ in {field.name} ({', '.join(map(str, sorted(values, key=str)))}); "
                f"they may differ in {', '.join(AXES)} only: run one sweep for each"
            )


def departures(config: Config) -> dict[str, object]:
    """Return the fields that differ from the paper's protocol, apart from the grid's axes, for a run's report."""
    paper = paper_config(config.method, receptive_field=config.receptive_field)
    return {
        field.name: getattr(config, field.name)
        for field in fields(Config)
        if field.name not in AXES and getattr(config, field.name) != getattr(paper, field.name)
    }
