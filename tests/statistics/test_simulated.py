"""Simulations: intervals cover the truth, equal methods are seldom called different, and promises are kept.

`benchmarks/simulate_statistics.py` makes the experiments, and is the larger run.
"""

import importlib
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from normal_guidance.statistics.conformal import calibrate_intervals
from normal_guidance.statistics.differences import differences, measure
from normal_guidance.statistics.split_results import METRICS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("simulate_statistics")


def inside(share, low, high, experiments):
    """Whether a share is between low and high, within 3 sd of this many experiments."""
    slack = 3 * math.sqrt(0.05 * 0.95 / experiments)
    return low - slack <= share <= high + slack


@pytest.mark.slow
def test_intervals_cover_the_truth_and_equal_methods_are_equal(simulation, unchecked):
    """Overlapping splits, one to three scans a patient, 60 positive patients; benchmarks/ has the larger run."""
    rows = list(simulation.simulate("overlapping-60", 300, draws=300))
    assert [row.metric for row in rows] == list(METRICS)
    for row in rows:
        assert inside(row.covered, *simulation.COVERAGE, experiments=300), row
        assert inside(row.covered_equal, *simulation.COVERAGE, experiments=300), row
        assert inside(row.different, *simulation.SIZE, experiments=300), row
        assert row.power > 0.2, row


def test_the_simulation_can_tell_intervals_that_are_too_short(simulation, unchecked, monkeypatch):
    monkeypatch.setattr(simulation, "differences", partial(differences, level=0.75))
    for row in simulation.simulate("one-60", 150, draws=100):
        assert not inside(row.covered, *simulation.COVERAGE, experiments=150), row
        assert not inside(row.covered_equal, *simulation.COVERAGE, experiments=150), row


def test_the_truth_of_the_simulation_is_that_of_very_many_scans(simulation):
    design = simulation.Design("one", 20_000)
    splits = simulation.experiment(design, np.random.default_rng(0))
    for metric, methods in measure(splits).items():
        for method, value in methods.items():
            assert value == pytest.approx(simulation.truth(design, method)[metric], abs=0.01)


def test_the_benchmark_ends_with_one_json_line():
    command = [sys.executable, str(BENCHMARKS / "simulate_statistics.py"), "--experiments", "2", "--draws", "20"]
    run = subprocess.run([*command, "--designs", "one-16"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert [row["metric"] for row in report["rows"]] == list(METRICS)
    assert report["options"]["experiments"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{kind}-{n}" for kind in ("good", "useless", "point", "ties") for n in (30, 100)])
def test_promised_intervals_hold_new_scans(simulation, unchecked, name):
    row = simulation.simulate_intervals(name, experiments=1000)
    assert row.met, row
    assert 0.88 <= row.covered <= 0.92


def test_promised_intervals_hold_new_scans_in_a_few_experiments(simulation, unchecked):
    row = simulation.simulate_intervals("good-30", experiments=150)
    assert abs(row.covered - 28 / 31) <= 3 * row.spread / math.sqrt(150)


def test_better_attention_gives_shorter_intervals(simulation, unchecked):
    good, useless = (simulation.simulate_intervals(name, experiments=50) for name in ("good-100", "useless-100"))
    assert good.length < 0.7 * useless.length


def test_the_simulation_can_tell_promises_that_are_not_kept(simulation, unchecked, monkeypatch):
    monkeypatch.setattr(simulation, "calibrate_intervals", partial(calibrate_intervals, coverage=0.8))
    assert not simulation.simulate_intervals("good-100", experiments=100).met
