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
    from normal_guidance.base.errors import UserError as UserError
    from normal_guidance.clinic.predict.predicting import PredictOptions as PredictOptions
    from normal_guidance.core.bags import Bag as Bag
    from normal_guidance.core.bags import Bags as Bags
    from normal_guidance.core.bags import collate as collate
    from normal_guidance.core.guidance import DIVERGENCES as DIVERGENCES
    from normal_guidance.core.guidance import NEGATIVES as NEGATIVES
    from normal_guidance.core.guidance import LabelGuidance as LabelGuidance
    from normal_guidance.core.guidance import NormalGuidance as NormalGuidance
    from normal_guidance.core.guidance import divergence as divergence
    from normal_guidance.core.guidance import label_reference as label_reference
    from normal_guidance.core.guidance import normal_reference as normal_reference
    from normal_guidance.core.layout import Layout as Layout
    from normal_guidance.core.layout import pack as pack
    from normal_guidance.core.layout import unpack as unpack
    from normal_guidance.core.methods import METHODS as METHODS
    from normal_guidance.core.methods import build_model as build_model
    from normal_guidance.core.metrics import auprc as auprc
    from normal_guidance.core.metrics import auroc as auroc
    from normal_guidance.core.metrics import localization as localization
    from normal_guidance.core.metrics import scan_level as scan_level
    from normal_guidance.core.prediction import Prediction as Prediction
    from normal_guidance.fit.export import export_model as export_model
    from normal_guidance.fit.hub import pull_from_hub as pull_from_hub
    from normal_guidance.fit.hub import push_to_hub as push_to_hub
    from normal_guidance.fit.slice_finder import SliceFinder as SliceFinder
    from normal_guidance.front.fitted_model import fit as fit
    from normal_guidance.front.predicted import predict as predict
    from normal_guidance.scans.features.store import open_store as open_store
    from normal_guidance.study import figures as figures
    from normal_guidance.sweep.config import Config as Config
    from normal_guidance.sweep.config import Execution as Execution
    from normal_guidance.sweep.config import grid as grid
    from normal_guidance.sweep.lightning import GuidanceCallback as GuidanceCallback
    from normal_guidance.sweep.loop import predict_bags as predict_bags
    from normal_guidance.sweep.loop import train_model as train_model
    from normal_guidance.sweep.sweep import sweep as sweep

__all__, __getattr__, __dir__ = lazy_names(__name__)

if missing_extras("lightning"):
    __all__.remove("GuidanceCallback")  # for `import *` and dir(); the name itself says how to install lightning
