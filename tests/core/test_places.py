"""Attention over places: the prior without evidence, Bayes' rule with it, and no influence of padding."""

import math
from itertools import product

import pytest
import torch

from normal_guidance.core.bells import CENTRAL_WIDTH, FLATNESS, INSIDE, Places
from normal_guidance.core.layout import Layout

KINDS = [Places(*kind) for kind in product((0.0, 1.5), (True, False))]
EVIDENCE = [0.3, -1.0, 2.0, 0.0, 0.5, -0.2, 1.0]


def by_hand(places: Places, evidence: list[float]) -> tuple[list[float], float]:
    """Attention and log-odds by the formulas of the module, slice by slice."""
    n = len(evidence)

    def window(distance: int) -> float:
        return math.exp(-0.5 * (abs(distance) / places.reach) ** FLATNESS) if places.reach else float(distance == 0)

    whole = sum(window(d) for d in range(-20, 21))
    means, prior = [], []
    for c in range(n):
        means.append(sum(window(c - j) * e for j, e in enumerate(evidence)) / whole)
        middle = ((c + 0.5) / n - 0.5) / CENTRAL_WIDTH if places.central else 0.0
        prior.append((sum(window(c - j) for j in range(n)) / whole) ** INSIDE * math.exp(-0.5 * middle**2))
    weights = [p / sum(prior) * math.exp(mean) for p, mean in zip(prior, means, strict=True)]
    spread = [sum(window(c - j) * weights[c] for c in range(n)) for j in range(n)]
    return [one / sum(spread) for one in spread], math.log(sum(weights))


@pytest.mark.parametrize("places", KINDS, ids=str)
def test_attention_and_odds_are_bayes_rule(places: Places) -> None:
    here = places.of(Layout.packed([7]))
    windows = here.windows(torch.tensor(EVIDENCE, dtype=torch.float64)[None, None])
    attention, odds = by_hand(places, EVIDENCE)
    assert here.attend(windows).exp()[0, 0].tolist() == pytest.approx(attention, rel=1e-9)
    assert here.log_odds(windows).item() == pytest.approx(odds, rel=1e-9)


@pytest.mark.parametrize("places", KINDS, ids=str)
def test_other_scans_and_padding_change_nothing(places: Places) -> None:
    def look(rows: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        here = places.of(layout)
        windows = here.windows(layout.fold(rows))
        return layout.restore(here.attend(windows)).exp(), here.log_odds(windows)

    rows, lengths = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)), [5, 1, 6]
    attention, odds = look(rows, Layout.packed(lengths))
    alone = [look(part, Layout.packed([part.shape[1]])) for part in rows.split(lengths, 1)]
    torch.testing.assert_close(attention, torch.cat([one for one, _ in alone], 1))
    torch.testing.assert_close(odds, torch.cat([one for _, one in alone]))


def test_the_whole_scan_as_one_place_is_its_mean_and_says_nothing_about_where() -> None:
    layout = Layout.packed([3, 2])
    here = Places(None, central=False).of(layout)
    windows = here.windows(layout.fold(torch.tensor([[1.0, 2.0, 6.0, 1.0, 2.0]]).double()))
    torch.testing.assert_close(here.log_odds(windows), torch.tensor([[3.0], [1.5]]).double())
    attention = layout.restore(here.attend(windows)).exp().flatten()
    torch.testing.assert_close(attention, torch.tensor([1 / 3] * 3 + [1 / 2] * 2).double())


def test_very_strong_evidence_stays_exact() -> None:
    evidence = torch.zeros(1, 1, 60)
    evidence[0, 0, 7] = 2000.0
    places = Places(1.0, central=False).of(Layout.packed([60]))
    log_attention = places.attend(places.windows(evidence))
    assert log_attention.isfinite().all()
    assert log_attention.argmax().item() == 7
    assert log_attention.exp().sum().item() == pytest.approx(1.0)
