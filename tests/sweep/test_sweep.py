"""The sweep gives the same results as the plain loop in `sweep.loop`, for every configuration, by either engine."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import first_orders, make_engine
from memory_checkpoint import MemoryCheckpoint
from normal_guidance.base.errors import UserError
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import BEYOND, DISTINCT, METHODS, build_model
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import sweep as sweep_module
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.engine import Engine, PackedEngine
from normal_guidance.sweep.loop import EpochScores, TrainedModel, predict_bags, select_epoch, train_model
from normal_guidance.sweep.sweep import Selection, StateFile, SweepProgress, SweepState, Winner, collect, restore, sweep

Sets, Patch = tuple[Bags, Bags], pytest.MonkeyPatch
FEATURES = 16
TRAINABLE = [
    *(name for name, method in METHODS.items() if method.scores_scans),
    *(name for name, method in BEYOND.items() if method.guided),  # the loss without guidance is a part of theirs
    *(name for name in DISTINCT if name not in (*METHODS, *BEYOND)),
]
ADAMW = {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "class_weights": True}
REFERENCE = {"method": "slice_reference", "receptive_field": 4}
OPTIONS: dict[str, dict[str, object]] = {
    "adamw": ADAMW,
    "uniform": {"negatives": "uniform"},
    "none": {"negatives": "none"},
    "modes": {"modes": 2},
    "warmup": {"warmup": 3},
}
CASES: dict[str, dict[str, object]] = {
    **{name: {"method": name} for name in TRAINABLE},
    # L1 is left out: the keys' bias has no gradient, so rounding decides where AdamW moves it.
    **{f"{m}+{name}": {"method": m, "l1": [0.0], **OPTIONS[name]} for m in ("ng", "mhng") for name in OPTIONS},
    "slice_reference": REFERENCE,
    "slice_reference+adamw": {**REFERENCE, **ADAMW},
}
QUICK = (
    *("ng-streamed", "ng+adamw-recorded", "mhng+modes-recorded", "ng+warmup-packed", "slice_reference+adamw-recorded"),
    *("slice_reference+adamw-packed", "ng+uniform-recorded", "ng+none-packed"),
    *(f"{name}-{kind}" for name in TRAINABLE if name != "transmil" for kind in ("packed", "recorded")),
)
"""What `make test` compares with the plain loop: all methods but TransMIL, a part of MHNG; one streamed."""
EXACT = Execution(precision="float64")
PlainLoop = Callable[[tuple[Config, ...]], list[TrainedModel]]


def scans(n: int, seed: int, **options: object) -> Bags:
    return shifted_mean(n, seed=seed, features=FEATURES, **options).to(dtype=torch.float64)


@pytest.fixture(scope="module")
def sets() -> Sets:
    train = scans(70, seed=1, max_slices=33, shift=2.0, prevalence=0.4)
    return train, scans(40, seed=2, max_slices=40, shift=2.0)


def small_grid(method: str, l1: Sequence[float] = (0.01, 0.0), **options: object) -> tuple[Config, ...]:
    base = Config(method, **{"epochs": 3, "batch_size": 16, "seed": 5, **options})
    return grid(base, lr=[0.1, 0.01], l1=l1)


@pytest.fixture(scope="module")
def plain_loop(sets: Sets) -> PlainLoop:
    """The results of the plain loop, computed once for all engines that are compared with it."""
    return cache(lambda configs: [train_model(config, *sets) for config in configs])


def best_epochs(fits: Sequence[TrainedModel]) -> list[int]:
    return [fit.best.number if fit.best else 0 for fit in fits]


@pytest.mark.usefixtures("double")
@pytest.mark.slow(but=QUICK)
@pytest.mark.parametrize("kind", ["packed", "recorded", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_engines_train_as_the_plain_loop_does(case: str, kind: str, sets: Sets, plain_loop: PlainLoop) -> None:
    configs = small_grid(**CASES[case])
    fits = plain_loop(configs)
    engine = make_engine(kind, configs, *sets)
    for number, (order, _) in enumerate(first_orders(sets[0], configs)):
        engine.stack.begin_epoch(number + 1)
        loss, train_auroc = engine.train_epoch(order)
        got = torch.stack([loss, train_auroc, *engine.evaluate()], 1)
        epochs = [fit.history[number] for fit in fits]
        want = [[epoch.loss, epoch.train_auroc, epoch.val_auroc, epoch.val_loss] for epoch in epochs]
        # With L1, a bias without gradient (the keys') goes where its last bit of rounding points: |theta| differs.
        torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1e-5)
        torch.testing.assert_close(got[2:], torch.tensor(want)[2:])


KEPT: dict[str, dict[str, object]] = {
    **{name: {"method": name} for name in ("mean", "max", "ng")},
    "paper": {"method": "abmil", "train_above_val": True},
    "slice_reference": REFERENCE,
}


@pytest.mark.slow(but=("ng-recorded", "paper-packed", "slice_reference-packed"))
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("engine", ["packed", "recorded"])
@pytest.mark.parametrize("case", KEPT)
def test_a_sweep_keeps_what_the_plain_loop_keeps(case: str, engine: str, sets: Sets, plain_loop: PlainLoop) -> None:
    configs = small_grid(**{"epochs": 25, **KEPT[case]})
    fits = plain_loop(configs)
    result = sweep(configs, *sets, replace(EXACT, engine=engine))
    assert result.best_epoch.tolist() == best_epochs(fits)
    assert any(fit.best for fit in fits), "nothing was selected, so nothing was tested"
    loss = 0.0 if case == "paper" else -1.0  # by the paper's rule the first of equals wins
    best = max((fit for fit in fits if fit.best), key=lambda fit: (fit.best.val_auroc, loss * fit.best.val_loss))
    (winner,) = result.winners
    assert (winner.config, winner.epoch, winner.val_auroc) == (best.config, best.best.number, best.best.val_auroc)
    for name, parameter in best.model.named_parameters():
        torch.testing.assert_close(winner.weights[name], parameter.detach())


RESUMED: dict[str, dict[str, object]] = {
    "adamw": {"method": "ng", **ADAMW},
    "warmup": {"method": "ng", "warmup": 4},
    "slice_reference": REFERENCE,
    **{name: {"method": name} for name, method in BEYOND.items() if method.guided},
}


@pytest.mark.slow(but=("adamw-recorded", "warmup-packed", "slice_reference-recorded", "whole_bells_ng-recorded"))
@pytest.mark.parametrize("engine", ["packed", "recorded"])
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_sweep_has_the_same_bits(case: str, engine: str, sets: Sets) -> None:
    configs, execution = small_grid(epochs=5, **RESUMED[case]), Execution(engine=engine)
    bags, memory = [part.to(dtype=torch.float32) for part in sets], MemoryCheckpoint(interrupt_at=1)
    with pytest.raises(KeyboardInterrupt):
        sweep(configs, *bags, execution, checkpoint=memory)
    training = memory.saved[0].pending[0].training
    if case == "adamw":
        assert training["momenta.steps"].tolist() == [8.0] * 4  # two epochs of four steps
        assert training["momenta.score.weight.square"].gt(0).any()
    else:
        kinds = [name.partition(".")[0] for name in training]
        assert kinds.count("momenta") == kinds.count("parameters")
    resumed, whole = sweep(configs, *bags, execution, checkpoint=memory), sweep(configs, *bags, execution)
    assert resumed.history.equal(whole.history)
    assert whole.history[:, :, 0].isfinite().all()
    assert resumed.best_epoch.tolist() == whole.best_epoch.tolist()
    for winner, other in zip(resumed.winners, whole.winners, strict=True):
        assert all(winner.weights[name].equal(weight) for name, weight in other.weights.items())


@pytest.mark.slow(but=("ng-3", "slice_reference-1"))
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("method", ["ng", "slice_reference"])
def test_chunks_change_nothing(method: str, size: int, sets: Sets) -> None:
    configs = small_grid(**{"epochs": 6, "method": method, **(REFERENCE if method == "slice_reference" else {})})
    whole, parts = sweep(configs, *sets, EXACT), sweep(configs, *sets, replace(EXACT, chunk=size))
    assert sum(parts.chunks) == len(configs)
    assert max(parts.chunks) == size
    torch.testing.assert_close(parts.history, whole.history)
    assert parts.best_epoch.tolist() == whole.best_epoch.tolist()
    assert [w.number for w in parts.winners] == [w.number for w in whole.winners]


@pytest.mark.slow(but="None")
@pytest.mark.parametrize("message", [None, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"])
def test_memory_that_runs_out_midway_costs_the_epochs_since_the_last_state(
    message: str | None, sets: Sets, monkeypatch: Patch
) -> None:
    trained: list[tuple[int, int]] = []
    train_epoch = PackedEngine.train_epoch

    def out_of_memory_in_epoch_6(self: PackedEngine, order: Tensor) -> tuple[Tensor, Tensor]:
        trained.append((len(self.stack.configs), len(trained) + 1))
        if len(trained) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory") if message is None else RuntimeError(message)
        return train_epoch(self, order)

    configs = small_grid("ng", epochs=8)
    want = sweep(configs, *sets, EXACT)
    monkeypatch.setattr(PackedEngine, "train_epoch", out_of_memory_in_epoch_6)
    got = sweep(configs, *sets, EXACT, checkpoint=MemoryCheckpoint())
    assert got.chunks == (2, 2)
    assert [size for size, _ in trained] == [4] * 6 + [2] * 4 + [2] * 4, "both halves go on behind epoch 4"
    torch.testing.assert_close(got.history, want.history)
    assert got.best_epoch.tolist() == want.best_epoch.tolist()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("shapes differ"), RuntimeError, "shapes differ"),
        (torch.OutOfMemoryError("CUDA out of memory"), UserError, "batch size"),
    ],
)
def test_other_errors_and_one_configuration_too_large_end_the_sweep(
    error: Exception, kind: type[Exception], message: str, sets: Sets, monkeypatch: Patch
) -> None:
    def broken(*_: object) -> Engine:
        raise error

    monkeypatch.setattr(sweep_module, "choose_engine", broken)
    with pytest.raises(kind, match=message):
        sweep(small_grid("ng"), *sets, EXACT)


@pytest.mark.parametrize("engine", ["packed", "recorded"])
def test_a_finished_engine_is_freed_before_the_next(engine: str, sets: Sets, monkeypatch: Patch) -> None:
    made, alive, make = weakref.WeakSet(), [], sweep_module.choose_engine

    def count(*arguments: object) -> Engine:
        alive.append(len(made))
        engine = make(*arguments)
        made.add(engine)
        return engine

    monkeypatch.setattr(sweep_module, "choose_engine", count)
    sweep(small_grid("ng", epochs=1), *sets, replace(EXACT, engine=engine, chunk=1))
    assert alive == [0, 0, 0, 0]


def test_a_configuration_that_diverges_leaves_the_others_alone(sets: Sets) -> None:
    good = Config("abmil", lr=0.01, epochs=4, batch_size=16)
    mad = replace(good, lr=1e308)
    result = sweep([good, mad], *sets, EXACT)
    assert result.history[-1, 1].isnan().any()
    assert result.best_epoch[1] <= 1
    torch.testing.assert_close(result.history[:, 0], sweep([good], *sets, EXACT).history[:, 0])


TWO = {"weight": torch.zeros(2, 3)}


def test_patience_waits_for_who_still_learns_though_nothing_can_be_selected_yet() -> None:
    selection = Selection(TWO, train_above_val=True, patience=2)
    learning, idle = [0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.5, 0.5, 0.5, 0.9]
    training = torch.tensor([[0.4, 0.4], [0.5, 0.4], [0.6, 0.4], [0.7, 0.4], [0.95, 0.95]])
    over = []
    for epoch, values in enumerate(zip(learning, idle, strict=True), start=1):
        selection.update(epoch, training[epoch - 1], torch.tensor(values), torch.ones(2), TWO)
        over.append(selection.over(epoch))
    assert over[3] == [False, True]
    assert selection.epoch.tolist() == [5, 0]
    assert selection.trained(5).tolist() == [5, 3]


def test_of_equal_epochs_the_lowest_loss_is_kept_and_patience_does_not_wait_for_it() -> None:
    selection = Selection(TWO, patience=2)
    losses = torch.tensor([[0.5, 0.5], [0.4, 0.6], [0.3, 0.4], [0.2, 0.1]])
    for epoch, loss in enumerate(losses, start=1):
        selection.update(epoch, torch.zeros(2), torch.ones(2), loss, TWO)
        if epoch == 2:
            assert selection.epoch.tolist() == [2, 1]
    assert selection.epoch.tolist() == [3, 3]
    assert selection.over(3) == [True, True]
    assert selection.loss.tolist() == pytest.approx([0.3, 0.4])


def test_of_equal_configurations_the_lowest_loss_wins_but_by_the_papers_rule_the_first() -> None:
    for paper, expected in ((False, 1), (True, 0)):
        about = {"config": Config("ng", train_above_val=paper), "epoch": 1, "val_auroc": 1.0, "weights": {}}
        equal = [Winner(number=number, val_loss=loss, **about) for number, loss in enumerate((0.5, 0.4, 0.4))]
        assert max(equal, key=Winner.rank).number == expected


def test_a_state_of_a_version_that_counted_patience_otherwise_is_refused(sets: Sets) -> None:
    engine = make_engine("packed", [Config("abmil", batch_size=16)], *sets)
    selection, history = Selection(engine.parameters), torch.zeros(2, 1, 4)
    saved = collect(engine, selection, history, torch.zeros(1))
    restore(engine, selection, history, saved)
    lacking = {name: tensor for name, tensor in saved.items() if name != "risen"}
    with pytest.raises(UserError, match="an older version wrote it: it does not hold 'risen'; delete it to train from"):
        restore(engine, selection, history, lacking)
    for other in (saved["best_val"][0], saved["best_val"].float(), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(UserError, match=r"damaged.*best_val is \(.*, not \(1,\) of torch.float64; delete it"):
            restore(engine, selection, history, {**saved, "best_val": other})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunks": "1"}, "chunks is '1', not a list"),
        ({"pending": [{"members": [0, 7], "epoch": 1}]}, "configuration 7 is unknown; there are 2"),
        ({"pending": [{"members": [0], "epoch": 1}, {"members": [1, 0], "epoch": 1}]}, "is in two chunks"),
        ({"pending": [{"members": [0], "epoch": -1}]}, r"pending\[0\].epoch is -1, not"),
        ({"winners": [{"number": 9, "epoch": 1, "val_auroc": 0.5, "val_loss": 1.0}]}, "configuration 9 is unknown"),
    ],
)
def test_a_state_with_other_values_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    fresh, state = SweepState.begin([Config("abmil"), Config("ng")], None), StateFile(tmp_path / "state", "run")
    state.save(fresh)
    tensors, about = read_tensors(state.path, "copy it again")
    write_tensors(state.path, tensors, {**about, **change})
    with pytest.raises(UserError, match=f"{words}.*; delete it to train from the start"):
        state.load(fresh)


def test_half_precision_features_are_pooled_in_full_precision(sets: Sets) -> None:
    half = [bags.to(dtype=torch.float16) for bags in sets]
    full = [bags.to(dtype=torch.float32) for bags in half]
    assert sweep(small_grid("mean"), *half).history.equal(sweep(small_grid("mean"), *full).history)


def test_progress_is_reported(sets: Sets) -> None:
    seen: list[SweepProgress] = []
    sweep(small_grid("mean", epochs=3), *sets, replace(EXACT, chunk=2), watch=seen.append)
    assert seen[-1].done == 1.0
    assert [one.first_config for one in seen if one.epoch == 3] == [0, 2]
    assert [one.done for one in seen if one.epoch == 3] == [0.5, 1.0]
    assert all(one.slices_per_second > 0 for one in seen)


@pytest.mark.parametrize("options", [{}, ADAMW], ids=["sgd", "adamw"])
def test_patience_does_not_depend_on_the_company(options: dict[str, object], sets: Sets, monkeypatch: Patch) -> None:
    """Those that stay when others leave keep their momenta."""
    monkeypatch.setattr(sweep_module, "WORTH_LEAVING", 1)
    base = Config("abmil", epochs=12, batch_size=16, patience=2, **options)
    configs = grid(base, lr=[0.3, 0.1, 0.01, 0.001], l1=[0.0])
    fits = [train_model(config, *sets) for config in configs]
    assert len({len(one.history) for one in fits}) > 1, "all ended together, so nothing was tested"
    for execution in (EXACT, replace(EXACT, chunk=2)):
        result = sweep(configs, *sets, execution)
        assert len(result.chunks) > len(configs) // (execution.chunk or len(configs)), "no configuration was dropped"
        assert result.trained.tolist() == [len(one.history) for one in fits]
        assert result.best_epoch.tolist() == best_epochs(fits)
        assert (~result.history[:, :, 0].isnan()).sum(0).tolist() == result.trained.tolist()


def test_the_best_epoch_is_kept(sets: Sets) -> None:
    result = train_model(Config("abmil", lr=0.1, epochs=12, batch_size=16), *sets)
    assert result.best is not None
    assert result.best == select_epoch(result.history)
    again = train_model(Config("abmil", lr=0.1, epochs=result.best.number, batch_size=16), *sets)
    assert all(map(torch.equal, result.model.parameters(), again.model.parameters()))
    assert result.history[-1].val_auroc > 0.9  # it learns


@pytest.mark.parametrize(
    ("train_above_val", "rows", "best"),
    [
        (True, [(0.5, 0.9, 1.0), (0.4, 0.5, 1.0)], None),
        (True, [(0.9, 0.6, 0.3), (0.7, 0.8, 0.2), (0.9, 0.7, 0.6), (0.95, 0.7, 0.5)], 3),  # the first of equals
        (False, [(0.9, 0.8, 0.3), (0.7, 0.8, 0.2), (0.7, 0.8, 0.4), (0.95, 0.7, 0.1)], 2),  # of equals the lowest loss
        (False, [(math.nan, math.nan, math.nan)], None),  # a diverged configuration
    ],
)
def test_select_epoch(train_above_val: bool, rows: list[tuple[float, float, float]], best: int | None) -> None:
    history = tuple(EpochScores(number, 1.0, *row) for number, row in enumerate(rows, start=1))
    chosen = select_epoch(history, train_above_val=train_above_val)
    assert (chosen and chosen.number) == best


def test_predictions_come_in_order_whatever_the_batch(sets: Sets) -> None:
    model = build_model("transmil", FEATURES).double()
    whole, parts = predict_bags(model, sets[1], batch_size=64), predict_bags(model, sets[1], batch_size=7)
    torch.testing.assert_close(whole.logit, parts.logit)
    torch.testing.assert_close(whole.log_attention, parts.log_attention)
    assert not whole.logit.requires_grad


def test_a_prediction_leaves_every_part_of_the_model_in_its_mode(sets: Sets) -> None:
    model = build_model("abmil", FEATURES).double().train()
    model.hidden.eval()
    predict_bags(model, sets[1])
    assert [part.training for part in (model, model.hidden, model.classifier)] == [True, False, True]
    assert not train_model(Config("abmil", epochs=1, batch_size=64), *sets).model.training
