"""Frozen image encoders by name: `load_encoder` loads one, `Encoder.encode` turns images into features.

There are three kinds: the paper's ViT-B/16, EfficientNet-Lite0 (whose weights come in a package, so that a real encoder
works without any network), and every vision model that Hugging Face's `AutoModel` loads.  The first two were trained on
RGB photographs and receive one gray channel here: the filters of their first convolution are summed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from normal_guidance.errors import UserError
from normal_guidance.features.huggingface import load_huggingface
from normal_guidance.features.vit import ENCODERS_EXTRA, HEADS, build_vit, fit_channels, image_size, torchvision_weights
from normal_guidance.features.weights import (
    KNOWN_WEIGHTS,
    fetch_weights,
    file_sha256,
    is_offline,
    network,
    read_state_dict,
)

VERSION = 1
"""Version of this module's arithmetic: a change that alters features raises it and changes the fingerprints."""

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen network from images to feature vectors, on its device, in eval mode.

    Args:
        name: the name it was loaded by; with the user's own weights, the beginning of their sha256 is added.
        channels: channels of an image.
        size: rows and columns of an image.
        width: features per image.
        unit_range: whether the images' values are 0..1 (`Preprocessing.to_unit_range`), because the encoder normalises
            them with the mean and sd that it was trained with.  Otherwise the training scans' statistics normalise
            them (`Preprocessing.with_statistics`).
        fingerprint: sha256 of architecture, weights and `VERSION`; device and precision are not in it.
        module: the network.
        device: where the network lies.
        precision: precision of products and convolutions on CUDA.
    """

    name: str
    channels: int
    size: int
    width: int
    unit_range: bool
    fingerprint: str
    module: nn.Module
    device: str = "cpu"
    precision: Precision = "float32"

    def encode(
        self, images: Float32[Tensor, "images {self.channels} {self.size} {self.size}"]
    ) -> Float32[Tensor, "images {self.width}"]:
        """The features of images, one row each, on the CPU; the images may be on any device.

        The same batch gives the same bits; the same image in another batch may differ in the last bits.
        """
        return self.begin(images).cpu().clone()  # a normal tensor: training cannot use those of inference mode

    def begin(self, images: Float32[Tensor, "images channels size size"]) -> Float32[Tensor, "images {self.width}"]:
        """`encode` on the encoder's device: a card may still compute when this returns."""
        if images.shape[1:] != (self.channels, self.size, self.size):
            raise ValueError(
                f"{self.name} takes {(self.channels, self.size, self.size)}, not {tuple(images.shape[1:])}"
            )
        if not len(images):
            return torch.empty(0, self.width)
        with torch.inference_mode(), _arithmetic(self.device, self.precision):
            return self.module(images.to(self.device, non_blocking=True)).float()


class _LoadedNetwork(NamedTuple):
    """A network as one of the three loaders returns it."""

    module: nn.Module
    size: int
    unit_range: bool
    fingerprint: str


class NamedEncoder(NamedTuple):
    """A row of `ENCODERS`."""

    description: str
    load: Callable[[Path, int], _LoadedNetwork]
    """Takes a file of weights and the number of channels."""


def load_encoder(
    name: str,
    *,
    weights: Path | None = None,
    device: str = "cpu",
    precision: Precision = "float32",
    channels: int = 1,
    offline: bool = False,
) -> Encoder:
    """Loads the encoder of a name in `ENCODERS`, of a Hugging Face id, or in a folder of Hugging Face's format.

    Args:
        name: for instance "vit-b16-imagenet", "microsoft/rad-dino", "models/dinov2-base".
        weights: replaces the published file of a name in `ENCODERS`; its hash is not checked.
        device: "cpu", "cuda", "cuda:1".
        precision: "tf32" and "bf16" are for CUDA.
        channels: windows of the images: one, or as many as the network was trained with.  One channel is repeated for
            a Hugging Face model; for the others the filters are summed, which is equivalent.
        offline: makes no network call, as does NGUIDE_OFFLINE=1 in the environment.
    """
    _check_device(device, precision)
    offline = is_offline(offline)
    with network(offline=offline):
        if name in ENCODERS:
            loaded, name = _load_named(name, weights, channels, offline)
        elif weights is not None:
            raise UserError(
                f"encoder {name} has its own weights and cannot use {weights}; give one of {', '.join(ENCODERS)}, or "
                "leave out the weights"
            )
        else:
            loaded = _load_huggingface(name, channels, offline)
    module = loaded.module.eval().requires_grad_(False).to(device)
    if precision == "bf16":
        _round_weights(module)
    probe = torch.zeros(1, channels, loaded.size, loaded.size, device=device)
    with torch.inference_mode(), _arithmetic(device, precision):
        width = module(probe).shape[1]
    return Encoder(
        name=name,
        channels=channels,
        size=loaded.size,
        width=width,
        unit_range=loaded.unit_range,
        fingerprint=loaded.fingerprint,
        module=module,
        device=device,
        precision=precision,
    )


def fingerprint(architecture: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 of everything that determines an encoder's features: architecture, configuration and every weight."""
    head = {"version": VERSION, "architecture": architecture, "config": config}
    digest = hashlib.sha256(json.dumps(head, sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class _ClassToken(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).last_hidden_state[:, 0]


class _MeanPooled(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last)  # 1.6 times as fast on the CPU

    def forward(self, images: Tensor) -> Tensor:
        return self.model.extract_features(images).mean(dim=(2, 3))


def _load_vit(file: Path, channels: int) -> _LoadedNetwork:
    weights = torchvision_weights(read_state_dict(file), channels)
    model = build_vit(weights, HEADS)
    # The hash uses torchvision's names: transformers renames its own from time to time without changing features.
    print_of = fingerprint("torchvision-vit", {"heads": HEADS}, weights.items())
    return _LoadedNetwork(_ClassToken(model), image_size(weights), unit_range=False, fingerprint=print_of)


def _load_efficientnet(file: Path, channels: int) -> _LoadedNetwork:
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise UserError(f"the encoder needs efficientnet-lite-pytorch; {ENCODERS_EXTRA}") from error
    weights = read_state_dict(file)
    if "_conv_stem.weight" not in weights:
        raise UserError(f"{file} does not hold weights of EfficientNet-Lite0 (no _conv_stem.weight); give another file")
    weights["_conv_stem.weight"] = fit_channels(weights["_conv_stem.weight"], channels)
    model = EfficientNet.from_name("efficientnet-lite0", in_channels=channels)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{file} does not hold weights of EfficientNet-Lite0 ({reason}); give another file") from error
    model._fc = nn.Identity()  # the features do not depend on the classifier
    print_of = fingerprint("efficientnet-lite0", {}, model.state_dict().items())
    return _LoadedNetwork(_MeanPooled(model), model.input_image_size, unit_range=False, fingerprint=print_of)


def _load_huggingface(name: str, channels: int, offline: bool) -> _LoadedNetwork:
    if not (name and Path(name).is_dir()) and not _is_hub_id(name):
        raise UserError(
            f"there is no encoder {name!r}; give one of {', '.join(ENCODERS)}, a folder, or a Hugging Face id such as "
            "microsoft/rad-dino"
        )
    module, config = load_huggingface(name, channels=channels, offline=offline)
    tensors = (*module.named_parameters(), *module.named_buffers())
    return _LoadedNetwork(module, module.size, unit_range=True, fingerprint=fingerprint("huggingface", config, tensors))


ENCODERS = {
    "vit-b16-imagenet": NamedEncoder("ViT-B/16, ImageNet-1k (torchvision's IMAGENET1K_V1), class token.", _load_vit),
    "efficientnet-lite0": NamedEncoder("EfficientNet-Lite0, ImageNet-1k, mean over the image.", _load_efficientnet),
}
"""Encoders that have their own names; the names are those of `KNOWN_WEIGHTS`."""


def _load_named(name: str, weights: Path | None, channels: int, offline: bool) -> tuple[_LoadedNetwork, str]:
    file = fetch_weights(name, offline=offline) if weights is None else weights
    if not file.is_file():
        raise UserError(f"{file} is not a file; give the weights of {name}, or leave them out")
    loaded = ENCODERS[name].load(file, channels)
    if weights is None:
        return loaded, name
    sha256 = file_sha256(file)
    return loaded, name if sha256.startswith(KNOWN_WEIGHTS[name].sha256) else f"{name}+{sha256[:8]}"


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", name) is not None


def _check_device(device: str, precision: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"device {device!r} is unknown; give cpu, cuda or cuda:1") from error
    if precision not in ("float32", "tf32", "bf16"):
        raise UserError(f"precision {precision!r} is unknown; choose one of float32, tf32, bf16")
    if kind != "cuda" and precision != "float32":
        raise UserError(f"precision {precision} is for CUDA, and the device is {device}; use float32")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device} is not available on this machine or in this torch; use cpu")


def _round_weights(module: nn.Module) -> None:
    """Rounds to bf16 at once what autocast would round for every batch."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.to(torch.bfloat16)


@contextmanager
def _arithmetic(device: str, precision: Precision) -> Iterator[None]:
    """Inside the block, products have this precision, and every run uses the same kernels."""
    if torch.device(device).type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    torch.backends.cudnn.deterministic = True
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before[1:]
