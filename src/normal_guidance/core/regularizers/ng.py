"""Normal Guidance, the paper's own: `core.guidance` has it."""

from __future__ import annotations

from normal_guidance.core.attention_term import Regularizer
from normal_guidance.core.guidance import NormalGuidance

REGULARIZER = Regularizer(
    "ng",
    "Normal Guidance",
    NormalGuidance,
    "Attention has the shape of a bell, wherever it lies.",
    options=("divergence", "renormalize", "modes", "negatives", "least_width"),
)
