"""Every method of the tables: the same results for bags in every form, and equal to an independent calculation."""

import sys

import pytest
import torch
import torchmil.models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from in_a_process import assert_script_passes, needs_cuda
from normal_guidance.base.errors import UserError
from normal_guidance.core.layout import Layout, SlottedLayout, unpack
from normal_guidance.core.methods import (
    BEYOND,
    DISTINCT,
    EVERY_METHOD,
    METHODS,
    NAMED,
    build_model,
    model_options,
)
from normal_guidance.core.models import ABMIL, CenteredGaussian, MaxPooling, MeanPooling, TransMIL
from normal_guidance.core.prediction import Prediction
from normal_guidance.sweep.config import Config
from same import assert_same

FEATURES = 16
NOT_OF_THE_PAPER = [name for name in DISTINCT if name not in (*METHODS, *BEYOND)]
COMPILED = ("abmil", "smap", "smtp", "whole_bells_ng", *NOT_OF_THE_PAPER)
"""smtp holds every layer of the transformers, smap those of ABMIL and spectral normalisation, whole_bells_ng (packed
too) the guidance and the mixture of bells."""


def model_of(method: str) -> nn.Module:
    """The model in float64, with no parameter at 0 or 1, which would hide a mistake."""
    model = build_model(method, FEATURES).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def features_of(lengths: list[int]) -> Tensor:
    return torch.randn(sum(lengths), FEATURES, dtype=torch.float64)


def in_fixed_rows(rows: Tensor, lengths: list[int], capacity: int) -> Tensor:
    """Packed rows laid out in `capacity` rows, by hand; rows without a slice hold large numbers."""
    laid_out = torch.randn(capacity, rows.shape[1], dtype=rows.dtype) * 100
    begin = start = 0
    for length in lengths:
        laid_out[start + 1 : start + 1 + length] = rows[begin : begin + length]
        begin, start = begin + length, start + 1 + length
    return laid_out


def joined(logit: Tensor, attention: Tensor, log_attention: Tensor) -> Tensor:
    """All numbers of a prediction in one vector; log-attention as far as a number is more than 0."""
    return torch.cat([logit, attention, log_attention.clamp_min(-700).flatten()])


@pytest.mark.parametrize("method", [name for name, method in NAMED.items() if method.model == name])
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 45), min_size=1, max_size=5), spare=st.integers(0, 40), beyond=st.integers(0, 5))
def test_packed_padded_slotted_and_one_bag_at_a_time_agree(
    method: str, lengths: list[int], spare: int, beyond: int
) -> None:
    model, features, counts = model_of(method), features_of(lengths), torch.tensor(lengths)
    padded, mask = unpack(features, counts)
    padded = padded.masked_fill(~mask[..., None], 1e3)  # nothing may leak out of the padding
    capacity = sum(lengths) + len(lengths) + spare
    slotted = SlottedLayout.of(counts, capacity, max(lengths) + beyond)

    prediction = model(features, counts)
    sums = torch.stack([bag.sum() for bag in prediction.attention.split(lengths)])
    if isinstance(model, TransMIL):  # the class token keeps a share
        assert ((sums > 0) & (sums < 1)).all()
    else:
        torch.testing.assert_close(sums, torch.ones_like(sums))
    torch.testing.assert_close(prediction.slice_scores.exp(), prediction.attention)
    want = joined(*prediction[:3])
    single = [model(bag, torch.tensor([len(bag)])) for bag in features.split(lengths)]
    joints = [torch.cat([getattr(bag, name) for bag in single], -1) for name in Prediction._fields[:3]]
    assert_same(joined(*joints), want, model.parameters(), atol=1e-9, rtol=1e-6)
    forms = [(model(padded, mask), mask)]
    if NAMED[method].scores_scans:
        forms.append((model(in_fixed_rows(features, lengths, capacity), slotted), slotted.mask))
    for (logit, attention, log_attention, _), real in forms:
        assert not attention[~real].any()
        got = joined(logit, attention[real], log_attention.movedim(1, -1)[real].T)
        assert_same(got, want, model.parameters(), atol=1e-9, rtol=1e-6)


def test_parameter_counts() -> None:
    abmil, transmil = 768 * 128 + 128 + 128 + 1 + 769, 4_742_400 + 769
    counts = {
        **{"centered_gaussian": 0, "max": 769, "mean": 769, "abmil": abmil, "smap": abmil + 1, "ng": abmil},
        **{"transmil": transmil, "smtp": transmil + 2, "mhng": transmil, "evidence": 769 + 2, "whole_bells": 769 + 5},
    }
    assert {name: sum(p.numel() for p in build_model(name).parameters()) for name in counts} == counts


def test_abmil_equals_torchmil() -> None:
    lengths = torch.tensor([9, 20, 3])
    ours = ABMIL(FEATURES).double()
    theirs = torchmil.models.ABMIL((FEATURES,), att_dim=128, att_act="tanh", gated=False).double()
    theirs.pool.fc1.module.load_state_dict(ours.hidden.state_dict())
    theirs.pool.fc2.weight.data.copy_(ours.score.weight)  # no bias there: the softmax drops ours
    theirs.classifier.module.load_state_dict(ours.classifier.state_dict())
    features = features_of(lengths.tolist())
    padded, mask = unpack(features, lengths)
    logit, scores = theirs(padded, mask, return_att=True)
    got = ours(features, lengths)
    torch.testing.assert_close(got.logit, logit)
    want = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(got.attention, want[mask])


@pytest.mark.parametrize("smooth", [False, True])
def test_transmil_equals_the_textbook_with_torch_modules(smooth: bool) -> None:
    """Blocks with nn.MultiheadAttention, PPEG by three convolutions, Sm step by step: values and gradients."""
    model = model_of("smtp" if smooth else "transmil")
    assert isinstance(model, TransMIL)

    def sm(rows: Tensor, operator: nn.Module | None) -> Tensor:
        if operator is None:
            return rows
        alpha, g = torch.sigmoid(operator.raw_alpha), rows
        for _ in range(10):
            neighbours = torch.stack([g[[j for j in (i - 1, i + 1) if 0 <= j < len(g)]].mean(0) for i in range(len(g))])
            g = (1 - alpha) * rows + alpha * neighbours
        return g

    for slices in (1, 4, 26):
        features = features_of([slices]).requires_grad_()
        x = torch.cat([model.class_token, features])
        normed = model.block1.block.norm(x)[None]
        x = x + sm(model.block1.block.attention(normed, normed, normed)[0][0], model.sm1)
        image = x[1:].T[None]
        x = torch.cat([x[:1], (image + sum(conv(image) for conv in model.ppeg.convs))[0].T])
        normed = model.block2.block.norm(x)[None]
        output, weights = model.block2.block.attention(normed, normed, normed, average_attn_weights=False)
        x = x + sm(output[0], model.sm2)
        got = model(features, torch.tensor([slices]))
        torch.testing.assert_close(got.attention, weights[0, :, 0, 1:].mean(0))
        numbers = torch.cat([got.logit, got.log_attention.exp().flatten()])
        want = torch.cat([model.classifier(x[0]), weights[0, :, 0, 1:].flatten()])
        assert_same(numbers, want, [features, *model.parameters()], atol=1e-9, rtol=1e-6)


def test_mean_and_max_by_hand() -> None:
    features = torch.tensor([[1.0, 5.0, 2.0, 0.0], [3.0, 5.0, 1.0, 0.0], [2.0, 4.0, 9.0, 0.0]])
    maximum, mean = MaxPooling(4), MeanPooling(4)
    got = maximum(features, torch.tensor([3]))
    torch.testing.assert_close(got.logit, maximum.classifier(torch.tensor([3.0, 5.0, 9.0, 0.0])))
    assert got.attention.tolist() == [0.5, 0.25, 0.25]  # ties go to the first slice
    torch.testing.assert_close(mean(features, torch.tensor([3])).logit, mean.classifier(features.mean(0)))


def test_centered_gaussian_does_not_tie_and_its_published_form_does() -> None:
    bags, features = torch.tensor([200]), torch.zeros(200, 2)
    log_density = CenteredGaussian()(features, bags)
    scores = log_density.slice_scores
    assert len(scores.unique()) == 101  # mirrored around slice 100: slices 1 to 99, 100, and 200 alone
    assert scores.argmax() == 99
    assert log_density.logit.isnan().all()
    published = CenteredGaussian(published=True)(features, bags).slice_scores
    assert (published == -torch.inf).sum() > 100
    position = torch.linspace(1, 199, 200, dtype=torch.float64)
    density = torch.exp(-0.5 * (position - 100) ** 2)
    torch.testing.assert_close(published, (density / density.sum()).log())


@pytest.mark.parametrize(
    ("method", "device"),
    [
        *(pytest.param(method, "cpu", marks=pytest.mark.slow) for method in COMPILED),
        *(pytest.param(method, "cuda", marks=needs_cuda) for method in ("ng", "mhng", *COMPILED[1:4])),
    ],
)
def test_compiled_and_stacked_equals_eager(method: str, device: str) -> None:
    """Run in a separate process, because dynamo cannot trace the run-time shape checks of this one."""
    assert_script_passes(__file__, method, device)


def compiled(method: str, device: str) -> None:
    """One step of the sweep, compile(vmap(grad_and_value)) of a model, against the same step without the compiler."""
    torch.manual_seed(0)
    torch.set_default_device(device)
    lengths = [5, 1, 33, 12]
    packed = torch.randn(sum(lengths), 32)
    padded, mask = unpack(packed, torch.tensor(lengths))
    forms = [(padded, Layout.from_mask(mask))]
    if method == "whole_bells_ng":
        forms.append((packed, Layout.packed(torch.tensor(lengths))))
    models = [build_model(method, 32) for _ in range(3)]
    stacked, _ = stack_module_state(models)
    term = Config("mhng" if method == "smtp" else method).regularizer()  # smtp with guidance, as mhng

    def loss(parameters: dict[str, Tensor], features: Tensor, layout: Layout) -> Tensor:
        prediction = functional_call(models[0], parameters, (features, layout))
        value = EVERY_METHOD[method].loss(prediction, torch.tensor([0, 1, 1, 0], device=features.device), None)
        if term is not None:
            value = value + term(prediction.log_attention, lengths=layout, from_logits=True, features=features)
        return value

    step = vmap(grad_and_value(loss), in_dims=(0, None, None))
    for features, layout in forms:
        want, values = step(stacked, features, layout)
        got, compiled_values = torch.compile(step, fullgraph=True)(stacked, features, layout)
        torch.testing.assert_close(compiled_values, values)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    print("largest difference within the tolerance")


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_model_is_built_with_its_options(method: str) -> None:
    """Defaults are those of a model without options; another number changes the model, and it still runs."""
    options = model_options(method)
    plain, same = build_model(method, FEATURES), build_model(method, FEATURES, **options)
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (plain, same)]
    assert shapes[0] == shapes[1]
    for name, default in options.items():
        if not isinstance(default, bool):
            other = build_model(method, FEATURES, **{name: 2})
            assert other(torch.randn(5, FEATURES), [2, 3]).logit.shape == (2,)
            sizes = [sum(p.numel() for p in model.parameters()) for model in (other, plain)]
            shares = EVERY_METHOD[method].model in ("transmil", "smtp")  # heads divide the same weights among them
            assert shares or sizes[0] != sizes[1]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("mean", {"hidden": 64}, "method 'mean' has no option 'hidden'; it has none"),
        ("centered_gaussian", {"published": 1}, "published is 1; give True or False"),
    ],
)
def test_options_that_a_method_does_not_have(method: str, options: dict[str, object], message: str) -> None:
    """Beside those of docs/errors_page.py."""
    with pytest.raises(UserError, match=message):
        build_model(method, **options)


if __name__ == "__main__":
    compiled(*sys.argv[1:])
