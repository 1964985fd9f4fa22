"""Hugging Face's models as encoders: their own numbers, normalised as they say, and none of their code."""

import json
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    ConvNextConfig,
    ConvNextModel,
    Dinov2Config,
    Dinov2Model,
    ResNetConfig,
    ResNetModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features.encoders import IMAGENET_MEAN, IMAGENET_SD, load_encoder

SIZE = 28
TOKENS = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": SIZE, "patch_size": 14}


SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
MODELS = {
    "vit": lambda: ViTModel(ViTConfig(intermediate_size=30, **TOKENS)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(mlp_ratio=2, **TOKENS)),
    "resnet": lambda: ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
    "convnext": lambda: ConvNextModel(ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])),
    "swin": lambda: SwinModel(SwinConfig(**SWIN)),
}


def make(kind: str) -> torch.nn.Module:
    return MODELS[kind]().eval()


def features_of(kind: str, model: torch.nn.Module, normalised: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(pixel_values=normalised)
    return output.last_hidden_state[:, 0] if kind in ("vit", "dinov2") else output.pooler_output.flatten(1)


def save(folder: Path, model: torch.nn.Module, **preprocessor: object) -> str:
    model.save_pretrained(folder)
    if preprocessor:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return str(folder)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def column(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values)[:, None, None]


@pytest.fixture
def no_network(monkeypatch) -> list[str]:
    """Every attempt to reach a network is refused and written down."""
    attempts: list[str] = []

    def refuse(*words: object, **options: object) -> None:
        attempts.append(str(words))
        raise RuntimeError("no network in this test")  # an OSError would be tried again and again

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    return attempts


@pytest.mark.parametrize(
    ("kind", "size", "width"),
    [("vit", SIZE, 24), ("dinov2", SIZE, 24), ("resnet", 224, 16), ("convnext", 224, 32), ("swin", 32, 16)],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_features_are_the_models_own(tmp_path, no_network, kind, size, width, channels):
    model = make(kind)
    encoder = load_encoder(save(tmp_path / "model", model), channels=channels, offline=True)
    assert (encoder.channels, encoder.size, encoder.width, encoder.unit_range) == (channels, size, width, True)
    images = torch.rand(3, channels, size, size)
    normalised = (images.expand(-1, 3, -1, -1) - column(IMAGENET_MEAN)) / column(IMAGENET_SD)
    torch.testing.assert_close(encoder.encode(images), features_of(kind, model, normalised))
    assert no_network == []


def test_a_model_in_hugging_faces_cache_loads_offline_by_its_id(tmp_path, no_network, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder, commit = tmp_path / "models--somebody--dino", "0" * 40
    save(folder / "snapshots" / commit, make("dinov2"), size=42)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    encoder = load_encoder("somebody/dino", offline=True)
    assert (encoder.name, encoder.size, encoder.width) == ("somebody/dino", 42, 24)
    assert encoder.fingerprint == load_encoder(str(folder / "snapshots" / commit)).fingerprint
    assert no_network == []


@pytest.mark.parametrize(
    ("preprocessor", "size"),
    [
        ({"size": {"height": 42, "width": 56}}, 42),
        ({"size": {"shortest_edge": 56}, "crop_size": {"height": 42, "width": 42}}, 42),
        ({"size": 42, "crop_size": 56}, 56),
        ({"size": 42, "crop_size": 56, "do_center_crop": False}, 42),
    ],
)
def test_mean_sd_and_size_are_the_preprocessors(tmp_path, preprocessor, size):
    model, mean, sd = make("dinov2"), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    encoder = load_encoder(save(tmp_path / "model", model, image_mean=mean, image_std=sd, **preprocessor))
    assert encoder.size == size
    images = torch.rand(2, 1, size, size)
    normalised = (images - column(mean)) / column(sd)
    torch.testing.assert_close(encoder.encode(images), features_of("dinov2", model, normalised))


def test_a_one_channel_model_takes_the_mean_of_the_preprocessors_means(tmp_path):
    model = ViTModel(ViTConfig(intermediate_size=30, num_channels=1, **TOKENS)).eval()
    half = ViTModel(model.config).half().eval()  # files of half precision are used in single precision
    half.load_state_dict(model.state_dict())
    model.load_state_dict(half.float().state_dict())
    folder = save(tmp_path / "model", half.half(), image_mean=[0.1, 0.2, 0.6], image_std=0.5)
    encoder = load_encoder(folder)
    images = torch.rand(2, 1, SIZE, SIZE)
    assert encoder.encode(images).dtype == torch.float32
    torch.testing.assert_close(encoder.encode(images), features_of("vit", model, (images - 0.3) / 0.5))


def test_a_classifiers_folder_gives_its_encoder_and_what_transformers_makes_up_is_not_in_the_fingerprint(tmp_path):
    """A ViT without pooling layer: transformers adds a random one each time."""
    classifier = ViTForImageClassification(ViTConfig(intermediate_size=30, **TOKENS)).eval()
    folder = save(tmp_path / "model", classifier, do_normalize=False)
    encoder, images = load_encoder(folder), torch.rand(2, 1, SIZE, SIZE)
    expected = features_of("vit", classifier.vit, images.expand(-1, 3, -1, -1))
    torch.testing.assert_close(encoder.encode(images), expected)
    assert load_encoder(folder).fingerprint == encoder.fingerprint


@pytest.mark.parametrize("kind", ["vit", "dinov2", "resnet"])
def test_the_fingerprint_follows_weights_config_and_normalisation(tmp_path, kind):
    model = make(kind)
    folder = tmp_path / "model"
    prints = [load_encoder(save(folder, model)).fingerprint]
    edit(folder / "config.json", transformers_version="4.0.0", _name_or_path="elsewhere")
    assert load_encoder(str(folder)).fingerprint == prints[0]
    edit(folder / "config.json", hidden_act="silu")
    prints.append(load_encoder(str(folder)).fingerprint)
    prints.append(load_encoder(save(folder, model, image_mean=[0, 0, 0], image_std=[1, 1, 1])).fingerprint)
    (folder / "preprocessor_config.json").unlink()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    prints.append(load_encoder(save(folder, model)).fingerprint)
    assert len(set(prints)) == 4


def test_offline_an_unknown_id_is_an_error_and_nobody_is_asked(no_network, monkeypatch):
    monkeypatch.setenv("NGUIDE_OFFLINE", "1")
    with pytest.raises(UserError, match=r"nobody/such-model cannot be loaded.*offline mode.*hf download"):
        load_encoder("nobody/such-model")
    assert no_network == []
    monkeypatch.delenv("NGUIDE_OFFLINE")
    with pytest.raises(UserError, match=r"nobody/such-model cannot be loaded.*check the id"):
        load_encoder("nobody/such-model")
    assert no_network != [], "the trap works"


def test_code_in_a_folder_is_not_run(tmp_path):
    folder, marker = tmp_path / "model", tmp_path / "executed"
    save(folder, make("vit"))
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass A: pass\nB = A\n")
    evil = {"AutoConfig": "evil.A", "AutoModel": "evil.B", "AutoImageProcessor": "evil.A"}
    edit(folder / "config.json", auto_map=evil)
    assert load_encoder(str(folder)).width == 24  # transformers' own ViT
    edit(folder / "config.json", model_type="evil")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_encoder(str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "preprocessor_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff" * 100])
def test_damaged_files_are_errors(tmp_path, file, content):
    folder = tmp_path / "model"
    save(folder, make("vit"), do_normalize=False)
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match="model"):
        load_encoder(str(folder))


@pytest.mark.parametrize(
    ("changes", "preprocessor", "message"),
    [
        ({"hidden_size": "wide"}, {}, "cannot be loaded"),
        ({"num_hidden_layers": 3}, {}, "lacks the weights of layers.2"),
        ({"model_type": "bert"}, {}, "model"),
        ({}, {"size": 30}, "cannot encode 30 x 30 images"),
        ({}, {"image_mean": "gray", "image_std": 1}, "are not numbers"),
        ({}, {"image_mean": [0.0], "image_std": [1.0, 1.0]}, "cannot normalise"),
    ],
)
def test_configurations_that_do_not_fit_are_errors(tmp_path, changes, preprocessor, message):
    folder = save(tmp_path / "model", make("vit"), **preprocessor)
    edit(tmp_path / "model" / "config.json", **changes)
    with pytest.raises(UserError, match=message):
        load_encoder(folder)


def test_models_that_do_not_fit_are_errors(tmp_path):
    text = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    pickled, model = tmp_path / "pickled", make("vit")
    save(pickled, model)
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    for folder, channels, message in (
        (save(tmp_path / "text", text), 1, "BertModel, which does not take images"),
        (save(tmp_path / "model", model), 2, "takes 1 or 3 channels, not 2; give as many windows"),
        (str(pickled), 1, r"cannot be loaded.*model\.safetensors"),
    ):
        with pytest.raises(UserError, match=message):
            load_encoder(folder, channels=channels)
