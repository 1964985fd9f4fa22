"""The extras of the package: the purpose of each, and the words that say which one is missing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

PACKAGE = "normal-guidance"


class Extra(NamedTuple):
    """A set of packages that some commands need."""

    purpose: str
    modules: tuple[str, ...]
    """If none of these is there, the extra was not installed."""


EXTRAS = {
    "dicom": Extra("scans: nguide phantom, index, encode, predict, and slices in nguide view", ("pydicom",)),
    "encoders": Extra(
        "features of scans: nguide encode and predict", ("transformers", "efficientnet_lite_pytorch", "h5py")
    ),
    "export": Extra("models as ONNX graphs", ("onnx", "onnxruntime")),
    "hub": Extra("models to and from the Hugging Face Hub", ("huggingface_hub",)),
    "lightning": Extra("the callback for Lightning's Trainer", ("lightning",)),
    "node": Extra("nguide node", ("pynetdicom",)),
    "ray": Extra("several machines: the option --ray", ("ray",)),
    "track": Extra("the option --track", ("tensorboard", "mlflow")),
    "viewer": Extra("nguide view", ("fastapi", "uvicorn")),
}
"""The extras that a user may want; `all` has them all."""


def install_command(*extras: str) -> str:
    """Return the command that brings the package with these extras."""
    return f"pip install '{PACKAGE}[{','.join(extras)}]'"


def missing_extras(*extras: str) -> list[str]:
    """Return those of these extras that were not installed; nothing is imported."""
    return [extra for extra in extras if not any(find_spec(module) for module in EXTRAS[extra].modules)]
