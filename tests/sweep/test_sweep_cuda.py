"""The recorded and the compiled engine on a GPU train like the packed one on the CPU; also runs without conftest."""

import time

import pytest
import torch
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import execution
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.engine import SlottedEngine, matrix_precision, slot_numbers
from normal_guidance.sweep.stack import Stack
from normal_guidance.sweep.sweep import HISTORY, Sweep, sweep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

FEATURES = 64
TOLERANCE = {"float32": 1e-4, "tf32": 5e-3, "bf16": 3e-2}
"""Absolute tolerance of the loss after three epochs."""


@pytest.fixture(autouse=True)
def nothing_is_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed engine would do these tests."""
    monkeypatch.setattr(execution, "RECORDING_SECONDS", 0.0)


def scans() -> tuple[Bags, Bags]:
    return tuple(shifted_mean(n, seed, features=FEATURES, max_slices=70, shift=2.0) for seed, n in ((1, 150), (2, 70)))


def configs(method: str, **options: object) -> tuple[Config, ...]:
    return grid(Config(method, **{"epochs": 3, "batch_size": 32, **options}), lr=[0.1, 0.01], l1=[0.01, 0.0])


def largest_difference(got: Sweep, want: Sweep, what: str) -> float:
    return (got.history - want.history)[:, :, HISTORY.index(what)].abs().max().item()


REFERENCE = {"method": "slice_reference", "receptive_field": 12}
PROTOCOLS = (
    {"weight_decay": 0.1, "class_weights": True},
    {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "class_weights": True},
)
METHODS = ("mean", "ng", "smap", "mhng", "smtp", "evidence", "whole_bells_ng")
COMPILED = (("ng", "tf32"), ("smap", "float32"), ("mhng", "bf16"), ("whole_bells_ng", "bf16"))


@pytest.mark.parametrize(
    ("options", "execution", "slack"),
    [
        *[({"method": method}, (precision, None), 1) for method in METHODS for precision in TOLERANCE],
        *[({"method": method}, (precision, "compiled"), 1) for method, precision in COMPILED],
        ({"method": "smtp"}, ("tf32", "packed"), 1),
        *[({**REFERENCE, "receptive_field": 11 + odd}, (p, None), 1) for odd in (0, 1) for p in TOLERANCE],
        # AdamW divides gradients by their size, so that those which are only rounding move weights, too.
        *[
            ({"method": "ng", **protocol}, ("float32", engine), 10)
            for protocol in PROTOCOLS
            for engine in ("packed", "recorded", "compiled")
        ],
    ],
)
def test_a_gpu_trains_as_the_cpu_does(
    options: dict[str, object], execution: tuple[str, str | None], slack: float
) -> None:
    train, val = scans()
    want = sweep(configs(**options), train, val)
    got = sweep(configs(**options), train, val, Execution("cuda", *execution))
    tolerance = slack * TOLERANCE[execution[0]]
    assert largest_difference(got, want, "loss") < tolerance
    assert largest_difference(got, want, "val_auroc") < 10 * tolerance


@pytest.mark.parametrize("precision", list(TOLERANCE))
def test_the_packed_engine_trains_on_long_scans(precision: str) -> None:
    """More than 256 slices take torch's own attention, which has kernels of its own for each dtype."""
    train, val = (Bags(torch.randn(n * 301, FEATURES), torch.full((n,), 301), torch.arange(n) % 2) for n in (8, 4))
    both = configs("transmil", batch_size=4)
    want, got = sweep(both, train, val), sweep(both, train, val, Execution("cuda", precision, "packed"))
    assert largest_difference(got, want, "loss") < TOLERANCE[precision]


@pytest.mark.parametrize("method", ["ng", "mhng"])
def test_a_step_is_compiled_while_training(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every number of rows, because compiling is said to cost nothing."""
    train, val = scans()
    want = sweep(configs(method, epochs=5), train, val)
    monkeypatch.setattr(execution, "COMPILING_SECONDS", 0.0)
    compiled: list[SlottedEngine] = []
    compile_step = SlottedEngine.compile

    def noting(engine: SlottedEngine, **options: bool) -> None:
        compiled.append(engine)
        compile_step(engine, **options)

    monkeypatch.setattr(SlottedEngine, "compile", noting)
    got = sweep(configs(method, epochs=5), train, val, Execution("cuda", "float32"))
    assert [engine.compiled for engine in compiled] == [True]
    assert len(compiled[0].rows) > 1
    assert largest_difference(got, want, "loss") < TOLERANCE["float32"]


class Slow:
    """Scans from a slow disk: the reading thread is still at work when a graph is recorded."""

    def __init__(self, bags: Bags) -> None:
        self.bags, self.width, self.dtype = bags, bags.width, bags.dtype
        self.lengths, self.labels, self.slice_labels = bags.lengths, bags.labels, bags.slice_labels

    def rows(self, numbers: Tensor) -> Tensor:
        time.sleep(0.01)
        return self.bags.rows(numbers)


@pytest.mark.parametrize("options", [{"method": "ng"}, REFERENCE])
def test_streamed_features_train_as_resident_ones_do(options: dict[str, object]) -> None:
    train, val = scans()
    orders = [torch.randperm(len(train), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    slots = slot_numbers(train.lengths, 32, iter(orders), classes=3)
    made = []
    for source, streamed in (((train, val), False), ((Slow(train), Slow(val)), True)):
        with matrix_precision("float32"):
            stack = Stack.of(configs(**options), FEATURES, "cuda")
            engine = SlottedEngine(stack, *source, 32, "float32", slots, streamed=streamed)
            made.append(
                [[values.clone() for values in (*engine.train_epoch(order), *engine.evaluate())] for order in orders]
            )
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("method", ["ng", "mhng"])
def test_two_runs_and_a_resumed_one(method: str) -> None:
    """Runs on one GPU differ by rounding at most; LOG.md has the measured differences."""
    train, val = scans()
    first, second = (sweep(configs(method), train, val, Execution("cuda", "tf32")) for _ in range(2))
    print(f"{method}: largest difference between two runs {(first.history - second.history).abs().max():.1e}")
    torch.testing.assert_close(first.history, second.history, rtol=0, atol=1e-4)


def test_too_little_memory_halves_the_chunk() -> None:
    train, val = scans()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(int(free * 0.97), dtype=torch.uint8, device="cuda")
    try:
        result = sweep(configs("mhng", epochs=1)[:2] * 16, train, val, Execution("cuda", "tf32"))
    finally:
        del hog
        torch.cuda.empty_cache()
    assert sum(result.chunks) == 32
