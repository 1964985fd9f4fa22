"""The tables of methods, and the names and titles of the other rows of a table: the ceiling and its references.

`METHODS` holds the nine of the paper, `BEYOND` two heads for research, `FIELD` those that others compare with.
Guidance is a loss, not a model: `ng` is `abmil` and `mhng` is `transmil` trained with `NormalGuidance`.  Any method
with trained attention has such a version with any regularizer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from inspect import signature

from torch import nn

from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.base.system import one_per_file
from normal_guidance.core import field
from normal_guidance.core.arrays import checked_whole, is_number, is_whole
from normal_guidance.core.method import GUIDANCE, Method
from normal_guidance.core.models import ABMIL, CenteredGaussian, EvidenceMIL, MaxPooling, MeanPooling, SmAP, TransMIL
from normal_guidance.core.prediction import FEATURES
from normal_guidance.core.regularizers import REGULARIZERS


def _centered_gaussian(features: int, *, published: bool = False) -> CenteredGaussian:
    return CenteredGaussian(published=published)


_PLAIN = partial(TransMIL, smooth=False)  # without the smooth operator, which is a method of its own and not an option

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("centered_gaussian", "Centered Gaussian", _centered_gaussian, scores_scans=False),
        Method("max", "Max pooling", MaxPooling, pool=lambda rows: rows.amax(0)),
        Method("mean", "Mean pooling", MeanPooling, pool=lambda rows: rows.mean(0)),
        Method("abmil", "ABMIL", ABMIL),
        Method("smap", "ABMIL + Smooth Operator", SmAP),
        Method("ng", "ABMIL + Normal Guidance", ABMIL, GUIDANCE, "abmil"),
        Method("transmil", "TransMIL", _PLAIN),
        Method("smtp", "TransMIL + Smooth Operator", partial(TransMIL, smooth=True)),
        Method("mhng", "TransMIL + Multi-Head Normal Guidance", _PLAIN, GUIDANCE, "transmil"),
    )
}
"""The nine methods of the paper, in the order of its tables."""

_OF_EVIDENCE = ("classifier.bias", "attention.log_sigma", "attention.log_beta")
_OF_BELLS = (*_OF_EVIDENCE, "attention.log_kappa", "attention.log_shape", "log_gamma")


BEYOND: dict[str, Method] = {
    method.name: method
    for plain in (
        Method(
            "evidence",
            "Tied Evidence",
            partial(EvidenceMIL, bells=False),
            unpenalized=_OF_EVIDENCE,
            when="Use it for findings in several places, anywhere in the scan.",
        ),
        Method(
            "whole_bells",
            "Mixture of Whole Bells",
            partial(EvidenceMIL, bells=True),
            unpenalized=_OF_BELLS,
            when="Use it for findings in one block of slices, usually around the middle of the scan.",
        ),
    )
    for method in (plain, replace(plain.regularized(REGULARIZERS[GUIDANCE]), when=plain.when))
}
"""Methods beyond the paper, each followed by its guided version.

L1 penalises w only.  It would pull width, sharpness, shape and scale to 1."""

FIELD: dict[str, Method] = one_per_file(field, "METHOD")
"""The methods that the field compares with, each in a file of `core.field`."""

NAMED: dict[str, Method] = METHODS | BEYOND | FIELD  # every method with a name of its own

EVERY_METHOD: dict[str, Method] = {
    method.name: method
    for named in NAMED.values()
    for method in (
        named,
        *(named.regularized(term) for term in REGULARIZERS.values() if named.attends and named.regularizer is None),
    )
    if method.name == named.name or method.name not in NAMED
}
"""Those of `NAMED`, each followed by its versions with every other regularizer: abmil, abmil_entropy and so on."""

DISTINCT: tuple[str, ...] = (*NAMED, *(f"abmil_{name}" for name in REGULARIZERS if f"abmil_{name}" in EVERY_METHOD))
"""Every model and every regularizer at least once: what checks of all methods run through."""


def build_model(method: str, features: int = FEATURES, **options: int | float | bool) -> nn.Module:
    """A new model of a method, by its name in `METHODS` or in `core.methods.EVERY_METHOD`.

    Args:
        method: its name, such as "abmil".
        features: numbers per slice.
        options: those of the model itself, such as `hidden` of ABMIL; `model_options` lists them.  Configurations and
            saved models have the defaults.

    Example:
        >>> sum(p.numel() for p in build_model("transmil").parameters()) - (768 + 1)  # pooling without classifier
        4742400
        >>> build_model("abmil", 512, hidden=64).hidden
        Linear(in_features=512, out_features=64, bias=True)
    """
    build = _row(method).build
    features = checked_whole("features", features)
    known = model_options(method)
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, [*known, "features"], n=1)
            has = f"it has {', '.join(known)}" if known else "it has none"
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"method {method!r} has no option {name!r}; {has}{hint}")
        if isinstance(known[name], bool) and not isinstance(value, bool):
            raise UserError(f"{name} is {value!r}; give True or False")
        if is_whole(known[name]):
            options[name] = checked_whole(name, value)
        if isinstance(known[name], float) and not (is_number(value) and math.isfinite(value)):
            raise UserError(f"{name} is {value!r}; give a finite number")
    return build(features, **options)


def model_options(method: str) -> dict[str, object]:
    """The options of a method's model, beside `features`, with their defaults."""
    parameters = signature(_row(method).build).parameters
    fixed = getattr(_row(method).build, "keywords", {})
    return {name: known.default for name, known in parameters.items() if name != "features" and name not in fixed}


def _row(method: str) -> Method:
    if not isinstance(method, str):
        raise UserError(f"method: got {type(method).__name__}; give the name of one, such as 'abmil'")
    if method not in EVERY_METHOD:
        choose_one_of("method", method, NAMED, near_miss(method))
    return EVERY_METHOD[method]


def near_miss(method: str) -> str:
    """The nearest name of a method, as a question for a message; empty if none is near."""
    near = [] if method in EVERY_METHOD else get_close_matches(method.lower().replace("-", "_"), EVERY_METHOD, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


CEILING = "ceiling"  # the name of the tables' last row: the Bayes oracle or the supervised reference

SLICE_REFERENCE = "slice_reference"
"""The method name of the supervised reference for localization, in configurations and folders."""

SCAN_REFERENCE = "scan_reference"  # the method name of the supervised reference for scan scores, in folders
ENSEMBLE = "ensemble"  # the method name of what `nguide fit` makes
COMPARED: tuple[str, ...] = (*EVERY_METHOD, ENSEMBLE)  # the rows of a table, apart from the ceiling

REFERENCE_TITLES = {SLICE_REFERENCE: "Slice reference", SCAN_REFERENCE: "Scan reference"}
"""The titles of the two runs that make up the supervised reference."""


DRAWN = ("semi-synthetic", "lidc-positions")  # datasets that we draw, so that Bayes' rule gives their ceiling


def scores_scans(method: str) -> bool:
    """Whether a row of a table has scan scores; all but the centred Gaussian do."""
    return method not in EVERY_METHOD or EVERY_METHOD[method].scores_scans


def method_title(method: str, dataset: str = "") -> str:
    """A method's title; that of the ceiling depends on the dataset."""
    if method == CEILING:
        return "Bayes oracle" if dataset in DRAWN else "Supervised reference"
    if method == ENSEMBLE:
        return "Ensemble"
    return REFERENCE_TITLES.get(method) or EVERY_METHOD[method].title


REFERENCES = tuple(REFERENCE_TITLES)  # models that are trained with slice labels
EVERYTHING = (*COMPARED, CEILING, *REFERENCES)  # all names that a study's folder may hold
