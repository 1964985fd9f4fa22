"""What a dry run says a sweep would take, and how many configurations memory holds."""

from itertools import islice

import pytest
import torch

from normal_guidance.core.bags import Bag, Bags
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import estimate as estimate_module
from normal_guidance.sweep import execution as execution_module
from normal_guidance.sweep.batches import draw_orders, heaviest_batch
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.engine import PackedEngine
from normal_guidance.sweep.estimate import estimate_sweep
from normal_guidance.sweep.execution import fitting_chunk
from normal_guidance.sweep.stack import Stack
from normal_guidance.sweep.sweep import sweep
from own_clock import OwnClock

Sets, Patch = tuple[Bags, Bags], pytest.MonkeyPatch
FEATURES = 16


@pytest.fixture(scope="module")
def scans() -> Sets:
    return tuple(shifted_mean(n, seed, features=FEATURES) for n, seed in ((100, 1), (40, 2)))


def configs(method: str = "ng", epochs: int = 50) -> tuple[Config, ...]:
    return grid(Config(method, epochs=epochs, batch_size=8), lr=[0.1, 0.01], l1=[0.01, 0.0])


class Clock(OwnClock):
    """A clock that only training and evaluation move: 3 seconds a step, a half for a validation scan."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch, estimate_module)
        self.steps = 0
        patch.setattr(estimate_module, "SLOW", 10.0)
        train_epoch, evaluate_plainly = PackedEngine.train_epoch, PackedEngine.evaluate

        def train(engine: PackedEngine, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.now += 3.0 * engine.steps
            self.steps += engine.steps
            return train_epoch(engine, order)

        def evaluate(engine: PackedEngine) -> torch.Tensor:
            self.now += 0.5 * len(engine.val.lengths)
            return evaluate_plainly(engine)

        patch.setattr(PackedEngine, "train_epoch", train)
        patch.setattr(PackedEngine, "evaluate", evaluate)


def test_time_is_that_of_all_steps_and_evaluations(scans: Sets, monkeypatch: Patch) -> None:
    clock = Clock(monkeypatch)
    estimate = estimate_sweep(configs(), *scans, Execution())
    assert (estimate.scans, estimate.batches, estimate.configs, estimate.chunks) == (140, 12, 4, 1)
    assert estimate.slices == int(scans[0].lengths.sum() + scans[1].lengths.sum())
    assert estimate.step_s == pytest.approx(3.0)
    assert estimate.total_s == pytest.approx(50 * (12 * 3.0 + 40 * 0.5))
    assert clock.steps == 2 * (1 + estimate_module.BATCHES)
    assert estimate.device_bytes > 0
    weights = sum(value.numel() for value in Stack.of(configs(), FEATURES).initial_parameters().values())
    assert estimate.disk_bytes == pytest.approx(3 * 4 * weights, rel=0.1)
    clock.steps = 0
    monkeypatch.setattr(estimate_module, "SLOW", 1.0)  # a slow batch is trained once
    assert estimate_sweep(configs(), *scans).step_s == pytest.approx(3.0)
    assert clock.steps == 1


def test_long_work_on_a_card_is_estimated_as_compiled(scans: Sets, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Execution, "slotted", property(lambda self: True))
    monkeypatch.setattr(execution_module, "RECORDING_SECONDS", 0.0)
    assert estimate_sweep(configs(epochs=2), *scans).engine == "recorded"
    monkeypatch.setattr(execution_module, "COMPILING_SECONDS", 0.0)  # so that any work is long
    assert estimate_sweep(configs(epochs=2), *scans).engine == "compiled"
    assert execution_module.compiled_seconds(1000.0) == pytest.approx(1000 * execution_module.COMPILED_SHARE)


def test_the_cpu_trains_what_its_memory_holds(
    scans: Sets, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    config = configs("mhng")[0]
    one = PackedEngine(Stack.of([config], FEATURES), *scans, 8, "float32")
    weights = sum(value.nbytes for value in one.parameters.values())
    orders = [order for order, _ in islice(draw_orders(len(scans[0]), config.seed), config.epochs)]
    needed = execution_module.COPIES * weights + one.saved_bytes(heaviest_batch(scans[0].lengths, 8, orders))
    assert needed > 5 * weights
    want = sweep(configs("mhng", epochs=2), *scans)

    def with_room_for(count: float) -> int:
        free = int(count * needed / execution_module.MEMORY_SHARE)
        monkeypatch.setattr(execution_module, "machine_memory", lambda: (2 * free, free))
        return fitting_chunk(configs("mhng"), *scans, Execution())

    assert [with_room_for(count) for count in (100, 2.5, 0.1)] == [4, 2, 1]
    assert "memory holds 2 of 4 configurations together" in caplog.records[0].getMessage()
    with_room_for(2.5)
    got = sweep(configs("mhng", epochs=2), *scans)
    assert got.chunks == (2, 2)
    torch.testing.assert_close(got.history, want.history, rtol=1e-4, atol=1e-5)


def test_the_longest_scan_counts_wherever_it_is(scans: Sets, monkeypatch: Patch) -> None:
    """The first batch has short scans only; memory must hold the one with the long scan."""
    train, val = scans
    longer = Bags.pack([*train, Bag(torch.randn(4000, FEATURES), 1)])
    monkeypatch.setattr(execution_module, "machine_memory", lambda: (2**26, 2**25))
    chunks = [fitting_chunk([Config("abmil", batch_size=8)] * 100, part, val, Execution()) for part in (train, longer)]
    assert 1 < chunks[1] < chunks[0] < 100
