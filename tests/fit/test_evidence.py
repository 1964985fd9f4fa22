"""Penalised logistic regressions beside scikit-learn's, each with scans and a penalty of its own."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from normal_guidance.fit.evidence import fit_logistic

SCANS, INPUTS = 80, 6


def sklearns(rows: torch.Tensor, labels: torch.Tensor, *, ridge: float, lasso: float) -> tuple[np.ndarray, float]:
    if lasso:
        model = LogisticRegression(C=1 / (lasso * len(rows)), l1_ratio=1.0, solver="saga", tol=1e-9, max_iter=100_000)
    else:
        model = LogisticRegression(C=1 / (ridge * len(rows)), tol=1e-10, max_iter=10_000)
    model.fit(rows.double().numpy(), labels.numpy())
    return model.coef_[0], float(model.intercept_[0])


def test_all_at_once_equals_scikit_learn_one_by_one() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, SCANS, INPUTS, generator=generator) * torch.tensor([1.0, 3.0, 0.3, 1.0, 1.0, 1.0])
    labels = (rows[0, :, 0] + 0.7 * torch.randn(SCANS, generator=generator) > 0.3).long()
    chosen = torch.ones(2, SCANS, dtype=torch.bool)
    chosen[1, ::3] = False
    weights, bias = fit_logistic(rows, labels, chosen, ridge=torch.tensor([0.2, 0.0]), lasso=torch.tensor([0.0, 0.03]))
    for model, (ridge, lasso) in enumerate([(0.2, 0.0), (0.0, 0.03)]):
        want, intercept = sklearns(rows[model][chosen[model]], labels[chosen[model]], ridge=ridge, lasso=lasso)
        np.testing.assert_allclose(weights[model].numpy(), want, atol=2e-4)
        assert bias[model].item() == pytest.approx(intercept, abs=2e-4)
    assert (weights[1] == 0).any()  # lasso leaves inputs out
