"""The supervised reference for localization: a linear model of a window of slices, trained on slice labels.

It is not in `METHODS`, because it is the ceiling of the paper's comparison: it learns from slice labels, which no
method may see.  The reference for scans needs no model here: it is logistic regression on oracle-pooled scans.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from normal_guidance.core.layout import Layout, as_rows
from normal_guidance.core.prediction import FEATURES, BagsLike, Features, Prediction
from normal_guidance.core.slotted_layout import SlottedLayout
from normal_guidance.errors import UserError


class SliceReference(nn.Module):
    r"""A depthwise convolution of R taps along the slices, then one linear layer, without a non-linearity.

    $$ z_j = w^\top \Big(b + \sum_{k=1}^{R} c_k \odot h_{j + k - 1 - \lfloor (R-1)/2 \rfloor}\Big) + v $$

    Slices beyond a scan's ends are zeros; an even R = 12 covers j-5 to j+6.  Both layers are linear, so the features
    are multiplied by the R vectors $c_k \odot w$, and the R numbers of each slice are added up along the diagonal.
    That is one matrix product, where the convolution would compute 768 numbers for each slice.

    In the `Prediction`, `attention` is the probability that a slice is positive and `log_attention` its logit $z_j$;
    neither sums to one over a scan.  The scan's logit is NaN.

    Reference: the paper's section on the best-in-class ceiling for localization.
    """

    def __init__(self, features: int = FEATURES, *, receptive_field: int) -> None:
        super().__init__()
        if receptive_field < 1:
            raise UserError(f"receptive_field is {receptive_field}; it must be at least 1 slice")
        self.convolution = nn.Conv1d(features, features, receptive_field, groups=features)
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        weight, bias = self.classifier.weight[0], self.convolution.bias
        assert bias is not None
        kernel = self.convolution.weight[:, 0].T.contiguous() * weight  # c_k * w, one row a tap
        constant = bias @ weight + self.classifier.bias
        # Contiguous and on the left: `vmap` makes the taps of all configurations the rows of one matrix product.
        taps = (kernel.to(rows.dtype) @ rows.T).to(weight.dtype)
        logits = layout.hide(layout.fold(_add_windows(taps, _bag_of_rows(layout)) + constant))
        nowhere = torch.full((layout.bags,), torch.nan, device=rows.device, dtype=weight.dtype)
        return Prediction(nowhere, layout.restore(logits.sigmoid()), layout.restore(logits[:, None]))


def _add_windows(taps: Float[Tensor, "taps rows"], bag: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """For each row r, the sum over k of tap k at row r + k - (R-1)//2, over rows of the same bag.

    Reading the flat matrix with rows one column longer makes row k begin k numbers later, so a column is a diagonal.
    Indexing would scatter the gradient; this is padding and a view, forward and backward.
    """
    width, rows = taps.shape
    before = (width - 1) // 2
    after = width - 1 - before
    same = bag == F.pad(bag, (before, after), value=-2).unfold(0, width, 1).T
    flat = F.pad(F.pad(taps, (before, after)).flatten(), (0, width))
    shifted = flat.unflatten(0, (width, -1))[:, :rows]
    return torch.where(same, shifted, 0).sum(0)


def _bag_of_rows(layout: Layout) -> Int[Tensor, "rows"]:
    """The bag of each row; rows that do not hold a slice have a number that no slice has."""
    if isinstance(layout, SlottedLayout):
        return torch.where(layout.is_token(), -1, layout.bag)
    number = torch.arange(layout.bags, device=layout.mask.device)
    return layout.restore(torch.where(layout.mask, number[:, None], -1)).flatten()
