"""What heads see of an encoder's features: all of one size and, where features repeat each other, decorrelated.

Encoders make features of very different size that mostly repeat each other.  SGD then follows the few largest, and
L1 presses on the small ones.  Dividing each feature by its standard deviation mends the first; replacing features by
their first principal components, each of variance 1, mends the second.  Features that do not repeat each other stay
as they are, because L1 can choose among them.  Labels are not used.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normal_guidance.training.batches import LOADING_BATCH, Scans

COMPONENTS = 256
"""Principal components that are kept of features that repeat each other, at most."""

SLICES_A_COMPONENT = 10
"""Fewer slices than this for each component would make components of noise."""

REPEATING = 0.5
"""Features repeat each other where their effective number is below this share of them."""


class Scaling(nn.Module):
    """Scales rows of features: $(h - \\mathrm{mean}) \\cdot \\mathrm{scale}$, then a rotation if there is one."""

    mean: Tensor
    scale: Tensor
    rotation: Tensor | None

    def __init__(
        self,
        mean: Float[Tensor, "features"],
        scale: Float[Tensor, "features"],
        rotation: Float[Tensor, "features inputs"] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        self.register_buffer("rotation", rotation)

    @property
    def features(self) -> int:
        """Features of a slice before scaling."""
        return len(self.mean)

    @property
    def inputs(self) -> int:
        """Numbers of a slice that heads see."""
        return len(self.mean) if self.rotation is None else self.rotation.shape[1]

    def forward(self, rows: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows inputs"]:
        scaled = (rows.to(self.mean.dtype) - self.mean) * self.scale
        return scaled if self.rotation is None else scaled @ self.rotation


def fit_scaling(scans: Scans, components: int = COMPONENTS) -> Scaling:
    """Scale the features of these scans to variance 1; a feature that is always the same becomes 0.

    Features that repeat each other become at most `components` principal components, also of variance 1.
    """
    count, mean, covariance = _moments(scans)
    deviation = covariance.diagonal().clamp_min(0.0).sqrt()
    varies = deviation > (1e-6 * (mean.square() + deviation.square()).sqrt()).clamp_min(1e-30)
    scale = torch.where(varies, 1.0 / deviation, 0.0)
    values, vectors = torch.linalg.eigh(covariance * scale * scale[:, None])
    values = values.clamp_min(0.0)
    components = max(1, min(components, count // SLICES_A_COMPONENT))
    if effective_number(values) >= REPEATING * int((scale > 0).sum()) or components >= scans.width:
        return Scaling(mean.float(), scale.float())
    first = values.argsort(descending=True)[:components]
    first = first[values[first] > 1e-6 * values.max()]
    largest = vectors[:, first].abs().argmax(0)  # a component and its negative are the same: one sign on every machine
    signs = vectors[largest, first].sign()
    return Scaling(mean.float(), scale.float(), (vectors[:, first] * signs / values[first].sqrt()).float())


def effective_number(variances: Float[Tensor, "components"]) -> float:
    """How many equal variances would be as spread out as these: (sum v)^2 / sum v^2."""
    squares = variances.square().sum().item()
    return variances.sum().item() ** 2 / squares if squares else 0.0


def _moments(scans: Scans) -> tuple[int, Float[Tensor, "features"], Float[Tensor, "features features"]]:
    """Number of slices, mean and covariance of their features, in one pass over the scans."""
    width, count = scans.width, 0
    total, products = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    shift: Tensor | None = None
    for batch in torch.arange(len(scans.lengths)).split(LOADING_BATCH):
        rows = scans.rows(batch).double()
        if shift is None:
            shift = rows.mean(0)  # close to the mean, so that the products are about the variance alone
        rows = rows - shift
        count += len(rows)
        total += rows.sum(0)
        products += rows.T @ rows
    assert shift is not None
    mean = total / count
    return count, shift + mean, products / count - mean.outer(mean)
