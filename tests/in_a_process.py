"""What the tests of the Triton kernels share: parts of a test file run as a script, and checks that they end with.

Dynamo cannot trace a process whose shapes are checked, and Triton cannot change its mode once imported.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="TRITON IS NOT INSTALLED: THE CUDA KERNELS ARE NOT TESTED HERE"
)

HANGS = 3600
"""Seconds after which a script hangs, on however slow a machine."""


def assert_script_passes(file: str, *arguments: str, **environment: str) -> None:
    """Run a part of a test file in a new process, which must succeed and print its largest error."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, file, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)} | environment,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "largest difference" in run.stdout


def assert_compiled_equals_eager(step: Callable[..., Tensor], leaves: Sequence[Tensor], *rest: Tensor) -> None:
    """Compare the gradients of a compiled sum with those without the compiler."""
    want = torch.autograd.grad(step(*leaves, *rest), leaves)
    got = torch.autograd.grad(torch.compile(step, fullgraph=True)(*leaves, *rest), leaves)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    print(f"largest difference {max((o - w).abs().max().item() for o, w in zip(got, want, strict=True)):.1e}")


def let_interpreter_loop() -> None:
    """Work around Triton 3.6: its interpreter calls int() on an array of one number, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def worst_error(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float) -> float:
    """The largest error relative to an output's largest number; it must be below the tolerance."""
    worst = 0.0
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        worst = max(worst, ((one.double() - other.to(one.device)).abs().max() / other.abs().max()).item())
    assert worst < tolerance, f"off by {worst:.1e}"
    return worst


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """torch's products of float32 in this precision, highest or high."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def assert_a_graph_serves_other_bags(
    run: Callable[..., Sequence[Tensor]], places: Sequence[Tensor], others: Sequence[Tensor]
) -> None:
    """A CUDA graph captured with some places gives what a run with others gives, once these are copied in."""
    want = [tensor.clone() for tensor in run(*others)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*places)
    for place, other in zip(places, others, strict=True):
        place.copy_(other)
    graph.replay()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
