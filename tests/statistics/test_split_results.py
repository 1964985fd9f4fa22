"""The four scores against scikit-learn, bag by bag."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from normal_guidance.core.bags import UNKNOWN
from normal_guidance.statistics.split_results import score
from normal_guidance.study.drawn import shifted_mean


def test_scores_are_scikit_learns_over_positive_scans() -> None:
    bags = shifted_mean(60, 1, features=2)
    slices, scans = torch.randn(len(bags.features)), torch.randn(60)
    got = score(bags, slices, scans)
    parts = zip(bags, slices.split(bags.lengths.tolist()), strict=True)
    pairs = [(bag.slice_labels.numpy(), part.numpy()) for bag, part in parts if bag.label]
    for name, theirs in (("auroc", roc_auc_score), ("auprc", average_precision_score)):
        localized, scanned = np.mean([theirs(*pair) for pair in pairs]), theirs(bags.labels.numpy(), scans.numpy())
        assert getattr(got, f"localization_{name}") == pytest.approx(localized, abs=1e-12)
        assert getattr(got, f"scan_{name}") == pytest.approx(scanned, abs=1e-12)
    assert (got.localized, got.left_out) == (len(pairs), 0)


def test_scans_that_cannot_be_localized_are_counted() -> None:
    bags = shifted_mean(30, 1, features=2)
    labels = bags.slice_labels.clone()
    first, second, third = bags.localizable.nonzero().flatten().tolist()[:3]
    starts = [0, *bags.lengths.cumsum(0).tolist()]
    for scan, label in ((first, UNKNOWN), (second, 0), (third, 1)):
        labels[starts[scan] : starts[scan + 1]] = label
    got = score(replace(bags, slice_labels=labels), torch.randn(len(bags.features)))
    assert (got.localized, got.left_out, got.scan_auroc) == (int(bags.labels.sum()) - 3, 3, None)
    got = score(replace(bags, slice_labels=None), torch.randn(len(bags.features)), torch.randn(30))
    assert np.isnan([got.localization_auroc, got.localization_auprc]).all()
    assert (got.localized, got.left_out) == (0, int(bags.labels.sum()))
    assert 0 < got.scan_auroc < 1
