"""The four scores against scikit-learn, bag by bag."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import UNKNOWN
from normal_guidance.statistics.split_results import score
from normal_guidance.study.drawn import shifted_mean


def test_scores_are_scikit_learns_over_positive_scans() -> None:
    bags = shifted_mean(60, 1, features=2)
    slices, scans = torch.randn(len(bags.features)), torch.randn(60)
    got = score(bags, slices, scans)
    pairs = [
        (bag.slice_labels.numpy(), part.numpy())
        for bag, part in zip(bags, slices.split(bags.lengths.tolist()), strict=True)
        if bag.label
    ]
    assert got.localization_auroc == pytest.approx(np.mean([roc_auc_score(*pair) for pair in pairs]), abs=1e-12)
    assert got.localization_auprc == pytest.approx(
        np.mean([average_precision_score(*pair) for pair in pairs]), abs=1e-12
    )
    assert got.scan_auroc == pytest.approx(roc_auc_score(bags.labels.numpy(), scans.numpy()), abs=1e-12)
    assert got.scan_auprc == pytest.approx(average_precision_score(bags.labels.numpy(), scans.numpy()), abs=1e-12)
    assert got.localized == len(pairs)
    assert got.left_out == 0


def test_scans_that_cannot_be_localized_are_counted() -> None:
    bags = shifted_mean(30, 1, features=2)
    labels = bags.slice_labels.clone()
    first, second, third = bags.localizable.nonzero().flatten().tolist()[:3]
    starts = [0, *bags.lengths.cumsum(0).tolist()]
    labels[starts[first] : starts[first + 1]] = UNKNOWN
    labels[starts[second] : starts[second + 1]] = 0
    labels[starts[third] : starts[third + 1]] = 1
    got = score(replace(bags, slice_labels=labels), torch.randn(len(bags.features)))
    assert got.left_out == 3
    assert got.localized == int(bags.labels.sum()) - 3
    assert got.scan_auroc is None


def test_without_slice_labels_there_is_nothing_to_localize() -> None:
    bags = replace(shifted_mean(5, 1, features=2), slice_labels=None)
    with pytest.raises(UserError, match="no slice labels"):
        score(bags, torch.randn(len(bags.features)))
