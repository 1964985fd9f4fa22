"""The bare matrix products that one training step cannot avoid, as tables of shapes, and how long they take.

Only products of matrices count, in the cheapest known order: features are frozen, so nothing flows back into them;
TransMIL's second block is needed for the class token alone.  Activations, norms, softmax, the optimiser, Sm and
guidance are not in the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

HIDDEN = 128
HEADS = 8


class Product(NamedTuple):
    """One product `(batch, m, k) @ (batch, k, n)`."""

    what: str
    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def flop(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n


def pooling(lengths: Sequence[int], M: int) -> list[Product]:
    """Mean and max: one pass over the data, then logistic regression on one row per bag."""
    N, B = sum(lengths), len(lengths)
    return [
        Product("pooling: 1^T X", 1, N, M),
        Product("logit: Z w", B, M, 1),
        Product("dw = dlogit^T Z", 1, B, M),
    ]


def attention_pooling(lengths: Sequence[int], M: int) -> list[Product]:
    """ABMIL, NG and SmAP: the hidden layer, and the evidence w . h_j that is pooled instead of h_j."""
    N = sum(lengths)
    return [
        Product("hidden: X W1", N, M, HIDDEN),
        Product("dW1 = dH^T X", HIDDEN, N, M),
        Product("evidence: X w", N, M, 1),
        Product("dw = de^T X", 1, N, M),
    ]


def transformer(lengths: Sequence[int], M: int) -> list[Product]:
    """TransMIL, SmTP and MHNG.  The class token is projected once for all bags and is a row of every bag after that."""
    N, B, d = sum(lengths), len(lengths), M // HEADS
    products = [
        # Block 1, all rows.
        Product("qkv: X W", N + 1, M, 3 * M),
        Product("dW = dqkv^T X", 3 * M, N + 1, M),
        Product("out: O W", N + B, M, M),
        Product("dO = dY W^T", N + B, M, M),
        Product("dW = dY^T O", M, N + B, M),
        # Block 2, one row per bag: query, query in key space, value of the pooled rows, output.
        Product("q", B, M, M),
        Product("q: input gradient", B, M, M),
        Product("q: weight gradient", M, B, M),
        Product("u = Wk^T q", B, d, M, HEADS),
        Product("u: input gradient", B, M, d, HEADS),
        Product("u: weight gradient", d, B, M, HEADS),
        Product("v = Wv z", B, M, d, HEADS),
        Product("v: input gradient", B, d, M, HEADS),
        Product("v: weight gradient", d, B, M, HEADS),
        Product("out", B, M, M),
        Product("out: input gradient", B, M, M),
        Product("out: weight gradient", M, B, M),
    ]
    for T in (length + 1 for length in lengths):
        products += [
            # Block 1, per bag and head.
            Product("Q K^T", T, d, T, HEADS),
            Product("P V", T, T, d, HEADS),
            Product("dV = P^T dO", T, T, d, HEADS),
            Product("dP = dO V^T", T, d, T, HEADS),
            Product("dQ = dS K", T, T, d, HEADS),
            Product("dK = dS^T Q", T, T, d, HEADS),
            # Block 2, per bag: all heads' class-token queries against all rows, and the pooled rows.
            Product("scores: u X^T", HEADS, M, T),
            Product("du = ds X", HEADS, T, M),
            Product("dX = ds^T u", T, HEADS, M),
            Product("pooled: a X", HEADS, T, M),
            Product("da = dz X^T", HEADS, M, T),
            Product("dX = a^T dz", T, HEADS, M),
        ]
    return products


FLOORS: dict[str, Callable[[Sequence[int], int], list[Product]]] = {
    "max": pooling,
    "mean": pooling,
    "abmil": attention_pooling,
    "smap": attention_pooling,
    "ng": attention_pooling,
    "transmil": transformer,
    "smtp": transformer,
    "mhng": transformer,
}


def gigaflop(products: Sequence[Product]) -> float:
    """Work of the products."""
    return sum(product.flop for product in products) / 1e9


def runner(products: Sequence[Product]) -> Callable[[], None]:
    """A function that runs the products into preallocated, contiguous matrices; equal shapes share their memory."""
    memory: dict[tuple[str, int, int, int], Tensor] = {}

    def matrix(role: str, batch: int, rows: int, columns: int) -> Tensor:
        key = (role, batch, rows, columns)
        if key not in memory:
            memory[key] = torch.randn(batch, rows, columns)
        return memory[key]

    calls = []
    for _, m, k, n, batch in products:
        left, right = matrix("operand", batch, m, k), matrix("operand", batch, k, n)
        calls.append((left, right, matrix("result", batch, m, n)))

    def run() -> None:
        for left, right, result in calls:
            if len(left) == 1:
                torch.mm(left[0], right[0], out=result[0])
            else:
                torch.bmm(left, right, out=result)

    return run
