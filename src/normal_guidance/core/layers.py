"""Layers of the models: smoothing along slices, position encoding, and the two attention blocks of TransMIL.

Parameters are in torch's own modules (`nn.MultiheadAttention`, `nn.Conv1d`, `nn.LayerNorm`), so initialisation and
state dicts are torch's; the forward passes compute the same functions with far fewer operations.

Weights that multiply rows are cast to the rows' dtype: bfloat16 rows are multiplied on bfloat16 matrix units, whatever
the dtype of the parameters, and rows in the parameters' dtype need no cast.
"""

from __future__ import annotations

from functools import reduce
from math import comb
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normal_guidance.core.kernels.convolution import depthwise as ragged_depthwise
from normal_guidance.core.kernels.products import Rows, project, vmap_over_configurations, with_bias
from normal_guidance.core.kernels.scoring import project_columns, tanh_scores
from normal_guidance.core.kernels.self_attention import attend as ragged_attend
from normal_guidance.core.kernels.smoothing import smooth as ragged_smooth
from normal_guidance.core.layout import SMOOTHING_BLOCK, Layout, SlottedLayout, mirror, take_rows

Hidden = Float[Tensor, "hidden"]
Sequences = Float[Tensor, "batch length features"]
Taps = Float[Tensor, "features taps"]

WRITTEN_OUT = 256
"""The most rows for which attention keeps its matrix of weights; for more, torch's kernel saves memory."""


def linear(layer: nn.Linear, rows: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """A linear layer in the rows' dtype."""
    return F.linear(rows, layer.weight.to(rows.dtype), layer.bias.to(rows.dtype))


def matvec(
    matrix: Float[Tensor, "*parts rows columns"], vector: Float[Tensor, "*parts columns"]
) -> Float[Tensor, "*parts rows"]:
    """Matrix times vector.  A compiler fuses it with other work on the matrix; without a compiler BLAS does it."""
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return (matrix * vector[..., None, :]).sum(-1)
    return (matrix.to(vector.dtype) @ vector[..., None]).squeeze(-1)


def hidden_scores(layer: nn.Linear, vector: Hidden, rows: Rows, layout: Layout) -> Float[Tensor, "rows"]:
    """ABMIL's score of every row, v . tanh(W x + b), in the vector's dtype."""
    if isinstance(layout, SlottedLayout):
        return tanh_scores(project_columns(rows, layer.weight.to(rows.dtype)), layer.bias, vector)
    return matvec(torch.tanh(linear(layer, rows)).to(vector.dtype), vector)


def projected_scores(
    projected: Float[Tensor, "rows hidden"], bias: Hidden, vector: Hidden, layout: Layout
) -> Float[Tensor, "rows"]:
    """`hidden_scores` of rows that are projected already."""
    if isinstance(layout, SlottedLayout):
        return tanh_scores(projected.mT, bias, vector)
    return matvec(torch.tanh(projected + bias).to(vector.dtype), vector)


class GatedScores(nn.Module):
    r"""Gated attention's scores of rows, one for each head: $w_k^\top(\tanh(Vx + b) \odot \sigma(Ux + d)) + c_k$."""

    # Reference: Ilse, Tomczak, Welling, "Attention-based Deep Multiple Instance Learning", 2018.

    def __init__(self, features: int, hidden: int = 128, heads: int = 1) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.gate = nn.Linear(features, hidden)
        self.score = nn.Linear(hidden, heads)

    def forward(self, rows: Rows) -> Float[Tensor, "heads rows"]:
        gated = torch.tanh(linear(self.hidden, rows)) * torch.sigmoid(linear(self.gate, rows))
        return (F.linear(gated.to(self.score.weight.dtype), self.score.weight) + self.score.bias).mT


class Sm(nn.Module):
    r"""The smooth operator: T steps of $g \leftarrow (1-\alpha)h + \alpha A g$ from $g = h$ along the chain."""

    # With A = D^-1 A' row-normalised, T steps are one convolution of the mirrored slices by a symmetric kernel of 2T +
    # 1 taps. Sm(h) W = Sm(h W): smooth the few projected columns, not the 768 features.  Reference: Castro-Macías et
    # al., "Sm: enhanced localization in Multiple Instance Learning", 2024.

    walks: Tensor
    band: Tensor

    def __init__(self, steps: int = 10) -> None:
        super().__init__()
        self.steps = steps
        self.raw_alpha = nn.Parameter(torch.zeros(()))  # sigmoid(0) = .5
        walks = torch.zeros(steps + 1, 2 * steps + 1, dtype=torch.float64)
        for t in range(steps + 1):  # row t: the probabilities of -T to T after t random steps of +-1
            for ups in range(t + 1):
                walks[t, steps + 2 * ups - t] = comb(t, ups) / 2**t
        self.register_buffer("walks", walks, persistent=False)
        self.register_buffer("band", _band(SMOOTHING_BLOCK, 2 * steps + 1), persistent=False)

    def kernel(self) -> Float[Tensor, "taps"]:
        """The symmetric kernel of 2T + 1 taps, which sums to one."""
        alpha = torch.sigmoid(self.raw_alpha)
        power = alpha ** torch.arange(self.steps + 1, device=alpha.device, dtype=alpha.dtype)
        last = torch.arange(self.steps + 1, device=alpha.device) == self.steps
        return torch.where(last, power, (1 - alpha) * power) @ self.walks.to(alpha.dtype)

    def forward(self, rows: Rows, layout: Layout) -> Rows:
        """Rows smoothed within each bag."""
        kernel = self.kernel()
        if isinstance(layout, SlottedLayout):
            return ragged_smooth(rows, kernel, layout.starts, layout.lengths, layout.longest)
        if layout.bags == 1 and torch.compiler.is_exporting():  # without blocks: the graph would fix their number
            positions = torch.arange(-self.steps, layout.longest + self.steps, device=rows.device)
            mirrored = take_rows(rows, mirror(positions, layout.lengths)).T[:, None]
            return F.conv1d(mirrored, kernel.to(rows.dtype)[None, None]).squeeze(1).T
        read, write = layout.windows(halo=self.steps)
        matrix, (reach, blocks) = self.band.to(kernel.dtype) @ kernel, read.shape
        window = take_rows(rows, read).reshape(reach, blocks * rows.shape[1])
        smooth = (matrix @ window.to(matrix.dtype)).reshape(SMOOTHING_BLOCK * blocks, rows.shape[1])
        return take_rows(smooth, write)

    def first_row(self, layout: Layout) -> Float[Tensor, "bags reach"]:
        """Row 0 of the operator: the weights of each bag's first T + 1 rows in its smoothed row 0."""
        kernel = self.kernel()
        offset = torch.arange(-self.steps, self.steps + 1, device=kernel.device)
        row = mirror(offset.expand(layout.bags, -1), layout.lengths[:, None])
        reached = row[:, :, None] == torch.arange(self.steps + 1, device=row.device)
        return (reached.to(kernel.dtype) * kernel[:, None]).sum(1)


def _band(block: int, taps: int) -> Float[Tensor, "block window taps"]:
    """Entry (i, j, k) is 1 where tap k stands at row i, column j of the banded matrix of one block."""
    tap = torch.arange(block + taps - 1) - torch.arange(block)[:, None]
    return (tap[:, :, None] == torch.arange(taps)).to(torch.float64)


class PPEG(nn.Module):
    r"""Pyramidal position encoding: $x + \sum_k \mathrm{conv}_k(x)$, depthwise along the slices, k = 3, 5, 7."""

    # The three kernels and the identity add up to one kernel of 7 taps.  The class token, row 0 of each bag, stays
    # unchanged and affects no slice.  Reference: Shao et al., "TransMIL", 2021.

    SIZES = (3, 5, 7)

    def __init__(self, features: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(features, features, size, padding=size // 2, groups=features) for size in self.SIZES
        )

    def forward(self, tokens: Rows, layout: Layout) -> Rows:
        """Tokens with position encoding; `layout` counts the class token."""
        weight, bias = self._merged()
        if isinstance(layout, SlottedLayout):
            return ragged_depthwise(tokens, weight, bias, layout.first, layout.lengths - 1, layout.longest - 1)
        weight, bias = weight.to(tokens.dtype), bias.to(tokens.dtype)
        if layout.sizes is None:
            padded = tokens.view(layout.bags, layout.longest, -1)
            slices = padded[:, 1:] * layout.mask[:, 1:, None]
            encoded = _depthwise(slices, weight, bias)
            return torch.cat([padded[:, :1], encoded], dim=1).flatten(0, 1)
        # One long sequence with zeros between the bags, so that no tap reaches into a neighbour.
        gap = tokens.new_zeros(max(self.SIZES) // 2, tokens.shape[1])
        bags = [bag.split([1, len(bag) - 1]) for bag in tokens.split(layout.sizes)]
        sequence = torch.cat([piece for _, slices in bags for piece in (slices, gap)])
        encoded = _depthwise(sequence[None], weight, bias)[0]
        pieces = encoded.split([size for n in layout.sizes for size in (n - 1, len(gap))])[::2]
        return torch.cat([piece for (token, _), slices in zip(bags, pieces, strict=True) for piece in (token, slices)])

    def _merged(self) -> tuple[Taps, Float[Tensor, "features"]]:
        """The sum of the identity and the three kernels, and the sum of their biases."""
        widest = max(self.SIZES)
        kernels: list[Tensor] = []
        biases: list[Tensor] = []
        for conv in self.convs:
            assert isinstance(conv, nn.Conv1d)
            assert conv.bias is not None
            margin = (widest - conv.kernel_size[0]) // 2
            kernels.append(F.pad(conv.weight.squeeze(1), (margin, margin)))
            biases.append(conv.bias)
        weight, bias = reduce(add, kernels), reduce(add, biases)
        identity = (torch.arange(widest, device=weight.device) == widest // 2).to(weight.dtype)
        return weight + identity, bias


def _depthwise(sequences: Sequences, weight: Taps, bias: Float[Tensor, "features"]) -> Sequences:
    """Depthwise convolution along `length`, features last."""
    # In 2-D the tensor is already in channels-last order: on the CPU ten times faster than `conv1d` (2.7 for 29 ms).
    image = sequences[:, :, None].permute(0, 3, 1, 2)
    kernel = weight[:, None, :, None]
    encoded = F.conv2d(image, kernel, bias, padding=(weight.shape[1] // 2, 0), groups=weight.shape[0])
    return encoded.permute(0, 2, 3, 1).squeeze(2)


class AttentionBlock(nn.Module):
    """The parameters of one transformer block without MLP, x + MHA(LN(x)), and its two parts."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(features)
        self.attention = nn.MultiheadAttention(features, heads, batch_first=True)

    def normalize(self, rows: Rows) -> Rows:
        """LayerNorm without scale and shift."""
        return F.layer_norm(rows, (rows.shape[-1],), eps=self.norm.eps)

    def folded_projection(self) -> tuple[Float[Tensor, "three_features features"], Float[Tensor, "three_features"]]:
        """Weight and bias of q, k, v on `normalize`d rows n: W (γ n + β) + b = (W γ) n + (W β + b)."""
        # n then depends on no parameters: features without a gradient need none through the projection either (a third
        # of its work), and configurations trained together share n.  This pays off with many rows.
        weight, bias = self.attention.in_proj_weight, self.attention.in_proj_bias
        assert weight is not None
        assert bias is not None
        # One copy of scale and shift for each head: their gradients are then summed head by head first, in parallel,
        # where one long sum for each feature would leave a GPU idle.
        parts = weight.view(3 * self.heads, -1, weight.shape[1])
        scale, shift = (vector.expand(len(parts), -1) for vector in (self.norm.weight, self.norm.bias))
        return (parts * scale[:, None]).flatten(0, 1), bias + matvec(parts, shift).flatten()


class SelfAttention(nn.Module):
    r"""AttentionBlock 1: softmax attention among a bag's class token and slices, $\mathrm{MHA}(\mathrm{LN}(x))$."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.block = AttentionBlock(features, heads)

    def forward(
        self, token: Float[Tensor, "1 features"], rows: Rows, layout: Layout, tokens: Layout
    ) -> Float[Tensor, "tokens features"]:
        """The output of MHA for the rows of `tokens`, with the class token first in each bag."""
        n, weight, bias = self.block.normalize(rows), *self.block.folded_projection()
        weight, bias = weight.to(rows.dtype), bias.to(rows.dtype)
        projected_token = matvec(weight, self.block.normalize(token)[0].to(rows.dtype)) + bias
        if isinstance(layout, SlottedLayout):
            projected, out = project(*with_bias(n, weight, bias)), self.block.attention.out_proj
            places = (layout.first, layout.lengths, self.block.heads, layout.longest)
            joined = ragged_attend(projected, projected_token, *places)
            return project(joined, out.weight.to(n.dtype)) + out.bias.to(n.dtype)
        projected = F.linear(n, weight, bias)
        joined = attend(layout.prepend(projected_token[None], projected), tokens, self.block.heads)
        return linear(self.block.attention.out_proj, joined)


def attend(qkv: Float[Tensor, "rows three_features"], layout: Layout, heads: int) -> Rows:
    """Multi-head attention within each bag, softmax(q k^T / sqrt(d)) v, heads joined again; packed bags one by one."""
    if layout.sizes is None:
        q, k, v = qkv.view(layout.bags, layout.longest, 3, heads, -1).permute(2, 0, 3, 1, 4)
        # Explicit products: torch's fused kernels cannot be stacked with a shared mask (torch 2.13).
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        hidden = ~layout.mask[:, None, None]
        joined = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ v
        return joined.transpose(1, 2).flatten(2).flatten(0, 1)
    bags = [bag.view(1, len(bag), 3, heads, -1).permute(2, 0, 3, 1, 4) for bag in qkv.split(layout.sizes)]
    return torch.cat([_attention(q, k, v)[0].transpose(0, 1).flatten(1) for q, k, v in bags])


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention, with explicit products for short bags: as fast as torch's CPU kernel, and `vmap` can batch them."""
    if q.shape[-2] <= WRITTEN_OUT:
        return ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).softmax(-1) @ v
    attended: Tensor = LongAttention.apply(q, k, v)
    return attended


class LongAttention(torch.autograd.Function):
    """torch's fused attention, given stacked configurations as more bags."""

    # Its own rule for `vmap` fails on CUDA (torch 2.11): "LSE is not correctly aligned" in float32, NaN in bf16.

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            again = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            return torch.autograd.grad(F.scaled_dot_product_attention(*again), again, gradient)

    vmap = staticmethod(vmap_over_configurations(F.scaled_dot_product_attention, stacked=3))


class ClassAttention(nn.Module):
    """AttentionBlock 2, computed for the class token only: its multi-head attention output and its attention row."""

    # Values are pooled before W_v, so a slice costs 4HM operations instead of 8M^2.  With Sm after this block, Sm's
    # first row mixes the attention of the next T rows before pooling: exact, since all behind the softmax is linear and
    # Sm's weights sum to one.

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.block = AttentionBlock(features, heads)

    def forward(
        self, tokens: Rows, layout: Layout, mix: Float[Tensor, "bags queries"] | None = None
    ) -> tuple[Float[Tensor, "bags features"], Float[Tensor, "bags heads longest"]]:
        """The output of MHA for row 0 (or the rows mixed by `mix`), and log-attention of row 0 with its own entry."""
        heads, features = self.block.heads, tokens.shape[1]
        width = features // heads
        weight, bias = self.block.attention.in_proj_weight, self.block.attention.in_proj_bias
        assert weight is not None
        assert bias is not None
        w_q, w_k, w_v = weight.split(features)
        b_q, _, b_v = bias.split(features)  # the keys' bias adds a constant to a row, which softmax ignores
        scale, shift = self.block.norm.weight, self.block.norm.bias  # not folded, as there are few rows
        n = self.block.normalize(tokens)

        count = 1 if mix is None else mix.shape[1]
        first = layout.take_first(n)[:, None] if mix is None else take_rows(n, layout.first_rows(count))
        first = (first * scale + shift).to(weight.dtype)
        q = layout.project(first.flatten(0, 1), w_q) + b_q
        q = q.to(weight.dtype).reshape(-1, heads, width)
        w_k, w_v = (w.view(heads, width, features) for w in (w_k, w_v))
        u = torch.einsum("bhd,hdm->bhm", q, w_k).reshape(layout.bags, count * heads, features) * scale * width**-0.5
        scores = layout.dot(u.to(n.dtype).contiguous(), n)  # without shift, which also adds a constant
        log_rows = layout.log_softmax(scores).reshape(layout.bags, count, heads, layout.longest)
        a = log_rows.exp()
        a = a[:, 0] if mix is None else (a * mix[:, :, None, None]).sum(1)

        pooled = layout.pool(a, n) * scale + shift  # a sums to one, mixed or not
        values = layout.project(pooled.to(weight.dtype).movedim(1, 0), w_v).movedim(0, 1).flatten(1) + b_v
        out = self.block.attention.out_proj
        return layout.project(values.to(weight.dtype), out.weight) + out.bias, log_rows[:, 0]


class SpectralLinear(nn.Linear):
    r"""A linear layer whose weight is divided by its largest singular value, $W / \sigma_1(W)$."""

    # From repeated squaring of W W^T.  Unlike torch's own parametrization it has no buffers that a forward pass
    # changes, so it can be stacked over configurations.  Singular vectors are constants to the gradient, as in torch.

    SQUARINGS = 12  # in effect W W^T to the power 2^12: a gap of .3 % between the two largest values is resolved
    SMALLEST = 1e-12  # a weight that L1 has driven to zero stays zero instead of becoming NaN

    def normalized_weight(self) -> Float[Tensor, "out_features in_features"]:
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        if self.out_features == 1:
            return weight / weight.norm().clamp_min(self.SMALLEST)
        with torch.no_grad():
            gram = weight @ weight.T
            for number in range(self.SQUARINGS):
                if number % 3 == 0:  # often enough: the largest eigenvalue, at least n**-.5 then, does not vanish
                    gram = gram / gram.norm().clamp_min(torch.finfo(gram.dtype).tiny)
                gram = gram @ gram
            # Every column is now a multiple of the eigenvector of the largest eigenvalue: take the longest.
            longest = torch.arange(len(gram), device=gram.device) == gram.diagonal().argmax()
            u = F.normalize(gram @ longest.to(gram.dtype), dim=0)
            v = F.normalize(weight.T @ u, dim=0)
        sigma = torch.dot(u, weight @ v)
        return weight / sigma.clamp_min(self.SMALLEST)

    def forward(self, rows: Float[Tensor, "*rows in_features"]) -> Float[Tensor, "*rows out_features"]:
        return F.linear(rows, self.normalized_weight().to(rows.dtype), self.bias.to(rows.dtype))
