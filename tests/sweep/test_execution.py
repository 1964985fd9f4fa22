"""The engine that takes over or that ends first, with the same numbers; what a sweep would take; what memory holds."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bag, Bags
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import engine as engine_module
from normal_guidance.sweep import estimate as estimate_module
from normal_guidance.sweep import execution as execution_module
from normal_guidance.sweep.batches import draw_orders, heaviest_batch
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.engine import Engine, PackedEngine, SlottedEngine
from normal_guidance.sweep.estimate import estimate_sweep
from normal_guidance.sweep.execution import Compiler, choose_engine, fitting_chunk
from normal_guidance.sweep.stack import Stack
from normal_guidance.sweep.sweep import sweep
from own_clock import OwnClock

Sets, Patch = tuple[Bags, Bags], pytest.MonkeyPatch
EPOCHS, FEATURES = 4, 16


@pytest.fixture(scope="module")
def scans() -> Sets:
    return tuple(shifted_mean(n, seed, features=FEATURES, shift=2.0) for n, seed in ((40, 1), (20, 2)))


@pytest.fixture
def as_on_cuda(monkeypatch: Patch) -> Iterator[pytest.MonkeyPatch]:
    """The CPU is treated as a card: slotted batches first, whatever little work there is."""
    monkeypatch.setattr(Execution, "slotted", property(lambda self: self.engine != "packed"))
    monkeypatch.setattr(execution_module, "RECORDING_SECONDS", 0.0)
    return monkeypatch


def configs(method: str = "mhng") -> tuple[Config, ...]:
    return grid(Config(method, epochs=EPOCHS, batch_size=8), lr=[0.1, 0.01], l1=[0.01, 0.0])


def out_of_resources(*_: object) -> None:
    raise RuntimeError("out of resource: shared memory, Required: 286720, Hardware limit: 232448\nmore about it")


def test_the_packed_engine_takes_over_from_a_kernel_that_does_not_fit(
    scans: Sets, as_on_cuda: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    want = sweep(configs(), *scans, Execution(engine="packed"))
    as_on_cuda.setattr(SlottedEngine, "_train_step", out_of_resources)
    as_on_cuda.setattr(SlottedEngine, "_predictions", out_of_resources)
    got = sweep(configs(), *scans, Execution())
    assert torch.equal(got.history, want.history)
    assert [record.getMessage() for record in caplog.records] == [
        "the recorded engine cannot run mhng here (RuntimeError: out of resource: shared memory, Required: 286720, "
        "Hardware limit: 232448); the packed engine takes over, which is slower"
    ]


@pytest.mark.parametrize("engine", ["recorded", "compiled"])
def test_an_engine_that_was_asked_for_and_cannot_run_is_an_error(engine: str, scans: Sets, as_on_cuda: Patch) -> None:
    as_on_cuda.setattr(SlottedEngine, "_predictions", out_of_resources)
    with pytest.raises(UserError, match=rf"the {engine} engine cannot run ng .*286720.*; leave --engine out"):
        sweep(configs("ng"), *scans, Execution(engine=engine))


def test_the_recorded_step_goes_on_where_the_compiler_fails(
    scans: Sets, as_on_cuda: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(function: object, **options: object) -> object:
        raise torch._dynamo.exc.Unsupported("data-dependent branching")

    want = sweep(configs(), *scans, Execution(engine="recorded"))
    as_on_cuda.setattr(execution_module, "COMPILING_SECONDS", 0.0)
    as_on_cuda.setattr(torch, "compile", unsupported)
    got = sweep(configs(), *scans, Execution())
    assert torch.equal(got.history, want.history)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("compiling the step failed (Unsupported: data-dependent branching")
    assert message.endswith("the recorded step goes on, slower")


def chosen(scans: Sets, **options: str) -> Engine:
    return choose_engine(configs("ng"), *scans, Execution(**options), 0, EPOCHS)


@pytest.mark.usefixtures("as_on_cuda")
def test_a_long_training_is_compiled_after_its_second_epoch(scans: Sets, monkeypatch: Patch) -> None:
    """The compiler that changes nothing stands for torch's, which takes a minute here."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    engine, short = chosen(scans), chosen(scans)
    compiler, counts = Compiler(engine, Execution()), engine.rows
    assert len(counts) > 1
    for left in (10**9, 10**9):
        assert not engine.compiled
        compiler.after_epoch(left)
    assert engine.compiled
    assert engine.rows == counts, "so much work is worth compiling every number of rows"
    engine.compile()
    assert engine.rows == counts[-1:]
    compiler = Compiler(short, Execution())
    for left in (2, 1):
        compiler.after_epoch(left)
    assert not short.compiled


@pytest.mark.usefixtures("as_on_cuda")
def test_every_number_of_rows_is_recorded_with_a_batch_that_it_holds(scans: Sets, monkeypatch: Patch) -> None:
    """More slices than rows would be read beyond the end, which on a card ends the process."""
    engine, free = chosen(scans), []

    def note(rows: int) -> None:
        lengths = engine.plan.lengths[int(engine.step)]
        free.append(rows - int(lengths.sum()) - len(lengths))

    longest_first = scans[0].lengths.argsort(descending=True).reshape(-1, 8)
    engine.plan.copy_(engine.train.plan(longest_first, engine.rows[-1]))
    monkeypatch.setattr(engine, "graphed", True)
    monkeypatch.setattr(engine, "_record", note)
    monkeypatch.setattr(engine, "evaluate", lambda: None)
    engine.prepare(engine.rows)
    assert len(free) > 1
    assert min(free) >= 0


def test_little_work_goes_to_the_packed_engine(scans: Sets, as_on_cuda: Patch) -> None:
    assert isinstance(chosen(scans), SlottedEngine)
    as_on_cuda.setattr(execution_module, "RECORDING_SECONDS", 3600.0)
    little = chosen(scans)
    assert isinstance(little, PackedEngine)
    assert isinstance(chosen(scans, engine="recorded"), SlottedEngine)
    assert 0 < little.time_step() < 60
    want = PackedEngine(little.stack, *scans, 8, "float32").parameters
    assert all(torch.equal(little.parameters[name], value) for name, value in want.items()), "timing changes nothing"


def test_batches_too_large_for_32_bits_are_left_to_the_packed_engine(
    scans: Sets, as_on_cuda: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    as_on_cuda.setattr(engine_module, "MOST_NUMBERS", 1000)
    assert isinstance(chosen(scans), PackedEngine)
    assert "its kernels cannot count batches of" in caplog.records[0].getMessage()


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
    assert (estimate.scans, estimate.batches, estimate.configs, estimate.chunks) == (60, 5, 4, 1)
    assert estimate.slices == int(scans[0].lengths.sum() + scans[1].lengths.sum())
    assert estimate.step_s == pytest.approx(3.0)
    assert estimate.total_s == pytest.approx(EPOCHS * (5 * 3.0 + 20 * 0.5))
    assert clock.steps == 2 * (1 + estimate_module.BATCHES)
    assert estimate.device_bytes > 0
    weights = sum(value.numel() for value in Stack.of(configs(), FEATURES).initial_parameters().values())
    assert estimate.disk_bytes == pytest.approx(3 * 4 * weights, rel=0.1)
    clock.steps = 0
    monkeypatch.setattr(estimate_module, "SLOW", 1.0)  # a slow batch is trained once
    assert estimate_sweep(configs(), *scans).step_s == pytest.approx(3.0)
    assert clock.steps == 1


def test_long_work_on_a_card_is_estimated_as_compiled(scans: Sets, as_on_cuda: Patch) -> None:
    assert estimate_sweep(configs(), *scans).engine == "recorded"
    as_on_cuda.setattr(execution_module, "COMPILING_SECONDS", 0.0)  # so that any work is long
    assert estimate_sweep(configs(), *scans).engine == "compiled"
    assert execution_module.compiled_seconds(1000.0) == pytest.approx(1000 * execution_module.COMPILED_SHARE)


def test_the_cpu_trains_what_its_memory_holds(
    scans: Sets, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    config = configs()[0]
    one = PackedEngine(Stack.of([config], FEATURES), *scans, 8, "float32")
    weights = sum(value.nbytes for value in one.parameters.values())
    orders = [order for order, _ in islice(draw_orders(len(scans[0]), config.seed), config.epochs)]
    needed = execution_module.COPIES * weights + one.saved_bytes(heaviest_batch(scans[0].lengths, 8, orders))
    assert needed > 5 * weights
    want = sweep(configs(), *scans)

    def with_room_for(count: float) -> int:
        free = int(count * needed / execution_module.MEMORY_SHARE)
        monkeypatch.setattr(execution_module, "machine_memory", lambda: (2 * free, free))
        return fitting_chunk(configs(), *scans, Execution())

    assert [with_room_for(count) for count in (100, 2.5, 0.1)] == [4, 2, 1]
    assert "memory holds 2 of 4 configurations together" in caplog.records[0].getMessage()
    with_room_for(2.5)
    got = sweep(configs(), *scans)
    assert got.chunks == (2, 2)
    torch.testing.assert_close(got.history, want.history, rtol=1e-4, atol=1e-5)


def test_the_longest_scan_counts_wherever_it_is(scans: Sets, monkeypatch: Patch) -> None:
    """The first batch has short scans only; memory must hold the one with the long scan."""
    train, val = scans
    longer = Bags.pack([*train, Bag(torch.randn(4000, FEATURES), 1)])
    monkeypatch.setattr(execution_module, "machine_memory", lambda: (2**26, 2**25))
    chunks = [fitting_chunk([Config("abmil", batch_size=8)] * 100, part, val, Execution()) for part in (train, longer)]
    assert 1 < chunks[1] < chunks[0] < 100
