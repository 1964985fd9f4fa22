"""What is asked for: a point of a grid with its training protocol, where to compute, and the paper's grids.

The command line derives its options from the fields, so torch is imported only where a value is made.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

from normal_guidance.base.errors import UserError, choose_one_of

if TYPE_CHECKING:
    import torch

    from normal_guidance.core.attention_term import AttentionTerm
    from normal_guidance.core.method import Method

OptimizerName = Literal["sgd", "adamw"]
ScheduleName = Literal["constant", "cosine"]
Precision = Literal["float64", "float32", "tf32", "bf16"]
EngineName = Literal["packed", "recorded", "compiled"]

# Those of `core.guidance`, whose import takes a second; a test keeps them equal.
DivergenceName = Literal["forward_kl", "reverse_kl", "squared_error"]
NegativesName = Literal["own", "uniform", "none"]
LEARNING_RATES = (0.1, 0.01, 0.001, 0.0001)  # the paper's grid has every pair of the two: 32 configurations
L1_STRENGTHS = (1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 0.0)
GUIDANCE_WEIGHTS = (0.1, 1.0, 10.0)  # lambda in the paper's sensitivity study

# The paper's protocol, where the defaults of `Config` may differ from it.
PAPER: dict[str, Any] = {"epochs": 1000, "batch_size": 64, "patience": None, "train_above_val": True}
AXES = ("lr", "l1", "guidance_weight", "divergence", "seed")  # may differ between configurations trained together

# Fields that concern regularized methods only, all but `warmup` guided ones only; and those that run folders hold only
# where they are set.
GUIDES = ("renormalize", "modes", "negatives", "warmup", "least_width")
OPTIONAL = (*GUIDES[1:], "receptive_field", "hidden", "optimizer", "weight_decay", "schedule", "class_weights")

AT_LEAST_0, WHOLE = (0.0, math.inf), (1, math.inf)


def _field(
    default: Any, within: tuple[float | int, float | int] | None = None, *, help: str | None = None, **more: Any
) -> Any:
    """A field with its least and greatest value; with `help`, it is an option of the command line."""
    return field(default=default, metadata={"within": within, "help": help, **more})


_guidance_field, _training_field = (partial(_field, panel=panel) for panel in ("guidance", "training"))


@dataclass(frozen=True)
class Config:
    """One configuration: a point of a grid, `lr` and `l1`, with its training protocol; `paper_config` has the paper's.

    `divergence`, `renormalize`, `modes`, `negatives` and `least_width` are those of `NormalGuidance`.

    Args:
        method: a name in `EVERY_METHOD`; regularized methods add their term.  Or `SLICE_REFERENCE`, the
            supervised reference, the only one trained and selected on slice labels: see `on_slices`.
        lr: learning rate.
        l1: alpha, the strength of L1 on all trainable parameters except those of `Method.unpenalized`.
        guidance_weight: lambda, the weight of guidance or of another regularizer; not comparable across divergences,
            regularizers or scan lengths.
        warmup: epochs in which lambda rises from 0 to its value in equal steps; 0: lambda is constant.
        momentum: of SGD, or beta_1 of AdamW.
        clip_norm: the greatest norm of a step's gradient, L1 included; longer ones are scaled down to it.
        patience: stop after so many epochs in which validation AUROC reached no new high; None trains all epochs.
        train_above_val: the paper's rule: only an epoch whose training AUROC is above its validation AUROC can be
            selected, and of equals the first.  Otherwise the highest validation AUROC of all epochs is, and of equals
            the lowest validation loss.
        seed: seed of the initial weights; in a sweep, the first configuration's also orders the scans.
        receptive_field: R of the supervised reference: required for it, and refused for other methods.
        hidden: units of the hidden layer, for methods that have one; None: their usual number.
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
    lr: float = _field(0.01, AT_LEAST_0, panel="grid", help="Learning rates, such as 0.1,0.01. Default: the paper's 4.")
    l1: float = _field(0.0, AT_LEAST_0, panel="grid", help="Strengths of the L1 penalty. Default: the paper's 8.")
    guidance_weight: float = _guidance_field(
        1.0,
        AT_LEAST_0,
        help="Lambda, the weight of guidance or of another regularizer. nguide sweep takes several, each with its own "
        "winner. Default: 1.0.",
    )
    divergence: DivergenceName = _guidance_field(
        "forward_kl",
        choices=get_args(DivergenceName),
        help="forward_kl, reverse_kl or squared_error. nguide sweep takes several, each with its own winner. Default: "
        "forward_kl.",
    )
    renormalize: bool = _guidance_field(
        True, help="Scale the class token's attention to sum to 1 over the slices before it is guided."
    )
    epochs: int = _training_field(1000, WHOLE, help="Most passes over the training scans.")
    batch_size: int = _training_field(
        64, WHOLE, help="Scans in a batch. Default: 64; 32, 16 or 8 for fewer than 256, 128 or 64 training scans."
    )
    momentum: float = _field(0.9, (0.0, 1.0))
    clip_norm: float = _field(1.0, (1e-12, math.inf))
    patience: int | None = _training_field(
        50,
        metavar="EPOCHS",
        help="Stop after so many epochs in which validation AUROC reached no new high; 0: never. Default: 50.",
    )
    train_above_val: bool = _training_field(
        False, help="Select only epochs whose training AUROC is above their validation AUROC. Default: all epochs."
    )
    seed: int = _field(0, (0, 2**63 - 1))
    receptive_field: int | None = None
    hidden: int | None = None
    modes: int = _guidance_field(1, WHOLE, help="Number of bells that attention is guided to.")
    negatives: NegativesName = _guidance_field(
        "own",
        choices=get_args(NegativesName),
        help="How negative scans are guided: to their own bell (own), to uniform attention (uniform), or not at all "
        "(none).",
    )
    warmup: int = _guidance_field(
        0, (0, math.inf), metavar="EPOCHS", help="Raise lambda from 0 to its value over so many epochs."
    )
    optimizer: OptimizerName = _training_field(
        "sgd", choices=get_args(OptimizerName), help="sgd, with momentum, or adamw. Default: sgd."
    )
    weight_decay: float = _training_field(
        0.0, AT_LEAST_0, help="Decay of the weights, as torch's SGD or AdamW does it. Default: 0."
    )
    schedule: ScheduleName = _training_field(
        "constant",
        choices=get_args(ScheduleName),
        help="Learning rate over the epochs: constant, or cosine, which falls to 0 at --epochs. Default: constant.",
    )
    class_weights: bool = _training_field(
        False,
        choices=(False, True),
        help="Weight positive and negative training scans inversely to their number. Default: all count alike.",
    )
    least_width: float = _guidance_field(
        0.0,
        AT_LEAST_0,
        help="Least standard deviation of the bell that attention is guided to, in slices (1.5) or by the scans' "
        "median spacing in mm (8mm). With 0, attention on one slice is not guided.",
    )

    def __post_init__(self) -> None:
        from normal_guidance.core.arrays import checked_whole, is_whole
        from normal_guidance.core.guidance import NormalGuidance
        from normal_guidance.core.methods import EVERY_METHOD, NAMED, SLICE_REFERENCE, model_options, near_miss

        if not isinstance(self.method, str):
            raise UserError(f"method: got {type(self.method).__name__}; give the name of one, such as 'abmil'")
        # Two fields together ask for slice labels, so that one typing error cannot.
        width, is_reference = self.receptive_field, self.method == SLICE_REFERENCE
        if is_reference and not (is_whole(width) and width >= 1):
            raise UserError(
                f"receptive_field is {width}; give {SLICE_REFERENCE} the mean length of the training scans' positive "
                "blocks, a whole number of at least 1"
            )
        if not is_reference and width is not None:
            raise UserError(
                f"receptive_field is {width}, but method {self.method!r} has none; leave it out, or train "
                f"{SLICE_REFERENCE!r}"
            )
        if not self.on_slices and (self.method not in EVERY_METHOD or not EVERY_METHOD[self.method].scores_scans):
            trainable = ", ".join(name for name, method in NAMED.items() if method.scores_scans)
            raise UserError(
                f"method {self.method!r} cannot be trained{near_miss(self.method)}; choose one of {trainable}"
            )
        if self.hidden is not None:
            object.__setattr__(self, "hidden", checked_whole("hidden", self.hidden))
            if is_reference or "hidden" not in model_options(self.method):
                having = ", ".join(name for name in NAMED if "hidden" in model_options(name))
                raise UserError(
                    f"hidden is {self.hidden}, but method {self.method!r} has no such layer; leave it out, or take one "
                    f"of {having}"
                )
        NormalGuidance(self.guidance_weight, self.divergence, negatives=self.negatives)  # refuses wrong values
        for each in fields(self):
            if each.metadata.get("within"):
                # 1 and 1.0 are the same configuration; numpy's numbers could not be saved.
                object.__setattr__(self, each.name, _checked_number(each, getattr(self, each.name)))
        _check_choices(self)
        if self.optimizer == "adamw" and self.momentum == 1.0:
            raise UserError("momentum is 1.0; of adamw it is beta_1, which must be below 1")
        if self.patience is not None:
            object.__setattr__(self, "patience", checked_whole("patience", self.patience))

    @property
    def on_slices(self) -> bool:
        """Whether it learns slice labels; only the supervised reference does."""
        return self.receptive_field is not None

    @property
    def spec(self) -> Method:
        """The method to train: a row of `EVERY_METHOD`, or the supervised reference of this receptive field."""
        from normal_guidance.core.bells import SliceReference
        from normal_guidance.core.method import Method
        from normal_guidance.core.methods import EVERY_METHOD
        from normal_guidance.core.prediction import slice_classification

        if self.receptive_field is None:
            known = EVERY_METHOD[self.method]
            return known if self.hidden is None else replace(known, build=partial(known.build, hidden=self.hidden))
        build = partial(SliceReference, receptive_field=self.receptive_field)
        return Method(self.method, "Supervised reference", build, loss=slice_classification, scores_scans=False)

    def as_json(self) -> dict[str, object]:
        """Return the fields as run folders hold them; `OPTIONAL` ones only if they differ from their default."""
        default = {each.name: each.default for each in fields(self) if each.name in OPTIONAL}
        return {name: value for name, value in asdict(self).items() if name not in default or value != default[name]}

    @property
    def term_options(self) -> tuple[str, ...]:
        """The fields that the method's regularizer takes."""
        from normal_guidance.core.regularizers import REGULARIZERS

        name = self.spec.regularizer
        return () if name is None else REGULARIZERS[name].options

    def regularizer(self, epoch: int | None = None) -> AttentionTerm | None:
        """Return the term of a regularized method in an epoch, counted from 1; without an epoch, after the warm-up."""
        from normal_guidance.core.regularizers import REGULARIZERS

        name = self.spec.regularizer
        if name is None:
            return None
        weight = self.guidance_weight * (1.0 if epoch is None else self.ramp(epoch))
        return REGULARIZERS[name].term(weight, **{option: getattr(self, option) for option in self.term_options})

    def without_idle_guides(self) -> Config:
        """Return the same with those of `GUIDES` at their defaults that have no effect on the method."""
        idle = {*GUIDES} - {*self.term_options} - ({"warmup"} if self.spec.regularizer else set())
        defaults: dict[str, Any] = {each.name: each.default for each in fields(self) if each.name in idle}
        return replace(self, **defaults)

    def ramp(self, epoch: int) -> float:
        """Return the share of lambda that counts in an epoch, counted from 1."""
        return min(1.0, epoch / self.warmup) if self.warmup else 1.0

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 1."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * (epoch - 1) / self.epochs))


@dataclass(frozen=True)
class Execution:
    """Where and how to compute; results differ in rounding at most.

    Args:
        device: "cpu", "cuda", "cuda:1".
        precision: of matrix products. "tf32" and "bf16" are for CUDA; parameters, losses and metrics stay float32.
        engine: "packed" runs anywhere; "recorded" replays a recorded step and needs CUDA to be fast; "compiled" waits
            up to a minute for a faster step.  None takes packed on the CPU, and on CUDA what ends first by a
            measurement of its own steps: packed for little work, else recorded, and compiled for what remains of long
            work.  Packed also takes over where the others cannot run.
        chunk: the most configurations to train together; halved automatically when memory runs out.

    Example:
        >>> Execution(device="cpu").slotted
        False
    """

    device: str = _field("cpu", help="cpu, cuda or cuda:1. Default: cuda where there is one.")
    precision: Precision = _field(
        "float32", choices=get_args(Precision), help="auto (float32 on the CPU, tf32 on CUDA), float32, tf32 or bf16."
    )
    engine: EngineName | None = _field(
        None,
        choices=(*get_args(EngineName), None),
        help="auto (the one that ends first, by measurement), packed (any device, no preparation), recorded or "
        "compiled (a minute of preparation, the fastest steps).",
    )
    chunk: int | None = _field(
        None, help="Train at most so many configurations together; fewer need less memory. Default: all."
    )

    def __post_init__(self) -> None:
        import torch

        from normal_guidance.core.arrays import checked_whole

        _check_choices(self)
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise UserError(f"device {self.device!r} is unknown; give cpu, cuda or cuda:1") from error
        if self.precision in ("tf32", "bf16") and torch.device(self.device).type != "cuda":
            raise UserError(f"precision {self.precision} is for CUDA; on {self.device} use float32")
        if self.chunk is not None:
            checked_whole("chunk", self.chunk)

    @property
    def slotted(self) -> bool:
        """Whether to train in batches with a fixed number of rows: recorded or compiled."""
        import torch

        if self.engine is None:
            return torch.device(self.device).type == "cuda"
        return self.engine != "packed"

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        import torch

        return torch.float64 if self.precision == "float64" else torch.float32


def _check_choices(options: Config | Execution) -> None:
    for each in fields(options):
        if choices := each.metadata.get("choices"):
            choose_one_of(each.name, getattr(options, each.name), choices)


def _checked_number(each: Field[Any], value: Any) -> float | int:
    """The number in the type of its least value."""
    from normal_guidance.core.arrays import is_number, is_whole

    name, (least, most) = each.name, each.metadata["within"]
    if not is_number(value):
        raise UserError(f"{name} is {value!r}; give a number")
    if not least <= value <= min(most, sys.float_info.max):
        limits = f"at least {least}, and finite" if math.isinf(most) else f"from {least} to {most}"
        raise UserError(f"{name} is {value}; it must be {limits}")
    if isinstance(least, int) and not is_whole(value):
        raise UserError(f"{name} is {value}; it must be a whole number")
    return type(least)(value)


def paper_config(method: str, **fields: Any) -> Config:
    """Return a configuration of the paper's protocol, but for the given fields."""
    return Config(method, **{**PAPER, **fields})


def fitting_batch(scans: int) -> int:
    """Return the batch size for so many training scans: 64, or fewer where an epoch would have less than four steps."""
    size = next((size for size in (64, 32, 16) if 4 * size <= scans), 8)
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
    axes: dict[str, Any] = {"divergence": divergence, "guidance_weight": guidance_weight, "seed": seed}
    axes = {name: [getattr(base, name)] if values is None else values for name, values in axes.items()}
    axes |= {"l1": l1, "lr": lr}
    for name, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise UserError(f"{name} is {values!r}; give a list of values, such as [{getattr(base, name)!r}]")
    return tuple(replace(base, **dict(zip(axes, values, strict=True))) for values in product(*axes.values()))


def grid_of_method(base: Config, **axes: Any) -> tuple[Config, ...]:
    """Return `grid` of the given axes, without those that have no effect on the method."""
    known = {"lr", "l1", "seed", *base.term_options, *(["guidance_weight"] if base.spec.regularizer else [])}
    return grid(base, **{axis: axes[axis] for axis in axes if axis in known})


def sensitivity_grid(
    base: Config, *, lr: Sequence[float] = LEARNING_RATES, l1: Sequence[float] = L1_STRENGTHS
) -> tuple[Config, ...]:
    return grid(base, lr=lr, l1=l1, divergence=get_args(DivergenceName), guidance_weight=GUIDANCE_WEIGHTS)


def check_together(configs: Sequence[Config]) -> None:
    """Refuse configurations that cannot be trained together: they may differ in `AXES` only."""
    if isinstance(configs, Config) or not isinstance(configs, Sequence):
        raise UserError(f"configs: got {type(configs).__name__}; give a list of Config, such as grid(Config('ng'))")
    if not configs:
        raise UserError("configs: there is no configuration to train; give at least one")
    wrong = next((config for config in configs if not isinstance(config, Config)), None)
    if wrong is not None:
        raise UserError(f"configs: got {type(wrong).__name__} in the list; give a list of Config")
    for name in (each.name for each in fields(Config) if each.name not in AXES):
        values = {getattr(config, name) for config in configs}
        if len(values) > 1:
            raise UserError(
                f"configurations of one sweep differ in {name} ({', '.join(map(str, sorted(values, key=str)))}); "
                f"they may differ in {', '.join(AXES)} only: run one sweep for each"
            )


def departures(config: Config) -> dict[str, object]:
    """Return the fields that differ from the paper's protocol, apart from the grid's axes, for a run's report."""
    paper = paper_config(config.method, receptive_field=config.receptive_field)
    return {name: value for name, value in asdict(config).items() if name not in AXES and value != getattr(paper, name)}
