"""Whole studies on tiny scans: what is trained, what is not trained twice, and what the tables say of it."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.core.bags import Bags
from normal_guidance.scans.index.manifest import PARTS
from normal_guidance.show.text_tables import digits
from normal_guidance.statistics.split_results import score
from normal_guidance.study import reproduction as initialisations
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import (
    Listener,
    Study,
    StudyData,
    TrainingJob,
    bayes_oracle,
    find_results,
    load_result,
    train_study,
)
from normal_guidance.study.references import published_choice, published_seed
from normal_guidance.study.reproduction import (
    Initialisations,
    collect_initialisations,
    reproduce,
    reproduce_sensitivity,
    train_initialisations,
    write_initialisations,
)
from normal_guidance.study.study_tables import collect
from normal_guidance.sweep.config import Config, Execution, grid, paper_config
from normal_guidance.sweep.run import Selected, load_run
from small_study import HOPELESS, small_grid

SUFFIXES = (".csv", ".json", ".md", ".tex")
# Any epoch may be selected, so that few epochs on few scans have a winner.
PROTOCOL = paper_config("ng", epochs=2, batch_size=16, train_above_val=False)


def draw(seed: int, part: str) -> Bags:
    return shifted_mean(60, seed + PARTS.index(part), features=8, shift=2.0)


TINY = StudyData("semi-synthetic", draw, (1001, 2001, 3001), bayes_oracle)


def small_sensitivity(base: Config) -> tuple[Config, ...]:
    return grid(base, lr=[0.1, 0.01], l1=[0.0], divergence=["forward_kl", "reverse_kl"], guidance_weight=[0.1, 1.0])


def study(folder: Path, *methods: str, seeds: tuple[int, ...] = (1001, 2001), protocol: Config = PROTOCOL) -> Study:
    return Study(TINY, folder, methods, seeds, protocol)


def run(folder: Path, *methods: str, **options):
    return reproduce(study(folder, *methods, **options), make_grid=small_grid)


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    """A study of three methods and two seeds."""
    folder = tmp_path_factory.mktemp("study")
    run(folder, "centered_gaussian", "mean", "ng")
    return folder


def rows(results) -> dict[str, tuple[int, ...]]:
    return {row.method: row.seeds for row in results.table.rows}


def change(path: Path, **changes) -> None:
    """Writes other values into a JSON file."""
    write_json(path, {**read_json(path), **changes})


def test_the_tables_cover_exactly_what_ran_with_the_runs_own_numbers(complete):
    methods = ["centered_gaussian", "mean", "ng", "ceiling"]
    assert {path.name for path in complete.iterdir()} == {*methods, *(f"tables{suffix}" for suffix in SUFFIXES)}
    results = collect(complete, "semi-synthetic")
    assert list(rows(results).items()) == [(method, (1001, 2001)) for method in methods]
    trained = [("mean", 1001), ("mean", 2001), ("ng", 1001), ("ng", 2001)]
    assert [(choice["method"], choice["seed"]) for choice in results.chosen] == trained
    winners = [load_run(complete / "ng" / str(seed)).winners[0] for seed in (1001, 2001)]
    gaussian, _, ng, ceiling = results.table.rows
    assert ng.scores == tuple(winner.test for winner in winners)
    assert ng.cells[0].published.mean == 0.541
    test = draw(1001, "test")
    assert ceiling.scores[0] == score(test, *bayes_oracle(test))
    # The seed of the partition is the seed of the weights.
    assert [winner.config.seed for winner in winners] == [1001, 2001]
    # Centered Gaussian has two forms.
    (note,) = [note for note in results.notes if "Centered Gaussian" in note]
    both = read_json(complete / "centered_gaussian" / "1001" / "scores.json")["scores"]
    assert list(both) == ["published form", "log-density"]
    assert gaussian.scores[0].localization_auroc == both["published form"]["localization_auroc"]
    assert both["log-density"] != both["published form"]
    assert "log-density, without ties: Localization AUROC ." in note


def test_the_page_names_what_it_was_computed_with(complete):
    page = (complete / "tables.md").read_text()
    assert page.startswith("# Semi-synthetic: the paper's tables, reproduced\n\n- Software: normal-guidance ")
    for line in (
        "- Machine: ",
        "- Date: 20",
        "(h:mm:ss) for 4 runs",
        "- Departures from the paper's protocol: epochs 2, batch_size 16, train_above_val False, lr [0.01, 0.1], "
        "l1 [0.0] (mean, ng)\n",
        "## Tables\n\n### Localization AUROC, semi-synthetic\n",
        "## What validation chose\n",
    ):
        assert line in page
    assert str(complete) not in page  # it is committed as it is
    assert (complete / "tables.tex").read_text().startswith("% Semi-synthetic")
    theirs = published_choice("ng", "semi-synthetic", 1001)
    chosen = next(line for line in page.splitlines() if line.startswith("| ABMIL + N") and line.count("|") == 10)
    _, seed, *_, l1, lr = (cell.strip() for cell in chosen.strip("|").split("|"))
    assert (seed, l1, lr) == ("1001", f"{theirs.l1:g}", f"{theirs.lr:g}")


def test_a_second_start_trains_and_draws_nothing(complete, trained):
    before = {path: path.read_bytes() for path in complete.rglob("*") if path.is_file() and path.name != "lock"}

    def nothing(seed: int, part: str) -> Bags:
        raise AssertionError("scans were drawn")

    again = replace(study(complete, "centered_gaussian", "mean", "ng"), dataset=replace(TINY, draw=nothing))
    reproduce(again, make_grid=small_grid)
    assert trained == []
    assert {path: path.read_bytes() for path in before} == before


def test_methods_and_seeds_fill_up_the_same_tables(tmp_path, trained):
    first = run(tmp_path, "mean", seeds=(1001,))
    assert (rows(first), first.notes) == ({"mean": (1001,), "ceiling": (1001,)}, ())
    second = run(tmp_path, "abmil", "mean")
    assert trained == [("mean", 1001), ("abmil", 1001), ("abmil", 2001), ("mean", 2001)]
    assert (rows(second), second.notes) == (dict.fromkeys(["mean", "abmil", "ceiling"], (1001, 2001)), ())
    third = run(tmp_path, "ng", seeds=(2001,))
    assert rows(third) == {**rows(second), "ng": (2001,)}
    assert "Their means are over the seeds that they have" in third.notes[0]
    assert third.markdown().count("| ABMIL + Normal Guidance (1 of 2 seeds) |") == 4


def test_the_scans_of_a_seed_are_drawn_once(tmp_path):
    drawn = []

    def counting(seed: int, part: str) -> Bags:
        drawn.append((seed, part))
        return draw(seed, part)

    one = replace(study(tmp_path, "centered_gaussian", "mean", "max"), dataset=replace(TINY, draw=counting))
    reproduce(one, make_grid=small_grid)
    assert sorted(drawn) == sorted((seed, part) for seed in (1001, 2001) for part in PARTS)
    assert [seed for seed, _ in drawn] == sorted(seed for seed, _ in drawn)  # one seed's scans at a time


def test_a_stopped_study_goes_on_and_listeners_hear_of_what_is_trained(tmp_path, trained):
    def stop(title, run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce(study(tmp_path, "mean"), make_grid=small_grid, listener=Listener(finished=stop))
    assert not (tmp_path / "tables.md").exists()
    heard, finished = [], []
    listener = Listener(lambda title: nullcontext(heard.append), lambda title, run: finished.append((title, run)))
    reproduce(study(tmp_path, "mean"), make_grid=small_grid, listener=listener)
    assert trained == [("mean", 1001), ("mean", 2001)]
    assert heard[-1].done == 1.0
    assert [(title, run.folder) for title, run in finished] == [("mean, seed 2001", tmp_path / "mean" / "2001")]


def test_other_options_or_data_in_the_same_folder_are_refused_before_anything_trains(complete, trained):
    with pytest.raises(UserError, match=r"ng/1001 holds another run: configs\.0\.epochs was 2, now it is 3 \(1 more"):
        run(complete, "max", "ng", protocol=replace(PROTOCOL, epochs=3))
    with pytest.raises(UserError, match=r"holds another run: configs\.0\.l1 was 0.0, now it is 1.0"):
        reproduce(study(complete, "ng"))
    other = replace(study(complete, "ng"), dataset=replace(TINY, name="head-ct"))
    for methods, message in (
        (("ng",), "ng/1001 is about semi"),
        ((), "ceiling/1001 is about semi-synthetic, not head"),
    ):
        with pytest.raises(UserError, match=message):
            reproduce(replace(other, methods=methods), make_grid=small_grid)
    # How a complete run was computed does not matter, so a folder can be told about on any machine.
    reproduce(replace(study(complete, "ng"), execution=Execution(chunk=1)), make_grid=small_grid)
    assert trained == []


def test_models_are_built_before_anything_trains(tmp_path, trained):
    def narrow(seed: int, part: str) -> Bags:
        return shifted_mean(60, seed + PARTS.index(part), features=12)

    one = replace(study(tmp_path, "mean", "transmil"), dataset=replace(TINY, draw=narrow))
    with pytest.raises(UserError, match=r"12 features cannot be divided among 8 heads"):
        reproduce(one, make_grid=small_grid)
    assert trained == []
    assert list(tmp_path.iterdir()) == []


def test_runs_on_different_scans_are_not_put_side_by_side(tmp_path):
    run(tmp_path, "mean", seeds=(1001,))
    other = replace(TINY, draw=lambda seed, part: draw(seed + 1, part))
    with pytest.raises(UserError, match="were scored on different test scans"):
        reproduce(replace(study(tmp_path, "ng", seeds=(1001,)), dataset=other), make_grid=small_grid)


def test_departures_name_the_seeds_and_concern_guided_methods_only_where_they_guide(tmp_path):
    big = replace(TINY, draw=lambda seed, part: shifted_mean(70, seed + PARTS.index(part), features=8))
    page = reproduce(Study(big, tmp_path / "big", ("mean",), (1001,), paper_config("ng", epochs=2))).markdown()
    assert "- Departures from the paper's protocol: epochs 2 (mean)\n" in page
    run(tmp_path, "mean")
    page = run(tmp_path, "mean", seeds=(3001,), protocol=replace(PROTOCOL, patience=1)).markdown()
    (line,) = [line for line in page.splitlines() if line.startswith("- Departures")]
    assert "(mean seed 1001, 2001); epochs 2, batch_size 16, patience 1, " in line
    assert line.endswith("(mean seed 3001)")
    results = run(tmp_path / "mhng", "mean", "mhng", seeds=(1001,), protocol=replace(PROTOCOL, renormalize=False))
    assert "renormalize" not in results.about["departures"]["mean"]["1001"]
    assert results.about["departures"]["mhng"]["1001"]["renormalize"] is False


def environment_of(commit, date: str, device: str) -> dict[str, object]:
    versions = {"normal_guidance": "9.9", "python": "3.14", "torch": "3.0", "numpy": "2.9", "triton": None}
    return {"date": date, **versions, "device": device, "threads": 2, "commit": commit}


@pytest.fixture
def copied(complete, tmp_path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "copy"))


def test_the_page_names_every_start_of_every_run(copied):
    starts = [
        environment_of({"id": "a" * 40, "dirty": False}, "2026-01-02", "H200"),
        environment_of({"id": "b" * 40, "dirty": True}, "2026-01-05", "L4"),
        environment_of({"id": "c" * 40, "dirty": None, "told": True}, "2026-02-01", "L4"),
        environment_of(None, "2026-02-01", "L4"),
    ]
    for name, of_file in (("report", starts), ("scores", starts[1:2])):
        for path in copied.glob(f"*/*/{name}.json"):
            change(path, environments=of_file)
    page = collect(copied, "semi-synthetic").markdown()
    for line in (
        f"- Software: normal-guidance 9.9, commit {'a' * 12}, torch 3.0; "
        f"normal-guidance 9.9, commit {'b' * 12} with uncommitted changes, torch 3.0; "
        f"normal-guidance 9.9, commit {'c' * 12} (as stated), torch 3.0; "
        "normal-guidance 9.9, installed, torch 3.0\n",
        "- Machine: H200, float32; L4, float32\n",
        "- Date: 2026-01-02 to 2026-02-01\n",
    ):
        assert line in page


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("mean/1001/report.json", {"options": []}),
        ("mean/1001/report.json", {"data": {"test": {}}}),
        ("mean/1001/report.json", {"environments": [{}]}),
        ("mean/1001/report.json", {"execution": {}}),
        ("ceiling/1001/scores.json", {"scores": {}}),
        ("centered_gaussian/1001/scores.json", {"environments": 3}),
    ],
)
def test_files_of_another_shape_are_named(copied, trained, file, changes):
    change(copied / file, **changes)
    for attempt in (lambda: collect(copied, "semi-synthetic"), lambda: run(copied, "centered_gaussian", "mean", "max")):
        with pytest.raises(UserError, match=f"{file} is damaged.*; (delete it, or )?give"):
            attempt()
    assert trained == []


def test_sensitivity_has_a_winner_for_each_setting(tmp_path, trained):
    (results,) = reproduce_sensitivity(study(tmp_path, "ng"), make_grid=small_sensitivity).values()
    folder = tmp_path / "sensitivity"
    assert {path.name for path in folder.iterdir()} == {"ng", *(f"ng{suffix}" for suffix in SUFFIXES)}
    table = results.table
    settings = [("forward_kl", 0.1), ("forward_kl", 1.0), ("reverse_kl", 0.1), ("reverse_kl", 1.0)]
    assert [row.setting for row in table.rows] == settings
    assert table.seeds == (1001, 2001)
    winners = load_run(folder / "ng" / "2001").winners
    assert [row.cells[0].values[1] for row in table.rows] == [winner.test.localization_auroc for winner in winners]
    content = read_json(folder / "ng.json")
    assert len(content["tables"]) == 16
    # The published choice is that of the paper's own setting.
    choices = [(row["divergence"], row["guidance_weight"], row["published"] is not None) for row in content["chosen"]]
    assert choices == [(*setting, setting == ("forward_kl", 1.0)) for setting in settings] * 2
    page = (folder / "ng.md").read_text()
    assert page.startswith("# Semi-synthetic: sensitivity of ABMIL + Normal Guidance\n")
    assert "guidance_weight" not in page  # what the study varies is no departure
    reproduce_sensitivity(study(tmp_path, "ng"), make_grid=small_sensitivity)
    assert trained == [("ng", 1001), ("ng", 2001)]


def test_settings_without_a_winner_are_named_and_left_out(tmp_path):
    def partly_hopeless(base: Config) -> tuple[Config, ...]:
        bad = grid(base, lr=[HOPELESS], l1=[0.0], divergence=["reverse_kl"])
        return (*grid(base, lr=[0.1], l1=[0.0]), *(bad if base.seed == 2001 else (replace(bad[0], lr=0.1),)))

    (results,) = reproduce_sensitivity(study(tmp_path, "ng"), make_grid=partly_hopeless).values()
    assert [row.setting for row in results.table.rows] == [("forward_kl", 1.0)]
    assert results.notes == ("reverse_kl, λ 1: left out, no epoch could be selected for 1 of 2 seeds",)

    def hopeless(base: Config) -> tuple[Config, ...]:
        return grid(base, lr=[HOPELESS], l1=[0.0])

    alone = study(tmp_path / "none", "ng", seeds=(1001,))
    (results,) = reproduce_sensitivity(alone, make_grid=hopeless).values()
    assert (results.table, results.csv(), json.loads(results.json())["tables"]) == (None, "", [])
    assert results.latex().count(r"% \usepackage") == 1
    assert "left out" in results.markdown()


def test_mistakes_are_found_before_anything_is_drawn(tmp_path):
    for method, seeds, message in (
        ("abmil", (1001,), "method 'abmil' has no guidance to vary; choose one of ng, mhng"),
        ("nng", (1001,), "method 'nng' is unknown; choose among centered_gaussian, max"),
        ("ng", (7,), "semi-synthetic has no seed 7; choose among 1001, 2001, 3001"),
    ):
        with pytest.raises(UserError, match=message):
            reproduce_sensitivity(study(tmp_path, method, seeds=seeds))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        undrawn = replace(study(folder, "ng"), dataset=replace(TINY, draw=pytest.fail))
        with pytest.raises(UserError, match="is, or lies under, a file; name a folder"):
            reproduce(undrawn, make_grid=small_grid)


# Chosen configurations trained again from other initial weights


WEAK = StudyData(
    "semi-synthetic",
    lambda seed, part: shifted_mean(60, seed + len(part), features=8, shift=0.8),
    (1001, 2001),
    bayes_oracle,
)


@pytest.fixture(scope="module")
def again(tmp_path_factory) -> Study:
    protocol = Config("ng", epochs=6, batch_size=8, train_above_val=False)
    trained = Study(WEAK, tmp_path_factory.mktemp("study"), ("centered_gaussian", "abmil"), (1001, 2001), protocol)
    train_study(trained, make_grid=small_grid)
    train_initialisations(trained, 3)
    return trained


def winners_of(study: Study, seed: int, folder: str = "abmil") -> tuple[Selected, ...]:
    return load_result("abmil", seed, study.folder / folder / str(seed)).winners


def jobs_of_initialisations(study: Study, count: int) -> list[TrainingJob]:
    return [job for seed in study.seeds for job in initialisations._jobs_of_run(study, "abmil", seed, count)]


def test_a_study_is_needed_first(tmp_path):
    alone = Study(WEAK, tmp_path, ("abmil",), (1001,))
    with pytest.raises(UserError, match=r"has no complete run abmil/1001; train it first, by the same command"):
        train_initialisations(alone, 2)
    with pytest.raises(UserError, match="has no complete run; train them with --initialisations"):
        write_initialisations(tmp_path, "semi-synthetic")


def test_the_first_initialisation_is_the_studys_own_and_complete_runs_are_not_repeated(again):
    for seed in again.seeds:
        chosen, winners = winners_of(again, seed)[0], winners_of(again, seed, "initialisations/chosen/abmil")
        configs = [replace(chosen.config, seed=seed + offset) for offset in (0, 10_000, 20_000)]
        assert [winner.config for winner in winners] == configs
        assert winners[0].test.localization_auroc == pytest.approx(chosen.test.localization_auroc, abs=1e-5)
        assert winners[0].epoch == chosen.epoch
        assert len({winner.test.scan_auroc for winner in winners}) > 1
    assert all(job.is_done(again) for job in jobs_of_initialisations(again, 3))
    with pytest.raises(UserError, match="holds another run"):
        train_initialisations(again, 4)


def test_the_published_choice_is_trained_where_it_differs(again):
    """The authors chose L1 .01 and lr .1 for ABMIL on both partitions."""
    published = [job for job in jobs_of_initialisations(again, 3) if "published" in job.folder.parts]
    chosen = {seed: winners_of(again, seed)[0].config for seed in again.seeds}
    assert {job.seed for job in published} == {s for s, own in chosen.items() if (own.l1, own.lr) != (0.01, 0.1)}
    for job in published:
        assert {(config.l1, config.lr) for config in job.make_grid(job.protocol)} == {(0.01, 0.1)}


def test_a_run_counts_for_the_authors_too_where_validation_chose_the_same(again, monkeypatch):
    """On both partitions the same choice: one row; on one of them: the authors' row takes that run from the study."""
    chosen = {seed: winners_of(again, seed)[0].config for seed in (1001, 2001)}
    in_chosen = lambda folder, dataset: find_results(folder, dataset) if folder.name == "chosen" else []  # noqa: E731
    monkeypatch.setattr(initialisations, "find_results", in_chosen)
    for same, expected in (
        ((1001, 2001), [("chosen", (1001, 2001))]),
        ((1001,), [("chosen", (1001, 2001)), ("published", (1001,))]),
    ):
        choices = {seed: (one.l1, one.lr if seed in same else -1.0) for seed, one in chosen.items()}
        monkeypatch.setattr(initialisations, "published_choice", lambda method, dataset, seed, of=choices: of[seed])
        rows = collect_initialisations(again.folder, "semi-synthetic", "localization_auroc")
        assert [(row.origin, tuple(row.scores)) for row in rows] == expected


def test_means_are_of_every_combination_of_initialisations():
    row = Initialisations("ng", "chosen", {1: {1: 0.0, 8: 1.0}, 2: {2: 0.5, 9: 0.7}})
    assert sorted(row.means) == pytest.approx([0.25, 0.35, 0.75, 0.85])
    assert row.first == 0.25
    assert np.isnan(Initialisations("ng", "chosen", {1: {8: 1.0}, 2: {2: 0.5}}).first)


def test_validation_chooses_among_initialisations(again):
    (row, *_) = collect_initialisations(again.folder, "semi-synthetic", "localization_auroc")
    assert (row.method, row.origin, row.means.shape) == ("abmil", "chosen", (9,))
    of_seeds = [winners_of(again, seed, "initialisations/chosen/abmil") for seed in again.seeds]
    best = [max(winners, key=lambda winner: winner.val_auroc).test.localization_auroc for winners in of_seeds]
    assert row.chosen == pytest.approx(np.mean(best))


def test_the_page_shows_the_published_value_in_the_distribution(again):
    page = write_initialisations(again.folder, "semi-synthetic")
    row = next(line for line in page.splitlines() if line.startswith("| ABMIL"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    shown = collect_initialisations(again.folder, "semi-synthetic", "localization_auroc")[0]
    theirs = np.mean([published_seed("localization_auroc", "abmil", "semi-synthetic", seed) for seed in (1001, 2001)])
    assert cells[:3] == ["ABMIL", "validation's (1001, 2001)", digits(shown.first)]
    assert cells[6:9] == [digits(shown.chosen), digits(theirs), f"{(shown.means <= theirs).mean():.0%}"]
    assert (again.folder / "initialisations.png").stat().st_size > 10_000
    assert json.loads((again.folder / "initialisations.json").read_text())["scan_auroc"][0]["method"] == "abmil"
