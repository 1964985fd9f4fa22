"""Plans follow the paper's tables, and nothing but the blocks depends on the label."""

import numpy as np
import pytest
import torch

from normal_guidance.core.blocks import block_statistics
from normal_guidance.core.metrics import localization
from normal_guidance.scans.phantom.plan import ANATOMIES, GAP, MIN_SLICES, ScanPlan, plan

# The paper's tables; chest and abdomen exchanged in the second and third, which are printed the wrong way round.
BLOCKS = {"head": (8296, 569, 17), "chest": (1437, 497, 185, 65, 16, 7, 4), "abdomen": (304, 53, 7, 1)}
FRACTIONS = {  # mean, 25th, 50th, 75th, 95th
    "head": (0.350, 0.172, 0.342, 0.513, 0.688),
    "chest": (0.119, 0.027, 0.063, 0.174, 0.401),
    "abdomen": (0.093, 0.023, 0.059, 0.137, 0.283),
}
CENTERED_GAUSSIAN = {"head": (0.850, 0.02), "chest": (0.780, 0.02), "abdomen": (0.573, 0.04)}  # AUROC, tolerance


def packed(plans: list[ScanPlan]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.cat([torch.from_numpy(one.slice_labels).long() for one in plans])
    return labels, torch.tensor([one.slices for one in plans])


@pytest.fixture(scope="module")
def positive() -> dict[str, list[ScanPlan]]:
    return {name: plan(name, 1500, seed=5, positive=1.0) for name in ANATOMIES}


@pytest.mark.parametrize("anatomy", ANATOMIES)
def test_blocks_follow_the_papers_tables(positive, anatomy):
    statistics = block_statistics(*packed(positive[anatomy]))
    shares = np.array(BLOCKS[anatomy]) / sum(BLOCKS[anatomy])
    found = [statistics.bags_by_blocks.get(number + 1, 0) / 1500 for number in range(len(shares))]
    assert np.abs(shares - found).max() < 0.03
    summary = statistics.summary()["fraction"]
    drawn = [summary[name] for name in ("mean", "25th", "50th", "75th", "95th")]
    np.testing.assert_allclose(drawn, FRACTIONS[anatomy], atol=0.02)


@pytest.mark.parametrize("anatomy", ANATOMIES)
def test_being_central_helps_as_much_as_in_the_paper(positive, anatomy):
    labels, lengths = packed(positive[anatomy])
    scores = torch.cat([-((torch.arange(1, n + 1).double() - n / 2) ** 2) for n in lengths.tolist()])
    wanted, tolerance = CENTERED_GAUSSIAN[anatomy]
    assert float(localization(scores, labels, lengths).mean_auroc) == pytest.approx(wanted, abs=tolerance)


@pytest.mark.parametrize("anatomy", ANATOMIES)
def test_blocks_lie_in_the_organ_and_apart(positive, anatomy):
    low, high = ANATOMIES[anatomy].organ
    for one in positive[anatomy][:150]:
        assert one.blocks[0].start >= low * one.slices
        assert one.blocks[-1].stop <= high * one.slices
        assert all(b.start - a.stop > GAP for a, b in zip(one.blocks, one.blocks[1:], strict=False))
        assert len(one.blocks) == len(block_statistics(*packed([one])).lengths)


@pytest.mark.parametrize("slices", [MIN_SLICES, 13, 20])
def test_short_scans_have_room_for_their_blocks(slices):
    for one in plan("chest", 60, seed=1, positive=1.0, slices=slices):
        assert one.blocks
        assert len(one.blocks) == len(block_statistics(*packed([one])).lengths)


@pytest.mark.parametrize(("anatomy", "share"), [("head", 0.41), ("chest", 0.30), ("abdomen", 0.08)])
def test_the_share_of_positive_scans_is_exact(anatomy, share):
    assert sum(one.label for one in plan(anatomy, 200, seed=0)) == round(200 * share)
    assert sum(one.label for one in plan(anatomy, 10, seed=0, positive=0.5)) == 5


@pytest.mark.parametrize("anatomy", ANATOMIES)
def test_only_the_blocks_depend_on_the_label(anatomy):
    plans = (plan(anatomy, 50, seed=3, positive=share) for share in (1.0, 0.0))
    for scan, other in zip(*plans, strict=True):
        assert (scan.slices, scan.patient, scan.injuries) == (other.slices, other.patient, other.injuries)
        assert scan.stream("ids").random() == other.stream("ids").random()
        assert (bool(scan.blocks), bool(other.blocks)) == (True, False)


def test_patients_have_as_many_scans_as_the_real_ones():
    def per_patient(anatomy):
        plans = plan(anatomy, 1200, seed=0)
        return len(plans) / len({one.patient for one in plans})

    assert per_patient("chest") == 1
    assert per_patient("head") == pytest.approx(21_744 / 18_938, abs=0.06)  # patients: the challenge's own count
    assert per_patient("abdomen") == pytest.approx(4711 / 3147, abs=0.06)


def test_scans_of_one_patient_share_its_injuries():
    plans = plan("abdomen", 400, seed=0)
    injuries = {one.patient: dict(one.injuries) for one in plans}
    assert all(injuries[one.patient] == one.injuries for one in plans)
    assert {grade for found in injuries.values() for grade in found.values()} == {"low", "high"}
