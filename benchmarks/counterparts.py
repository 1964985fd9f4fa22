"""torchmil's nearest counterpart of every trained method, on padded bags with a mask.

None of them has guidance, so `ng` and `mhng` are compared with the unguided model.  For TransMIL the counterpart is
`TransformerABMIL` with two full-attention layers of 8 heads and no MLP: it respects the mask and computes softmax
attention, as ours does, and it does less (no class token, no PPEG, no output projection).  torchmil's `TransMIL` takes
no mask and approximates attention by Nystrom landmarks; with its default for 768 features (384 landmarks) the head
batch was killed for memory on a machine of 24 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchmil.models import ABMIL, SmABMIL, SmTransformerABMIL, TransformerABMIL
from torchmil.nn import MaxPool, MeanPool

HEADS = 8


class PoolAndClassify(nn.Module):
    """A pool of torchmil and a linear classifier."""

    def __init__(self, pool: nn.Module, features: int) -> None:
        super().__init__()
        self.pool = pool
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return self.classifier(self.pool(features, mask)).squeeze(-1)


class Counterpart(NamedTuple):
    """How to build a model of torchmil, and whether it also wants the adjacency of the slices."""

    title: str
    build: Callable[[int], nn.Module]
    needs_adjacency: bool = False


def _transformer(features: int) -> nn.Module:
    return TransformerABMIL(
        (features,),
        transf_att_dim=features,
        transf_n_layers=2,
        transf_n_heads=HEADS,
        transf_use_mlp=False,
        transf_add_self=False,
    )


def _smooth_transformer(features: int) -> nn.Module:
    return SmTransformerABMIL(
        (features,),
        pool_spectral_norm=True,
        transf_att_dim=features,
        transf_n_layers=2,
        transf_n_heads=HEADS,
        transf_use_mlp=False,
        transf_add_self=False,
    )


_MAX = Counterpart("MaxPool + Linear", lambda features: PoolAndClassify(MaxPool(), features))
_MEAN = Counterpart("MeanPool + Linear", lambda features: PoolAndClassify(MeanPool(), features))
_ABMIL = Counterpart("ABMIL", lambda features: ABMIL((features,)))
_SM_ABMIL = Counterpart("SmABMIL", lambda features: SmABMIL((features,), spectral_norm=True), needs_adjacency=True)
_TRANSFORMER = Counterpart("TransformerABMIL", _transformer)
_SM_TRANSFORMER = Counterpart("SmTransformerABMIL", _smooth_transformer, needs_adjacency=True)

COUNTERPARTS: dict[str, Counterpart] = {
    "max": _MAX,
    "mean": _MEAN,
    "abmil": _ABMIL,
    "smap": _SM_ABMIL,
    "ng": _ABMIL,
    "transmil": _TRANSFORMER,
    "smtp": _SM_TRANSFORMER,
    "mhng": _TRANSFORMER,
}


def chain_adjacency(lengths: Sequence[int]) -> Tensor:
    """Row-normalised adjacency of each bag's chain, `(bags, longest, longest)`, sparse as torchmil's loader has it."""
    edges, weights = [], []
    for bag, length in enumerate(lengths):
        left = torch.arange(length - 1)
        rows, columns = torch.cat([left, left + 1]), torch.cat([left + 1, left])
        edges.append(torch.stack([torch.full_like(rows, bag), rows, columns]))
        inner = (rows > 0) & (rows < length - 1)
        weights.append(torch.where(inner, 0.5, 1.0))
    shape = (len(lengths), max(lengths), max(lengths))
    return torch.sparse_coo_tensor(torch.cat(edges, 1), torch.cat(weights), shape, check_invariants=True).coalesce()
