"""torchvision's Vision Transformer weights in Hugging Face's ViTModel: the same function under other names.

The paper's encoder is torchvision's `vit_b_16`.  Hugging Face's model computes the same, so users need no second vision
library whose releases are tied to torch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from normal_guidance.errors import UserError
from normal_guidance.extras import install_command

if TYPE_CHECKING:
    from transformers import ViTModel

EPS = 1e-6
"""Epsilon of torchvision's LayerNorms; Hugging Face's default is 1e-12."""

HEADS = 12
"""Attention heads of ViT-B."""

ENCODERS_EXTRA = install_command("encoders")

# Names of a layer's parts in transformers: releases since 5 have the first ones, earlier releases the second.
_LAYER_NAMES = (
    {
        "layer": "layers.{}.",
        "ln_1": "layernorm_before",
        "query": "attention.q_proj",
        "key": "attention.k_proj",
        "value": "attention.v_proj",
        "out": "attention.o_proj",
        "ln_2": "layernorm_after",
        "mlp_1": "mlp.fc1",
        "mlp_2": "mlp.fc2",
    },
    {
        "layer": "encoder.layer.{}.",
        "ln_1": "layernorm_before",
        "query": "attention.attention.query",
        "key": "attention.attention.key",
        "value": "attention.attention.value",
        "out": "attention.output.dense",
        "ln_2": "layernorm_after",
        "mlp_1": "intermediate.dense",
        "mlp_2": "output.dense",
    },
)


def build_vit(weights: Mapping[str, Tensor], heads: int) -> ViTModel:
    """Hugging Face's ViT with the weights that `torchvision_weights` gives, in eval mode.

    `last_hidden_state[:, 0]` is the class token after the final LayerNorm, which torchvision's `heads` takes.  All
    sizes but the number of attention heads (12 for ViT-B) follow from the weights.
    """
    try:
        from transformers import ViTConfig, ViTModel
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit torch
        raise UserError(f"the encoder needs transformers ({_first_lines(error)}); {ENCODERS_EXTRA}") from error
    width, channels, patch, _ = weights["conv_proj.weight"].shape
    layers = _number_of_layers(weights)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=len(weights[_layer(0) + "mlp.0.bias"]),
        hidden_act="gelu",  # the exact one
        layer_norm_eps=EPS,
        image_size=image_size(weights),
        patch_size=patch,
        num_channels=channels,
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ViTModel(config, add_pooling_layer=False)
    try:
        model.load_state_dict(_renamed(weights, layers, set(model.state_dict())))
    except RuntimeError as error:
        raise UserError(f"{_NOT_VIT} ({_first_lines(error)}); {_WHICH}") from error
    return model.eval()


def torchvision_weights(state_dict: Mapping[str, Tensor], channels: int = 1) -> dict[str, Tensor]:
    """The weights in float32 without the classifier, with current names and an input convolution for `channels`.

    With one channel, the convolution's filters are summed over RGB: a gray image then gives what it gives repeated
    three times.
    Older torchvision files call a layer's two linear maps mlp.linear_1 and mlp.linear_2; newer ones mlp.0 and mlp.3.
    """
    weights = {
        name.replace("mlp.linear_1.", "mlp.0.").replace("mlp.linear_2.", "mlp.3."): tensor.detach().float()
        for name, tensor in state_dict.items()
        if not name.startswith("heads.")
    }
    _check_sizes(weights)
    weights["conv_proj.weight"] = fit_channels(weights["conv_proj.weight"], channels)
    return weights


def image_size(weights: Mapping[str, Tensor]) -> int:
    """Rows and columns of the training images: there is a position for each patch, and one for the class token."""
    patches = weights["encoder.pos_embedding"].shape[1] - 1
    return math.isqrt(patches) * weights["conv_proj.weight"].shape[-1]


def fit_channels(filters: Tensor, channels: int) -> Tensor:
    """The filters of an RGB convolution, (out, 3, rows, columns), for one channel (their sum) or three (unchanged)."""
    if channels not in (1, filters.shape[1]):
        raise UserError(f"this encoder takes 1 or {filters.shape[1]} channels, not {channels}; give as many windows")
    return filters.sum(dim=1, keepdim=True) if channels == 1 else filters


_NOT_VIT = "these are not weights of torchvision's vit_b_16"
_WHICH = "give torchvision's vit_b_16-c867db91.pth, or a state_dict() of its vit_b_16"


def _layer(number: int) -> str:
    return f"encoder.layers.encoder_layer_{number}."


def _number_of_layers(weights: Mapping[str, Tensor]) -> int:
    return len({name.split(".")[2] for name in weights if name.startswith("encoder.layers.")})


def _check_sizes(weights: Mapping[str, Tensor]) -> None:
    """Checks the weights that sizes are read from; `load_state_dict` checks the rest."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    needed = ("conv_proj.weight", "class_token", "encoder.pos_embedding", _layer(0) + "mlp.0.bias")
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise UserError(f"{_NOT_VIT} (no {missing[0]}); {_WHICH}")
    filters, positions = shapes["conv_proj.weight"], shapes["encoder.pos_embedding"]
    square = len(positions) == 3 and positions[1] > 1 and math.isqrt(positions[1] - 1) ** 2 == positions[1] - 1
    if len(filters) != 4 or filters[1] != 3 or filters[2] != filters[3] or not square:
        raise UserError(
            f"{_NOT_VIT} (conv_proj.weight has the shape {filters}, encoder.pos_embedding {positions}); {_WHICH}"
        )


def _renamed(weights: Mapping[str, Tensor], layers: int, wanted: set[str]) -> dict[str, Tensor]:
    """torchvision's tensors under Hugging Face's names; any other keeps its name, and loading rejects it."""
    left = dict(weights)
    renamed = {
        "embeddings.cls_token": left.pop("class_token"),
        "embeddings.position_embeddings": left.pop("encoder.pos_embedding"),
    }
    modules = {"conv_proj": "embeddings.patch_embeddings.projection", "encoder.ln": "layernorm"}
    names = next((one for one in _LAYER_NAMES if one["layer"].format(0) + one["query"] + ".weight" in wanted), None)
    if names is None:
        raise UserError(f"this release of transformers has unknown names for ViT's parameters; {ENCODERS_EXTRA}")
    for number in range(layers):
        ours, theirs = names["layer"].format(number), _layer(number)
        for part, module in (
            ("ln_1", "ln_1"),
            ("out", "self_attention.out_proj"),
            ("ln_2", "ln_2"),
            ("mlp_1", "mlp.0"),
            ("mlp_2", "mlp.3"),
        ):
            modules[theirs + module] = ours + names[part]
        for kind in ("weight", "bias"):
            stacked = left.pop(f"{theirs}self_attention.in_proj_{kind}", None)
            if stacked is None or len(stacked) % 3:
                raise UserError(f"{_NOT_VIT} (in_proj of layer {number}); {_WHICH}")
            for part, tensor in zip(("query", "key", "value"), stacked.chunk(3), strict=True):
                renamed[f"{ours}{names[part]}.{kind}"] = tensor
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in left:  # `load_state_dict` names a missing one
                renamed[f"{ours}.{kind}"] = left.pop(f"{theirs}.{kind}")
    return renamed | left


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
