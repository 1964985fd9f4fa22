"""The supervised references: what is pooled, what is written, and that they are as good as references should be."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.scans.features.store import write_store
from normal_guidance.statistics.split_results import score
from normal_guidance.study.drawn import bayes_slice_scores, shifted_mean
from normal_guidance.study.references import (
    References,
    oracle_pooled,
    resampled,
    run_scan_reference,
    run_slice_reference,
    slice_reference_config,
)
from normal_guidance.sweep.config import Config, grid, paper_config
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.run import load_winner, run_sweep

# ----------------------------------------------------------------------------------------------------
# Pooling
# ----------------------------------------------------------------------------------------------------


def bags_of(*scans: tuple[int, list[int]]) -> Bags:
    """Scans by label and slice labels; slice j of all has the one feature 2^j."""
    slice_labels = torch.tensor([label for _, labels in scans for label in labels])
    return Bags(
        2.0 ** torch.arange(len(slice_labels), dtype=torch.float64)[:, None],
        torch.tensor([len(labels) for _, labels in scans]),
        torch.tensor([label for label, _ in scans]),
        slice_labels,
        scan_ids=tuple("ABCDEFGH"[: len(scans)]),
        patient_ids=tuple("abcdefgh"[: len(scans)]),
    )


def test_pooling_by_hand() -> None:
    # A is positive in slices 1 and 2 of 4.  B has 3 slices: round(0, 1.5, 3) = 0, 2, 3, so its slice 1.
    # C has 7: round(0, .5, 1, 1.5, 2, 2.5, 3) = 0, 0, 1, 2, 2, 2, 3, so slices 2 to 5.
    bags = bags_of((1, [0, 1, 1, 0]), (0, [0] * 3), (0, [0] * 7))
    pooled = oracle_pooled(bags, seed=3)
    assert pooled.features.flatten().tolist() == [(2 + 4) / 2, 2**5, (2**9 + 2**10 + 2**11 + 2**12) / 4]
    assert pooled.labels.tolist() == [1, 0, 0]
    assert pooled.lengths.tolist() == [1, 1, 1]
    assert pooled.slice_labels is None
    assert (pooled.scan_ids, pooled.patient_ids) == (tuple("ABC"), tuple("abc"))


@pytest.mark.parametrize(("length", "wanted"), [(1, 4), (4, 1), (12, 60), (60, 12), (37, 37), (4, 7)])
def test_resampling_is_rounding_numpys_linspace(length: int, wanted: int) -> None:
    assert resampled(length, wanted).tolist() == np.rint(np.linspace(0, length - 1, wanted)).astype(int).tolist()


def test_scans_that_tell_nothing_are_left_out() -> None:
    unknown = [UNKNOWN] * 2
    bags = bags_of((1, [0, 1]), (1, [0, 0]), (1, unknown), (0, unknown), (0, [0]))
    pooled = oracle_pooled(bags, seed=0)
    # B and C have no positive slice; a negative scan needs no labels of its own; E could only borrow A's slice 0.
    assert pooled.scan_ids == ("A", "D")
    assert pooled.features.flatten().tolist() == [2.0, 2.0**7]


def test_empty_borrowed_labels_are_drawn_again_and_all_that_fit_are_as_likely() -> None:
    # At two slices only the ends of a donor count: A fits by its first slice, C and D by their last, B not at all.
    donors = [(1, [1, 0, 0]), (1, [0, 1, 0]), (1, [0, 0, 1]), (1, [0, 0, 0, 0, 1])]
    bags = bags_of(*donors, (0, [0, 0]))
    found = Counter(oracle_pooled(bags, seed).features[-1].item() for seed in range(600))
    assert set(found) == {2.0**14, 2.0**15}, "never empty, never both"
    assert found[2.0**14] / 600 == pytest.approx(1 / 3, abs=0.06)  # three sd of 600 draws


def test_pooling_is_seeded_and_leaves_the_callers_generator_alone() -> None:
    bags = shifted_mean(40, seed=5, features=3)
    before = torch.get_rng_state()
    first, again, other = (oracle_pooled(bags, seed).features for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    assert torch.get_rng_state().equal(before)
    positive = bags.labels == 1
    assert first[positive].equal(other[positive]), "only negative scans depend on chance"


class OneAtATime:
    """A store's part that counts how many scans are read together."""

    def __init__(self, part: object) -> None:
        self.part, self.most = part, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.part, name)

    def __len__(self) -> int:
        return len(self.part)

    def rows(self, numbers: Tensor) -> Tensor:
        self.most = max(self.most, len(numbers))
        return self.part.rows(numbers)


@pytest.mark.usefixtures("unchecked")
def test_a_store_is_pooled_as_bags_are_one_scan_at_a_time(tmp_path: Path) -> None:
    bags = shifted_mean(30, seed=5, features=4)
    store = write_store(tmp_path / "store", [("train", bags)], provenance={}, dtype=torch.float16)
    part = OneAtATime(store.part("train"))
    pooled, want = oracle_pooled(part, seed=1), oracle_pooled(bags.to(dtype=torch.float16).to(dtype=torch.float32), 1)
    assert part.most == 1
    assert pooled.features.dtype == torch.float32
    assert pooled.features.equal(want.features)
    assert (pooled.scan_ids, pooled.labels.tolist()) == (bags.scan_ids, bags.labels.tolist())


def test_scans_without_any_positive_slice_are_refused() -> None:
    with pytest.raises(UserError, match="none of 2 scans has a slice labelled positive"):
        oracle_pooled(bags_of((1, [0, 0]), (0, [0])), seed=0)
    with pytest.raises(UserError, match="learns slice labels"):
        oracle_pooled(replace(bags_of((1, [1])), slice_labels=None), seed=0)


# ----------------------------------------------------------------------------------------------------
# Runs
# ----------------------------------------------------------------------------------------------------

SHIFT = 1.0
PROTOCOL = paper_config("ng", epochs=60, batch_size=32, seed=7)


def few(config: Config) -> tuple[Config, ...]:
    return grid(config, lr=(0.1, 0.01), l1=(0.01, 0.001))


@pytest.fixture(scope="module")
def sets() -> tuple[Bags, Bags, Bags]:
    train, val, test = (shifted_mean(n, s, features=8, shift=SHIFT) for n, s in ((256, 1), (128, 2), (128, 3)))
    labels = list(test.slice_labels.split(test.lengths.tolist()))
    first = int(test.labels.nonzero()[0])
    labels[first] = torch.full_like(labels[first], UNKNOWN)
    return train, val, replace(test, slice_labels=torch.cat(labels))


def run_references(folder: Path, *sets: Bags, receptive_field: int | None = None, **options: Any) -> References:
    """Both references, as a study trains them."""
    common = {"make_grid": few, **options}
    return References(
        run_slice_reference(folder / "slice", *sets, PROTOCOL, receptive_field=receptive_field, **common),
        run_scan_reference(folder / "scan", *sets, PROTOCOL, **common),
    )


@pytest.fixture(scope="module")
def references(sets: tuple[Bags, Bags, Bags], tmp_path_factory: pytest.TempPathFactory) -> References:
    folder = tmp_path_factory.mktemp("references")
    return run_references(folder, *sets, options={"dataset": "easy"})


@pytest.mark.slow
def test_the_row_of_the_tables_is_of_both_runs(references: References, sets: tuple[Bags, Bags, Bags]) -> None:
    on_slices, on_scans = (load_winner(run.folder) for run in (references.slices, references.scans))
    got, test = references.scores, sets[2]
    assert got is not None
    localizable = [bag for bag in test if bag.label and bag.slice_labels is not None]
    aurocs = [
        roc_auc_score(bag.slice_labels, on_slices(bag.features, [len(bag.features)]).slice_scores.detach())
        for bag in localizable
    ]
    assert got.localization_auroc == pytest.approx(np.mean(aurocs))
    assert (got.localized, got.left_out) == (len(aurocs), 1)
    pooled = oracle_pooled(test, seed=7)
    with torch.no_grad():
        logits = on_scans.classifier(pooled.features).squeeze(1)
    assert got.scan_auroc == pytest.approx(roc_auc_score(pooled.labels, logits))
    assert got.scan_auprc == pytest.approx(average_precision_score(pooled.labels, logits))


@pytest.mark.slow
def test_reports_and_predictions_say_what_they_are(references: References, sets: tuple[Bags, Bags, Bags]) -> None:
    assert references.slices.report["options"] == {
        "dataset": "easy",
        "reference": "slices",
        "receptive_field": 12,
        "receptive_field_given": False,
    }
    assert references.scans.report["options"] == {
        "dataset": "easy",
        "reference": "scans",
        "left_out": {"train": 0, "val": 0, "test": 1},
    }
    (winner,) = references.slices.report["winners"]
    assert winner["test"]["scan_auroc"] is None, "the slice reference scores no scans"
    assert winner["config"]["receptive_field"] == 12
    table = pq.read_table(references.slices.folder / "predictions.parquet").to_pandas()
    rows = table[table["part"] == "test"]
    prediction = predict_bags(load_winner(references.slices.folder), sets[2])
    assert np.concatenate(rows["attention"].tolist()).tolist() == prediction.attention.tolist()
    (logits,) = rows["log_attention"].iloc[0]
    assert logits.tolist() == prediction.slice_scores[: len(logits)].tolist()
    scans = pq.read_table(references.scans.folder / "predictions.parquet").to_pandas()
    assert set(scans["slices"]) == {1}
    assert set(sets[2].scan_ids) - set(scans["scan_id"]) == {sets[2].scan_ids[int(sets[2].labels.nonzero()[0])]}


@pytest.mark.slow
def test_the_winner_is_chosen_by_validation_slices(references: References, sets: tuple[Bags, Bags, Bags]) -> None:
    val, (winner,) = sets[1], references.slices.winners
    logits = predict_bags(load_winner(references.slices.folder), val).slice_scores
    assert winner.val_auroc == pytest.approx(roc_auc_score(val.slice_labels, logits), abs=1e-9)
    history = pq.read_table(references.slices.folder / "history.parquet").to_pandas()
    selectable = history[history["train_auroc"] > history["val_auroc"]]
    assert winner.val_auroc == selectable["val_auroc"].max()


@pytest.mark.slow
def test_the_slice_reference_beats_guidance_and_comes_close_to_bayes(
    references: References, sets: tuple[Bags, Bags, Bags], tmp_path: Path
) -> None:
    guided = run_sweep(tmp_path, few(PROTOCOL), *sets).winners[0].test
    bayes = score(sets[2], bayes_slice_scores(sets[2], shift=SHIFT))
    assert references.scores is not None
    assert guided is not None
    found = references.scores.localization_auroc
    assert found > guided.localization_auroc + 0.02
    assert bayes.localization_auroc - 0.04 < found < bayes.localization_auroc


@pytest.mark.slow
def test_complete_references_are_only_loaded(references: References, sets: tuple[Bags, Bags, Bags]) -> None:
    folder = references.slices.folder.parent
    again = run_references(folder, *sets, watch=lambda _: pytest.fail("it was trained again"))
    assert again.slices.report == references.slices.report
    assert again.scores == references.scores
    with pytest.raises(UserError, match=r"receptive_field was 12, now it is 5"):
        run_references(folder, *sets, receptive_field=5)


def test_the_receptive_field_is_the_training_blocks_or_given(sets: tuple[Bags, Bags, Bags]) -> None:
    train = bags_of((1, [1, 1, 0, 0, 0, 1, 0]), (1, [0, 1]), (0, [0]))  # blocks of 6 (bridged) and 1
    assert slice_reference_config(PROTOCOL, train).receptive_field == round(3.5)
    assert slice_reference_config(PROTOCOL, train, 29).receptive_field == 29
    with pytest.raises(UserError, match="learns slice labels"):
        slice_reference_config(PROTOCOL, replace(train, slice_labels=None))


def test_guidance_of_the_protocol_is_no_departure(sets: tuple[Bags, Bags, Bags], tmp_path: Path) -> None:
    protocol = replace(PROTOCOL, renormalize=False, epochs=1, train_above_val=False)
    run = run_scan_reference(tmp_path, *sets, protocol)
    assert run.report["departures"] == {"epochs": 1, "batch_size": 32, "train_above_val": False}
    assert len(pq.read_table(tmp_path / "history.parquet")) == 32, "the paper's grid"


@pytest.mark.slow
def test_a_reference_that_selected_nothing_has_no_row(references: References) -> None:
    assert replace(references, scans=replace(references.scans, winners=())).scores is None
