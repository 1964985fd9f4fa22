"""Any vision model of Hugging Face's `AutoModel` as an encoder: one gray channel, or the model's own, in 0..1.

Only architectures of transformers itself and only safetensors files are loaded: no code of a model's repository runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normal_guidance.errors import UserError
from normal_guidance.features.vit import ENCODERS_EXTRA

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_SD = (0.229, 0.224, 0.225)
DEFAULT_SIZE = 224

# Features do not depend on these parameters: a checkpoint may lack them, and transformers then draws random ones.
_UNUSED_WITH_CLASS_TOKEN = ("mask_token", "pooler.")

# Entries of config.json that do not change what the model computes.
_INCIDENTAL = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


class HuggingFaceEncoder(nn.Module):
    """A model with the normalisation that it was trained with, and one vector per image as output.

    The output is the class token where the model has one.  Otherwise it is the model's own pooled output (ResNet,
    ConvNeXt, Swin), or the mean over the image.
    """

    mean: Tensor
    sd: Tensor

    def __init__(self, model: nn.Module, size: int, mean: Sequence[float], sd: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        self.size = size
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


def load_huggingface(name: str, *, channels: int, offline: bool) -> tuple[HuggingFaceEncoder, dict[str, Any]]:
    """Loads the model of an id or folder, and the part of its configuration that decides what it computes."""
    try:
        import transformers
        from transformers import AutoConfig, AutoModel
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit torch
        raise UserError(f"encoder {name} needs transformers ({_reason(error)}); {ENCODERS_EXTRA}") from error
    common: dict[str, Any] = {"local_files_only": offline, "trust_remote_code": False}
    try:
        with _quiet(transformers):
            config = AutoConfig.from_pretrained(name, **common)
            written, _ = type(config).get_config_dict(name, local_files_only=offline)
            model, report = AutoModel.from_pretrained(
                name, config=config, use_safetensors=True, output_loading_info=True, **common
            )
    except Exception as error:  # transformers raises many kinds of errors for damaged files
        raise UserError(f"encoder {name} cannot be loaded: {_reason(error)}; {_advice(offline)}") from error
    _refuse_other_models(name, model, report["missing_keys"])
    _drop_unused(model)
    own = _channels(config)
    if channels not in (1, own):
        raise UserError(f"encoder {name} takes 1 or {own} channels, not {channels}; give as many windows")
    size, mean, sd = _image_format(name, config, own, offline)
    module = HuggingFaceEncoder(model.float().eval(), size, mean, sd)
    _check_output(name, module, channels)
    return module, {key: value for key, value in written.items() if key not in _INCIDENTAL}


def _check_output(name: str, module: HuggingFaceEncoder, channels: int) -> None:
    try:
        with torch.inference_mode():
            features = module(torch.zeros(1, channels, module.size, module.size))
    except Exception as error:  # a configuration that fits no image fails in many ways
        raise UserError(
            f"encoder {name} cannot encode {module.size} x {module.size} images ({_reason(error)}); correct the size "
            "in its preprocessor_config.json, or choose another encoder"
        ) from error
    if features.ndim != 2:
        raise UserError(
            f"encoder {name} gives shape {tuple(features.shape)} for one image, not a vector; choose another encoder"
        )


def _refuse_other_models(name: str, model: nn.Module, missing: Iterable[str]) -> None:
    if getattr(model, "main_input_name", None) != "pixel_values":
        raise UserError(f"encoder {name} is a {type(model).__name__}, which does not take images alone; choose another")
    unused = _UNUSED_WITH_CLASS_TOKEN if _has_class_token(model) else ()
    lacking = sorted(key for key in missing if not any(part in key for part in unused))
    if lacking:
        raise UserError(
            f"encoder {name} lacks the weights of {lacking[0]} ({len(lacking)} such parameters), which would be "
            "random; choose another, or correct its model.safetensors"
        )


def _has_class_token(model: nn.Module) -> bool:
    return any(name.endswith("cls_token") for name, _ in model.named_parameters())


def _drop_unused(model: nn.Module) -> None:
    """Removes parameters that no feature depends on and that may be random, so that the fingerprint ignores them."""
    if not _has_class_token(model):
        return
    if isinstance(getattr(model, "pooler", None), nn.Module):
        setattr(model, "pooler", None)  # noqa: B010 - the model's type does not allow None
    for name, parameter in model.named_parameters():
        if name.endswith("mask_token"):
            parameter.data.zero_()


def _image_format(name: str, config: Any, channels: int, offline: bool) -> tuple[int, list[float], list[float]]:
    """Size, mean and sd of the images that a model was trained on: its preprocessor_config.json, else ImageNet's."""
    written = _preprocessor(name, offline)
    size = _size(written, config)
    mean, sd = ([float(value) for value in values] for values in (IMAGENET_MEAN, IMAGENET_SD))
    if written.get("do_normalize", True) is False:
        mean, sd = [0.0], [1.0]
    elif written.get("image_mean") is not None and written.get("image_std") is not None:
        mean, sd = (_numbers(name, written[key]) for key in ("image_mean", "image_std"))
    fits = all(len(values) in (1, channels) or (values and channels == 1) for values in (mean, sd))
    if not fits or min(sd) <= 0:
        raise UserError(
            f"encoder {name}: image_mean {mean} and image_std {sd} cannot normalise; correct preprocessor_config.json"
        )
    return size, _per_channel(mean, channels), _per_channel(sd, channels)


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
        raise UserError(f"{file} cannot be read ({_reason(error)}); correct or delete it") from error


def _size(written: Mapping[str, Any], config: Any) -> int:
    """Rows and columns; a model that was trained on oblong images gets squares of their shorter side."""
    cropped = written.get("do_center_crop", "crop_size" in written) and written.get("crop_size")
    for given in (cropped, written.get("size"), getattr(config, "image_size", None)):
        sides = list(given.values()) if isinstance(given, Mapping) else given
        sides = sides if isinstance(sides, list | tuple) else [sides]
        whole = [side for side in sides if isinstance(side, int) and not isinstance(side, bool) and side > 0]
        if whole:
            return min(whole)
    return DEFAULT_SIZE


def _numbers(name: str, values: Any) -> list[float]:
    try:
        return [float(value) for value in (values if isinstance(values, list | tuple) else [values])]
    except (TypeError, ValueError) as error:
        raise UserError(f"encoder {name}: {values!r} are not numbers; correct its preprocessor_config.json") from error


def _per_channel(values: list[float], channels: int) -> list[float]:
    """One value per channel: the values themselves, or their mean for each channel."""
    return values if len(values) == channels else [sum(values) / len(values)] * channels


def _channels(config: Any) -> int:
    found = getattr(config, "num_channels", 3)
    return found if isinstance(found, int) and found > 0 else 3


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


def _advice(offline: bool) -> str:
    if offline:
        return "in offline mode, run hf download ID --local-dir FOLDER where there is a network, and give FOLDER"
    return "check the id or folder; it needs config.json and model.safetensors of an architecture that transformers has"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
