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
    from normal_guidance.clinic.predict.new_scans import NotPredicted as NotPredicted
    from normal_guidance.clinic.predict.new_scans import find_scans as find_scans
    from normal_guidance.clinic.predict.predicting import PredictOptions as PredictOptions
    from normal_guidance.clinic.predict.predicting import predict_features as predict_features
    from normal_guidance.clinic.predict.predicting import predict_found as predict_found
    from normal_guidance.clinic.predict.scan_prediction import ScanPrediction as ScanPrediction
    from normal_guidance.clinic.results.result_folder import prediction_json as prediction_json
    from normal_guidance.clinic.results.result_folder import write_predictions as write_predictions
    from normal_guidance.clinic.results.result_folder import write_scan as write_scan
    from normal_guidance.fit.bundle import Bundle as Bundle
    from normal_guidance.fit.bundle import bundle_run as bundle_run
    from normal_guidance.fit.bundle import load_bundle as load_bundle
    from normal_guidance.fit.bundle import write_bundle as write_bundle
    from normal_guidance.front.predicted import predict as predict

__all__, __getattr__, __dir__ = lazy_names(__name__)
