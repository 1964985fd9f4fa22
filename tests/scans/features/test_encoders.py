"""Encoders by name: what they compute, what their fingerprints tell apart, and what is refused.

torchvision's ViT weights stand against a forward pass by hand; other models of Hugging Face
have test_huggingface.py.
"""

import hashlib
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from efficientnet_lite_pytorch import EfficientNet
from fake_scans import make_vit_weights
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features import encoders
from normal_guidance.scans.features.encoders import (
    ENCODERS,
    HEADS,
    build_vit,
    fingerprint,
    load_encoder,
    torchvision_weights,
)
from normal_guidance.scans.features.weights import KNOWN_WEIGHTS, KnownWeights, find_weights, read_state_dict

WIDTH, SIZE, LAYERS, PATCH, SIDE = 24, 12, 2, 4, 3
LITE0 = "efficientnet-lite0"
VIT = "vit-b16-imagenet"


def save(file: Path, weights: dict[str, Tensor]) -> Path:
    torch.save(weights, file)
    return file


@pytest.fixture(scope="module")
def lite0():
    return load_encoder(LITE0, offline=True)


@pytest.fixture
def vit_file(tmp_path) -> Path:
    return save(tmp_path / "vit.pth", make_vit_weights())


def test_published_weights_come_from_the_cache_and_keep_the_name(tmp_path, monkeypatch, vit_file):
    content = vit_file.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(KNOWN_WEIGHTS, VIT, KnownWeights("published.pth", sha256[:8], 1, "us", "http://127.0.0.1:9/"))
    monkeypatch.setenv("NGUIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    with pytest.raises(UserError, match=f"nguide weights import {VIT} published.pth"):
        load_encoder(VIT, offline=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/published.pth").write_bytes(content)
    cached, given = load_encoder(VIT, offline=True), load_encoder(VIT, weights=vit_file)
    assert cached.name == given.name == VIT
    assert cached.fingerprint == given.fingerprint


def test_the_users_own_weights_have_another_name_and_a_fingerprint_over_torchvisions_names(vit_file):
    sha256 = hashlib.sha256(vit_file.read_bytes()).hexdigest()
    assert load_encoder(VIT, weights=vit_file).name == f"{VIT}+{sha256[:8]}"
    weights = {name: value for name, value in make_vit_weights().items() if not name.startswith("heads.")}
    weights["conv_proj.weight"] = weights["conv_proj.weight"].sum(dim=1, keepdim=True)
    expected = fingerprint("torchvision-vit", {"heads": 12}, weights.items())
    assert load_encoder(VIT, weights=vit_file).fingerprint == expected


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
        layer = f"encoder.layers.encoder_layer_{number}."
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


@pytest.mark.parametrize("channels", [1, 3])
def test_vit_gives_the_class_token_of_the_transformer_written_out_by_hand(vit_file, channels):
    encoder = load_encoder(VIT, weights=vit_file, channels=channels)
    assert (encoder.channels, encoder.size, encoder.width) == (channels, SIZE, WIDTH)
    assert not encoder.unit_range
    images = torch.randn(5, channels, SIZE, SIZE)
    expected = forward_by_hand(make_vit_weights(), images.expand(-1, 3, -1, -1))
    torch.testing.assert_close(encoder.encode(images).double(), expected, atol=1e-4, rtol=1e-4)


def test_the_names_of_older_files_are_understood(tmp_path, vit_file):
    weights = make_vit_weights()
    named = {name: name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2.") for name in weights}
    older = save(tmp_path / "older.pth", {named[name]: tensor for name, tensor in weights.items()})
    images = torch.randn(2, 1, SIZE, SIZE)
    token, other = (load_encoder(VIT, weights=file).encode(images) for file in (vit_file, older))
    assert torch.equal(token, other)


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    weights = make_vit_weights() | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"a": torch.zeros(1)}, "no conv_proj.weight"),
        (changed(class_token=None), "no class_token"),
        (changed(encoder__ln__bias=None), "ln.bias"),
        (changed(extra__weight=torch.zeros(1)), "extra.weight"),
        (changed(encoder__pos_embedding=torch.zeros(1, 9, WIDTH)), r"encoder.pos_embedding \(1, 9, 24\)"),
        (changed(conv_proj__weight=torch.zeros(WIDTH, 1, 4, 4)), r"conv_proj.weight is \(24, 1, 4, 4\)"),
        (changed(encoder__layers__encoder_layer_1__self_attention__in_proj_bias=None), "layers.1.in_proj.bias"),
    ],
)
def test_other_weights_are_refused(weights, reason):
    with pytest.raises(UserError, match=f"not weights of torchvision's vit_b_16.*{reason}"):
        build_vit(torchvision_weights(weights), HEADS)


@pytest.mark.parametrize("channels", [1, 3])
def test_lite0_is_the_packages_network_on_a_repeated_gray_image(lite0, channels):
    assert (lite0.name, lite0.channels, lite0.size, lite0.width) == (LITE0, 1, 224, 1280)
    encoder = lite0 if channels == 1 else load_encoder(LITE0, channels=3)
    images = torch.randn(2, channels, 224, 224)
    theirs = EfficientNet.from_name(LITE0).eval()
    theirs.load_state_dict(read_state_dict(find_weights(LITE0)))
    with torch.no_grad():
        rgb = images.expand(-1, 3, -1, -1)
        pooled = F.adaptive_avg_pool2d(theirs.extract_features(rgb), 1).flatten(1)
        logits = theirs(rgb)
    features = encoder.encode(images)
    torch.testing.assert_close(features, pooled, atol=1e-4, rtol=1e-4)
    # The package's own forward pass ends in its classifier: the features are what that takes.
    with torch.no_grad():
        torch.testing.assert_close(theirs._fc(features), logits, atol=1e-3, rtol=1e-3)


def test_lite0_refuses_other_weights(tmp_path, vit_file):
    with pytest.raises(UserError, match="does not hold weights of EfficientNet-Lite0"):
        load_encoder(LITE0, weights=vit_file)
    weights = read_state_dict(find_weights(LITE0))
    del weights["_bn1.bias"]
    with pytest.raises(UserError, match=r"does not hold weights of EfficientNet-Lite0.*_bn1\.bias"):
        load_encoder(LITE0, weights=save(tmp_path / "a.pth", weights))


def test_the_same_batch_gives_the_same_bits_and_nothing_learns(lite0):
    images = torch.randn(3, 1, 224, 224)
    first = lite0.encode(images)
    alone = torch.cat([lite0.encode(image[None]) for image in images])
    torch.testing.assert_close(first, alone, atol=1e-4, rtol=1e-4)
    assert lite0.encode(torch.empty(0, 1, 224, 224)).shape == (0, 1280)
    assert torch.equal(lite0.encode(images.clone()), first)
    assert (first.dtype, first.device.type, first.requires_grad) == (torch.float32, "cpu", False)
    assert not first.is_inference()
    assert not lite0.module.training
    assert not any(parameter.requires_grad for parameter in lite0.module.parameters())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(2, 3, 224, 224), (2, 1, 223, 224), (2, 224, 224)])
def test_images_of_another_shape_are_refused(lite0, shape):
    with pytest.raises(ValueError, match=r"efficientnet-lite0 takes \(1, 224, 224\), not"):
        lite0.encode(torch.zeros(shape))


def test_a_fingerprint_is_the_same_each_time_and_unlike_any_other(tmp_path, vit_file, lite0, monkeypatch):
    same = load_encoder(VIT, weights=vit_file).fingerprint
    assert load_encoder(VIT, weights=vit_file).fingerprint == same
    moved = save(tmp_path / "moved.pth", dict(reversed(make_vit_weights().items())))
    assert load_encoder(VIT, weights=moved).fingerprint == same  # neither the file nor its order count

    changed = make_vit_weights()
    changed["encoder.ln.bias"][0] += 1e-6
    other = load_encoder(VIT, weights=save(tmp_path / "changed.pth", changed)).fingerprint
    rgb = load_encoder(VIT, weights=vit_file, channels=3).fingerprint
    monkeypatch.setattr(encoders, "VERSION", 2)
    newer = load_encoder(VIT, weights=vit_file).fingerprint
    assert len({same, other, rgb, newer, lite0.fingerprint}) == 5


def test_a_fingerprint_counts_names_shapes_types_and_bits():
    a = torch.tensor([1.0, 2.0])
    others = [a, a[None], a.double(), a.view(torch.int32), a.nextafter(torch.tensor(9.0)), a.flip(0)]
    tensors = [{"a": other} for other in (*others, torch.tensor(0.0), torch.tensor(-0.0))]
    tensors += [{"b": a}, {"a": a[:1], "b": a[1:]}]
    cases = [("other", {}, {"a": a}), ("net", {"eps": 1e-6}, {"a": a}), *(("net", {}, named) for named in tensors)]
    prints = [fingerprint(kind, config, named.items()) for kind, config, named in cases]
    assert len(set(prints)) == len(cases)


UNKNOWN = ("resnet50", "./no/such", "/no/such", "a/b/c", "../up", "", "a/..", "http://x/y")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"name": name}, r"there is no encoder .*vit-b16-imagenet, efficientnet-lite0") for name in UNKNOWN),
        ({"device": "gpu7"}, "device 'gpu7' is unknown"),
        ({"precision": "float16"}, "precision 'float16' is unknown"),
        ({"precision": "bf16"}, "precision bf16 is for CUDA"),
        ({"precision": "tf32"}, "precision tf32 is for CUDA"),
        ({"channels": 2}, "1 or 3 channels, not 2"),
        ({"name": VIT, "weights": Path("a.pth")}, r"a.pth is not a file; give the weights of vit-b16-imagenet"),
        ({"name": "microsoft/rad-dino", "weights": Path("a.pth")}, "has its own weights and cannot use"),
    ],
)
def test_impossible_options_are_refused(options, message):
    assert ENCODERS.keys() == KNOWN_WEIGHTS.keys()
    with pytest.raises(UserError, match=message):
        load_encoder(**{"name": LITE0, "offline": True, **options})


@pytest.mark.parametrize("name", [LITE0, "microsoft/rad-dino"])
def test_a_missing_package_is_named(monkeypatch, vit_file, name):
    for package in ("transformers", "efficientnet_lite_pytorch"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"needs (transformers|efficient).*pip install 'normal-guidance\[encoders\]'"):
        load_encoder(name, weights=vit_file if name == VIT else None, offline=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("tf32", 2e-2), ("bf16", 2e-1)])
def test_cuda_gives_what_the_cpu_gives(vit_file, precision, tolerance):
    images = torch.randn(8, 1, SIZE, SIZE)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    features = load_encoder(VIT, weights=vit_file, device="cuda", precision=precision).encode(images)
    assert (features.dtype, features.device.type) == (torch.float32, "cpu")
    expected = load_encoder(VIT, weights=vit_file).encode(images)
    torch.testing.assert_close(features, expected, atol=tolerance, rtol=tolerance)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
