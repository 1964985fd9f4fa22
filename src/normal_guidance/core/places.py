r"""Where a finding may lie: how likely each place is before a scan is looked at, and after.

A place is a window of adjacent slices around slice $c$, with a flat top and a given reach.  Each slice has evidence
$e_j$, the log-odds that it speaks for a finding, as seen from its window: a window's evidence $s_c$ is the mean over
all slices that it reaches, those beyond the scan counted as 0.  With the prior $\pi_c$ of the places, Bayes' rule gives
the odds of the scan, the posterior $q$ of the places, and a slice's attention, which is how much of $q$ covers it:

$$ s_c = \frac{(K e)_c}{\sum_d K_d}, \quad \mathrm{odds} = \sum_c \pi_c e^{s_c}, \quad
   q = \mathrm{softmax}_c(\log \pi_c + s_c), \quad a_j \propto (K q)_j $$

These are the odds of a finding in one place.  Findings in $n$ places that do not depend on each other have the
$n$-th power of these odds, and the same $q$.

Evidence of 0 leaves the prior.  So a model that knows nothing looks where findings usually lie, and not at noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from normal_guidance.core.layout import Layout
from normal_guidance.core.window_sums import window_sums

CENTRAL_WIDTH = 0.2
"""Standard deviation of the central prior, in lengths of the scan."""

INSIDE = 4.0
"""The prior of a window is this power of the part of it that is inside the scan."""

FLATNESS = 8.0
"""The shape of windows: 2 would be a normal's bell, and large numbers are boxes."""

DENSE = 128
"""Slices up to which windows are summed by one matrix product."""


@dataclass(frozen=True)
class Places:
    """The kind of places that a finding may have.

    Args:
        reach: half the width of the windows, in slices; 0 for single slices.  None makes the whole scan the one place:
            its evidence is the mean of all slices', and nothing is said about where the finding lies.
        central: whether places around the middle of the scan are more likely; else all are alike, but windows that
            extend beyond the scan.
    """

    reach: float | None
    central: bool

    @property
    def whole_scan(self) -> bool:
        """Whether the whole scan is the one place."""
        return self.reach is None

    def of(self, layout: Layout) -> ScanPlaces:
        """The places of these scans."""
        device = layout.mask.device
        if self.reach is None:
            alike = layout.log_softmax(torch.zeros(layout.bags, layout.longest, dtype=torch.float64, device=device))
            return ScanPlaces(layout, None, layout.lengths.double()[:, None, None], alike)
        farthest = math.ceil(2.0 * self.reach)  # beyond it a window is 0
        half = farthest if torch.compiler.is_exporting() else min(farthest, layout.longest - 1)
        distance = torch.arange(half + 1, device=device, dtype=torch.float64)
        taps = torch.exp(-0.5 * (distance / max(self.reach, 1e-9)) ** FLATNESS)
        whole = 1.0 + 2.0 * sum(math.exp(-0.5 * (d / self.reach) ** FLATNESS) for d in range(1, farthest + 1))
        prior = INSIDE * (smooth(layout.mask.double(), taps) / whole).clamp_min(1e-300).log()
        if self.central:
            place = torch.arange(layout.longest, device=device, dtype=torch.float64) + 0.5
            prior = prior - 0.5 * ((place / layout.lengths[:, None] - 0.5) / CENTRAL_WIDTH).square()
        return ScanPlaces(layout, taps, torch.tensor(whole, dtype=torch.float64), layout.log_softmax(prior))


@dataclass(frozen=True, eq=False)
class ScanPlaces:
    """The places of some scans; `Places.of` makes it."""

    layout: Layout
    taps: Float64[Tensor, "reach"] | None
    """A window, from its middle to its last slice; None for a window that is the whole scan."""
    whole: Float64[Tensor, "*bags_1_1"]
    """The size of a window that is inside the scan, or of each scan."""
    log_prior: Float64[Tensor, "bags longest"]

    def windows(self, evidence: Float[Tensor, "bags members longest"]) -> Float64[Tensor, "bags members longest"]:
        """The evidence of the window around every slice; 0 in the padding."""
        padding = ~self.layout.mask[:, None]
        sums = smooth(evidence.masked_fill(padding, 0.0).flatten(0, 1), self.taps).view(evidence.shape)
        return (sums / self.whole).masked_fill(padding, 0.0)

    def log_odds(self, windows: Float64[Tensor, "bags members longest"]) -> Float64[Tensor, "bags members"]:
        """log-odds of the scans, but for a constant."""
        return self.layout.hide(self.log_prior[:, None] + windows).logsumexp(2)

    def attend(self, windows: Float64[Tensor, "bags members longest"]) -> Float64[Tensor, "bags members longest"]:
        """log-attention; very low in the padding."""
        places = self.layout.log_softmax(self.log_prior[:, None] + windows)
        spread = smooth(places.exp().flatten(0, 1), self.taps).view(windows.shape)
        # The place of the slice itself is a lower bound, and exact where all others are too small for float64.
        return self.layout.log_softmax(torch.maximum(spread.clamp_min(1e-300).log(), places))


def smooth(
    values: Float[Tensor, "rows longest"], taps: Float64[Tensor, "reach"] | None
) -> Float64[Tensor, "rows longest"]:
    """Sums under a window of any shape around every slice, or over all; `values` are 0 beyond the scan."""
    values, longest = values.double(), values.shape[1]
    if taps is None:
        return values.sum(1, keepdim=True).expand(-1, longest)
    if len(taps) == 1:
        return values * taps
    if not torch.compiler.is_exporting() and longest <= DENSE:
        place = torch.arange(longest, device=values.device)
        distance = (place[:, None] - place).abs()
        kernel = torch.where(distance < len(taps), taps[distance.clamp_max(len(taps) - 1)], 0.0)
        return values @ kernel
    return window_sums(values, taps)
