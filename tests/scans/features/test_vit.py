"""torchvision's ViT weights in Hugging Face's model: against a forward pass by hand."""

import math

import pytest
import torch
from fake_scans import make_vit_weights
from torch import Tensor
from transformers import ViTModel

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features import encoders as vit
from normal_guidance.scans.features.encoders import build_vit, torchvision_weights

WIDTH, HEADS, LAYERS, PATCH, SIDE, HIDDEN = 12, 3, 2, 4, 3, 20
LAYER = "encoder.layers.encoder_layer_{}."


def make_weights() -> dict[str, Tensor]:
    """Every number random, so that nothing can be swapped."""
    return make_vit_weights(WIDTH, LAYERS, HIDDEN)


def vit_from_torchvision(weights: dict[str, Tensor], *, channels: int = 1, heads: int) -> ViTModel:
    return build_vit(torchvision_weights(weights, channels), heads)


def class_token(model: ViTModel, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(pixel_values=images).last_hidden_state[:, 0]


def forward_by_hand(weights: dict[str, Tensor], rgb: Tensor) -> Tensor:
    """The Vision Transformer of Dosovitskiy et al. (2021), written out, in float64."""
    weights = {name: tensor.double() for name, tensor in weights.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        return centred / (variance + 1e-6).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    # (images, 3, rows, patch, columns, patch) -> (images, rows * columns, 3 * patch * patch)
    patches = rgb.double().unflatten(3, (SIDE, PATCH)).unflatten(2, (SIDE, PATCH)).permute(0, 2, 4, 1, 3, 5)
    tokens = patches.flatten(3).flatten(1, 2) @ weights["conv_proj.weight"].flatten(1).T + weights["conv_proj.bias"]
    x = torch.cat([weights["class_token"].expand(len(rgb), -1, -1), tokens], dim=1) + weights["encoder.pos_embedding"]
    for number in range(LAYERS):
        layer = LAYER.format(number)
        normed = norm(x, layer + "ln_1")
        stacked = normed @ weights[layer + "self_attention.in_proj_weight"].T
        stacked = stacked + weights[layer + "self_attention.in_proj_bias"]
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in stacked.split(WIDTH, dim=-1))
        attention = (query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).softmax(-1)
        x = x + linear((attention @ value).transpose(1, 2).flatten(2), layer + "self_attention.out_proj")
        hidden = linear(norm(x, layer + "ln_2"), layer + "mlp.0")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, layer + "mlp.3")
    return norm(x, "encoder.ln")[:, 0]


# The same function


@pytest.mark.parametrize("channels", [1, 3])
def test_the_model_is_the_transformer_written_out_by_hand(channels):
    weights = make_weights()
    images = torch.randn(4, channels, SIDE * PATCH, SIDE * PATCH)
    model = vit_from_torchvision(weights, channels=channels, heads=HEADS)
    expected = forward_by_hand(weights, images.expand(-1, 3, -1, -1))
    torch.testing.assert_close(class_token(model, images).double(), expected, atol=1e-5, rtol=1e-5)


def test_the_names_of_older_files_are_understood():
    weights = make_weights()
    older = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for name, tensor in weights.items()
    }
    assert older.keys() != weights.keys()
    images = torch.randn(2, 1, SIDE * PATCH, SIDE * PATCH)
    one, other = (class_token(vit_from_torchvision(each, heads=HEADS), images) for each in (weights, older))
    assert torch.equal(one, other)


def test_the_names_of_older_releases_of_transformers_are_understood():
    """Only their names: the release itself is not installed beside the present one."""
    wanted = {"encoder.layer.0.attention.attention.query.weight"}
    renamed = vit._renamed(torchvision_weights(make_weights()), LAYERS, wanted)
    first = {name.removeprefix("encoder.layer.0.") for name in renamed if name.startswith("encoder.layer.0.")}
    modules = (
        "attention.attention.query attention.attention.key attention.attention.value attention.output.dense "
        "intermediate.dense output.dense layernorm_before layernorm_after"
    )
    assert first == {f"{module}.{kind}" for module in modules.split() for kind in ("weight", "bias")}


# Guards


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    weights = make_weights() | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"a": torch.zeros(1)}, "no conv_proj.weight"),
        (changed(class_token=None), "no class_token"),
        (changed(encoder__ln__bias=None), "layernorm.bias"),
        (changed(extra__weight=torch.zeros(1)), "extra.weight"),
        (changed(encoder__pos_embedding=torch.zeros(1, 9, WIDTH)), r"encoder.pos_embedding \(1, 9, 12\)"),
        (changed(conv_proj__weight=torch.zeros(WIDTH, 1, 4, 4)), r"the shape \(12, 1, 4, 4\)"),
        (changed(encoder__layers__encoder_layer_1__self_attention__in_proj_bias=None), "in_proj of layer 1"),
    ],
)
def test_other_weights_are_refused(weights, reason):
    with pytest.raises(UserError, match=f"not weights of torchvision's vit_b_16.*{reason}"):
        vit_from_torchvision(weights, heads=HEADS)


def test_two_channels_and_unknown_names_of_transformers_are_errors():
    with pytest.raises(UserError, match="1 or 3 channels, not 2"):
        vit_from_torchvision(make_weights(), channels=2, heads=HEADS)
    with pytest.raises(UserError, match="has unknown names for ViT's parameters"):
        vit._renamed(torchvision_weights(make_weights()), LAYERS, {"blocks.0.query.weight"})
