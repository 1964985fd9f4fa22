"""New scans: predictions, key slices, and results that hospital software opens.

Example:
    >>> from normal_guidance.clinical import load_bundle, predict, write_predictions
    >>> load_bundle("run")  # the folder of a run, or of `nguide bundle`
    Traceback (most recent call last):
    normal_guidance.errors.UserError: run is neither a bundle (no bundle.json) nor a complete run (no report.json); give
    the folder of one

`docs/howto/predict.md` goes on from there.  The names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normal_guidance.lazy_names import lazy_names

if TYPE_CHECKING:
    from normal_guidance.clinical.bundle import Bundle, bundle_run, load_bundle, write_bundle
    from normal_guidance.clinical.fitting import FittedModel
    from normal_guidance.clinical.in_python import fit, predict
    from normal_guidance.clinical.new_features import predict_features
    from normal_guidance.clinical.new_scans import NotPredicted, find_scans
    from normal_guidance.clinical.predicting import PredictOptions, predict_found
    from normal_guidance.clinical.result_folder import prediction_json, write_predictions, write_scan
    from normal_guidance.clinical.scan_prediction import ScanPrediction

_HOME = {
    "Bundle": "bundle",
    "FittedModel": "fitting",
    "NotPredicted": "new_scans",
    "PredictOptions": "predicting",
    "ScanPrediction": "scan_prediction",
    "bundle_run": "bundle",
    "find_scans": "new_scans",
    "load_bundle": "bundle",
    "fit": "in_python",
    "predict": "in_python",
    "predict_features": "new_features",
    "predict_found": "predicting",
    "prediction_json": "result_folder",
    "write_bundle": "bundle",
    "write_predictions": "result_folder",
    "write_scan": "result_folder",
}

__all__ = [
    "Bundle",
    "FittedModel",
    "NotPredicted",
    "PredictOptions",
    "ScanPrediction",
    "bundle_run",
    "find_scans",
    "fit",
    "load_bundle",
    "predict",
    "predict_features",
    "predict_found",
    "prediction_json",
    "write_bundle",
    "write_predictions",
    "write_scan",
]


__getattr__, __dir__ = lazy_names(__name__, _HOME)
