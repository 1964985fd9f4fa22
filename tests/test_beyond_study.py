"""docs/measure_beyond.py: the study's table, what it holds and what it resumes, its tables and its page."""

import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from normal_guidance.core.models import EVERY_METHOD
from normal_guidance.errors import UserError
from normal_guidance.simulate.semi_synthetic import VARIANTS
from normal_guidance.statistics.scores import score
from normal_guidance.statistics.split_results import MethodResults
from normal_guidance.training.sweep import Execution, sweep

DOCS = Path(__file__).resolve().parents[1] / "docs"
STAGES = ("choosing", "drawing", "figures", "measuring", "page", "points", "results", "tables", "variations", "working")
SEEDS = (1001, 2001)


@pytest.fixture(scope="module")
def study():
    """The script and its modules; docs/ is a folder of scripts and no package, so it is on the path only here."""
    sys.path.insert(0, str(DOCS))
    try:
        modules = {name: importlib.import_module(f"beyond.{name}") for name in STAGES}
        yield SimpleNamespace(script=importlib.import_module("measure_beyond"), **modules)
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def protocol(study):
    return study.points.Protocol(
        epochs=2, lr=(0.1,), l1=(0.01,), batch_size=32, sizes=(96, 32, 48), features=8, patience=2
    )


@pytest.fixture(scope="module")
def measured(study, protocol, tmp_path_factory):
    """Both seeds of one axis and of the oracle, and lambdas for choosing: what was told, and where it lies."""
    folder, told = tmp_path_factory.mktemp("beyond"), []
    jobs = [*study.points.jobs_of("kernel"), study.points.Job("oracle"), study.points.plain("posterior_bells_ng")]
    tasks = [study.working.Task(job, seed) for job in jobs for seed in (SEEDS if job.restarts == 1 else SEEDS[1:])]
    setting = study.working.Setting(folder, protocol, Execution())
    failed = study.working.work(study.working.lacking(tasks, setting), setting, told.append)
    return SimpleNamespace(folder=folder, told=told, failed=failed, tasks=tasks, setting=setting, jobs=jobs)


@pytest.fixture(scope="module")
def found(study, protocol, measured):
    return study.results.read_all(measured.folder, measured.jobs, SEEDS, protocol)


# ----------------------------------------------------------------------------------------------------
# The table of points
# ----------------------------------------------------------------------------------------------------


def test_every_job_has_a_file_of_its_own(study):
    jobs = study.points.jobs_of(*study.points.AXES)
    assert len({study.results.path_of(Path(), job, 1) for job in jobs}) == len(jobs) > 100


def test_every_point_has_its_row_and_its_reference_once(study):
    for axis in study.points.AXES:
        rows = [(point.job.variant, point.label) for point in study.points.points_of(axis)]
        assert len(set(rows)) == len(rows) > 0, axis
        assert {(point.job.variant, point.against) for point in study.points.points_of(axis)} <= set(rows), axis
    assert {point.job.variant for point in study.points.points_of("data")} == set(VARIANTS)


def test_every_job_can_be_built_and_leaves_the_methods_as_they_were(study):
    before, protocol = dict(EVERY_METHOD), study.points.Protocol()
    for job in study.points.jobs_of(*study.points.AXES):
        if job.is_trained:
            with study.variations.registered(job.spec()):
                configs = job.configs(protocol, 1001)
                model = configs[0].spec.build(8)
            numbers = study.variations.numbers_of(model)
            assert len(configs) == 3 * len(job.l1 or protocol.l1) * len(job.weights) * job.restarts
            assert all(numbers[name] == pytest.approx(value) for name, value in (*job.held, *job.started))
            assert all(f"log_{name}" not in path for path, _ in model.named_parameters() for name, _ in job.held)
    assert before == EVERY_METHOD


def test_what_is_not_learned_cannot_be_held(study):
    with pytest.raises(UserError, match="ABMIL learns no sigma"):
        study.points.Job("abmil", held=(("sigma", 3.0),)).spec().build(8)


@pytest.mark.parametrize(("kind", "stays"), [("held", True), ("started", False)])
def test_held_numbers_stay_and_started_ones_move(study, protocol, kind, stays):
    job = study.points.Job("bells", **{kind: (("sigma", 6.0), ("beta", 0.5))})
    scans = study.drawing.drawn(1001, "paper", protocol)
    with study.variations.registered(job.spec()):
        configs = job.configs(replace(protocol, train_above_val=False), 1001)
        (winner,) = sweep(configs, scans.train, scans.val).winners
        model = study.measuring.winner_model(winner.config, scans.train.width, winner.weights)
    numbers = study.variations.numbers_of(model)
    assert ("attention.log_sigma" in winner.weights) != stays
    assert (numbers["sigma"] == pytest.approx(6.0, rel=1e-6)) == stays
    assert (numbers["beta"] == pytest.approx(0.5, rel=1e-6)) == stays
    assert "gamma" in numbers


def test_l1_counts_all_where_it_is_asked_to(study):
    own, all_of_it = (study.points.Job("bells", l1_on_all=on).spec().unpenalized for on in (False, True))
    assert "log_gamma" in own
    assert all_of_it == ()


# ----------------------------------------------------------------------------------------------------
# Measuring
# ----------------------------------------------------------------------------------------------------


def test_everything_asked_for_is_measured_and_told(measured):
    assert measured.failed == []
    assert len(measured.told) == len(measured.tasks)
    assert measured.told[-1].startswith(f"[{len(measured.tasks)}/{len(measured.tasks)}] paper/posterior_bells_ng")


def test_what_is_done_is_not_done_again(study, measured, protocol):
    assert study.working.lacking(measured.tasks, measured.setting) == []
    study.results.path_of(measured.folder, *measured.tasks[0]).rename(measured.folder / "away.json")
    assert study.working.lacking(measured.tasks, measured.setting) == measured.tasks[:1]
    (measured.folder / "away.json").rename(study.results.path_of(measured.folder, *measured.tasks[0]))
    with pytest.raises(UserError, match="another protocol: epochs is 2, not 3"):
        study.results.read(measured.folder, *measured.tasks[0], replace(protocol, epochs=3))
    other = replace(measured.jobs[-1], restarts=1)
    with pytest.raises(UserError, match="another job: restarts is 2, not 1"):
        study.results.read(measured.folder, other, SEEDS[1], protocol)


def test_results_say_what_the_model_scores(study, found, protocol):
    """Beside the four numbers of the library, from the weights trained again."""
    job, seed = study.points.plain("posterior_bells"), SEEDS[0]
    scans = study.drawing.drawn(seed, "paper", protocol)
    with study.variations.registered(job.spec()):
        (winner,) = sweep(job.configs(protocol, seed), scans.train, scans.val).winners
        model = study.measuring.winner_model(winner.config, 8, winner.weights)
    prediction = study.measuring.predict(model, scans.test)
    expected = score(scans.test, prediction.slice_scores, prediction.logit)
    stored = found[job, seed].winner(1.0)
    assert np.nanmean(stored.test.auroc) == pytest.approx(expected.localization_auroc, abs=1e-6)
    assert np.nanmean(stored.test.auprc) == pytest.approx(expected.localization_auprc, abs=1e-4)
    assert torch.equal(torch.from_numpy(stored.test.scan_scores).float(), prediction.logit)
    assert stored.numbers == study.variations.numbers_of(model)
    assert (stored.lr, stored.l1, stored.epoch) == (0.1, 0.01, winner.epoch)


def test_the_time_can_be_up(study, measured, tmp_path, protocol):
    job = study.points.plain("posterior_bells")
    with pytest.raises(study.measuring.OutOfTimeError, match="epoch 2 of 2"):
        study.measuring.measure(job, 1001, protocol, Execution(), deadline=time.time())
    late, told = replace(measured.setting, folder=tmp_path, deadline=time.time() - 1), []
    assert study.working.work(measured.tasks, late, told.append) == []
    assert told == []
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_told_and_the_rest_is_done(study, measured, tmp_path):
    wrong, right = study.points.Job("abmil", held=(("sigma", 3.0),)), study.points.Job("oracle")
    tasks, told = [study.working.Task(job, 1001) for job in (wrong, right)], []
    setting = replace(measured.setting, folder=tmp_path)
    assert study.working.work(tasks, setting, told.append) == tasks[:1]
    assert "FAILED, UserError: ABMIL learns no sigma" in told[0]
    assert study.working.lacking(tasks, setting) == tasks[:1]


def test_who_has_drawn_scans_keeps_them(study):
    task = study.working.Task
    tasks = [task(study.points.Job(method), seed) for method in ("mean", "abmil") for seed in SEEDS]
    board = study.working.Board(tasks)
    first, second = board.take(None), board.take(None)
    assert (first.seed, second.seed) == SEEDS
    assert board.take(second.scans) == task(study.points.Job("abmil"), SEEDS[1])
    assert board.take(second.scans) == task(study.points.Job("abmil"), SEEDS[0])
    assert board.take(first.scans) is None


# ----------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------


def mean(found, winners, seeds, metric):
    """Of a metric over some seeds, by scikit-learn and by hand."""
    if metric == "localization_auroc":
        return np.mean([np.nanmean(winners[seed].test.auroc) for seed in seeds])
    labels = {seed: result.labels for (_, seed), result in found.items()}
    return np.mean([roc_auc_score(labels[seed], winners[seed].test.scan_scores) for seed in seeds])


def test_rows_are_means_over_seeds_and_paired_differences(study, found):
    points = study.points.points_of("kernel")
    rows = study.tables.rows_of(found, points)
    assert [row.point for row in rows] == points
    reference = rows[0]
    assert reference.point.is_reference
    assert reference.beyond == {}
    for row in rows:
        for metric, value in row.values.items():
            assert value.low < value.value < value.high
            own, other = (mean(found, one.winners, row.winners, metric) for one in (row, reference))
            assert value.value == pytest.approx(own)
            if row is not reference:
                assert row.beyond[metric].value == pytest.approx(own - other)
    held = rows[-1].winners[SEEDS[0]].numbers["shape"]
    assert held == pytest.approx(8.0)


def test_tables_show_what_is_there_and_what_is_not(study, found):
    made = study.tables.axis_table(found, "kernel").splitlines()
    assert len(made) == 2 + 4
    assert made[2].startswith("| **Posterior Bells, p learned** | .")
    assert made[2].endswith("| 2 of 3 |")
    assert ", p 8 |" in made[-1]
    assert study.tables.axis_table(found, "temperature") == study.tables.IN_PROGRESS
    forms = study.tables.axis_table(found, "form")
    assert "| ABMIL | - | - | - | - | - | - | in progress |" in forms
    assert "| **The paper's data** " not in study.tables.data_tables(found)
    assert "| The paper's data | **Bayes oracle** | ." in study.tables.data_tables(found)


def test_a_point_without_a_selected_epoch_says_so(study, found):
    job = study.points.plain("bells")
    lost = {
        (job, seed): replace(found[measured], job=job.as_json(), winners=()) for measured in found for seed in SEEDS
    }
    assert "0 of 3 (2: no epoch selected)" in study.tables.axis_table({**found, **lost}, "form")


def test_regret_is_what_a_choice_loses(study):
    def winner(weight, localization, **known):
        return study.results.Winner(MethodResults(np.array([localization]), np.array([0.5])), weight=weight, **known)

    winners = (
        winner(0.0, 0.6, val_auroc=0.9, val_localization=0.5, criteria={"kept": 0.1, "lost": 1.0}),
        winner(1.0, 0.8, val_auroc=0.7, val_localization=0.9, criteria={"kept": 0.3}),
        winner(10.0, 0.7, val_auroc=0.8, val_localization=0.4, criteria={"kept": 0.4, "lost": 0.0}),
    )
    job = study.points.plain("ng")
    result = study.results.Result(job.as_json(), 1001, study.points.Protocol(), (1,), winners, {})
    made = {
        name: (one.weight, one.regret) for name, (one,) in study.choosing.choices({(job, 1001): result}, "ng").items()
    }
    assert made == {
        "validation scan AUROC": (0.0, pytest.approx(0.2)),
        "kept": (10.0, pytest.approx(0.1)),
        "slice labels of the validation scans": (1.0, 0.0),
    }
    assert "| kept | 10 | .700 | .100 | .100 |" in study.choosing.regret_table({(job, 1001): result})


def test_every_criterion_is_asked_about_every_lambda(study, found):
    result = found[study.points.plain("posterior_bells_ng"), SEEDS[1]]
    assert len(result.winners) > 1
    for winner in result.winners:
        assert len([name for name in winner.criteria if not name.startswith("agreement")]) == 10
        assert winner.val_localization is not None
    assert any("agreement of two trainings" in winner.criteria for winner in result.winners)


# ----------------------------------------------------------------------------------------------------
# The page
# ----------------------------------------------------------------------------------------------------


def test_the_page_is_made_and_its_words_are_kept(study, found, protocol, tmp_path):
    whole, page, images = replace(protocol, sizes=None, features=None), tmp_path / "page.md", tmp_path / "images"
    page.write_text(study.page.PAGE.read_text() + "\nWhat we make of it.\n")
    study.page.write_page({}, whole, page, images)
    assert page.read_text().count(study.tables.IN_PROGRESS) == len(study.page.sections({}, whole))
    study.page.write_page(found, whole, page, images)
    text = page.read_text()
    assert text.endswith("What we make of it.\n")
    assert "Posterior Bells, p = 8" in text
    assert sorted(path.name for path in images.iterdir()) == sorted(study.page.FILES.values())
    with pytest.raises(UserError, match="whole data"):
        study.page.write_page(found, protocol, page, images)


def test_the_published_page_has_a_place_for_everything(study):
    text = (DOCS / "results" / "beyond.md").read_text(encoding="utf-8")
    for name in study.page.sections({}, study.points.Protocol()):
        assert text.count(f"<!-- measured: {name} -->") == 1, name


def test_the_published_tables_are_those_of_the_kept_results(study):
    """Means and choices; intervals are drawn anew and take a minute."""
    written = importlib.import_module("measure_replication").written(study.page.PAGE.read_text(encoding="utf-8"))
    axes = [axis for axis in study.points.AXES if axis != "data"]
    found = study.results.read_all(
        study.script.RUNS, study.points.jobs_of(*axes), study.script.SEEDS, study.points.Protocol()
    )
    checked = 0
    for axis in axes:
        rows = {line.split("|")[1].strip().strip("*"): line.split("|")[2:-1] for line in written[axis].splitlines()}
        for point in study.points.points_of(axis):
            cells = [cell.strip() for cell in rows[point.label]]
            winners = study.results.winners_of(found, point)
            if not winners:
                assert cells[-1] == "in progress"
                continue
            mean = np.mean([np.nanmean(winner.test.auroc) for winner in winners.values()])
            assert float(cells[0].split()[0]) == pytest.approx(mean, abs=0.00051), point.label
            chosen = [f"{winner.lr:g}, {winner.l1:g}".replace("0.", ".") for winner in winners.values() if winner.lr]
            assert cells[5] == ("; ".join(chosen) or "-"), point.label
            checked += 1
    assert checked > 70


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "froms"], "axis 'froms' is unknown"),
        (["--seeds", "7"], "seed '7' is unknown"),
        (["--sizes", "1,2"], "three whole numbers"),
        (["--jobs", "0"], "at least 1 process"),
    ],
)
def test_what_cannot_be_done_is_refused(study, capsys, arguments, reason):
    assert study.script.main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_the_command_goes_on_where_it_was(study, tmp_path, capsys, monkeypatch):
    points = [point for point in study.points.POINTS if point.job.method == "oracle"]
    monkeypatch.setattr(study.points, "POINTS", points)
    command = ["--sizes", "64,48,48", "--features", "8", "--runs", str(tmp_path), "--only", "form", "--seeds", "1001"]
    assert study.script.main(command) == 0
    assert "[1/1] paper/oracle, seed 1001: localization 0." in capsys.readouterr().out
    assert study.script.main(command) == 0
    assert "1 tasks, 1 done before" in capsys.readouterr().out
    assert study.script.main([*command, "--list"]) == 0
    assert "1 points of   1 jobs,   1 new:   1 tasks,   0 lacking" in capsys.readouterr().out
    assert study.script.main([*command, "--tables"]) == 0
    assert "| Bayes oracle | ." in capsys.readouterr().out
    assert json.loads((tmp_path / "paper" / "oracle" / "1001.json").read_text())["seed"] == 1001
