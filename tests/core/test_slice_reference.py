"""The slice reference is a depthwise convolution, then a linear layer, for bags in any form."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.bells import SliceReference
from normal_guidance.core.layout import Layout, SlottedLayout, unpack
from same import assert_same

LENGTHS = [5, 1, 40, 13, 2]
WIDTHS = pytest.mark.parametrize("width", [1, 2, 3, 12, 35])


def textbook(model: SliceReference, bags: list[Tensor]) -> Tensor:
    """The same by torch's layers, one bag at a time, with torch's padding 'same'."""
    width = model.convolution.kernel_size[0]
    logits = []
    for bag in bags:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an even width is padded by a copy
            mixed = F.conv1d(
                bag.T[None], model.convolution.weight, model.convolution.bias, padding="same", groups=bag.shape[1]
            )
        assert mixed.shape[-1] == len(bag), width
        logits.append(model.classifier(mixed[0].T).squeeze(1))
    return torch.cat(logits)


def setup(width: int) -> tuple[SliceReference, Tensor]:
    model = SliceReference(features=6, receptive_field=width).double()
    return model, torch.randn(sum(LENGTHS), 6, dtype=torch.float64)


@WIDTHS
@pytest.mark.parametrize("form", ["packed", "padded", "slotted"])
def test_it_is_the_textbooks_layers(form: str, width: int) -> None:
    model, rows = setup(width)
    lengths = torch.tensor(LENGTHS)
    want = textbook(model, list(rows.split(LENGTHS)))
    padded, mask = unpack(rows, lengths)
    if form == "packed":
        got = model(rows, lengths).slice_scores
    elif form == "padded":
        garbage = torch.where(mask[:, :, None], padded, 1e3)
        got = model(garbage, mask).slice_scores[mask]
    else:
        layout = SlottedLayout.of(lengths, rows=80, longest=45)
        slots = torch.full((80, 6), 1e3, dtype=torch.float64)  # class tokens and unused slots hold anything
        slots[layout.pad_index[:, :40][mask]] = rows
        got = model(slots, layout).slice_scores[:, :40][mask]
    assert_same(got, want, model.parameters())


def test_a_prediction_holds_probabilities_and_logits_and_no_scan_score() -> None:
    model, rows = setup(3)
    prediction = model(rows, Layout.packed(LENGTHS))
    assert prediction.log_attention.shape == (1, sum(LENGTHS))
    torch.testing.assert_close(prediction.attention, prediction.slice_scores.sigmoid())
    assert prediction.logit.isnan().all()
    assert prediction.logit.shape == (len(LENGTHS),)
    padded = model(*unpack(rows, torch.tensor(LENGTHS)))
    assert padded.attention[1, 1:].eq(0).all(), "padding has no probability"


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="receptive_field is 0"):
        SliceReference(4, receptive_field=0)
