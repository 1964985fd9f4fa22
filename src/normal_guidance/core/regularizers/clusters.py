"""Uniform attention within clusters: slices that look alike should be attended alike."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.attention_term import AttentionTerm, Given, Regularizer
from normal_guidance.core.bells import Padded
from normal_guidance.core.layout import Layout, as_rows, take_rows

CLUSTERS = 8  # clusters of a bag, as in the paper; a bag with fewer slices has one for each
STEPS = 5  # steps of k-means from slices at equal distances


class ClusterUniformity(AttentionTerm):
    """Within each cluster of a bag's slices, the divergence of attention from uniform, the mean over the clusters."""

    # k-means groups the frozen embeddings from centres at equal distances, so the clusters of a bag are always the
    # same. Reference: Sharma et al., "Cluster-to-Conquer: A Framework for End-to-End Multi-Instance Learning for Whole
    # Slide Image Classification", 2021.

    in_order = True

    def values(self, log_a: Padded, layout: Layout, given: Given) -> Float[Tensor, "bags heads"]:
        if given.features is None:
            raise UserError("ClusterUniformity needs the embeddings of the slices; pass features=")
        with torch.no_grad():
            inside = cluster(given.features, layout)[:, None]  # (bags, 1, clusters, longest)
            size = inside.sum(-1)
        of_cluster = log_a[:, :, None].masked_fill(~inside, torch.finfo(log_a.dtype).min)
        log_share = torch.where(inside, of_cluster - of_cluster.logsumexp(-1, keepdim=True), 0.0)
        share = torch.where(inside, log_share.exp(), 0.0)
        divergence = (share * log_share).sum(-1) + size.clamp_min(1).to(log_a.dtype).log()
        return divergence.sum(-1) / (size > 0).sum(-1).to(log_a.dtype)


def cluster(
    features: Float[Tensor, "slices features"] | Float[Tensor, "bags longest features"], layout: Layout
) -> Bool[Tensor, "bags clusters longest"]:
    """The slices of each cluster of each bag, by k-means; some clusters may be empty."""
    rows, layout = as_rows(features, layout)
    place = torch.arange(CLUSTERS, device=rows.device)
    slices = layout.lengths[:, None]
    centres = take_rows(rows, layout.starts[:, None] + (2 * place + 1) * slices // (2 * CLUSTERS))
    inside = _nearest(centres, rows, layout)
    for _ in range(STEPS):
        size = inside.sum(-1, keepdim=True)
        mean = layout.pool(inside.to(rows.dtype) / size.clamp_min(1).to(rows.dtype), rows)
        centres = torch.where(size > 0, mean, centres)  # an empty cluster keeps its centre
        inside = _nearest(centres, rows, layout)
    return inside


def _nearest(centres: Tensor, rows: Tensor, layout: Layout) -> Bool[Tensor, "bags clusters longest"]:
    """Which slices are nearest to each centre, where x.c - |c|^2/2 is largest."""
    closeness = layout.dot(centres.contiguous(), rows) - centres.square().sum(-1, keepdim=True) / 2
    chosen = closeness.argmax(1, keepdim=True)
    return (torch.arange(CLUSTERS, device=rows.device)[:, None] == chosen) & layout.mask[:, None]


REGULARIZER = Regularizer(
    "clusters", "Cluster Uniformity", ClusterUniformity, "Slices that look alike have equal attention (C2C)."
)
