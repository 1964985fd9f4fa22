"""The paper's published numbers, for comparison with ours.

`published.json` holds the four result tables and the sensitivity analysis as printed (three digits), and the values and
chosen hyperparameters of single seeds from the authors' public notebooks, for the semi-synthetic data only.

Reference: Harvey, Loevlie, Hughes, "Normal Guidance is what Attention Needs", 2026.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from normal_guidance.core.methods import CEILING, COMPARED, NAMED
from normal_guidance.core.metrics import PUBLISHED_SD, MeanSd, SdKind
from normal_guidance.errors import UserError
from normal_guidance.statistics.scores import Metric

PUBLISHED_SEEDS = (1001, 2001, 3001)
"""The three partitions behind every published mean."""


class Choice(NamedTuple):
    """The configuration that validation chose."""

    l1: float
    lr: float


def published(metric: Metric, method: str, dataset: str) -> MeanSd | None:
    """Mean and sd over the three partitions as printed, or None where the paper has no such number."""
    _check_method(method)
    cell = _paper()["tables"][_name_in_paper(metric)].get(method, {}).get(dataset)
    return cell and MeanSd(cell["mean"], cell["sd"], published_sd_kind(metric, method, dataset))


def published_sd_kind(metric: Metric, method: str, dataset: str) -> SdKind:
    """Which sd the paper prints in a cell: `PUBLISHED_SD`, with one exception, which follows from the numbers.

    The scan AUROC of the Bayes oracle, .80088 .81505 .81303, has population sd .006, as printed, and sample sd .008.
    Which sd the ceilings of the CT data have is unknown.
    """
    if (method, dataset) == (CEILING, "semi-synthetic"):
        return "population"
    return PUBLISHED_SD[metric.partition("_")[0]]


def published_seed(metric: Metric, method: str, dataset: str, seed: int) -> float | None:
    """The value of one partition, or None where it is not known."""
    _check_method(method)
    return _of_seed(f"{dataset} {_name_in_paper(metric)}", method, seed)


def published_choice(method: str, dataset: str, seed: int) -> Choice | None:
    """The L1 penalty and learning rate that the authors' run chose, or None where it is not known."""
    _check_method(method)
    chosen = _of_seed(f"{dataset} chosen (l1, lr)", method, seed)
    return chosen and Choice(*chosen)


def published_sensitivity(metric: Metric, dataset: str, divergence: str, weight: float) -> MeanSd | None:
    """ABMIL + Normal Guidance under another divergence or lambda (`weight`), or None where it is not printed.

    The paper varies one of them at a time, from forward KL with lambda 1, and prints lambda for localization only.
    """
    printed, name = _paper()["sensitivity"], _name_in_paper(metric)
    if dataset != printed["dataset"]:
        return None
    cell = None
    if weight == 1:
        cell = printed["divergence"].get(divergence, {}).get(name)
    elif divergence == "forward_kl":
        cell = printed.get(f"lambda_{name}", {}).get(f"{weight:g}")
    return cell and MeanSd(cell[0], cell[1], published_sd_kind(metric, printed["method"], dataset))


@cache
def _paper() -> dict[str, Any]:
    return json.loads(files("normal_guidance.evaluation").joinpath("published.json").read_text(encoding="utf-8"))


def _of_seed(what: str, method: str, seed: int) -> Any:
    of_seeds: Sequence[Any] | None = _paper()["per_seed"].get(f"{what}, seeds 1001/2001/3001", {}).get(method)
    return of_seeds[PUBLISHED_SEEDS.index(seed)] if of_seeds and seed in PUBLISHED_SEEDS else None


def _name_in_paper(metric: Metric) -> str:
    return metric.replace("scan", "bag")


def _check_method(method: str) -> None:
    # A typing error must not look like "nothing was published".
    if method not in (*COMPARED, CEILING):
        raise UserError(f"method {method!r} is unknown; choose one of {', '.join(NAMED)}, {CEILING}")
