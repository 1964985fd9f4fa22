"""Numbers of any library become tensors; packed rows against plain Python lists: bags, places and sums."""

from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import as_tensor, sum_per_bag


@pytest.mark.parametrize(
    "numbers",
    [
        [0.0, 1.0],
        [np.float64(0.0), 1.0],
        [np.array(0.0), np.array(1.0)],
        [torch.tensor(0.0), torch.tensor(1.0)],
        [torch.tensor(0.0), 1.0],
    ],
)
def test_single_numbers_of_any_library(numbers):
    assert as_tensor(numbers, "values").tolist() == [0.0, 1.0]
    assert as_tensor([numbers, numbers], "values").tolist() == [[0.0, 1.0]] * 2


def test_a_list_of_tensors_keeps_its_gradient():
    weight = torch.ones(2, requires_grad=True)
    as_tensor([weight, weight], "values").sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("values", [[[1, 2], [3]], [np.ones(2), np.ones(3)], [torch.ones(2), 1.0]])
def test_rows_of_different_length_are_refused(values):
    with pytest.raises(UserError, match="rows differ in length"):
        as_tensor(values, "values")


LENGTHS = st.lists(st.integers(0, 9), max_size=8)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_sums_per_bag(lengths: list[int], random: Random) -> None:
    values = [[random.randrange(-(2**40), 2**40) for _ in range(length)] for length in lengths]
    packed = torch.tensor([value for bag in values for value in bag], dtype=torch.int64)
    assert sum_per_bag(packed, torch.tensor(lengths, dtype=torch.int64)).tolist() == [sum(bag) for bag in values]
