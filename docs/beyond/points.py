"""The table of the study: what is varied, along which axis, and what each point is compared with.

A point is a row of a page's table.  Several points may be of one job: what is trained in one sweep, on one variant of
the data.  The method as it stands is the job of most axes' first row, and lambda is varied inside a job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from beyond.variations import NUMBERS, Values, varied
from normal_guidance.core.bells import KAPPA, SIGMA
from normal_guidance.core.models import EVERY_METHOD, Method
from normal_guidance.simulate.semi_synthetic import VARIANTS
from normal_guidance.training.config import Config, grid

UNTRAINED = {
    "oracle": "Bayes oracle",
    "centered_gaussian": "Centered Gaussian",
    "ends_of_bells": "Bells, w = 0: the scan's ends alone",
    "ends_of_whole_bells": "Whole bells, w = 0: the scan's ends alone",
}
"""What is only scored."""


@dataclass(frozen=True)
class Protocol:
    """How all is trained; `sizes` (training, validation, test scans) and `features` are for trials only."""

    epochs: int = 200
    patience: int = 40
    lr: tuple[float, ...] = (0.1, 0.01, 0.001)
    l1: tuple[float, ...] = (0.1, 0.01, 0.001)
    batch_size: int = 64
    train_above_val: bool = False
    """The paper's filter: models that do not overfit have no epoch that passes it, or early ones only."""
    sizes: tuple[int, int, int] | None = None
    features: int | None = None

    @property
    def is_trial(self) -> bool:
        """Whether the scans are not those that the page is about."""
        return self.sizes is not None or self.features is not None


@dataclass(frozen=True)
class Job:
    """One sweep.

    Args:
        method: a name in `EVERY_METHOD` or `UNTRAINED`.
        variant: of the data, a name in `VARIANTS`.
        held: numbers that are not learned.
        started: numbers that are learned from elsewhere.
        l1_on_all: whether L1 counts what the method leaves alone.
        l1: strengths of L1; None: the protocol's.
        weights: lambdas, each with a winner of its own.
        restarts: initial weights; winners but those of the first are only asked whether they agree.
        options: fields of `Config`.
    """

    method: str
    variant: str = "paper"
    held: Values = ()
    started: Values = ()
    l1_on_all: bool = False
    l1: tuple[float, ...] | None = None
    weights: tuple[float, ...] = (1.0,)
    restarts: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Of the method that is trained, fit for a folder."""
        parts = [f"{number}-held-{value:g}" for number, value in self.held]
        parts += [f"{number}-from-{value:g}" for number, value in self.started]
        parts += ["l1-on-all"] if self.l1_on_all else []
        parts += ["l1-" + "-".join(f"{value:g}" for value in self.l1)] if self.l1 is not None else []
        parts += [f"{option}-{value}" for option, value in self.options]
        return "-".join([self.method, *parts])

    @property
    def is_trained(self) -> bool:
        return self.method not in UNTRAINED

    def spec(self) -> Method:
        """The method that is trained; register it before asking for `configs`."""
        own = EVERY_METHOD[self.method]
        unpenalized = () if self.l1_on_all else own.unpenalized
        return replace(own, name=self.name, build=varied(own.build, self.held, self.started), unpenalized=unpenalized)

    def configs(self, protocol: Protocol, seed: int) -> tuple[Config, ...]:
        base = Config(
            self.name,
            epochs=protocol.epochs,
            patience=protocol.patience,
            batch_size=protocol.batch_size,
            train_above_val=protocol.train_above_val,
            seed=seed,
            **dict(self.options),
        )
        return grid(
            base,
            lr=protocol.lr,
            l1=protocol.l1 if self.l1 is None else self.l1,
            guidance_weight=self.weights,
            seed=range(seed, seed + self.restarts),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Point:
    """One row: a job's winner for one lambda, and the row of the same axis and data that it is compared with."""

    axis: str
    label: str
    job: Job
    against: str
    weight: float = 1.0

    @property
    def is_reference(self) -> bool:
        return self.label == self.against


def title(method: str) -> str:
    """A method's name for readers."""
    return UNTRAINED.get(method) or EVERY_METHOD[method].title


# ----------------------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------------------

BELLS, POSTERIOR = "bells", "posterior_bells"

FORMS = (
    *("mean", "abmil", "smap", "ng", "evidence", "bells", "whole_bells", "posterior_bells", "abmil_bells"),
    *("evidence_ng", "bells_ng", "whole_bells_ng", "posterior_bells_ng", "abmil_bells_ng"),
    *UNTRAINED,
)
COMPARED = (
    *("mean", "abmil", "smap", "ng", "evidence", "bells", "whole_bells", "posterior_bells", "posterior_bells_ng"),
    "oracle",
)
LAMBDAS = (0.0, 0.01, 0.1, 1.0, 10.0, 100.0)
CHOOSING = ("ng", "bells_ng", "posterior_bells_ng")
"""Methods whose lambda is chosen without slice labels."""

WARMUP = 50

GUIDES_OF = ("ng", "bells_ng")
"""Methods of which negatives and modes are varied."""


def plain(method: str, variant: str = "paper") -> Job:
    """The method as it stands; those of `CHOOSING` for every lambda, so that all axes share what is trained once."""
    if method in CHOOSING and variant == "paper":
        return Job(method, weights=LAMBDAS, restarts=2)
    return Job(method, variant)


def _held(axis: str, method: str, number: str, values: Iterable[float]) -> list[Point]:
    label = f"{title(method)}, {NUMBERS[number]}"
    points = [Point(axis, f"{label} learned", plain(method), f"{label} learned")]
    points += [
        Point(axis, f"{label} = {value:g}", Job(method, held=((number, value),)), points[0].label) for value in values
    ]
    return points


def _started(method: str, number: str, values: Iterable[float], own: float) -> list[Point]:
    """`own` is where the method starts."""
    label = f"{title(method)}, {NUMBERS[number]} from"
    jobs = {value: Job(method, started=((number, value),)) for value in values} | {own: plain(method)}
    return [Point("start", f"{label} {value:g}", jobs[value], f"{label} {own:g}") for value in sorted(jobs)]


def _penalized(method: str) -> list[Point]:
    jobs = {
        "L1 on w": plain(method),
        "L1 on all": Job(method, l1_on_all=True),
        "no L1": Job(method, l1=(0.0,)),
    }
    return [Point("l1", f"{title(method)}, {where}", job, f"{title(method)}, L1 on w") for where, job in jobs.items()]


def _weighted(axis: str, method: str, weights: Iterable[float], reference: float, warmup: int = 0) -> list[Point]:
    name = f"{title(method)}, λ"
    job = plain(method) if not warmup else Job(method, weights=tuple(weights), options=(("warmup", warmup),))
    behind = f", {warmup} epochs of warm-up" if warmup else ""
    return [Point(axis, f"{name} = {w:g}{behind}", job, f"{name} = {reference:g}", weight=w) for w in weights]


def _guided(method: str) -> list[Point]:
    """Weight with and without warm-up; of some methods negatives and modes, too."""
    points = [
        point
        for warmup in (0, WARMUP)
        for point in _weighted("guidance", method, (0.1, 1.0, 10.0), reference=1.0, warmup=warmup)
    ]
    return [*points, *(_guides(method) if method in GUIDES_OF else [])]


def _guides(method: str) -> list[Point]:
    name = title(method)
    jobs = {
        "negatives uniform": Job(method, options=(("negatives", "uniform"),)),
        "negatives not guided": Job(method, options=(("negatives", "none"),)),
        "2 modes": Job(method, options=(("modes", 2),)),
        "3 modes": Job(method, options=(("modes", 3),)),
    }
    return [Point("guidance", f"{name}, {what}", job, f"{name}, λ = 1") for what, job in jobs.items()]


AXES = {
    "form": "Form",
    "width": "Width of the window",
    "kernel": "Shape of the window",
    "l1": "Where L1 counts",
    "start": "Where learning starts",
    "temperature": "Temperature",
    "guidance": "Guidance: weight, warm-up, negatives, modes",
    "lambda": "Lambda without slice labels",
    "data": "Data",
}
"""Name -> heading of the page, in the order in which they are measured."""

POINTS: tuple[Point, ...] = (
    *(Point("form", title(method), plain(method), title(POSTERIOR)) for method in FORMS),
    *(point for method in (BELLS, POSTERIOR) for point in _held("width", method, "sigma", (1, 3, 6, 12))),
    *_held("kernel", POSTERIOR, "shape", (1, 2, 8)),
    *(point for method in (BELLS, POSTERIOR) for point in _penalized(method)),
    *(point for method in (BELLS, POSTERIOR) for point in _started(method, "sigma", (1, 10), own=SIGMA)),
    *_started(POSTERIOR, "kappa", (1, 16), own=KAPPA),
    *_held("temperature", BELLS, "beta", (0.1, 0.25, 1)),
    *(point for method in CHOOSING for point in _guided(method)),
    *(point for method in CHOOSING for point in _weighted("lambda", method, LAMBDAS, reference=0.0)),
    *(
        Point("data", title(method), plain(method, variant), title("oracle"))
        for variant in VARIANTS
        for method in COMPARED
    ),
)


def points_of(*axes: str) -> list[Point]:
    return [point for point in POINTS if point.axis in axes]


def jobs_of(*axes: str) -> list[Job]:
    """What is trained for these axes, each once."""
    return list(dict.fromkeys(point.job for point in points_of(*axes)))
