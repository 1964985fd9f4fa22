"""Frozen image encoders by name: `load_encoder` loads one, `Encoder.encode` turns images into features.

There are three kinds: the paper's ViT-B/16, EfficientNet-Lite0 (whose weights come in a package, so that a real encoder
works without any network), and every vision model that Hugging Face's `AutoModel` loads.

The ViT is torchvision's `vit_b_16`, written here: a second vision library's releases are tied to torch's.  Of Hugging
Face's models only architectures of transformers itself and only safetensors files are loaded: no code of a model's
repository runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float32
from torch import Tensor, nn

from normal_guidance.base.errors import UserError, choose_one_of, reading, reason
from normal_guidance.base.system import importing, install_command
from normal_guidance.base.tensor_files import raw_bytes
from normal_guidance.scans.features.onnx_engine import TORCH, by_onnx
from normal_guidance.scans.features.weights import (
    KNOWN_WEIGHTS,
    fetch_weights,
    file_sha256,
    is_offline,
    network,
    read_state_dict,
)

VERSION = 1  # version of this module's arithmetic: a change that alters features raises it and changes the fingerprints

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen network from images of size x size pixels to vectors of `width` features, in eval mode."""

    name: str  # the name it was loaded by; with the user's own weights, the beginning of their sha256 is added
    channels: int
    size: int
    width: int
    unit_range: bool
    """Whether it takes values of 0..1, because it normalises them itself; else mean and sd of scans do."""
    fingerprint: str  # sha256 of architecture, weights and `VERSION`; device and precision are not in it
    module: nn.Module
    device: str = "cpu"
    precision: Precision = "float32"

    @property
    def engine(self) -> str:
        """What computes the features: torch, or ONNX Runtime and its version; known for sure after the first batch."""
        return getattr(self.module, "engine", TORCH)

    def encode(
        self, images: Float32[Tensor, "images {self.channels} {self.size} {self.size}"]
    ) -> Float32[Tensor, "images {self.width}"]:
        """The features of images, one row each, on the CPU; an image in another batch may differ in the last bits."""
        return self.begin(images).cpu().clone()  # a normal tensor: training cannot use those of inference mode

    def begin(self, images: Float32[Tensor, "images channels size size"]) -> Float32[Tensor, "images {self.width}"]:
        """`encode` on the encoder's device: a card may still compute when this returns."""
        shape = (self.channels, self.size, self.size)
        if images.shape[1:] != shape:
            raise ValueError(f"{self.name} takes {shape}, not {tuple(images.shape[1:])}")
        if not len(images):
            return torch.empty(0, self.width)
        with torch.inference_mode(), _arithmetic(self.device, self.precision):
            return self.module(images.to(self.device, non_blocking=True)).float()


_LoadedNetwork = tuple[nn.Module, int, bool, str]
"""The network, its size, `unit_range` and `fingerprint`, as in `Encoder`."""


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

    `weights` replace the published file of a name in `ENCODERS`; their hash is not checked.
    """
    # One channel is repeated for a Hugging Face model; for the others the filters are summed, which is equivalent.
    _check_device(device, precision)
    offline = is_offline(offline)
    with network(offline=offline):
        if name in ENCODERS:
            file = fetch_weights(name, offline=offline) if weights is None else weights
            if not file.is_file():
                raise UserError(f"{file} is not a file; give the weights of {name}, or leave them out")
            loaded = ENCODERS[name](file, channels)
            if weights is not None and not (sha256 := file_sha256(file)).startswith(KNOWN_WEIGHTS[name].sha256):
                name = f"{name}+{sha256[:8]}"
        elif weights is not None:
            raise UserError(
                f"encoder {name} has its own weights and cannot use {weights}; give one of {', '.join(ENCODERS)}, or "
                "leave out the weights"
            )
        else:
            loaded = _load_huggingface(name, channels, offline)
    module, size, unit_range, print_of = loaded
    module = module.eval().requires_grad_(False).to(device)
    if precision == "bf16":  # rounds at once what autocast would round for every batch
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Conv2d):
                part.to(torch.bfloat16)
    probe = torch.zeros(1, channels, size, size, device=device)
    with torch.inference_mode(), _arithmetic(device, precision):
        width = module(probe).shape[1]
    if isinstance(module, _MeanOverImage) and probe.device.type == "cpu":  # transformers are as fast in torch
        module = by_onnx(module, name, print_of, probe)
    return Encoder(name, channels, size, width, unit_range, print_of, module, device, precision)


def fingerprint(architecture: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 of everything that determines an encoder's features: architecture, configuration and every weight."""
    head = {"version": VERSION, "architecture": architecture, "config": config}
    digest = hashlib.sha256(json.dumps(head, sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _check_device(device: str, precision: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"device {device!r} is unknown; give cpu, cuda or cuda:1") from error
    choose_one_of("precision", precision, get_args(Precision))
    if kind != "cuda" and precision != "float32":
        raise UserError(f"precision {precision} is for CUDA, and the device is {device}; use float32")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device} is not available on this machine or in this torch; use cpu")


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


HEADS = 12  # attention heads of ViT-B

ENCODERS_EXTRA = install_command("encoders")


class _ViTLayer(nn.Module):
    """Attention and two linear maps, each behind a norm and added to what came in."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Identity(), nn.Linear(hidden, width))

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.in_proj(self.ln_1(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        tokens = tokens + self.out_proj(attended)
        return tokens + self.mlp(self.ln_2(tokens))


class VisionTransformer(nn.Module):
    """Gives the class token of a Vision Transformer (Dosovitskiy et al., 2021) of the sizes that its weights have."""

    def __init__(self, weights: Mapping[str, Tensor], heads: int) -> None:
        super().__init__()
        width, channels, patch, _ = weights["conv_proj.weight"].shape
        layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
        hidden = len(weights["layers.0.mlp.0.bias"])
        self.conv_proj = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.empty_like(weights["pos_embedding"]))
        self.layers = nn.Sequential(*(_ViTLayer(width, heads, hidden) for _ in range(layers)))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.load_state_dict(dict(weights))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv_proj(images).flatten(2).mT
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        return self.ln(self.layers(tokens + self.pos_embedding)[:, 0])


def build_vit(weights: Mapping[str, Tensor], heads: int) -> VisionTransformer:
    """The network with the weights that `torchvision_weights` gives, in eval mode."""
    names = {"encoder.layers.encoder_layer_": "layers.", "encoder.": "", "self_attention.": "", "in_proj_": "in_proj."}
    renamed = dict(weights)
    for theirs, ours in names.items():
        renamed = {name.replace(theirs, ours): tensor for name, tensor in renamed.items()}
    with reading("these", _WHICH, wrong=_NOT_VIT.removeprefix("these ")):
        return VisionTransformer(renamed, heads).eval()


def torchvision_weights(state_dict: Mapping[str, Tensor], channels: int = 1) -> dict[str, Tensor]:
    """The weights in float32 without the classifier, with current names and an input convolution for `channels`."""
    # Older torchvision files call a layer's two linear maps mlp.linear_1 and mlp.linear_2; newer ones mlp.0 and mlp.3.
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


def _check_sizes(weights: Mapping[str, Tensor]) -> None:
    """Checks the weights that sizes are read from; `load_state_dict` checks the rest."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    needed = ("conv_proj.weight", "class_token", "encoder.pos_embedding", "encoder.layers.encoder_layer_0.mlp.0.bias")
    if missing := [name for name in needed if name not in shapes]:
        raise UserError(f"{_NOT_VIT} (no {missing[0]}); {_WHICH}")
    filters, positions = shapes["conv_proj.weight"], shapes["encoder.pos_embedding"]
    square = len(positions) == 3 and positions[1] > 1 and math.isqrt(positions[1] - 1) ** 2 == positions[1] - 1
    if len(filters) != 4 or filters[1] != 3 or filters[2] != filters[3] or not square:
        raise UserError(f"{_NOT_VIT} (conv_proj.weight is {filters}, encoder.pos_embedding {positions}); {_WHICH}")


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_SD = (0.229, 0.224, 0.225)

# Entries of config.json that do not change what the model computes.
_INCIDENTAL = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


class HuggingFaceEncoder(nn.Module):
    """A model with its own normalisation; gives the class token, else the pooled output, else the mean of the image."""

    mean: Tensor
    sd: Tensor

    def __init__(self, model: nn.Module, mean: Sequence[float], sd: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        self.has_class_token = _has_class_token(model)
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("sd", torch.tensor(sd)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Takes (images, channels, size, size) in 0..1, repeats a single channel, and returns (images, width)."""
        output = self.model(pixel_values=(images - self.mean) / self.sd)
        hidden = output.last_hidden_state
        if self.has_class_token and hidden.ndim == 3:
            return hidden[:, 0]
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        return hidden.mean(dim=1) if hidden.ndim == 3 else hidden.mean(dim=(2, 3))


def _load_huggingface(name: str, channels: int, offline: bool) -> _LoadedNetwork:
    is_hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", name) is not None
    if not (name and Path(name).is_dir()) and not is_hub_id:
        raise UserError(
            f"there is no encoder {name!r}; give one of {', '.join(ENCODERS)}, a folder, or a Hugging Face id such as "
            "microsoft/rad-dino"
        )
    encoder = f"encoder {name}"
    with reading(encoder, ENCODERS_EXTRA, ImportError, wrong="needs transformers"):
        import transformers
        from transformers import AutoConfig, AutoModel
    common: dict[str, Any] = {"local_files_only": offline, "trust_remote_code": False}
    advice = (
        "in offline mode, run hf download ID --local-dir FOLDER where there is a network, and give FOLDER"
        if offline
        else "check the id or folder; it needs config.json and model.safetensors of an architecture of transformers"
    )
    # Damaged files raise many kinds of errors in transformers, and a configuration that fits no image, too.
    with reading(encoder, advice, Exception, wrong="cannot be loaded"), _quiet(transformers):
        config = AutoConfig.from_pretrained(name, **common)
        written, _ = type(config).get_config_dict(name, local_files_only=offline)
        model, report = AutoModel.from_pretrained(
            name, config=config, use_safetensors=True, output_loading_info=True, **common
        )
    _refuse_other_models(name, model, report["missing_keys"])
    if _has_class_token(model):  # what no feature depends on may be random: the fingerprint ignores it
        if isinstance(getattr(model, "pooler", None), nn.Module):
            setattr(model, "pooler", None)  # noqa: B010 - the model's type does not allow None
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("mask_token"):
                parameter.data.zero_()
    trained = getattr(config, "num_channels", 3)
    trained = trained if isinstance(trained, int) and trained > 0 else 3
    if channels not in (1, trained):
        raise UserError(f"{encoder} takes 1 or {trained} channels, not {channels}; give as many windows")
    size, mean, sd = _image_format(name, config, trained, offline)
    module = HuggingFaceEncoder(model.float().eval(), mean, sd)
    advice = "correct the size in its preprocessor_config.json, or choose another encoder"
    with reading(encoder, advice, Exception, wrong=f"cannot encode {size} x {size} images"), torch.inference_mode():
        features = module(torch.zeros(1, channels, size, size))
    if features.ndim != 2:
        raise UserError(f"{encoder} gives shape {tuple(features.shape)} for one image, not a vector; choose another")
    deciding = {key: value for key, value in written.items() if key not in _INCIDENTAL}
    tensors = (*module.named_parameters(), *module.named_buffers())
    return module, size, True, fingerprint("huggingface", deciding, tensors)


def _refuse_other_models(name: str, model: nn.Module, missing: Iterable[str]) -> None:
    if getattr(model, "main_input_name", None) != "pixel_values":
        raise UserError(f"encoder {name} is a {type(model).__name__}, which does not take images alone; choose another")
    # Features do not depend on these: a checkpoint may lack them, and transformers then draws random ones.
    unused = ("mask_token", "pooler.") if _has_class_token(model) else ()
    lacking = sorted(key for key in missing if not any(part in key for part in unused))
    if lacking:
        raise UserError(
            f"encoder {name} lacks the weights of {lacking[0]} ({len(lacking)} such parameters), which would be "
            "random; choose another, or correct its model.safetensors"
        )


def _has_class_token(model: nn.Module) -> bool:
    return any(name.endswith("cls_token") for name, _ in model.named_parameters())


def _image_format(name: str, config: Any, channels: int, offline: bool) -> tuple[int, list[float], list[float]]:
    """Size, mean and sd of the images that a model was trained on: its preprocessor_config.json, else ImageNet's."""
    written = _preprocessor(name, offline)
    mean, sd = ([float(value) for value in values] for values in (IMAGENET_MEAN, IMAGENET_SD))
    if written.get("do_normalize", True) is False:
        mean, sd = [0.0], [1.0]
    elif written.get("image_mean") is not None and written.get("image_std") is not None:
        given = [written[key] for key in ("image_mean", "image_std")]
        with reading(f"encoder {name}: {given}", "correct its preprocessor_config.json", wrong="are not numbers"):
            mean, sd = ([float(v) for v in (value if isinstance(value, list | tuple) else [value])] for value in given)
    fits = all(len(values) in (1, channels) or (values and channels == 1) for values in (mean, sd))
    if not fits or min(sd) <= 0:
        raise UserError(
            f"encoder {name}: image_mean {mean} and image_std {sd} cannot normalise; correct preprocessor_config.json"
        )
    mean, sd = (v if len(v) == channels else [sum(v) / len(v)] * channels for v in (mean, sd))
    return _size(written, config), mean, sd


def _preprocessor(name: str, offline: bool) -> dict[str, Any]:
    """The content of preprocessor_config.json; empty where there is no such file."""
    from transformers import ImageProcessingMixin

    try:
        written, _ = ImageProcessingMixin.get_image_processor_dict(name, local_files_only=offline)
        if not isinstance(written, dict):
            raise ValueError("not a JSON object")
        return written
    except Exception as error:
        file = Path(name, "preprocessor_config.json")
        if isinstance(error, OSError) and not file.exists():
            return {}
        raise UserError(f"{file} cannot be read ({reason(error)}); correct or delete it") from error


def _size(written: Mapping[str, Any], config: Any) -> int:
    """Rows and columns; a model that was trained on oblong images gets squares of their shorter side."""
    cropped = written.get("do_center_crop", "crop_size" in written) and written.get("crop_size")
    for given in (cropped, written.get("size"), getattr(config, "image_size", None)):
        sides = list(given.values()) if isinstance(given, Mapping) else given
        sides = sides if isinstance(sides, list | tuple) else [sides]
        whole = [side for side in sides if isinstance(side, int) and not isinstance(side, bool) and side > 0]
        if whole:
            return min(whole)
    return 224


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hides transformers' progress bars and its warnings about missing weights, which are checked here."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


class _MeanOverImage(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.extract_features(images).mean(dim=(2, 3))


def _load_vit(file: Path, channels: int) -> _LoadedNetwork:
    weights = torchvision_weights(read_state_dict(file), channels)
    print_of = fingerprint("torchvision-vit", {"heads": HEADS}, weights.items())
    return build_vit(weights, HEADS), image_size(weights), False, print_of


def _load_efficientnet(file: Path, channels: int) -> _LoadedNetwork:
    with importing("encoders", "the encoder needs efficientnet-lite-pytorch"):
        from efficientnet_lite_pytorch import EfficientNet
    weights = read_state_dict(file)
    if "_conv_stem.weight" not in weights:
        raise UserError(f"{file} does not hold weights of EfficientNet-Lite0 (no _conv_stem.weight); give another file")
    weights["_conv_stem.weight"] = fit_channels(weights["_conv_stem.weight"], channels)
    model = EfficientNet.from_name("efficientnet-lite0", in_channels=channels)
    with reading(file, "give another file", wrong="does not hold weights of EfficientNet-Lite0"):
        model.load_state_dict(weights)
    model._fc = nn.Identity()  # the features do not depend on the classifier
    model.to(memory_format=torch.channels_last)  # 1.6 times as fast on the CPU
    print_of = fingerprint("efficientnet-lite0", {}, model.state_dict().items())
    return _MeanOverImage(model), model.input_image_size, False, print_of


ENCODERS: dict[str, Callable[[Path, int], _LoadedNetwork]] = {
    "vit-b16-imagenet": _load_vit,  # ViT-B/16, ImageNet-1k (torchvision's IMAGENET1K_V1), class token
    "efficientnet-lite0": _load_efficientnet,  # ImageNet-1k, mean over the image
}
"""The encoders of `KNOWN_WEIGHTS`, and what loads them from a file of weights with so many channels."""
