"""With guidance beyond the paper, every engine gives the same results as the plain loop."""

from dataclasses import replace

import pytest
import torch

from memory_checkpoint import MemoryCheckpoint
from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.methods import build_model
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import (
    Config,
    Execution,
    departures,
    grid,
    paper_config,
)
from normal_guidance.sweep.loop import train_model
from normal_guidance.sweep.stack import Stack, objective
from normal_guidance.sweep.sweep import sweep

FEATURES = 8
GUIDES = [{"negatives": "uniform"}, {"negatives": "none"}, {"modes": 2}, {"warmup": 3}]


def scans(n: int, seed: int) -> Bags:
    return shifted_mean(n, seed, features=FEATURES, max_slices=33, shift=2.0).to(dtype=torch.float64)


@pytest.fixture(scope="module")
def train() -> Bags:
    return scans(50, seed=1)


@pytest.fixture(scope="module")
def val() -> Bags:
    return scans(30, seed=2)


@pytest.mark.slow(but="mhng-recorded-{'modes': 2}")
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("options", GUIDES, ids=str)
@pytest.mark.parametrize(("method", "engine"), [("ng", "packed"), ("ng", "recorded"), ("mhng", "recorded")])
def test_a_sweep_trains_as_the_plain_loop_does(
    options: dict[str, object], method: str, engine: str, train: Bags, val: Bags
) -> None:
    base = Config(method, epochs=4, batch_size=16, seed=5, **options)
    configs = grid(base, lr=[0.1, 0.01], l1=[0.0], guidance_weight=[0.5, 2.0])
    result = sweep(configs, train, val, Execution(precision="float64", engine=engine))
    plain = sweep([replace(c, modes=1, negatives="own", warmup=0) for c in configs], train, val)
    assert not torch.allclose(result.history[:, :, 0], plain.history[:, :, 0], rtol=1e-3), "the guide changes nothing"
    for number, config in enumerate(configs):
        history = train_model(config, train, val).history
        want = [[epoch.loss, epoch.train_auroc, epoch.val_auroc, epoch.val_loss] for epoch in history]
        torch.testing.assert_close(result.history[:, number], torch.tensor(want), rtol=0, atol=1e-6)


def test_lambda_rises_in_equal_steps_and_stays() -> None:
    config = Config("ng", guidance_weight=2.0, warmup=4)
    weights = [config.regularizer(epoch).weight for epoch in (1, 2, 4, 5, 100)]
    assert weights == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert config.regularizer().weight == Config("ng", guidance_weight=2.0).regularizer(1).weight == 2.0
    stack = Stack.of([config, replace(config, guidance_weight=0.0, divergence="reverse_kl")], FEATURES)
    place = stack.guidance_weights.data_ptr()
    for epoch, want in ((1, 0.5), (3, 1.5), (9, 2.0), (2, 1.0)):
        stack.begin_epoch(epoch)
        assert stack.guidance_weights.tolist() == [[want, 0.0], [0.0, 0.0]]
    assert stack.guidance_weights.data_ptr() == place, "recorded graphs read it where it was"


def test_a_sweep_that_goes_on_knows_how_far_the_warm_up_is(train: Bags, val: Bags) -> None:
    config, memory = Config("ng", epochs=5, batch_size=16, warmup=4), MemoryCheckpoint()
    whole = sweep([config], train, val, checkpoint=memory)
    memory.saved = memory.saved[:1]  # the state after two epochs
    again = sweep([config], train, val, checkpoint=memory)
    assert torch.equal(again.history, whole.history)


def test_the_objective_knows_the_scans_labels() -> None:
    model, lengths = build_model("ng", FEATURES), torch.tensor([4, 7, 2])
    bags = Bags(torch.randn(13, FEATURES), lengths, torch.tensor([0, 1, 1]))
    prediction = model(bags.features, bags.layout)
    guidance = NormalGuidance(negatives="none")
    with_term, without = (
        objective(prediction, bags.labels, bags.layout, model.parameters(), regularizer=one) for one in (guidance, None)
    )
    own = NormalGuidance().per_bag(prediction.attention, lengths=lengths)
    torch.testing.assert_close(with_term - without, own[1:].sum() / 3)


def test_run_folders_of_before_stay_what_they_are() -> None:
    """Guidance options at their defaults are not written, so that the identity of earlier runs does not change."""
    known = {"method", "lr", "l1", "guidance_weight", "divergence", "renormalize", "epochs", "batch_size", "momentum"}
    known |= {"clip_norm", "patience", "train_above_val", "seed"}
    assert set(Config("ng").as_json()) == known
    changed = paper_config("ng", modes=2, negatives="none", warmup=5)
    assert Config(**changed.as_json()) == changed
    assert departures(changed) == {"modes": 2, "negatives": "none", "warmup": 5}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": 0}, "modes is 0; it must be at least 1"),
        ({"modes": 1.5}, "modes is 1.5; it must be a whole number"),
        ({"warmup": -1}, "warmup is -1; it must be at least 0"),
        ({"negatives": "flat"}, "negatives 'flat' is unknown; choose one of own, uniform, none"),
    ],
)
def test_guides_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config("ng", **options)


def test_guides_are_one_protocol(train: Bags, val: Bags) -> None:
    with pytest.raises(UserError, match="differ in modes"):
        sweep([Config("ng"), Config("ng", modes=2)], train, val)
