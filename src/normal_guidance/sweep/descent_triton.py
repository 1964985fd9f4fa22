"""`descend` on CUDA: two launches for each parameter, which read weights, gradients and momenta as rarely as possible.

The first pass measures each configuration's gradient and weights, in parts that one small kernel adds up in a fixed
order.  The second takes the step.  With torch's own operations the same step makes fourteen passes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from normal_guidance.sweep.config import OptimizerName
from normal_guidance.sweep.stack import ADAM_EPSILON, BETA_2, CLIP_EPSILON, SQUARE, adamw_rates

# Kernels are written in Triton's language, so only their constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"


BLOCK = 4096  # numbers of a parameter that a program handles
SUM_BLOCK = 1024  # parts that are added up at a time


def descend(
    parameters: Mapping[str, Tensor],
    gradients: Sequence[Tensor],
    momenta: Mapping[str, Tensor],
    *,
    lr: Float[Tensor, "configs"],
    l1: Float[Tensor, "configs"],
    momentum: float,
    clip_norm: float,
    unpenalized: Collection[str],
    copies: Mapping[str, Tensor],
    optimizer: OptimizerName = "sgd",
    weight_decay: float = 0.0,
) -> Float[Tensor, "configs"]:
    """`stack.descend` in two passes."""
    configs = len(lr)
    sizes = [theta[0].numel() for theta in parameters.values()]
    starts = [0, *accumulate(triton.cdiv(size, BLOCK) for size in sizes)]
    parts = torch.empty(configs, starts[-1], 2, dtype=torch.float32, device=lr.device)
    scale, penalty = torch.empty_like(lr), torch.empty_like(lr)
    full = [gradient.contiguous() for gradient in gradients]
    adamw = optimizer == "adamw"
    rate, root = adamw_rates(momenta, lr, momentum) if adamw else (lr, lr)
    with torch.cuda.device_of(lr):
        for (name, theta), gradient, size, start in zip(parameters.items(), full, sizes, starts, strict=False):
            grid = (triton.cdiv(size, BLOCK), configs)
            _measure_kernel[grid](
                theta, gradient, l1, parts, size, start, starts[-1], PENALIZED=name not in unpenalized, BLOCK=BLOCK
            )
        _add_up_kernel[(configs,)](parts, l1, scale, penalty, starts[-1], clip_norm, CLIP_EPSILON, BLOCK=SUM_BLOCK)
        for (name, theta), gradient, size in zip(parameters.items(), full, sizes, strict=True):
            grid = (triton.cdiv(size, BLOCK), configs)
            copy = copies.get(name)
            _step_kernel[grid](
                theta,
                gradient,
                momenta[name],
                momenta[name + SQUARE] if adamw else theta,
                theta if copy is None else copy,
                l1,
                lr,
                rate,
                root,
                scale,
                size,
                momentum,
                BETA_2,
                ADAM_EPSILON,
                weight_decay,
                PENALIZED=name not in unpenalized,
                DECAYED=weight_decay > 0 and name not in unpenalized,
                ADAMW=adamw,
                COPIED=copy is not None,
                BLOCK=BLOCK,
            )
    return penalty


@triton.jit
@no_type_check
def _penalized_gradient(theta, gradient, offset, inside, strength, PENALIZED: tl.constexpr):
    """The weights and their gradient with that of the L1 term, alpha/2 sign(theta)."""
    weight = tl.load(theta + offset, mask=inside, other=0.0)
    slope = tl.load(gradient + offset, mask=inside, other=0.0).to(tl.float32)
    if PENALIZED:
        slope += 0.5 * strength * tl.where(weight > 0, 1.0, tl.where(weight < 0, -1.0, 0.0))
    return weight, slope


@triton.jit
@no_type_check
def _measure_kernel(theta, gradient, l1, parts, size, start, all_parts, PENALIZED: tl.constexpr, BLOCK: tl.constexpr):
    """One part of the gradient's square and of the weights' sum of absolute values."""
    config = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight, slope = _penalized_gradient(
        theta, gradient, config * size + number, number < size, tl.load(l1 + config), PENALIZED
    )
    part = parts + (config * all_parts + start + tl.program_id(0)) * 2
    tl.store(part, tl.sum(slope * slope, 0))
    tl.store(part + 1, tl.sum(tl.abs(weight), 0) if PENALIZED else 0.0)


@triton.jit
@no_type_check
def _add_up_kernel(parts, l1, scale, penalty, all_parts, clip_norm, epsilon, BLOCK: tl.constexpr):
    """The factor that clips a configuration's gradient, and the value of its L1 term."""
    config = tl.program_id(0).to(tl.int64)
    squares, sizes = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, all_parts, BLOCK):
        number = start + tl.arange(0, BLOCK)
        part = parts + (config * all_parts + number) * 2
        squares += tl.load(part, mask=number < all_parts, other=0.0)
        sizes += tl.load(part + 1, mask=number < all_parts, other=0.0)
    tl.store(scale + config, tl.minimum(clip_norm / (tl.sqrt(tl.sum(squares, 0)) + epsilon), 1.0))
    tl.store(penalty + config, 0.5 * tl.load(l1 + config) * tl.sum(sizes, 0))


@triton.jit
@no_type_check
def _step_kernel(
    theta,
    gradient,
    momenta,
    squares,
    copy,
    l1,
    lr,
    rate,
    root,
    scale,
    size,
    momentum,
    beta_2,
    epsilon,
    weight_decay,
    PENALIZED: tl.constexpr,
    DECAYED: tl.constexpr,
    ADAMW: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The step of one part of a parameter, with its momenta and its copy."""
    config = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset, inside = config * size + number, number < size
    weight, slope = _penalized_gradient(theta, gradient, offset, inside, tl.load(l1 + config), PENALIZED)
    moved = momentum * tl.load(momenta + offset, mask=inside, other=0.0)
    if ADAMW:
        slope *= tl.load(scale + config)
        moved += (1.0 - momentum) * slope
        square = beta_2 * tl.load(squares + offset, mask=inside, other=0.0) + (1.0 - beta_2) * slope * slope
        tl.store(squares + offset, square, mask=inside)
        if DECAYED:
            weight -= tl.load(lr + config) * weight_decay * weight
        weight -= tl.load(rate + config) * moved / (tl.sqrt(square) / tl.load(root + config) + epsilon)
    else:
        moved += tl.load(scale + config) * slope
        if DECAYED:
            moved += weight_decay * weight
        weight -= tl.load(lr + config) * moved
    tl.store(momenta + offset, moved, mask=inside)
    tl.store(theta + offset, weight, mask=inside)
    if COPIED:
        tl.store(copy + offset, weight.to(copy.dtype.element_ty), mask=inside)
