"""A scan of 20,000 slices among short ones: every method trains and predicts it in little memory."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from normal_guidance.base.system import limit_memory
from normal_guidance.core.bags import Bags
from normal_guidance.fit import ensemble
from normal_guidance.fit.ensemble import Ensemble, Members, fit_scalings, prior_attention
from normal_guidance.fit.fit_ensemble import KEPT, KINDS, KindTraining
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import batches
from normal_guidance.sweep.batches import MOST_PLACES, in_batches
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.engine import PackedEngine
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.stack import Stack

SLICES = 20_000
ROOM = 2**30
"""Bytes that a process may take beyond what its libraries take; a kernel of slices x slices has three times as many."""

STACKED = ("whole_bells_ng", "evidence_ng", "abmil_distance", "smap", "probsmooth")


def draw() -> Bags:
    lengths = torch.tensor([40, 30, SLICES, 1, 40, 30])
    generator = torch.Generator().manual_seed(0)
    return Bags(torch.randn(int(lengths.sum()), 16, generator=generator), lengths, torch.tensor([0, 1, 1, 0, 0, 1]))


def train_stacked(method: str) -> None:
    """A step of two configurations, and their validation."""
    scans, configs = draw(), grid(Config(method, batch_size=6), lr=[0.1, 0.01], l1=[0.01])
    limit_memory(ROOM)
    engine = PackedEngine(Stack.of(configs, scans.width), scans, scans, 6, "float32")
    before = {name: value.clone() for name, value in engine.parameters.items()}
    loss, _ = engine.train_epoch(torch.arange(6))
    assert loss.isfinite().all()
    for name, value in engine.parameters.items():
        assert value.isfinite().all()
        assert not torch.equal(value, before[name]) or name == "score.bias"  # softmax ignores it
    assert engine.evaluate()[1].isfinite().all()


def train_groups() -> None:
    """A step of every group and model of a guided kind, their validation, and a prediction by all of them."""
    scans, kind = draw(), KINDS[0]
    scaling = fit_scalings(scans)[kind.form]
    limit_memory(ROOM)
    training = KindTraining(kind, scans, scaling, torch.arange(6) // 2, 0, "cpu")
    training.steps = training.epochs = 1
    made = Ensemble([Members(replace(kind, scores=True), scaling, training.run(lambda _: None))])
    assert len(made) == 6 * KEPT
    prediction = predict_bags(made, scans)
    assert prediction.logit.isfinite().all()
    sums = torch.stack([own.sum() for own in prediction.attention.split(scans.lengths.tolist())])
    torch.testing.assert_close(sums, torch.ones(6), rtol=1e-4, atol=1e-4)


@pytest.mark.slow(but=("ensemble", "whole_bells_ng", "kernel"))
@pytest.mark.parametrize("what", ["ensemble", *STACKED, "kernel"])
def test_a_long_scan_trains_in_little_memory_where_a_kernel_of_its_slices_does_not_fit(what: str) -> None:
    made = subprocess.run([sys.executable, __file__, what], capture_output=True, text=True, check=False)
    if what == "kernel":
        assert re.search("not enough memory|allocate memory", made.stderr)
    else:
        assert made.returncode == 0, made.stderr


def test_batches_are_bounded_by_their_padding() -> None:
    lengths = torch.tensor([30, 20_000, *[30] * 600, 900_000, 30])
    made = in_batches(lengths, 256)
    assert torch.cat(made).tolist() == list(range(len(lengths)))
    assert max(map(len, made)) == 256
    for batch in made:
        assert len(batch) == 1 or len(batch) * int(lengths[batch].max()) <= MOST_PLACES
    assert [batch.tolist() for batch in in_batches(lengths[2:500], 256)] == [[*range(256)], [*range(256, 498)]]


def test_an_ensemble_in_parts_is_the_same_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    from small_bundle import fitted_bundle  # not where this file runs as a program

    made, scans = fitted_bundle(4).model, shifted_mean(30, seed=1, features=4)
    whole, prior = predict_bags(made, scans), prior_attention(scans.lengths)
    monkeypatch.setattr(ensemble, "AT_ONCE", 1)  # one member at a time
    monkeypatch.setattr(batches, "MOST_PLACES", 150)  # a few scans at a time
    for one, other in zip(predict_bags(made, scans)[:3], whole[:3], strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(prior_attention(scans.lengths), prior)


def make_kernel() -> None:
    limit_memory(ROOM)
    torch.zeros(SLICES, SLICES, dtype=torch.float64)


if __name__ == "__main__":
    others = {"ensemble": train_groups, "kernel": make_kernel}
    others.get(sys.argv[1], lambda: train_stacked(sys.argv[1]))()
