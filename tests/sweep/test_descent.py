"""The step of SGD or AdamW in Triton kernels equals the one in torch; `interpreted` runs in a process of its own."""

import contextlib
import sys

import pytest
import torch
from torch import Tensor

from in_a_process import assert_script_passes, let_interpreter_loop, needs_cuda, needs_triton
from normal_guidance.sweep.stack import descend, initial_momenta

CONFIGS = 3
SHAPES = {"matrix": (CONFIGS, 130, 70), "bias": (CONFIGS, 5), "width": (CONFIGS,)}
"""The matrix takes several blocks of the kernels, and ends within one."""
STEP = {"momentum": 0.9, "clip_norm": 1.0, "unpenalized": ("width",)}
OPTIMIZERS = ({}, {"weight_decay": 0.3}, {"optimizer": "adamw"}, {"optimizer": "adamw", "weight_decay": 0.3})


def make(
    dtype: torch.dtype, device: str, optimizer: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Parameters, momenta, and a copy of the matrix if it is multiplied in another dtype."""
    generator = torch.Generator().manual_seed(1)
    parameters = {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}
    parameters["matrix"][:, 0] = 0  # L1 has no slope there
    copies = {} if dtype == torch.float32 else {"matrix": parameters["matrix"].to(dtype)}
    return parameters, initial_momenta(parameters, optimizer), copies


def largest_difference(dtype: torch.dtype, device: str = "cpu", **options: object) -> float:
    """Take three steps both ways and compare all that they change."""
    from normal_guidance.sweep import descent_triton

    rates = {"lr": torch.tensor([0.1, 0.2, 0.3]), "l1": torch.tensor([0.0, 0.1, 0.01])}
    rates = {name: values.to(device) for name, values in rates.items()}
    want, got = (make(dtype, device, options.get("optimizer", "sgd")) for _ in range(2))
    generator, worst = torch.Generator().manual_seed(2), 0.0
    for scale in (1.0, 1e-4, 3.0):  # clipped, not clipped, clipped
        gradients = [scale * torch.randn(shape, generator=generator).to(device) for shape in SHAPES.values()]
        gradients[0] = gradients[0].to(dtype)
        penalties = [
            step(parameters, gradients, momenta, **rates, **STEP, copies=copies, **options)
            for step, (parameters, momenta, copies) in ((descend, want), (descent_triton.descend, got))
        ]
        torch.testing.assert_close(*penalties)
        for wanted, made in zip(want, got, strict=True):
            for name, tensor in wanted.items():
                torch.testing.assert_close(made[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
                worst = max(worst, (made[name] - tensor).abs().max().item())
    return worst


def interpreted() -> None:
    """The kernels on the CPU; float16 stands for bfloat16, which numpy does not know."""
    let_interpreter_loop()
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
    worst = max(largest_difference(dtype, **one) for dtype in (torch.float32, torch.half) for one in OPTIMIZERS)
    print(f"largest difference {worst:.1e}")


@needs_triton
def test_the_fused_step_equals_the_plain_one_in_tritons_interpreter() -> None:
    assert_script_passes(__file__, "interpreted", TRITON_INTERPRET="1")


@needs_cuda
@pytest.mark.parametrize("options", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_step_equals_the_plain_one_on_cuda(dtype: torch.dtype, options: dict[str, object]) -> None:
    assert largest_difference(dtype, "cuda", **options) < 2e-2  # bfloat16 between 2 and 4 has steps of 1 / 64


if __name__ == "__main__":
    {"interpreted": interpreted}[sys.argv[1]]()
