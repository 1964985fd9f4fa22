"""Attention over places: the prior without evidence, Bayes' rule with it, and no influence of padding."""

import math

import pytest
import torch

from normal_guidance.core.layout import Layout
from normal_guidance.core.places import CENTRAL_WIDTH, Places

KINDS = [Places(sigma, central) for sigma in (0.0, 1.5) for central in (True, False)]


def by_hand(places: Places, evidence: list[float]) -> list[float]:
    """The formulas of the module, slice by slice."""
    n = len(evidence)
    kernel = [
        [math.exp(-0.5 * ((j - k) / places.sigma) ** 2) if places.sigma else float(j == k) for k in range(n)]
        for j in range(n)
    ]
    weights = []
    for c in range(n):
        inside = sum(kernel[c])
        mean = sum(k * e for k, e in zip(kernel[c], evidence, strict=True)) / inside
        middle = ((c + 0.5) / n - 0.5) / CENTRAL_WIDTH
        weights.append(math.exp((-0.5 * middle**2 if places.central else 4.0 * math.log(inside)) + mean))
    spread = [sum(kernel[c][j] * weights[c] for c in range(n)) for j in range(n)]
    return [one / sum(spread) for one in spread]


@pytest.mark.parametrize("places", KINDS, ids=str)
def test_attention_is_bayes_rule(places: Places) -> None:
    evidence = [0.3, -1.0, 2.0, 0.0, 0.5, -0.2, 1.0]
    got = places.attend(torch.tensor(evidence, dtype=torch.float64)[None, None], Layout.packed([7])).exp()[0, 0]
    assert got.tolist() == pytest.approx(by_hand(places, evidence), rel=1e-9)


@pytest.mark.parametrize("places", KINDS, ids=str)
def test_other_scans_and_padding_change_nothing(places: Places) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, lengths = torch.randn(2, 12, generator=generator), [5, 1, 6]
    layout = Layout.packed(lengths)
    together = layout.restore(places.attend(layout.fold(rows), layout)).exp()
    alone = [places.attend(part[None], Layout.packed([part.shape[1]])).exp()[0] for part in rows.split(lengths, 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1))


def test_very_strong_evidence_stays_exact() -> None:
    evidence = torch.zeros(1, 1, 60)
    evidence[0, 0, 7] = 2000.0
    log_attention = Places(0.5, central=False).attend(evidence, Layout.packed([60]))
    assert log_attention.isfinite().all()
    assert log_attention.argmax().item() == 7
    assert log_attention.exp().sum().item() == pytest.approx(1.0)
