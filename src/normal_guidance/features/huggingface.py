"""Any vision model of Hugging Face's `AutoModel` as an encoder: one gray channel, or the model's own, in 0..1.

No code of a model's repository is run: only architectures that transformers itself has, and only safetensors files.
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

# Parameters that no feature depends on: a checkpoint may lack them, and transformers then invents random ones.
_UNUSED_WITH_CLASS_TOKEN = ("mask_token", "pooler.")

# In config.json, but not what the model computes: who saved it, where, and for what.
_INCIDENTAL = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


class HuggingFaceEncoder(nn.Module):
    """A model, the normalisation that it was trained with, and the choice of its output.

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
        """(images, channels, size, size), values in 0..1; one channel is repeated.  Gives (images, width)."""
        output = self.model(pixel_values=(images - self.mean) / self.sd)
        hidden = output.last_hidden_state
        if self.has_class_token and hidden.ndim == 3:
            return hidden[:, 0]
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        return hidden.mean(dim=1) if hidden.ndim == 3 else hidden.mean(dim=(2, 3))


def load_huggingface(name: str, *, channels: int, offline: bool) -> tuple[HuggingFaceEncoder, dict[str, Any]]:
    """The model of an id or folder, and the part of its configuration that decides what it computes."""
    try:
        import transformers
        from transformers import AutoConfig, AutoModel
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch stands in its way
        raise UserError(f"encoder {name} needs transformers ({_reason(error)}); {ENCODERS_EXTRA}") from error
    common: dict[str, Any] = {"local_files_only": offline, "trust_remote_code": False}
    try:
        with _quiet(transformers):
            config = AutoConfig.from_pretrained(name, **common)
            written, _ = type(config).get_config_dict(name, local_files_only=offline)
            model, report = AutoModel.from_pretrained(
                name, config=config, use_safetensors=True, output_loading_info=True, **common
            )
    except Exception as error:  # files from anywhere: transformers raises whatever their content leads to
        raise UserError(f"encoder {name} cannot be loaded: {_reason(error)}; {_advice(offline)}") from error
    _refuse_other_models(name, model, report["missing_keys"])
    _drop_unused(model)
    own = _channels(config)
    if channels not in (1, own):
        raise UserError(f"encoder {name} takes 1 or {own} channels, not {channels}; give as many windows")
    size, mean, sd = _input(name, config, own, offline)
    module = HuggingFaceEncoder(model.float().eval(), size, mean, sd)
    _try(name, module, channels)
    return module, {key: value for key, value in written.items() if key not in _INCIDENTAL}


def _try(name: str, module: HuggingFaceEncoder, channels: int) -> None:
    try:
        with torch.inference_mode():
            features = module(torch.zeros(1, channels, module.size, module.size))
    except Exception as error:  # a configuration that fits no image, however it may show
        raise UserError(
            f"encoder {name} cannot encode {module.size} x {module.size} images ({_reason(error)}); correct the size "
            "in its preprocessor_config.json, or choose another encoder"
        ) from error
    if features.ndim != 2:
        raise UserError(
            f"encoder {name} gives {tuple(features.shape)} for one image, no vector; choose another encoder"
        )


def _refuse_other_models(name: str, model: nn.Module, missing: Iterable[str]) -> None:
    if getattr(model, "main_input_name", None) != "pixel_values":
        raise UserError(f"encoder {name} is a {type(model).__name__}, which takes no images alone; choose another")
    unused = _UNUSED_WITH_CLASS_TOKEN if _has_class_token(model) else ()
    lacking = sorted(key for key in missing if not any(part in key for part in unused))
    if lacking:
        raise UserError(
            f"encoder {name} lacks the weights of {lacking[0]} ({len(lacking)} such parameters), which would be "
            "random; choose another, or mend its model.safetensors"
        )


def _has_class_token(model: nn.Module) -> bool:
    return any(name.endswith("cls_token") for name, _ in model.named_parameters())


def _drop_unused(model: nn.Module) -> None:
    """Takes out what no feature depends on and what may be random, so that it has no part in the fingerprint."""
    if not _has_class_token(model):
        return
    if isinstance(getattr(model, "pooler", None), nn.Module):
        setattr(model, "pooler", None)  # noqa: B010 - a model without one is typed as having one
    for name, parameter in model.named_parameters():
        if name.endswith("mask_token"):
            parameter.data.zero_()


def _input(name: str, config: Any, channels: int, offline: bool) -> tuple[int, list[float], list[float]]:
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
        raise UserError(f"encoder {name}: image_mean {mean} and image_std {sd} cannot normalise; correct them")
    return size, _fit(mean, channels), _fit(sd, channels)


def _preprocessor(name: str, offline: bool) -> dict[str, Any]:
    """The content of preprocessor_config.json; nothing where there is no such file."""
    from transformers import ImageProcessingMixin

    try:
        written, _ = ImageProcessingMixin.get_image_processor_dict(name, local_files_only=offline)
        if not isinstance(written, dict):
            raise ValueError("no JSON object")
        return written
    except Exception as error:
        file = Path(name, "preprocessor_config.json")
        if isinstance(error, OSError) and not file.exists():
            return {}
        raise UserError(f"{file} cannot be read ({_reason(error)}); mend or delete it") from error


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
        raise UserError(f"encoder {name}: {values!r} are no numbers; correct its preprocessor_config.json") from error


def _fit(values: list[float], channels: int) -> list[float]:
    """As many values as channels: themselves, or their mean for each."""
    return values if len(values) == channels else [sum(values) / len(values)] * channels


def _channels(config: Any) -> int:
    found = getattr(config, "num_channels", 3)
    return found if isinstance(found, int) and found > 0 else 3


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no remarks about weights that are left out: what matters is checked and said by us."""
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
        return "this is offline mode: where there is a network, run hf download ID --local-dir FOLDER, and give FOLDER"
    return "check the id or folder; it needs config.json and model.safetensors of an architecture that transformers has"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
