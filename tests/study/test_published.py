"""The paper's numbers: known cells, and single seeds that give the printed means and sds."""

import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import DIVERGENCES
from normal_guidance.core.methods import CEILING, METHODS, method_title
from normal_guidance.core.metrics import MeanSd, mean_and_sd
from normal_guidance.statistics.split_results import METRICS
from normal_guidance.study.references import (
    PUBLISHED_SEEDS,
    Choice,
    published,
    published_choice,
    published_sd_kind,
    published_seed,
    published_sensitivity,
)

DATASETS = ("semi-synthetic", "head-ct", "chest-ct", "abdomen-ct")
KNOWN = [
    (metric, method)
    for metric in METRICS
    for method in (*METHODS, CEILING)
    if published_seed(metric, method, "semi-synthetic", 1001) is not None
]


@pytest.mark.parametrize(
    ("metric", "method", "dataset", "expected"),
    [
        ("localization_auroc", "centered_gaussian", "semi-synthetic", MeanSd(0.689, 0.015, "population")),
        ("localization_auprc", "mhng", "chest-ct", MeanSd(0.535, 0.005, "population")),
        ("scan_auroc", "transmil", "abdomen-ct", MeanSd(0.684, 0.047, "sample")),
        ("scan_auprc", "ceiling", "head-ct", MeanSd(0.913, 0.010, "sample")),
    ],
)
def test_cells_are_those_of_the_paper(metric, method, dataset, expected):
    assert published(metric, method, dataset) == expected


def test_every_method_is_published_on_every_dataset_but_the_one_without_scan_scores():
    missing = [
        (metric, method, dataset)
        for metric in METRICS
        for method in (*METHODS, CEILING)
        for dataset in DATASETS
        if published(metric, method, dataset) is None
    ]
    assert missing == [
        (metric, "centered_gaussian", dataset) for metric in ("scan_auroc", "scan_auprc") for dataset in DATASETS
    ]


def test_another_dataset_has_nothing():
    assert published("scan_auroc", "ng", "my-ct") is None
    assert published_seed("scan_auroc", "ng", "my-ct", 1001) is None
    assert published_choice("ng", "my-ct", 1001) is None
    assert published_sensitivity("scan_auroc", "my-ct", "forward_kl", 1.0) is None


@pytest.mark.parametrize(("metric", "method"), KNOWN)
def test_single_seeds_give_the_printed_mean_and_sd(metric, method):
    """Independent of how either was typed in; it also decides which sd the paper prints."""
    printed = published(metric, method, "semi-synthetic")
    values = [published_seed(metric, method, "semi-synthetic", seed) for seed in PUBLISHED_SEEDS]
    ours = mean_and_sd(values, printed.kind)
    # Half a unit of rounding, and a little because some seeds are known to four digits only.
    assert ours.mean == pytest.approx(printed.mean, abs=0.0005 + 5e-5)
    assert ours.sd == pytest.approx(printed.sd, abs=0.0005 + 5e-5)


def test_the_oracle_prints_its_population_sd_on_scan_level():
    values = [published_seed("scan_auroc", CEILING, "semi-synthetic", seed) for seed in PUBLISHED_SEEDS]
    printed = published("scan_auroc", CEILING, "semi-synthetic")
    assert printed == MeanSd(0.81, 0.006, "population")
    assert mean_and_sd(values, "sample").sd > 0.0075  # would print .008
    assert published_sd_kind("scan_auroc", CEILING, "chest-ct") == "sample"


def test_how_many_single_seeds_are_known():
    assert len(KNOWN) == 9 + 6
    assert published_seed("localization_auroc", "max", "semi-synthetic", 2001) == 0.5061412737015998
    assert published_seed("localization_auroc", "max", "semi-synthetic", 4001) is None
    assert published_seed("scan_auroc", "ng", "semi-synthetic", 1001) is None


def test_choices():
    assert published_choice("ng", "semi-synthetic", 2001) == Choice(l1=0.1, lr=0.0001)
    assert published_choice("mhng", "semi-synthetic", 1001) == Choice(l1=0.001, lr=0.1)
    assert published_choice("mean", "semi-synthetic", 1001) is None


def test_sensitivity_varies_one_thing_at_a_time():
    def printed(metric: str) -> set[tuple[str, float]]:
        settings = [(divergence, weight) for divergence in DIVERGENCES for weight in (0.1, 1.0, 10.0)]
        return {s for s in settings if published_sensitivity(metric, "head-ct", *s) is not None}

    divergences = {(divergence, 1.0) for divergence in DIVERGENCES}
    assert printed("scan_auroc") == printed("scan_auprc") == divergences
    lambdas = {("forward_kl", 0.1), ("forward_kl", 10.0)}
    assert printed("localization_auroc") == printed("localization_auprc") == divergences | lambdas
    assert published_sensitivity("localization_auprc", "head-ct", "forward_kl", 0.1) == MeanSd(
        0.718, 0.011, "population"
    )
    assert published_sensitivity("scan_auroc", "head-ct", "squared_error", 1.0) == MeanSd(0.924, 0.012, "sample")


@pytest.mark.parametrize("metric", METRICS)
def test_the_paper_agrees_with_itself(metric):
    """Forward KL with lambda 1 is the row of Normal Guidance."""
    assert published_sensitivity(metric, "head-ct", "forward_kl", 1.0) == published(metric, "ng", "head-ct")


@pytest.mark.parametrize(
    "ask",
    [
        lambda method: published("scan_auroc", method, "head-ct"),
        lambda method: published_seed("scan_auroc", method, "semi-synthetic", 1001),
        lambda method: published_choice(method, "semi-synthetic", 1001),
    ],
)
def test_an_unknown_method_is_not_merely_unpublished(ask):
    with pytest.raises(UserError, match=r"method 'amil' is unknown; choose one of .*abmil.*ceiling"):
        ask("amil")


def test_everything_in_a_table_has_a_title():
    assert method_title("evidence_ng") == "Tied Evidence + Normal Guidance"
    assert published("localization_auroc", "evidence_ng", "semi-synthetic") is None  # the paper has no such method
    assert [method_title(method) for method in METHODS] == [about.title for about in METHODS.values()]
    assert method_title("slice_reference") == "Slice reference"
    assert method_title("scan_reference") == "Scan reference"
    assert method_title(CEILING, "semi-synthetic") == "Bayes oracle"
    assert {method_title(CEILING, name) for name in ("", "head-ct", "my own")} == {"Supervised reference"}
