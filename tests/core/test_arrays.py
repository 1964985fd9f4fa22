"""Lists become tensors whatever their numbers are: of Python, numpy or torch, with their gradient."""

import numpy as np
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import as_tensor


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


def test_a_list_of_arrays_is_stacked():
    assert as_tensor([np.ones(2), np.zeros(2, np.float32)], "values").tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_a_list_of_tensors_keeps_its_gradient():
    weight = torch.ones(2, requires_grad=True)
    as_tensor([weight, weight], "values").sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("values", [[[1, 2], [3]], [np.ones(2), np.ones(3)], [torch.ones(2), 1.0]])
def test_rows_of_different_length_are_refused(values):
    with pytest.raises(UserError, match="rows differ in length"):
        as_tensor(values, "values")
