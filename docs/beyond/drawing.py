"""The scans of a seed and variant, drawn once and kept while they are asked for again."""

from __future__ import annotations

from functools import lru_cache

from beyond.points import Protocol
from normal_guidance.core.bags import Bags
from normal_guidance.core.models import FEATURES
from normal_guidance.simulate.semi_synthetic import SEEDS, VARIANTS, SemiSynthetic, semi_synthetic, shifted_mean

TRIAL_SIZES = (640, 160, 160)
"""Scans of a trial that says only how many features it has."""


@lru_cache(maxsize=1)  # a seed of the widest variant takes 6.7 GB
def drawn(seed: int, variant: str, protocol: Protocol) -> SemiSynthetic:
    """All three sets; in a trial of the protocol's sizes, whatever the variant's are."""
    if not protocol.is_trial:
        return semi_synthetic(seed, variant)
    return SemiSynthetic(*(_trial(seed, variant, part, protocol) for part in SemiSynthetic._fields))


def _trial(seed: int, variant: str, part: str, protocol: Protocol) -> Bags:
    number, options = SemiSynthetic._fields.index(part), VARIANTS[variant].drawn(part)
    features = (protocol.features or FEATURES) * (options.pop("features", FEATURES) // FEATURES)
    sizes = protocol.sizes or TRIAL_SIZES
    return shifted_mean(sizes[number], SEEDS[seed][number], features=features, **options)
