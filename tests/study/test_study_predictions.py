"""What methods said, read back: the numbers are those of the models, put in the order of the scans."""

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.statistics.localization import localization_measures
from normal_guidance.statistics.split_results import split_results
from normal_guidance.study.experiment import Study, read_prediction, read_study_predictions, train_study
from normal_guidance.study.references import oracle_pooled
from normal_guidance.study.study_page import evaluate
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.predictions import PREDICTIONS
from normal_guidance.sweep.run import load_winner
from small_study import PROTOCOL, make_study, part_of, small_grid, some_scans, without_slice_labels

METHODS = ["centered_gaussian", "mean", "abmil", "ng"]


@pytest.fixture(scope="module")
def answers(small_experiment):
    return read_study_predictions(small_experiment.folder, small_experiment.dataset)


def test_predictions_are_the_winners_own(small_experiment, answers):
    assert [one.seed for one in answers] == [1001, 2001]
    for one in answers:
        assert list(one.predictions) == [*METHODS, "ceiling"]
        test = small_experiment.dataset.draw(one.seed, "test")
        assert one.scans.scan_ids == test.scan_ids
        for method in ("mean", "abmil", "ng"):
            expected = predict_bags(load_winner(small_experiment.folder / method / str(one.seed)), test)
            for field, own in zip(expected[:3], one.predictions[method][:3], strict=True):
                assert torch.equal(field, own)
        gaussian = predict_bags(CenteredGaussian(), test)
        assert torch.allclose(one.predictions["centered_gaussian"].log_attention, gaussian.log_attention.float())


def test_the_ceiling_is_both_references(small_experiment, answers):
    for one in answers:
        folder, test = small_experiment.folder, small_experiment.dataset.draw(one.seed, "test")
        slices = predict_bags(load_winner(folder / "slice_reference" / str(one.seed)), test)
        scans = predict_bags(load_winner(folder / "scan_reference" / str(one.seed)), oracle_pooled(test, one.seed))
        ceiling = one.predictions["ceiling"]
        assert torch.equal(ceiling.log_attention, slices.log_attention)
        assert torch.equal(ceiling.logit, scans.logit)
        assert one.left_out == 0
        own, theirs = (values.split(test.lengths.tolist()) for values in (ceiling.attention, slices.attention))
        for shares, probabilities in zip(own, theirs, strict=True):
            assert torch.allclose(shares / shares.sum(), probabilities / probabilities.sum())


def test_rows_may_lie_in_any_order_and_in_pieces(copied, answers):
    path = copied.folder / "ng" / "1001" / "predictions.parquet"
    table = pq.read_table(path)
    order = np.random.default_rng(0).permutation(len(table))
    pq.write_table(table.take(order), path, row_group_size=5)
    read = read_prediction(path.parent, answers[0].scans)
    for field, own in zip(answers[0].predictions["ng"][:3], read[:3], strict=True):
        assert torch.equal(field, own)


def test_every_head_is_read(tmp_path):
    study = make_study(tmp_path, ["mhng"])
    train_study(replace(study, seeds=(1001,)), make_grid=small_grid)
    (one,) = read_study_predictions(study.folder, study.dataset)
    test = study.dataset.draw(1001, "test")
    expected = predict_bags(load_winner(study.folder / "mhng" / "1001"), test)
    assert expected.log_attention.shape == (8, int(test.lengths.sum()))
    assert torch.equal(one.predictions["mhng"].log_attention, expected.log_attention)


def test_outcomes_and_measures_are_those_of_the_predictions(answers):
    one = answers[0]
    ng, gaussian = one.predictions["ng"], one.predictions["centered_gaussian"]
    outcomes = one.outcomes(["ng", "centered_gaussian"])
    expected = split_results(
        one.scans, {"ng": ng.slice_scores, "centered_gaussian": gaussian.slice_scores}, {"ng": ng.logit}
    )
    assert outcomes.scan_ids == expected.scan_ids
    assert outcomes.patient_ids == expected.patient_ids
    assert outcomes.methods["centered_gaussian"].scan_scores is None  # it says nothing about scans
    for method in expected.methods:
        for field in ("auroc", "auprc"):
            own, other = (getattr(one.methods[method], field) for one in (outcomes, expected))
            assert np.array_equal(own, other, equal_nan=True)
    assert np.array_equal(outcomes.methods["ng"].scan_scores, expected.methods["ng"].scan_scores)
    positions = torch.arange(int(one.scans.lengths.sum())).double()
    measures = localization_measures(
        ng.attention, one.scans.slice_labels, one.scans.lengths, scores=ng.slice_scores, positions=positions
    )
    assert one.measures("ng", positions).summary() == measures.summary()
    assert measures.summary()["peak_error_mm"].scans > 0


def test_probabilities_that_underflow_still_have_shares(copied, answers):
    """A slice reference that is sure of a negative scan: float32 knows no probability of a logit below -104."""
    path = copied.folder / "slice_reference" / "1001" / "predictions.parquet"
    frame = pq.read_table(path).to_pandas()
    frame["log_attention"] = [[head - 200 for head in heads] for heads in frame["log_attention"]]
    frame["attention"] = [np.zeros_like(one) for one in frame["attention"]]
    write(frame, path)
    (one, _) = read_study_predictions(copied.folder, copied.dataset)
    assert one.measures("ceiling").summary()["top_1_hit"] == answers[0].measures("ceiling").summary()["top_1_hit"]
    assert one.predictions["ceiling"].attention.max() == 1


def test_scans_that_the_scan_reference_leaves_out_blank_it_in_every_split(tmp_path):
    """A positive scan of the second split's test part without slice labels: statistics take all splits or none."""
    bags = some_scans()
    only_second = [
        number
        for number in range(len(bags))
        if bags.labels[number] == 1 and part_of(number, 2001) == "test" != part_of(number, 1001)
    ]
    study = make_study(tmp_path, ["mean"], without_slice_labels(bags, only_second[:1]))
    train_study(study, make_grid=small_grid)
    first, second = read_study_predictions(study.folder, study.dataset)
    assert (first.left_out, second.left_out) == (0, 1)
    for one in (first, second):
        assert one.predictions["ceiling"].logit.isnan().all()
        assert one.outcomes(["mean", "ceiling"]).methods["ceiling"].scan_scores is None
        assert one.outcomes(["mean", "ceiling"]).methods["mean"].scan_scores is not None
    experiment = evaluate(study)
    assert experiment.notes == (
        "The scan reference has no score for 1 test scan (positive without a positive slice), so methods are not "
        "compared with it at scan level.",
    )
    assert {one.metric for one in experiment.differences.found} == {"localization_auroc", "localization_auprc"}


def test_one_reference_alone_is_no_answer(copied):
    for method in (*METHODS, "scan_reference"):
        shutil.rmtree(copied.folder / method)
    assert read_study_predictions(copied.folder, copied.dataset) == []


def test_runs_of_other_splits_are_left_alone(copied):
    only = replace(copied.dataset, seeds=(2001,))
    assert [one.seed for one in read_study_predictions(copied.folder, only)] == [2001]


def damage(folder, change) -> None:
    path = folder / "predictions.parquet"
    frame = pd.read_parquet(path)
    change(frame)
    write(frame, path)


def write(frame, path) -> None:
    """Write the table; NaN, which is the slice reference's logit, stays NaN and does not become null."""
    types = {field.name: field.type for field in PREDICTIONS}
    columns = {name: list(frame[name]) for name in frame}
    garbled = {name: pa.array(values) for name, values in columns.items() if isinstance(values[0], str)}
    numbers = {name: pa.array(values, types[name]) for name, values in columns.items() if name not in garbled}
    pq.write_table(pa.table(garbled | numbers), path)


def rename(frame) -> None:
    frame["scan_id"] = "other-" + frame["scan_id"]


def lengthen(frame) -> None:
    frame["slices"] += 1
    frame["attention"] = [np.append(one, one[-1]) for one in frame["attention"]]
    frame["log_attention"] = [[np.append(head, head[-1]) for head in heads] for heads in frame["log_attention"]]


def miscount(frame) -> None:
    frame["slices"] += 1


def mislay(frame) -> None:
    del frame["log_attention"]


def garble(frame) -> None:
    frame["attention"] = "none"


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("ng", rename, "ng/1001 was tested on other scans; delete it and start the experiment again"),
        ("slice_reference", rename, "slice_reference/1001 was tested on other scans; delete it"),
        ("scan_reference", rename, "scan_reference/1001 was tested on other scans; delete it"),
        ("ng", lengthen, "ng/1001 was tested on scans of other lengths; delete it and start the experiment again"),
        ("ng", miscount, "ng/1001/predictions.parquet is damaged: scan .* not as many numbers of attention as slices"),
        ("ng", mislay, "ng/1001/predictions.parquet has no column 'log_attention'; copy the run again, or delete it"),
        ("ng", garble, r"ng/1001/predictions.parquet cannot be read \(.*\); copy the run again, or delete it"),
    ],
)
def test_predictions_that_do_not_fit_are_named(copied, method, change, message):
    damage(copied.folder / method / "1001", change)
    with pytest.raises(UserError, match=message):
        read_study_predictions(copied.folder, copied.dataset)


@pytest.mark.parametrize("content", [None, b"", b"PAR1 and nothing else"])
def test_predictions_that_are_damaged_or_gone_are_named(copied, content):
    path = copied.folder / "mean" / "2001" / "predictions.parquet"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=r"mean/2001/predictions.parquet cannot be read \(.*\); copy the run again"):
        read_study_predictions(copied.folder, copied.dataset)


def test_without_slice_labels_nothing_is_localized(tmp_path):
    study = make_study(tmp_path, ["mean"], without_slice_labels(some_scans()))
    train_study(Study(study.dataset, study.folder, ("mean",), (1001,), PROTOCOL), make_grid=small_grid)
    (one,) = read_study_predictions(study.folder, study.dataset)
    assert list(one.predictions) == ["mean"]
    with pytest.raises(UserError, match="the test scans of seed 1001 have no slice labels; nothing can be localized"):
        one.measures("mean")
