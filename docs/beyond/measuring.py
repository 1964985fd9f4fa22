"""One job on one seed: trained, selected by validation scan AUROC, and tested."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from beyond.drawing import drawn
from beyond.points import Job, Protocol
from beyond.results import Result, Winner
from beyond.variations import numbers_of, registered
from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.core.models import CenteredGaussian, Prediction, build_model
from normal_guidance.evaluation.criteria import SHARE, CutName, agreement, criteria
from normal_guidance.evaluation.runs import environment
from normal_guidance.simulate.semi_synthetic import VARIANTS, bayes_scan_scores, bayes_slice_scores
from normal_guidance.statistics.split_results import MethodResults, split_results
from normal_guidance.training import selection
from normal_guidance.training.fit import predict
from normal_guidance.training.progress import SweepProgress
from normal_guidance.training.sweep import Execution, Sweep, sweep
from normal_guidance.training.winners import diverged, winner_model

CUTS: dict[str, tuple[CutName, float]] = {
    "half of the attention": ("attention", SHARE),
    "0.3 of the slices": ("slices", 0.3),
}
"""What is cut out of a scan to ask about it; 12 of 40 slices, a finding's share, are 0.3."""


class OutOfTimeError(Exception):
    """The time that was given is over; what is under way is left."""


def measure(job: Job, seed: int, protocol: Protocol, execution: Execution, deadline: float | None = None) -> Result:
    """Everything that the tables need to know; raises `OutOfTimeError` at the deadline, in `time.time()`."""
    begin, scans = time.monotonic(), drawn(seed, job.variant, protocol)
    if job.is_trained:
        winners, trained = _train(job, seed, protocol, execution, deadline)
    else:
        prediction = _UNTRAINED[job.method](scans.test, job.variant)
        winners, trained = [Winner(test=_tested(scans.test, prediction))], {}
    return Result(
        job=job.as_json(),
        seed=seed,
        protocol=protocol,
        labels=tuple(scans.test.labels.tolist()),
        winners=tuple(winners),
        about={
            "seconds": round(time.monotonic() - begin, 1),
            "precision": execution.precision,
            **trained,
            "environment": environment(execution),
        },
    )


# ----------------------------------------------------------------------------------------------------
# What is trained
# ----------------------------------------------------------------------------------------------------


def _train(
    job: Job, seed: int, protocol: Protocol, execution: Execution, deadline: float | None
) -> tuple[list[Winner], dict[str, Any]]:
    scans = drawn(seed, job.variant, protocol)
    with registered(job.spec()):
        result = sweep(job.configs(protocol, seed), scans.train, scans.val, execution, watch=partial(_watch, deadline))
        models = {
            (one.config.guidance_weight, one.config.seed): _model(one, scans, execution) for one in result.winners
        }
    winners = []
    for one in result.winners:
        if one.config.seed != seed:
            continue
        weight = one.config.guidance_weight
        own = [model for (of_weight, _), model in models.items() if of_weight == weight]
        chosen = _chosen_without_labels(own, scans.val) if len(job.weights) > 1 and job.restarts > 1 else {}
        model = models[weight, seed]
        winners.append(
            Winner(
                weight=weight,
                lr=one.config.lr,
                l1=one.config.l1,
                epoch=one.epoch,
                val_auroc=one.val_auroc,
                numbers=numbers_of(model),
                test=_tested(scans.test, _predict(model, scans.test)),
                **chosen,
            )
        )
    return winners, _counts(result)


def _watch(deadline: float | None, progress: SweepProgress) -> None:
    if deadline is not None and time.time() > deadline:
        raise OutOfTimeError(f"epoch {progress.epoch} of {progress.epochs}")


def _model(one: selection.Winner, scans: Any, execution: Execution) -> nn.Module:
    return winner_model(one.config, scans.train.width, one.weights).to(execution.device)


def _counts(result: Sweep) -> dict[str, Any]:
    return {
        "configurations": len(result.configs),
        "selectable": int((result.best_epoch > 0).sum()),
        "diverged": diverged(result),
        "epochs": int(result.trained.max()),
    }


def _predict(model: nn.Module, scans: Bags) -> Prediction:
    return Prediction(*(field.cpu() for field in predict(model, scans)))


def _chosen_without_labels(models: list[nn.Module], val: Bags) -> dict[str, Any]:
    """Every criterion of the first model on the validation scans; and what slice labels say about it there."""
    first, found = partial(predict, models[0]), dict[str, float]()
    for cut, (of, share) in CUTS.items():
        found |= {f"{name}, {cut}": value for name, value in criteria(first, val, share=share, of=of).items()}
    slice_scores = [_predict(model, val).slice_scores for model in models]
    if len(models) > 1:
        found["agreement of two trainings"] = agreement(slice_scores, val.lengths, val.labels).beyond_position
    return {"criteria": found, "val_localization": _localization(slice_scores[0], val)}


def _localization(slice_scores: Tensor, scans: Bags) -> float:
    assert scans.slice_labels is not None
    return localization(slice_scores, scans.slice_labels, scans.lengths).mean_auroc.item()


# ----------------------------------------------------------------------------------------------------
# What is only scored
# ----------------------------------------------------------------------------------------------------


def _oracle(test: Bags, variant: str) -> Prediction:
    known = VARIANTS[variant].oracle("test")
    slice_scores = bayes_slice_scores(test, **known)
    return Prediction(bayes_scan_scores(test, **known), slice_scores.exp(), slice_scores[None])


def _centered(test: Bags, variant: str) -> Prediction:
    return predict(CenteredGaussian(), test)


def _ends(method: str, test: Bags, variant: str) -> Prediction:
    """Without evidence, what is left is where windows stick out of the scan; there is no scan score."""
    model = build_model(method, test.width)
    assert isinstance(model.classifier, nn.Linear)
    nn.init.zeros_(model.classifier.weight)
    prediction = predict(model, test)
    return prediction._replace(logit=torch.full_like(prediction.logit, torch.nan))


_UNTRAINED: dict[str, Callable[[Bags, str], Prediction]] = {
    "oracle": _oracle,
    "centered_gaussian": _centered,
    "ends_of_bells": partial(_ends, "bells"),
    "ends_of_whole_bells": partial(_ends, "whole_bells"),
}


def _tested(test: Bags, prediction: Prediction) -> MethodResults:
    return split_results(test, {"": prediction.slice_scores}, {"": prediction.logit}).methods[""]


def line(result: Result) -> str:
    """What a result says, for whoever watches."""
    labels = torch.tensor(result.labels)
    parts = []
    for one in result.winners:
        weight = f"λ {one.weight:g}: " if len(result.winners) > 1 else ""
        scores = f"{weight}localization {np.nanmean(one.test.auroc):.3f}"
        if one.test.scan_scores is not None:
            scores += f", scan {auroc(torch.from_numpy(one.test.scan_scores), labels).item():.3f}"
        parts.append(scores)
    return "; ".join(parts) or "no epoch could be selected"
