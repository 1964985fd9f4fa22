"""Configurations and executions: what cannot be, what is the same, what differs from the paper, what a folder keeps."""

import json
import math

import numpy as np
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config, departures, grid, paper_config, sensitivity_grid
from normal_guidance.sweep.sweep import sweep

ADAMW = {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "class_weights": True}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "slice_reference"}, "receptive_field is None; give slice_reference the mean length"),
        *[({"method": "slice_reference", "receptive_field": width}, f"is {width}; give") for width in (0, 2.5, True)],
        ({"receptive_field": 12}, "receptive_field is 12, but method 'ng' has none"),
        *[({"lr": number}, "lr is ") for number in (math.inf, math.nan, 10**400)],
        *[({"hidden": units}, f"hidden is {units}; give a whole number") for units in (0, -1, 2.5, True)],
        ({"method": "evidence_ng", "hidden": 8}, "hidden is 8, but method 'evidence_ng' has no such .* one of abmil, "),
        ({"method": "slice_reference", "receptive_field": 3, "hidden": 8}, "leave it out, or take one of abmil"),
        ({"momentum": -3.0}, "momentum is -3.0; it must be from 0.0 to 1.0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        *[({"seed": seed}, f"seed is {seed}") for seed in (1.5, 10**20, -1)],
        ({"epochs": 2.0}, "epochs is 2.0; it must be a whole number"),
        ({"modes": 0}, "modes is 0; it must be at least 1"),
        ({"warmup": -1}, "warmup is -1; it must be at least 0"),
        ({"optimizer": "adamw", "momentum": 1.0}, "momentum is 1.0; of adamw it is beta_1, which must be below 1"),
        ({"schedule": "linear"}, "schedule 'linear' is unknown; choose one of constant, cosine"),
        ({"class_weights": "balanced"}, "class_weights 'balanced' is unknown; choose one of False, True"),
    ],
)
def test_configurations_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    """Beside those of docs/errors_page.py."""
    with pytest.raises(UserError, match=message):
        Config(**({"method": "ng"} | wrong))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "no configuration"),
        ([{}, {"method": "abmil"}], "differ in method"),
        ([{"method": "slice_reference", "receptive_field": width} for width in (3, 4)], r"receptive_field \(3, 4\)"),
        *[
            ([{}, {name: value}], f"differ in {name}")
            for name, value in {**ADAMW, "epochs": 7, "modes": 2, "hidden": 8}.items()
        ],
    ],
)
def test_what_cannot_be_trained_together(changes: list[dict[str, object]], message: str) -> None:
    scans = shifted_mean(20, seed=1, features=4)
    with pytest.raises(UserError, match=message):
        sweep([Config(**{"method": "ng"} | change) for change in changes], scans, scans)


@pytest.mark.usefixtures("unchecked")
def test_equal_numbers_make_the_same_configuration() -> None:
    made = Config("ng", 0.1, seed=np.int64(1), batch_size=np.int64(8), patience=np.int64(3), hidden=np.int64(4))
    assert made == Config("ng", lr=np.float64(0.1), seed=1, batch_size=8, patience=3, hidden=4)
    assert made.spec.build(5).hidden.weight.shape == (4, 5)
    json.dumps(made.as_json())
    assert repr(Config("ng", lr=1)) == repr(Config("ng", lr=1.0))


def test_the_papers_grids() -> None:
    configs = grid(Config("ng"))
    assert len({(config.lr, config.l1) for config in configs}) == len(configs) == 32
    assert len({(c.divergence, c.guidance_weight) for c in sensitivity_grid(Config("ng"))}) == 9


@pytest.mark.parametrize(
    ("changes", "departing"),
    [
        ({"lr": 0.1, "l1": 1.0, "seed": 7}, {}),
        ({"epochs": 10, "train_above_val": False}, {"epochs": 10, "train_above_val": False}),
        ({"method": "slice_reference", "receptive_field": 12}, {}),
        ({"modes": 2, "negatives": "none", "warmup": 5}, {"modes": 2, "negatives": "none", "warmup": 5}),
        ({**ADAMW, "hidden": 8}, {**ADAMW, "hidden": 8}),
    ],
)
def test_departures_name_what_is_not_the_papers(changes: dict[str, object], departing: dict[str, object]) -> None:
    config = paper_config(**({"method": "ng"} | changes))
    assert departures(config) == departing
    assert Config(**config.as_json()) == config


def test_folders_hold_options_only_where_they_are_set() -> None:
    always = {"method", "lr", "l1", "guidance_weight", "divergence", "renormalize", "epochs", "batch_size", "momentum"}
    always |= {"clip_norm", "patience", "train_above_val", "seed"}
    assert set(Config("ng").as_json()) == always
    assert set(Config("ng", **ADAMW).as_json()) == always | ADAMW.keys()


def test_lambda_rises_in_equal_steps_and_stays_and_idle_guides_go() -> None:
    config = Config("ng", guidance_weight=2.0, warmup=4)
    assert [config.regularizer(epoch).weight for epoch in (1, 2, 4, 5, 100)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert config.regularizer().weight == Config("ng", guidance_weight=2.0).regularizer(1).weight == 2.0
    assert Config("abmil", modes=2, warmup=3).without_idle_guides() == Config("abmil")
    assert Config("ng", modes=2).without_idle_guides().modes == 2
