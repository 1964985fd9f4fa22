"""Find the slices that matter in a 3D medical scan when only the whole scan carries a label.

The public names below are imported at first use, so that `nguide --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from normal_guidance.core.bags import Bag, Bags
    from normal_guidance.core.blocks import block_statistics, find_blocks
    from normal_guidance.core.guidance import (
        DIVERGENCES,
        NEGATIVES,
        LabelGuidance,
        NormalGuidance,
        divergence,
        label_reference,
        normal_reference,
    )
    from normal_guidance.core.layout import Layout, pack, unpack
    from normal_guidance.core.methods import METHODS, build_model
    from normal_guidance.core.metrics import auprc, auroc, localization, scan_level
    from normal_guidance.core.prediction import Prediction
    from normal_guidance.errors import UserError
    from normal_guidance.training.slice_finder import SliceFinder

_HOME = {
    "Bag": "core.bags",
    "Bags": "core.bags",
    "block_statistics": "core.blocks",
    "find_blocks": "core.blocks",
    "DIVERGENCES": "core.guidance",
    "NEGATIVES": "core.guidance",
    "LabelGuidance": "core.guidance",
    "NormalGuidance": "core.guidance",
    "divergence": "core.guidance",
    "label_reference": "core.guidance",
    "normal_reference": "core.guidance",
    "Layout": "core.layout",
    "pack": "core.layout",
    "unpack": "core.layout",
    "auprc": "core.metrics",
    "auroc": "core.metrics",
    "localization": "core.metrics",
    "scan_level": "core.metrics",
    "METHODS": "core.methods",
    "Prediction": "core.prediction",
    "build_model": "core.methods",
    "UserError": "errors",
    "SliceFinder": "training.slice_finder",
}

__all__ = [
    "DIVERGENCES",
    "METHODS",
    "NEGATIVES",
    "Bag",
    "Bags",
    "LabelGuidance",
    "Layout",
    "NormalGuidance",
    "Prediction",
    "SliceFinder",
    "UserError",
    "auprc",
    "auroc",
    "block_statistics",
    "build_model",
    "divergence",
    "find_blocks",
    "label_reference",
    "localization",
    "normal_reference",
    "pack",
    "scan_level",
    "unpack",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
