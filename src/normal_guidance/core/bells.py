r"""Attention as a mixture of bells: its shape is built in, where Normal Guidance enforces it by a loss.

With K the Gaussian kernel matrix along the slices, $K_{jk} = \exp(-(j-k)^2 / 2\sigma^2)$, every slice first collects
the scores x around it (window sums over the scan's own slices); each slice's softmax weight is then spread as a bell:

    s = K x,   q = softmax(beta s),   a = K q / sum(K q)

A window that extends beyond the scan collects less.  If the finding lies wholly within the scan, such a window is also
a less likely place for it.  With `whole`, the prior of a window is the part of it inside the scan to a learned power:

    q = softmax(beta s + kappa log K 1)

Bayes' rule gives this with an infinite kappa for blocks that lie wholly inside.  With `shaped`, windows may have flat
tops and steep sides: $K_{jk} = \exp(-(|j-k| / \sigma)^p / 2)$ with a learned p.

If scores are log-likelihood ratios of single slices, s is the ratio of a window, and Bayes' rule also gives that of the
scan: the log of the mean of e^s over windows (`WindowAttention.posterior`), whose gradient by the scores is the
attention.

Both products are one dense matrix product, for any length, with a separate width for every configuration: 64 scans of
1,083 slices and 32 configurations take 29 GFLOP, forward and backward, and a kernel of 0.3 GB.  There are no taps to
unroll and no cut-off.

Everything is float64, whatever the model's dtype.  $K_{jj} = 1$, so $a_j$ is never far below $q_j$: its logarithm,
which guidance and localization need, is exact down to e^-667, where float32 would lose it at e^-87 and make distant
slices tie; and no setting of matrix units rounds the sums.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from normal_guidance.core.layout import Layout

SIGMA, BETA, KAPPA, SHAPE = 3.0, 0.25, 4.0, 2.0
"""Initial values: bells about seven slices wide at half height, a soft choice among them, little attention to windows
half outside the scan, and the shape of a normal."""

NEAREST = 1e-300
"""Replaces a distance of 0 before a learned power, because its logarithm must be finite."""

SMALLEST = 1e-290
"""Below this a sum of bells is no longer exact in float64, and its reciprocal in the gradient nearly overflows."""

STEEPEST, FARTHEST = 5.0, 7.0
"""Upper bounds of the log of a learned shape and of the log of a powered distance.  e^(-e^7 / 2) is practically 0;
beyond the bounds the value would be 0 and its gradient NaN."""

Scores = Float[Tensor, "bags longest"] | Float[Tensor, "bags heads longest"]


def gaussian_kernel(
    log_sigma: Float[Tensor, ""] | Float[Tensor, "heads"], longest: int
) -> Float64[Tensor, "*heads longest longest"]:
    r"""$K_{jk} = \exp(-(j-k)^2 / 2\sigma^2)$: 1 on the diagonal, so that rows are sums over a window, not means.

    Example:
        >>> gaussian_kernel(torch.tensor(0.0), 3).round(decimals=3)
        tensor([[1.0000, 0.6070, 0.1350],
                [0.6070, 1.0000, 0.6070],
                [0.1350, 0.6070, 1.0000]], dtype=torch.float64)
    """
    j = torch.arange(longest, device=log_sigma.device, dtype=torch.float64)
    distance = (j[:, None] - j) * torch.exp(-log_sigma.double())[..., None, None]  # in sigmas
    return torch.exp(-0.5 * distance.square())


def shaped_kernel(
    log_sigma: Float[Tensor, ""] | Float[Tensor, "heads"],
    log_shape: Float[Tensor, ""] | Float[Tensor, "heads"],
    longest: int,
) -> Float64[Tensor, "*heads longest longest"]:
    r"""$K_{jk} = \exp(-(|j-k| / \sigma)^p / 2)$: a normal's bell at p = 2, a box of half-width sigma as p grows.

    Example:
        >>> shaped_kernel(torch.tensor(1.5).log(), torch.tensor(9.0).log(), 4)[0].round(decimals=2)
        tensor([1.0000, 0.9900, 0.0000, 0.0000], dtype=torch.float64)
    """
    j = torch.arange(longest, device=log_sigma.device, dtype=torch.float64)
    log_distance = (j[:, None] - j).abs().clamp_min(NEAREST).log() - log_sigma.double()[..., None, None]
    power = torch.exp(log_shape.double().clamp_max(STEEPEST))[..., None, None]
    return torch.exp(-0.5 * torch.exp((power * log_distance).clamp_max(FARTHEST)))


def smooth(values: Scores, kernel: Float64[Tensor, "*heads longest longest"]) -> Scores:
    """Window sums along the slices, K x, in float64; `values` are 0 in the padding.

    Example:
        >>> smooth(torch.tensor([[0.0, 1.0, 0.0]]), gaussian_kernel(torch.tensor(0.0), 3)).round(decimals=3)
        tensor([[0.6070, 1.0000, 0.6070]], dtype=torch.float64)
    """
    values = values.double()
    if kernel.ndim == 2:
        return values @ kernel
    return (values.movedim(1, 0) @ kernel).movedim(0, 1)  # one product for each head


def centered(scores: Scores, layout: Layout) -> Scores:
    """Scores minus their mean over the scan, so that a constant, which softmax ignores, adds nothing to window sums.

    Example:
        >>> centered(torch.tensor([[1.0, 3.0, 99.0]]), Layout.padded(torch.tensor([2]), 3))
        tensor([[-1.,  1.,  0.]])
    """
    real = layout.mask.reshape(layout.bags, *[1] * (scores.ndim - 2), layout.longest)
    own = scores.masked_fill(~real, 0)
    mean = own.sum(-1, keepdim=True) / real.sum(-1, keepdim=True)
    return (own - mean).masked_fill(~real, 0)


class WindowAttention(nn.Module):
    r"""Attention from scores around each slice: $\mathrm{softmax}(\beta K x)$, or with `bells` a mixture of bells.

    $$ q = \mathrm{softmax}_j(\beta\,(K x)_j), \quad a_j = \frac{(K q)_j}{\sum_{j'} (K q)_{j'}} $$

    Width $\sigma$ and sharpness $\beta$ are learned as logarithms: both stay positive, and a step of SGD changes them
    by a factor, whatever their size.  (A negative $\beta$ would attend to the slices with least evidence.)

    Args:
        heads: the number of heads, each with a width and a sharpness; None for attention without heads.
        bells: whether each slice's softmax weight is spread as a bell around it.
        whole: whether windows that extend beyond the scan are less likely, by a learned power kappa.
        shaped: whether the shape of the windows is learned too.
        sharpened: whether beta is learned; otherwise it is 1, for scores with a meaningful scale.

    Example:
        >>> scores = torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0]])
        >>> WindowAttention(bells=True)(scores, Layout.packed([5])).exp().round(decimals=2)
        tensor([[0.1800, 0.2100, 0.2200, 0.2100, 0.1800]], grad_fn=<RoundBackward1>)
    """

    def __init__(
        self,
        heads: int | None = None,
        *,
        bells: bool,
        whole: bool = False,
        shaped: bool = False,
        sharpened: bool = True,
    ) -> None:
        super().__init__()
        shape = () if heads is None else (heads,)

        def starting_at(value: float) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, math.log(value)))

        self.log_sigma = starting_at(SIGMA)
        self.log_beta = starting_at(BETA) if sharpened else None
        self.log_kappa = starting_at(KAPPA) if whole else None
        self.log_shape = starting_at(SHAPE) if shaped else None
        self.bells = bells

    def forward(self, scores: Scores, layout: Layout) -> Scores:
        """log a of folded scores with any padding; in float32 or better, very low in the padding."""
        kernel = self._kernel(layout.longest)
        s, log_prior = self._windows(scores, layout, kernel)
        return self._attend(s + log_prior, kernel, layout, scores.dtype)

    def posterior(self, scores: Scores, layout: Layout) -> tuple[Scores, Float[Tensor, "bags *heads"]]:
        r"""log a as in `forward`, and the score of the scan: the log of the mean of $e^s$ over windows.

        $$ \log \frac{\sum_j e^{s_j} (K 1)_j^\kappa}{\sum_j (K 1)_j^\kappa}, \quad s = \beta K x $$

        Its derivative by a slice's score is $\beta (K q)_j$, so attention is the influence of each slice.

        Example:
            >>> attention = WindowAttention(bells=True, whole=True)
            >>> x = torch.randn(1, 5, requires_grad=True)
            >>> log_a, score = attention.posterior(x, Layout.packed([5]))
            >>> (slope,) = torch.autograd.grad(score.sum(), x)
            >>> torch.allclose(slope / slope.sum(), log_a.exp())
            True
        """
        kernel = self._kernel(layout.longest)
        s, log_prior = self._windows(scores, layout, kernel)
        score = layout.hide(s + log_prior).logsumexp(-1) - layout.hide(log_prior).logsumexp(-1)
        log_a = self._attend(s + log_prior, kernel, layout, scores.dtype)
        return log_a, score.to(log_a.dtype)

    def _windows(
        self, scores: Scores, layout: Layout, kernel: Float64[Tensor, "*heads longest longest"]
    ) -> tuple[Scores, Scores]:
        """The evidence of the windows, beta K x, and the logarithm of their prior, kappa log K 1."""
        real = layout.mask if scores.ndim == 2 else layout.mask[:, None]
        s = smooth(scores.masked_fill(~real, 0), kernel)
        if self.log_beta is not None:
            s = torch.exp(self.log_beta.double())[..., None] * s
        if self.log_kappa is None:
            return s, torch.zeros_like(s)
        inside = smooth(real.expand_as(scores).double(), kernel)  # at least 1 within the scan, from the slice itself
        return s, torch.exp(self.log_kappa.double())[..., None] * inside.clamp_min(SMALLEST).log()

    def _attend(
        self, log_weight: Scores, kernel: Float64[Tensor, "*heads longest longest"], layout: Layout, dtype: torch.dtype
    ) -> Scores:
        log_a = layout.log_softmax(log_weight)  # log q, so far
        if self.bells:
            log_a = layout.log_softmax(_log_bells(log_a, kernel))
        return layout.hide(log_a.to(torch.promote_types(dtype, torch.float32)))

    def _kernel(self, longest: int) -> Float64[Tensor, "*heads longest longest"]:
        if self.log_shape is None:
            return gaussian_kernel(self.log_sigma, longest)
        return shaped_kernel(self.log_sigma, self.log_shape, longest)

    def extra_repr(self) -> str:
        return f"bells={self.bells}"


def _log_bells(log_q: Scores, kernel: Float64[Tensor, "*heads longest longest"]) -> Scores:
    """log K q.  Where the sum underflows float64, its own term log q_j, a lower bound, replaces it."""
    mixed = smooth(log_q.exp(), kernel)
    return torch.where(mixed > SMALLEST, mixed.clamp_min(SMALLEST).log(), log_q)
