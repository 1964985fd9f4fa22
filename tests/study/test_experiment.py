"""Studies of stored scans: which scans, what is trained, what is read back, and what is refused.

`test_reproduction.py` has studies of drawn scans, whose best possible scores are known.
"""

import pickle
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lidc_files import agreed, write_lidc_table

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import ENSEMBLE, REFERENCES
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.fit.fit_ensemble import FoldPlan, fit_ensemble
from normal_guidance.scans.features.store import write_store
from normal_guidance.scans.index.manifest import PARTS
from normal_guidance.statistics.split_results import score
from normal_guidance.study import drawn, experiment
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import (
    Listener,
    Study,
    StudyData,
    find_results,
    lidc_data,
    read_study_predictions,
    stored_dataset,
    train_study,
    wanted_of,
)
from normal_guidance.study.references import oracle_pooled
from normal_guidance.study.reproduction import reproduce
from normal_guidance.study.study_page import evaluate
from normal_guidance.study.study_tables import collect
from normal_guidance.sweep import run as runs
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.predictions import PREDICTIONS
from normal_guidance.sweep.run import load_run, load_winner
from small_bundle import few_settings
from small_study import (
    PROTOCOL,
    SEEDS,
    make_store,
    make_study,
    part_of,
    small_grid,
    some_scans,
    without_slice_labels,
    write_splits,
)

METHODS = ["centered_gaussian", "mean", "abmil", "ng"]

# Datasets from stores and splits


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("stored") / "chest")


def test_each_split_has_the_scans_that_its_table_says(store, tmp_path):
    dataset = stored_dataset([store.folder], write_splits(tmp_path, store.scan_ids))
    assert (dataset.name, dataset.seeds, dataset.oracle) == ("chest", SEEDS, None)
    for seed in SEEDS:
        for part in PARTS:
            expected = [scan for number, scan in enumerate(store.scan_ids) if part_of(number, seed) == part]
            assert list(dataset.draw(seed, part).scan_ids) == expected
            assert dataset.fingerprints[seed, part] == dataset.draw(seed, part).fingerprint
    assert dataset.fingerprints[1001, "train"] != dataset.fingerprints[2001, "train"]


def test_seeds_are_the_numbers_of_the_files_unless_these_are_equal_or_missing(store, tmp_path):
    files = write_splits(tmp_path, store.scan_ids, (2001, 1001))
    (tmp_path / "readme.txt").write_text("no table")
    pd.read_csv(files[0]).to_parquet(tmp_path / "split-3.parquet")
    dataset = stored_dataset([store.folder], [tmp_path])
    assert dataset.seeds == (1001, 2001, 3)
    assert dataset.draw(3, "val").scan_ids == dataset.draw(2001, "val").scan_ids
    (tmp_path / "split-3.parquet").unlink()
    files[0].rename(tmp_path / "a.csv")
    files[1].rename(tmp_path / "b-7.csv")
    assert stored_dataset([store.folder], [tmp_path]).seeds == (1, 2)
    (tmp_path / "a.csv").rename(tmp_path / "c-7.csv")
    assert stored_dataset([store.folder], [tmp_path]).seeds == (1, 2)


def test_without_splits_each_store_has_its_own(tmp_path):
    folders = [tmp_path / f"chest-{seed}" for seed in SEEDS]
    for seed, folder in zip(SEEDS, folders, strict=True):
        bags = [(part, some_scans(6, seed + number)) for number, part in enumerate(PARTS)]
        write_store(folder, [(part, replace(scans, patient_ids=scans.scan_ids)) for part, scans in bags], provenance={})
    dataset = stored_dataset(folders)
    assert (dataset.name, dataset.seeds) == ("chest-1001", SEEDS)
    assert dataset.draw(2001, "val").scan_ids[0] == "synthetic-2002-000000"
    assert dataset.draw(2001, "val").folder == folders[1]


def test_a_store_for_each_split(store, tmp_path):
    """Features that were normalised with a split's training scans are that split's own."""
    other = make_store(tmp_path / "other", some_scans(shift=5.0))
    dataset = stored_dataset([store.folder, other.folder], write_splits(tmp_path / "splits", store.scan_ids))
    assert [dataset.draw(seed, "test").folder for seed in SEEDS] == [store.folder, other.folder]


def test_it_travels_to_processes_that_start_elsewhere(store, tmp_path, monkeypatch):
    splits = write_splits(tmp_path / "splits", store.scan_ids)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(store.folder)
    dataset = stored_dataset([(tmp_path / "link").relative_to(tmp_path)], [splits[0].relative_to(tmp_path)])
    monkeypatch.chdir("/")
    there = pickle.loads(pickle.dumps(dataset))
    assert there.draw(1001, "test").fingerprint == dataset.fingerprints[1001, "test"]


@pytest.mark.parametrize(
    ("unlabelled", "expected"),
    [((), (True, True)), (("train",), (True, False)), (("val",), (True, False)), (("test",), (False, False))],
)
def test_which_parts_have_slice_labels(tmp_path, unlabelled, expected):
    bags = some_scans()
    numbers = [number for number in range(len(bags)) if part_of(number, 2001) in unlabelled]
    store = make_store(tmp_path / "store", without_slice_labels(bags, numbers))
    # A third of the scans is in another part of the first split, which therefore has some labels in each.
    splits = write_splits(tmp_path / "splits", store.scan_ids)
    both, second = stored_dataset([store.folder], splits), stored_dataset([store.folder], splits[1:])
    assert (second.has_slice_labels, second.has_supervision) == expected
    assert (both.has_slice_labels, both.has_supervision) == expected  # what one split lacks, the dataset lacks


def test_negative_slices_alone_locate_nothing(tmp_path):
    bags = some_scans(36)
    store = make_store(tmp_path / "store", replace(bags, labels=0 * bags.labels, slice_labels=0 * bags.slice_labels))
    assert not stored_dataset([store.folder], write_splits(tmp_path, store.scan_ids)).has_slice_labels


@pytest.mark.parametrize(
    ("stores", "splits", "name", "message"),
    [
        ([], [], None, "no store is given; give the folder of one"),
        (["nowhere"], [], None, "nowhere is not a feature store: store.json is missing"),
        (["store"], [], None, "chest has no scan in part 'train'; give --split FILE"),
        (["store", "store", "store"], ["splits"], None, "3 stores and 2 splits; give one store for all splits, or one"),
        (["store"], ["splits/split-1001.csv", "splits"], None, "split-1001.csv is given twice; give each split once"),
        (["store", "store"], [], None, "chest is given twice; give each split once"),
        (["store"], ["empty"], None, r"empty holds no split \(.csv, .parquet\); make some with nguide split"),
        (["store"], ["nowhere.csv"], None, "nowhere.csv is not a file; .* holds all-train.csv, leaky.csv, short"),
        (["store"], ["splits.txt"], None, "splits.txt is not a .csv or .parquet file; give one with"),
        (["store"], ["short.csv"], None, "short.csv: scan '.*' is in the store, but has no part"),
        (["store"], ["all-train.csv"], None, "all-train.csv has no scan in part 'val'; give --split FILE"),
        (["store"], ["leaky.csv"], None, "patient 'patient-0' is in part 'train' and in part 'val'"),
        (["store"], ["splits"], "semi-synthetic", "dataset 'semi-synthetic' is drawn, not stored: .*another name"),
    ],
)
def test_what_is_refused(store, tmp_path, stores, splits, name, message):
    write_splits(tmp_path / "splits", store.scan_ids)
    (tmp_path / "empty").mkdir()
    tables = {
        "short.csv": [f"{scan},train" for scan in store.scan_ids[1:]],
        "all-train.csv": [f"{scan},train" for scan in store.scan_ids],
        "leaky.csv": [f"{scan},{PARTS[number % 3]}" for number, scan in enumerate(store.scan_ids)],
    }
    for file, lines in tables.items():
        (tmp_path / file).write_text("\n".join(["scan_id,part", *lines]))
    folders = [store.folder if given == "store" else tmp_path / given for given in stores]
    with pytest.raises(UserError, match=message):
        stored_dataset(folders, [tmp_path / given for given in splits], name)


# What is trained


def test_both_references_are_the_last_row(small_experiment):
    folder = small_experiment.folder
    results = collect(folder, "small")
    row = results.table.rows[-1]
    assert (row.method, row.title, row.seeds) == ("ceiling", "Supervised reference", (1001, 2001))
    for seed, scores in zip(row.seeds, row.scores, strict=True):
        slices, scans = (load_run(folder / reference / str(seed)).winners[0] for reference in REFERENCES)
        assert scores == replace(slices.test, scan_auroc=scans.test.scan_auroc, scan_auprc=scans.test.scan_auprc)
        assert (slices.config.method, slices.config.receptive_field) == ("slice_reference", 4)  # blocks of these scans
        assert (slices.config.seed, scans.config.seed) == (seed, seed)
    assert not (folder / "ceiling").exists()
    assert {choice["method"] for choice in results.chosen} == {"mean", "abmil", "ng", *REFERENCES}


def test_the_receptive_field_can_be_given(tmp_path, trained):
    study = replace(make_study(tmp_path, [], receptive_field=3), seeds=(1001,))
    train_study(study, make_grid=small_grid)
    assert load_run(study.folder / "slice_reference" / "1001").winners[0].config.receptive_field == 3
    trained.clear()
    train_study(study, make_grid=small_grid)
    for changes, message in (
        ({"receptive_field": 5}, r"holds another run: configs.0.receptive_field was 3, now it is 5"),
        ({"receptive_field": None}, r"slice_reference/1001 holds another run: its receptive field was set to 3"),
        (
            {"protocol": replace(PROTOCOL, epochs=4)},
            r"slice_reference/1001 holds another run: configs.0.epochs was 3, now",
        ),
    ):
        with pytest.raises(UserError, match=message):
            train_study(replace(study, **changes), make_grid=small_grid)
    assert trained == []


def test_slice_labels_of_test_scans_alone_measure_but_do_not_supervise(tmp_path, trained):
    bags = some_scans()
    numbers = [number for number in range(len(bags)) if part_of(number, 1001) != "test"]
    study = make_study(tmp_path, ["centered_gaussian", "mean"], without_slice_labels(bags, numbers))
    dataset = stored_dataset([tmp_path / "store"], [tmp_path / "splits" / "split-1001.csv"])
    study = replace(study, dataset=dataset, seeds=(1001,))
    assert wanted_of(study) == ["centered_gaussian", "mean"]
    results = reproduce(study, make_grid=small_grid)
    assert trained == [("mean", 1001)]
    assert [row.method for row in results.table.rows] == ["centered_gaussian", "mean"]
    assert results.table.rows[0].scores[0].localized > 0
    evaluated = evaluate(study)
    assert evaluated.notes == (
        "Training or validation scans have no slice labelled positive: there is no supervised reference.",
    )
    assert {(row.method, row.against) for row in evaluated.differences.rows} == {("mean", "centered_gaussian")}


def test_the_oracle_at_nodules_reads_the_table_that_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(drawn, "LIDC_SIZES", {"train": 3, "val": 3, "test": 6})
    scans = [(f"p{i}", [float(z) for z in range(12)], agreed(i, i + 1)) for i in range(10)]
    dataset = lidc_data(write_lidc_table(tmp_path / "table.sqlite", scans))
    test = dataset.draw(2001, "test")
    best, positions = dataset.oracle(test), drawn.read_positions(tmp_path / "table.sqlite")
    assert best.scan_scores.equal(drawn.lidc_scan_scores(test, positions))
    assert best.slice_scores.equal(drawn.lidc_slice_scores(test, positions))


def test_what_nguide_fit_makes_is_a_row_of_a_study(tmp_path, monkeypatch):
    """Its scores are those of an ensemble of training and validation scans."""

    def separable(seed: int, part: str) -> Bags:
        bags = shifted_mean(20, seed + len(part), features=2, shift=3.0, min_slices=6, max_slices=8, block=3)
        names = tuple(f"{part}-{number}" for number in range(len(bags)))
        return replace(bags, scan_ids=names, patient_ids=names)

    data = StudyData("own", separable, (5,), None, has_supervision=False)
    study = Study(data, tmp_path, ("centered_gaussian", ENSEMBLE), (5,))
    few_settings(monkeypatch)
    monkeypatch.setattr(experiment, "make_plan", lambda labels, patients, seed: FoldPlan(folds=3, seed=seed))
    train_study(study)
    (result,) = find_results(tmp_path, "own", [ENSEMBLE])
    train, val, test = (data.draw(5, part) for part in ("train", "val", "test"))
    names = ("features", "lengths", "labels")
    both = Bags(*(torch.cat([getattr(part, name) for part in (train, val)]) for name in names))
    patients = [*train.patient_ids, *val.patient_ids]
    ensemble = fit_ensemble(both, patients, FoldPlan(folds=3, seed=5)).ensemble
    want = score(test, (prediction := predict_bags(ensemble, test)).slice_scores, prediction.logit)
    assert result.scores.localization_auroc == pytest.approx(want.localization_auroc)
    assert result.scores.scan_auroc == pytest.approx(want.scan_auroc)
    assert result.scores.scan_auroc > 0.9


# Started again


def test_started_again_it_trains_what_is_missing_only(copied, trained):
    train_study(copied, make_grid=small_grid)
    assert trained == []
    (copied.folder / "slice_reference" / "2001" / "report.json").unlink()
    shutil.rmtree(copied.folder / "scan_reference" / "1001")
    shutil.rmtree(copied.folder / "centered_gaussian" / "1001")
    asked, finished = [], []
    somebody_else = Listener(train=lambda study, jobs, listener: asked.extend((job.method, job.folder) for job in jobs))
    train_study(copied, make_grid=small_grid, listener=somebody_else)
    lacking = [("scan_reference", 1001), ("slice_reference", 2001)]
    assert asked == [(method, copied.folder / method / str(seed)) for method, seed in lacking]
    assert trained == []
    train_study(copied, make_grid=small_grid, listener=Listener(finished=lambda title, run: finished.append(title)))
    assert trained == [("mean", 1001), ("slice_reference", 2001)]
    assert finished == ["scan reference, seed 1001", "slice reference, seed 2001"]
    assert (copied.folder / "centered_gaussian" / "1001" / "scores.json").exists()


def test_a_stopped_reference_goes_on_with_the_same_weights(small_experiment, copied, monkeypatch, trained):
    name = "slice_reference/1001"
    shutil.rmtree(copied.folder / name)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_history", stop)  # its state is saved, its report is not written
        with pytest.raises(KeyboardInterrupt):
            train_study(copied, make_grid=small_grid)
    assert (copied.folder / name / "state.safetensors").exists()
    train_study(copied, make_grid=small_grid)
    for file in ("best.safetensors", "history.parquet"):
        assert (copied.folder / name / file).read_bytes() == (small_experiment.folder / name / file).read_bytes()


def opened_again(study: Study, folder) -> Study:
    """As the command opens it when it is started again."""
    now = stored_dataset([folder / "store"], [folder / "splits"], study.dataset.name)
    labels = {name: getattr(study.dataset, name) for name in ("has_slice_labels", "has_supervision")}
    return replace(study, dataset=replace(now, **labels))


@pytest.mark.parametrize("part", ["train", "test"])
def test_runs_of_a_split_that_has_changed_are_refused(tmp_path, trained, part):
    """The same seed with other parts: complete runs on other scans must not be reported as this split's."""
    study = make_study(tmp_path, ["mean"])
    study = replace(study, seeds=(1001,), dataset=replace(study.dataset, has_slice_labels=False))
    train_study(study, make_grid=small_grid)
    train_study(opened_again(study, tmp_path), make_grid=small_grid)
    trained.clear()
    other = {"train": "val", "test": "train"}[part]
    patient = [scan for number, scan in enumerate(some_scans().scan_ids) if part_of(number, 1001) == part][:2]
    split = tmp_path / "splits" / "split-1001.csv"
    lines = [line.split(",") for line in split.read_text().splitlines()]
    split.write_text("\n".join(f"{scan},{other if scan in patient else own}" for scan, own in lines))
    message = "mean/1001 holds results on other (train|val|test) scans: split 1001 or its features have changed since"
    with pytest.raises(UserError, match=message):
        train_study(opened_again(study, tmp_path), make_grid=small_grid)
    assert trained == []


# Predictions read back


@pytest.fixture(scope="module")
def answers(small_experiment):
    return read_study_predictions(small_experiment.folder, small_experiment.dataset)


def test_predictions_are_the_winners_own_and_the_ceilings_are_both_references(small_experiment, answers):
    folder = small_experiment.folder
    assert [split.seed for split in answers] == [1001, 2001]
    for split in answers:
        seed, test = split.seed, small_experiment.dataset.draw(split.seed, "test")
        assert list(split.predictions) == [*METHODS, "ceiling"]
        assert (split.scans.scan_ids, split.left_out) == (test.scan_ids, 0)
        for method in ("mean", "abmil", "ng"):
            expected = predict_bags(load_winner(folder / method / str(seed)), test)
            for field, read in zip(expected[:3], split.predictions[method][:3], strict=True):
                assert torch.equal(field, read)
        gaussian = predict_bags(CenteredGaussian(), test)
        assert torch.allclose(split.predictions["centered_gaussian"].log_attention, gaussian.log_attention.float())
        slices = predict_bags(load_winner(folder / "slice_reference" / str(seed)), test)
        scans = predict_bags(load_winner(folder / "scan_reference" / str(seed)), oracle_pooled(test, seed))
        ceiling = split.predictions["ceiling"]
        assert torch.equal(ceiling.log_attention, slices.log_attention)
        assert torch.equal(ceiling.logit, scans.logit)
        both = (values.split(test.lengths.tolist()) for values in (ceiling.attention, slices.attention))
        for shares, probabilities in zip(*both, strict=True):
            assert torch.allclose(shares / shares.sum(), probabilities / probabilities.sum())


def write(frame: pd.DataFrame, path) -> None:
    """Write the table; NaN, which is the slice reference's logit, stays NaN and does not become null."""
    types = {field.name: field.type for field in PREDICTIONS}
    pq.write_table(pa.table({name: pa.array(list(frame[name]), types[name]) for name in frame}), path)


def test_probabilities_that_underflow_still_have_shares(copied, answers):
    """A slice reference that is sure of a negative scan: float32 knows no probability of a logit below -104."""
    path = copied.folder / "slice_reference" / "1001" / "predictions.parquet"
    frame = pq.read_table(path).to_pandas()
    frame["log_attention"] = [[head - 200 for head in heads] for heads in frame["log_attention"]]
    frame["attention"] = [np.zeros_like(attention) for attention in frame["attention"]]
    write(frame, path)
    (first, _) = read_study_predictions(copied.folder, copied.dataset)
    assert first.measures("ceiling")["top_1_hit"] == answers[0].measures("ceiling")["top_1_hit"]
    assert first.predictions["ceiling"].attention.max() == 1


def test_scans_that_the_scan_reference_leaves_out_blank_it_in_every_split(tmp_path):
    """A positive scan of the second split's test part without slice labels: statistics take all splits or none."""
    bags = some_scans()
    positive = bags.labels.nonzero().flatten().tolist()
    only_second = next(n for n in positive if part_of(n, 2001) == "test" != part_of(n, 1001))
    study = make_study(tmp_path, ["mean"], without_slice_labels(bags, [only_second]))
    train_study(study, make_grid=small_grid)
    first, second = read_study_predictions(study.folder, study.dataset)
    assert (first.left_out, second.left_out) == (0, 1)
    for split in (first, second):
        scored = {name: results.scan_scores for name, results in split.outcomes(["mean", "ceiling"]).methods.items()}
        assert scored["ceiling"] is None
        assert scored["mean"] is not None
    evaluated = evaluate(study)
    assert evaluated.notes == (
        "The scan reference has no score for 1 test scan (positive without a positive slice), so methods are not "
        "compared with it at scan level.",
    )
    assert {row.metric for row in evaluated.differences.rows} == {"localization_auroc", "localization_auprc"}


def test_one_reference_alone_is_no_answer(copied):
    for method in (*METHODS, "scan_reference"):
        shutil.rmtree(copied.folder / method)
    assert read_study_predictions(copied.folder, copied.dataset) == []


OTHER_NAMES = {"scan_id": lambda frame: "other-" + frame["scan_id"]}
OTHER_COUNTS = {"slices": lambda frame: frame["slices"] + 1}
LONGER = {
    **OTHER_COUNTS,
    "attention": lambda frame: [np.append(values, values[-1]) for values in frame["attention"]],
    "log_attention": lambda frame: [[np.append(h, h[-1]) for h in heads] for heads in frame["log_attention"]],
}


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("ng", OTHER_NAMES, "ng/1001 was tested on other scans; delete it and start the experiment again"),
        ("slice_reference", OTHER_NAMES, "slice_reference/1001 was tested on other scans; delete it"),
        ("ng", LONGER, "ng/1001 was tested on scans of other lengths; delete it and start the experiment again"),
        ("ng", OTHER_COUNTS, "predictions.parquet is damaged: scan .* not as many numbers of attention as slices"),
    ],
)
def test_predictions_that_do_not_fit_are_named(copied, method, change, message):
    path = copied.folder / method / "1001" / "predictions.parquet"
    frame = pd.read_parquet(path)
    write(frame.assign(**change), path)
    with pytest.raises(UserError, match=message):
        read_study_predictions(copied.folder, copied.dataset)
