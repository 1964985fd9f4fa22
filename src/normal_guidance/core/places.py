r"""Where a finding may lie: how likely each place is before a scan is looked at, and after.

A place is a window of adjacent slices, a bell of width $\sigma$ around slice $c$.  Each slice has evidence $e_j$, the
log-odds that it speaks for a finding.  A window's evidence is the mean over its slices; with the prior $\pi_c$ of the
places, Bayes' rule gives the posterior $q$, and a slice's attention is how much of it covers the slice:

$$ s_c = \frac{(K e)_c}{(K 1)_c}, \quad q = \mathrm{softmax}_c(\log \pi_c + s_c), \quad a_j \propto (K q)_j $$

Evidence of 0 leaves the prior.  So a model that knows nothing looks where findings usually lie, and not at noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from normal_guidance.core.bells import gaussian_kernel, smooth
from normal_guidance.core.layout import Layout

CENTRAL_WIDTH = 0.2
"""Standard deviation of the central prior, in lengths of the scan."""

INSIDE = 4.0
"""The power of the part of a window that is inside the scan, in the prior of places anywhere."""


@dataclass(frozen=True)
class Places:
    """The places that a finding may have, and their prior.

    Args:
        sigma: width of the windows in slices; 0 for single slices.
        central: whether places around the middle of the scan are more likely; else all are alike, but windows that
            extend beyond the scan.

    Example:
        >>> layout = Layout.packed([5])
        >>> Places(0.0, central=True).attend(torch.zeros(1, 1, 5), layout).exp().round(decimals=2)
        tensor([[[0.0500, 0.2400, 0.4000, 0.2400, 0.0500]]], dtype=torch.float64)
        >>> sure = torch.tensor([[[0.0, 5.0, 0.0, 0.0, 0.0]]])
        >>> Places(0.0, central=True).attend(sure, layout).exp().round(decimals=2)
        tensor([[[0.0000, 0.9800, 0.0100, 0.0100, 0.0000]]], dtype=torch.float64)
    """

    sigma: float
    central: bool

    def attend(
        self, evidence: Float[Tensor, "bags members longest"], layout: Layout
    ) -> Float64[Tensor, "bags members longest"]:
        """log-attention from the evidence of every slice; very low in the padding."""
        kernel = self._kernel(layout)
        inside = smooth(layout.mask.double(), kernel).clamp_min(1.0)
        real = layout.mask[:, None]
        mean = smooth(evidence.masked_fill(~real, 0.0).flatten(0, 1), kernel).view(evidence.shape) / inside[:, None]
        places = layout.log_softmax(self._log_prior(inside, layout)[:, None] + mean)
        spread = smooth(places.exp().flatten(0, 1), kernel).view(evidence.shape)
        # The place of the slice itself is a lower bound, and exact where all others are too small for float64.
        return layout.log_softmax(torch.maximum(spread.clamp_min(1e-300).log(), places))

    def _kernel(self, layout: Layout) -> Float64[Tensor, "longest longest"]:
        if self.sigma == 0.0:
            return torch.eye(layout.longest, dtype=torch.float64, device=layout.mask.device)
        return gaussian_kernel(
            torch.tensor(math.log(self.sigma), dtype=torch.float64, device=layout.mask.device), layout.longest
        )

    def _log_prior(self, inside: Float64[Tensor, "bags longest"], layout: Layout) -> Float64[Tensor, "bags longest"]:
        if not self.central:
            return INSIDE * inside.log()
        place = torch.arange(layout.longest, device=layout.mask.device, dtype=torch.float64) + 0.5
        return -0.5 * ((place / layout.lengths[:, None] - 0.5) / CENTRAL_WIDTH).square()
