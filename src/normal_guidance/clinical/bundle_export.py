"""A bundle as one file for other programs: from a scan's features to what `nguide predict` gives."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normal_guidance.clinical.bundle import Bundle
from normal_guidance.clinical.scan_prediction import attention_per_head
from normal_guidance.export import predict_one, write_graph
from normal_guidance.features.store_files import DTYPES

OUTPUTS = ("probability", "logit", "attention")


class BundleGraph(nn.Module):
    """The findings' probabilities, logits `(findings,)` and attention `(findings, slices)` of one scan's features.

    Features are rounded as those of the training scans were.  Attention is that of `nguide predict`: the heads' mean,
    and it sums to one.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self.dtype = DTYPES[bundle.dtype]
        self.models = nn.ModuleList(one.model for one in bundle.each)
        self.calibrations = [one.operation.calibration for one in bundle.each]

    def forward(self, features: Float[Tensor, "slices features"]) -> tuple[Tensor, Tensor, Tensor]:
        rows = features.to(self.dtype).float()
        found = [predict_one(model, rows) for model in self.models]
        attention = [attention_per_head(one.log_attention[0].double()).mean(0) for one in found]
        odds = [
            line.slope * one.logit.double() + line.intercept for one, line in zip(found, self.calibrations, strict=True)
        ]
        return (
            torch.cat(odds).sigmoid().float(),
            torch.cat([one.logit for one in found]),
            torch.stack(attention).float(),
        )


def export_bundle(bundle: Bundle, path: str | Path) -> Path:
    """Write a bundle as ONNX or as an exported program, by the ending of the path, and prove that the file equals it.

    The file takes the features of one scan, made by the encoder that its metadata names, and gives `OUTPUTS`.  Whether
    the model was made for a scan, key slices and intervals are `nguide predict`'s matter.
    """
    return write_graph(BundleGraph(bundle), path, bundle.features, OUTPUTS, metadata_of(bundle))


def metadata_of(bundle: Bundle) -> dict[str, str]:
    """What the file says of itself; lists are JSON, with one entry for each finding."""
    return {
        "method": bundle.method,
        "fingerprint": bundle.identity.fingerprint,
        "encoder": "" if bundle.encoder is None else bundle.encoder.name,
        "encoder_fingerprint": "" if bundle.encoder is None else bundle.encoder.fingerprint,
        "preprocessing": json.dumps(None if bundle.preprocessing is None else bundle.preprocessing.to_dict()),
        "expects": str(bundle.expects),
        "findings": json.dumps([None if one.finding is None else one.finding.name for one in bundle.each]),
        "thresholds": json.dumps([one.threshold for one in bundle.each]),
        "caution": "Research software, not a medical device.",
    }
