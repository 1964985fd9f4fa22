"""Kernels that ask for more shared memory than the card has: smaller tiles, fewer stages, or the plain formula."""

import pytest
import torch

from in_a_process import float32_products, needs_triton
from normal_guidance.core.kernels import self_attention

pytestmark = needs_triton


def out_of_resources(required: int) -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(required, 232_448, "shared memory")


class Kernel:
    """Runs with so many stages at most."""

    def __init__(self, most: int) -> None:
        self.most, self.tried = most, []

    def __getitem__(self, grid: object) -> "Kernel":
        return self

    def __call__(self, *arguments: object, num_stages: int, **constants: object) -> None:
        self.tried.append(num_stages)
        if num_stages > self.most:
            raise out_of_resources(100_000 * num_stages)


def test_a_kernel_loads_fewer_tiles_ahead_where_memory_is_small() -> None:
    from triton.runtime.errors import OutOfResources

    from normal_guidance.core.kernels.products_triton import launch

    fits, never = Kernel(most=2), Kernel(most=0)
    launch(fits, (1,), "rows", num_stages=4, BLOCK=16)
    assert fits.tried == [4, 3, 2]
    with pytest.raises(OutOfResources):
        launch(never, (1,), num_stages=2)
    assert never.tried == [2, 1]


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv, token, first, lengths: two bags of 70 and 5 slices, two heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 80, 3 * 2 * 16), (2, 3 * 2 * 16))
    qkv, token = (torch.randn(shape, generator=generator) for shape in shapes)
    return qkv, token, torch.tensor([0, 71]), torch.tensor([70, 5])


@pytest.mark.parametrize(("largest", "tried"), [(64, [64]), (16, [64, 32, 16]), (8, [64, 32, 16])])
def test_attention_takes_the_largest_tiles_that_fit(largest: int, tried: list[int]) -> None:
    from normal_guidance.core.kernels.self_attention_triton import _Plan, _run_with_tiles_that_fit

    qkv, _, first, lengths = problem()
    blocks: list[int] = []

    def run(plan: _Plan) -> None:
        blocks.append(plan.constants["BLOCK"])
        if blocks[-1] > largest:
            raise out_of_resources(286_720)

    with float32_products("high"):  # full float32 begins with smaller tiles
        assert _run_with_tiles_that_fit(run, qkv, first, lengths, 2, 70) == (largest >= 16)
    assert blocks == tried


def test_where_no_tile_fits_the_plain_formula_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's tensors are treated as a card's, whose kernels find no room."""
    from normal_guidance.core.kernels import self_attention_triton

    qkv, token, first, lengths = problem()
    leaves = [qkv.requires_grad_(), token.requires_grad_()]
    want = self_attention.attend(qkv, token, first, lengths, heads=2, longest=70)
    want_gradients = torch.autograd.grad(want.square().sum(), leaves)
    asked: list[str] = []
    monkeypatch.setattr(self_attention, "runs_in_triton", lambda qkv: True)
    for name in ("forward", "backward"):
        monkeypatch.setattr(self_attention_triton, name, lambda *_, name=name: asked.append(name))
    got = self_attention.attend(qkv, token, first, lengths, heads=2, longest=70)
    assert torch.equal(got, want)
    for one, other in zip(torch.autograd.grad(got.square().sum(), leaves), want_gradients, strict=True):
        assert torch.equal(one, other)
    assert asked == ["forward", "backward"]
