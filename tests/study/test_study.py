"""Studies of stored scans: what is trained with which labels, what is not trained twice, and what is refused.

`tests/reports/test_reproduction.py` has studies of drawn scans, whose best possible scores are known.
"""

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lidc_files import agreed, write_lidc_table

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import COMMITTEE, DRAWN, REFERENCES
from normal_guidance.fit.fit_committee import FoldPlan, fit_committee
from normal_guidance.scans.features.store import write_store
from normal_guidance.statistics.split_results import score
from normal_guidance.study import drawn as lidc_positions
from normal_guidance.study import experiment as study_module
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import (
    DATASETS,
    Listener,
    Study,
    StudyData,
    find_results,
    lidc_data,
    stored_dataset,
    train_study,
    wanted_of,
)
from normal_guidance.study.reproduction import reproduce
from normal_guidance.study.study_tables import collect
from normal_guidance.sweep import run as runs
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.run import load_run
from small_study import (
    PROTOCOL,
    make_study,
    part_of,
    small_grid,
    some_scans,
    without_slice_labels,
)


def test_guides_are_left_out_where_there_is_no_guidance(tmp_path):
    def drawn(seed, part):
        return shifted_mean(4, seed, features=2)

    guides = {"renormalize": False, "modes": 3, "negatives": "uniform", "warmup": 2}
    plain = Study(StudyData("drawn", drawn, (1,)), tmp_path, ("abmil", "ng"), (1,), PROTOCOL)
    study = replace(plain, protocol=replace(PROTOCOL, **guides))
    assert study.config("abmil", 1) == plain.config("abmil", 1)
    assert study.config("ng", 1) == replace(plain.config("ng", 1), **guides)


# ----------------------------------------------------------------------------------------------------
# What is trained
# ----------------------------------------------------------------------------------------------------


def test_both_references_are_the_last_row(small_experiment):
    folder = small_experiment.folder
    results = collect(folder, "small")
    row = results.table.rows[-1]
    assert (row.method, row.title, row.seeds) == ("ceiling", "Supervised reference", (1001, 2001))
    for seed, scores in zip(row.seeds, row.scores, strict=True):
        slices, scans = (load_run(folder / reference / str(seed)).winners[0] for reference in REFERENCES)
        assert scores.localization_auroc == slices.test.localization_auroc
        assert scores.localization_auprc == slices.test.localization_auprc
        assert (scores.scan_auroc, scores.scan_auprc) == (scans.test.scan_auroc, scans.test.scan_auprc)
        assert slices.config.method == "slice_reference"
        assert slices.config.receptive_field == 4  # the blocks of these scans
        assert (slices.config.seed, scans.config.seed) == (seed, seed)
    assert not (folder / "ceiling").exists()
    assert {one.method for one in results.chosen} == {"mean", "abmil", "ng", *REFERENCES}


def test_the_receptive_field_can_be_given(tmp_path, trained):
    study = make_study(tmp_path, [], receptive_field=3)
    study = replace(study, seeds=(1001,))
    train_study(study, make_grid=small_grid)
    assert load_run(study.folder / "slice_reference" / "1001").winners[0].config.receptive_field == 3
    trained.clear()
    train_study(study, make_grid=small_grid)
    with pytest.raises(UserError, match=r"holds another run: configs.0.receptive_field was 3, now it is 5"):
        train_study(replace(study, receptive_field=5), make_grid=small_grid)
    with pytest.raises(UserError, match=r"slice_reference/1001 holds another run: its receptive field was set to 3"):
        train_study(replace(study, receptive_field=None), make_grid=small_grid)
    assert trained == []


def test_without_slice_labels_neither_gaussian_nor_references(tmp_path, trained):
    study = make_study(tmp_path, ["centered_gaussian", "mean"], without_slice_labels(some_scans()))
    assert not study.dataset.has_slice_labels
    results = reproduce(study, make_grid=small_grid)
    assert trained == [("mean", 1001), ("mean", 2001)]
    assert sorted(path.name for path in study.folder.iterdir() if path.is_dir()) == ["mean"]
    (row,) = results.table.rows
    assert all(scores.localization_auroc != scores.localization_auroc for scores in row.scores)
    assert all(0 <= scores.scan_auroc <= 1 for scores in row.scores)
    assert "| Mean pooling | - |" in results.markdown().replace("  ", " ").replace("  ", " ")
    lines = list(csv.DictReader(results.csv().splitlines()))
    assert [line["ours_mean"] == "" for line in lines] == [True, True, False, False]


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


def test_a_known_ceiling_takes_the_references_place(tmp_path):
    def draw(seed, part):
        return shifted_mean(4, seed, features=2)

    with_oracle = StudyData("drawn", draw, (1,), oracle=lambda scans: pytest.fail("nothing is scored yet"))
    study = Study(with_oracle, tmp_path, ("ng",), (1,))
    assert wanted_of(study) == ["ng", "ceiling"]
    assert wanted_of(replace(study, dataset=replace(with_oracle, oracle=None))) == ["ng", *REFERENCES]


# ----------------------------------------------------------------------------------------------------
# Started again
# ----------------------------------------------------------------------------------------------------


def test_started_again_it_trains_what_is_missing_only(copied, trained):
    train_study(copied, make_grid=small_grid)
    assert trained == []
    (copied.folder / "slice_reference" / "2001" / "report.json").unlink()
    shutil.rmtree(copied.folder / "scan_reference" / "1001")
    shutil.rmtree(copied.folder / "centered_gaussian" / "1001")
    finished = []
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
        patch.setattr(runs, "_finish", stop)  # its state is saved, its report is not written
        with pytest.raises(KeyboardInterrupt):
            train_study(copied, make_grid=small_grid)
    assert (copied.folder / name / "state.safetensors").exists()
    train_study(copied, make_grid=small_grid)
    for file in ("best.safetensors", "history.parquet"):
        assert (copied.folder / name / file).read_bytes() == (small_experiment.folder / name / file).read_bytes()


def test_somebody_else_may_train_what_is_missing(copied):
    shutil.rmtree(copied.folder / "abmil" / "2001")
    asked = []

    def train(study, jobs, listener):
        asked.extend((job.method, job.seed, job.folder) for job in jobs)

    train_study(copied, make_grid=small_grid, train=train)
    assert asked == [("abmil", 2001, copied.folder / "abmil" / "2001")]


# ----------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", REFERENCES)
def test_references_trained_by_another_protocol_are_refused(copied, trained, method):
    alone = replace(copied, methods=(), protocol=replace(PROTOCOL, epochs=4))
    shutil.rmtree(copied.folder / next(one for one in REFERENCES if one != method))
    with pytest.raises(UserError, match=rf"{method}/1001 holds another run: configs.0.epochs was 3, now it is 4"):
        train_study(alone, make_grid=small_grid)
    assert trained == []


def opened_again(study: Study, folder) -> Study:
    """As the command opens it when it is started again."""
    now = stored_dataset([folder / "store"], [folder / "splits"], study.dataset.name)
    labels = {name: getattr(study.dataset, name) for name in ("has_slice_labels", "has_supervision")}
    return replace(study, dataset=replace(now, **labels))


def rewrite_split(path, change) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join(change(line) for line in lines))


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_runs_of_a_split_that_has_changed_are_refused(tmp_path, trained, part):
    """The same seed with other parts: complete runs on other scans must not be reported as this split's."""
    study = make_study(tmp_path, ["mean"])
    study = replace(study, seeds=(1001,), dataset=replace(study.dataset, has_slice_labels=False))
    train_study(study, make_grid=small_grid)
    train_study(opened_again(study, tmp_path), make_grid=small_grid)
    trained.clear()
    other = {"train": "val", "val": "test", "test": "train"}[part]
    patient = [scan for number, scan in enumerate(some_scans().scan_ids) if part_of(number, 1001) == part][:2]
    split = tmp_path / "splits" / "split-1001.csv"
    rewrite_split(split, lambda line: f"{line.split(',')[0]},{other}" if line.split(",")[0] in patient else line)
    message = "mean/1001 holds results on other (train|val|test) scans: split 1001 or its features have changed since"
    with pytest.raises(UserError, match=message):
        train_study(opened_again(study, tmp_path), make_grid=small_grid)
    assert trained == []


def test_runs_on_features_that_have_changed_are_refused(tmp_path, trained):
    study = make_study(tmp_path, ["centered_gaussian"])
    study = replace(study, seeds=(1001,), dataset=replace(study.dataset, has_supervision=False))
    train_study(study, make_grid=small_grid)
    bags = some_scans()
    shutil.rmtree(tmp_path / "store")
    write_store(tmp_path / "store", replace(bags, features=bags.features + 1), provenance={})
    with pytest.raises(
        UserError, match="centered_gaussian/1001 holds results on other test scans: split 1001 or its features"
    ):
        train_study(opened_again(study, tmp_path), make_grid=small_grid)


def test_another_dataset_s_references_are_refused(copied):
    other = replace(copied, methods=(), dataset=replace(copied.dataset, name="chest-ct"))
    with pytest.raises(UserError, match="slice_reference/1001 is about small, not chest-ct; give another folder"):
        train_study(other, make_grid=small_grid)


@pytest.mark.parametrize("data", [{"test": {}}, {"test": 3}, [1]])
def test_a_report_without_fingerprints_is_named(copied, data):
    path = copied.folder / "mean" / "1001" / "report.json"
    write_json(path, {**read_json(path), "data": data})
    with pytest.raises(UserError, match=r"mean/1001/report.json is damaged or not (written|a report).*; (delete|give)"):
        train_study(copied, make_grid=small_grid)


def test_drawn_datasets_are_those_whose_ceiling_is_the_bayes_oracle():
    assert tuple(name for name, dataset in DATASETS.items() if dataset.oracle is not None) == DRAWN


def test_the_oracle_at_nodules_reads_the_table_that_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(lidc_positions, "SIZES", {"train": 3, "val": 3, "test": 6})
    scans = [(f"p{i}", [float(z) for z in range(12)], agreed(i, i + 1)) for i in range(10)]
    dataset = lidc_data(write_lidc_table(tmp_path / "table.sqlite", scans))
    test = dataset.draw(2001, "test")
    best, positions = dataset.oracle(test), lidc_positions.read_positions(tmp_path / "table.sqlite")
    assert best.scan_scores.equal(lidc_positions.lidc_scan_scores(test, positions))
    assert best.slice_scores.equal(lidc_positions.lidc_slice_scores(test, positions))


def test_what_nguide_fit_makes_is_a_row_of_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores are those of a committee of training and validation scans; a complete one is not fitted again."""
    data = StudyData("own", _separable, (5,), None, has_supervision=False)
    study = Study(data, tmp_path, ("centered_gaussian", COMMITTEE), (5,))
    monkeypatch.setattr(
        study_module, "make_plan", lambda labels, patients, seed: FoldPlan(folds=3, repeats=1, seed=seed)
    )
    train_study(study)
    (_, found) = sorted(find_results(tmp_path, "own"), key=lambda one: one.method == COMMITTEE)
    train, val, test = data.parts(5)
    names = ("features", "lengths", "labels")
    both = Bags(*(torch.cat([getattr(part, name) for part in (train, val)]) for name in names))
    patients = [*train.patient_ids, *val.patient_ids]
    committee = fit_committee(both, patients, FoldPlan(folds=3, repeats=1, seed=5)).committee
    want = score(test, (prediction := predict_bags(committee, test)).slice_scores, prediction.logit)
    assert found.scores.localization_auroc == pytest.approx(want.localization_auroc)
    assert found.scores.scan_auroc == pytest.approx(want.scan_auroc)
    assert found.scores.scan_auroc > 0.9
    written = (tmp_path / COMMITTEE / "5" / "scores.json").stat().st_mtime_ns
    train_study(study)
    assert (tmp_path / COMMITTEE / "5" / "scores.json").stat().st_mtime_ns == written


def _separable(seed: int, part: str) -> Bags:
    bags = shifted_mean(20, seed + len(part), features=2, shift=3.0, min_slices=6, max_slices=8, block=3)
    names = tuple(f"{part}-{number}" for number in range(len(bags)))
    return replace(bags, scan_ids=names, patient_ids=names)
