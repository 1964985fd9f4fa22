"""Every engine of the sweep on the CPU, for the tests that compare it with a loop of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.sweep.batches import draw_orders
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.engine import Engine, PackedEngine, SlottedEngine, slot_numbers
from normal_guidance.sweep.stack import Stack


def make_engine(kind: str, configs: Sequence[Config], train: Bags, val: Bags) -> Engine:
    stack = Stack.of(configs, train.width, dtype=torch.float64)
    size = configs[0].batch_size
    if kind == "packed":
        return PackedEngine(stack, train, val, size, "float64")
    orders = iter([torch.arange(len(train.lengths))] + [order for order, _ in first_orders(train, configs)])
    slots = slot_numbers(train.lengths, size, orders, classes=2)
    return SlottedEngine(stack, train, val, size, "float64", slots, streamed=kind == "streamed")


def first_orders(train: Bags, configs: Sequence[Config]) -> list[tuple[Tensor, Tensor]]:
    orders = draw_orders(len(train.lengths), configs[0].seed)
    return [next(orders) for _ in range(configs[0].epochs)]
