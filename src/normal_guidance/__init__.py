"""Find the slices that matter in a 3D medical scan when only the whole scan carries a label.

    import normal_guidance as ng

    a model with nothing to choose    ng.fit, ng.predict (folders, as `nguide fit` and `nguide predict`); ng.SliceFinder
    scans                             ng.Bag, ng.Bags, ng.open_store, ng.collate
    your own training loop            ng.NormalGuidance, ng.GuidanceCallback (Lightning)
    the paper's methods               ng.METHODS, ng.build_model, ng.Config, ng.train_model, ng.predict_bags
    many configurations at once       ng.grid, ng.sweep, ng.Execution
    models for other programs         ng.export_model (ONNX, torch.export), ng.push_to_hub, ng.pull_from_hub
    measures and pictures             ng.localization, ng.scan_level, ng.auroc, ng.auprc, ng.figures

The names are imported at first use, so that `nguide --help` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normal_guidance.base.system import lazy_names, missing_extras

__version__ = "0.3.0.dev0"

if TYPE_CHECKING:
    from normal_guidance.base.errors import UserError
    from normal_guidance.clinic.predict.predicting import PredictOptions
    from normal_guidance.core.bags import Bag, Bags, collate
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
    from normal_guidance.fit.export import export_model
    from normal_guidance.fit.hub import pull_from_hub, push_to_hub
    from normal_guidance.fit.slice_finder import SliceFinder
    from normal_guidance.front.fitted_model import fit
    from normal_guidance.front.predicted import predict
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.study import figures
    from normal_guidance.sweep.config import Config, Execution, grid
    from normal_guidance.sweep.lightning import GuidanceCallback
    from normal_guidance.sweep.loop import predict_bags, train_model
    from normal_guidance.sweep.sweep import sweep

__all__ = [
    "DIVERGENCES",
    "METHODS",
    "NEGATIVES",
    "Bag",
    "Bags",
    "Config",
    "Execution",
    "GuidanceCallback",
    "LabelGuidance",
    "Layout",
    "NormalGuidance",
    "PredictOptions",
    "Prediction",
    "SliceFinder",
    "UserError",
    "auprc",
    "auroc",
    "build_model",
    "collate",
    "divergence",
    "export_model",
    "figures",
    "fit",
    "grid",
    "label_reference",
    "localization",
    "normal_reference",
    "open_store",
    "pack",
    "predict",
    "predict_bags",
    "pull_from_hub",
    "push_to_hub",
    "scan_level",
    "sweep",
    "train_model",
    "unpack",
]

if missing_extras("lightning"):
    __all__.remove("GuidanceCallback")  # for `import *` and dir(); the name itself says how to install lightning

__getattr__, __dir__ = lazy_names(__name__, __all__)
