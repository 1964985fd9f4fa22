"""A scan AUROC and its interval beside scikit-learn, the pairs of DeLong, and, at 1, a search over a grid."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from normal_guidance.statistics.differences import ScanAuroc, hanley_mcneil, scan_auroc


def test_the_interval_is_delongs_with_patients_as_units() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 80)
    scores = random.normal(size=80) + labels
    found = scan_auroc(torch.tensor(labels), [str(scan) for scan in range(80)], torch.tensor(scores))
    wins = (scores[labels == 1][:, None] > scores[labels == 0]).astype(float)
    error = (wins.mean(1).var(ddof=1) / len(wins) + wins.mean(0).var(ddof=1) / wins.shape[1]) ** 0.5
    assert found.value == pytest.approx(roc_auc_score(labels, scores)) == pytest.approx(wins.mean())
    assert found.high - found.low == pytest.approx(2 * 1.959964 * error, rel=0.02)
    assert found.shown
    assert not scan_auroc(torch.tensor(labels), [str(scan) for scan in range(80)], torch.zeros(80)).shown
    twice = (
        torch.tensor([*labels, *labels]),
        [str(scan % 80) for scan in range(160)],
        torch.tensor([*scores, *scores]),
    )
    again = scan_auroc(*twice)  # as much as is known of half as many scans
    assert again.high - again.low == pytest.approx(found.high - found.low, rel=0.03)


def test_the_standard_error_to_expect_is_that_of_hanley_and_mcneil() -> None:
    """Their example: 51 abnormal and 58 normal scans, an area of .893, a standard error of .032 (1982, table II)."""
    assert hanley_mcneil(0.893, 51, 58) == pytest.approx(0.0325, abs=0.0005)
    assert hanley_mcneil(0.5, 1, 1) == pytest.approx(0.5)  # one pair: a coin


def test_an_auroc_of_one_has_an_interval_with_a_width() -> None:
    """Newcombe's method 5, beside a search over a grid; with one patient of a class there is no interval."""

    def measured(positive: int, negative: int) -> ScanAuroc:
        labels = torch.tensor([1] * positive + [0] * negative)
        return scan_auroc(labels, [str(scan) for scan in range(len(labels))], labels.double())

    theta = torch.linspace(0.01, 0.99, 99_001, dtype=torch.float64)
    for m, n in ((4, 3), (20, 30)):
        others = (m + n) / 2 - 1
        ties = 1 + others * (1 - theta) / (2 - theta) + others * theta / (1 + theta)
        variance = theta * (1 - theta) * ties / (m * n)
        low = theta[((1 - theta) - 1.959964 * variance.sqrt()).abs().argmin()].item()
        assert (measured(m, n).value, measured(m, n).high) == (1.0, 1.0)
        assert measured(m, n).low == pytest.approx(low, abs=1e-4)
    assert str(measured(4, 3)) == "1.000 [.540, 1.000]"
    assert str(measured(1, 9)) == "1.000 [too few scans for an interval]"
    assert not measured(1, 9).shown
