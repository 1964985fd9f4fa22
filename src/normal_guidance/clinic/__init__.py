"""New scans: predictions, key slices, and results that hospital software opens.

Example:
    >>> from normal_guidance.clinic import load_bundle, predict, write_predictions
    >>> load_bundle("run")  # the folder of a run, or of `nguide bundle`
    Traceback (most recent call last):
    normal_guidance.base.errors.UserError: run is neither a bundle (no bundle.json) nor a complete run (no report.json);
    give the folder of one

`docs/howto/predict.md` goes on from there.  The names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normal_guidance.base.system import lazy_names

if TYPE_CHECKING:
    from normal_guidance.clinic.predict.new_scans import NotPredicted, find_scans
    from normal_guidance.clinic.predict.predicting import PredictOptions, predict_features, predict_found
    from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
    from normal_guidance.clinic.results.result_folder import prediction_json, write_predictions, write_scan
    from normal_guidance.fit.bundle import Bundle, bundle_run, load_bundle, write_bundle
    from normal_guidance.front.predicted import predict

__all__ = [
    "Bundle",
    "NotPredicted",
    "PredictOptions",
    "ScanPrediction",
    "bundle_run",
    "find_scans",
    "load_bundle",
    "predict",
    "predict_features",
    "predict_found",
    "prediction_json",
    "write_bundle",
    "write_predictions",
    "write_scan",
]


__getattr__, __dir__ = lazy_names(__name__, __all__)
