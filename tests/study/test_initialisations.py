"""Chosen configurations trained again: the first initialisation is the study's own, and a page shows them all."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.show.text_tables import digits
from normal_guidance.study import reproduction as initialisations
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import Study, StudyData, bayes_oracle, find_results, load_result, train_study
from normal_guidance.study.references import published_seed
from normal_guidance.study.reproduction import (
    Initialisations,
    collect_initialisations,
    from_initialisations,
    initialisation_jobs,
    train_initialisations,
    write_initialisations,
)
from normal_guidance.sweep.config import Config


def draw(seed: int, part: str):
    return shifted_mean(60, seed + len(part), features=8, shift=0.8)


DATA = StudyData("semi-synthetic", draw, (1001, 2001), bayes_oracle)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    protocol = Config("ng", epochs=6, batch_size=8)
    study = Study(DATA, tmp_path_factory.mktemp("study"), ("centered_gaussian", "abmil"), (1001, 2001), protocol)
    train_study(study)
    train_initialisations(study, 3)
    return study


def test_a_study_is_needed_first(tmp_path: Path) -> None:
    study = Study(DATA, tmp_path, ("abmil",), (1001,))
    with pytest.raises(UserError, match=r"has no complete run abmil/1001; train it first, by the same command"):
        initialisation_jobs(study, 2)


def test_the_first_initialisation_is_the_studys_own(study: Study) -> None:
    for seed in study.seeds:
        chosen = load_result("abmil", seed, study.folder / "abmil" / str(seed)).winners[0]
        again = load_result("abmil", seed, study.folder / "initialisations/chosen/abmil" / str(seed)).winners
        assert [one.config.seed for one in again] == [seed, seed + 10_000, seed + 20_000]
        assert {(one.config.l1, one.config.lr) for one in again} == {(chosen.config.l1, chosen.config.lr)}
        assert again[0].test.localization_auroc == pytest.approx(chosen.test.localization_auroc, abs=1e-5)
        assert again[0].epoch == chosen.epoch
        assert len({one.test.scan_auroc for one in again}) > 1


def test_the_published_choice_is_trained_where_it_differs(study: Study) -> None:
    """The authors chose L1 .01 and lr .1 for ABMIL on both partitions."""
    jobs = initialisation_jobs(study, 3)
    published = [job for job in jobs if "published" in job.folder.parts]
    assert {job.seed for job in published} == {
        seed
        for seed in study.seeds
        if (one := load_result("abmil", seed, study.folder / "abmil" / str(seed)).winners[0].config)
        and (one.l1, one.lr) != (0.01, 0.1)
    }
    for job in published:
        assert {(one.l1, one.lr) for one in job.make_grid(job.protocol)} == {(0.01, 0.1)}


def test_every_combination_of_partitions_is_a_mean(study: Study) -> None:
    (chosen, *_) = collect_initialisations(study.folder, "semi-synthetic", "localization_auroc")
    assert (chosen.method, chosen.origin, chosen.means.shape) == ("abmil", "chosen", (9,))
    assert chosen.means.mean() == pytest.approx(np.mean([np.mean([*one.values()]) for one in chosen.scores.values()]))


def test_a_run_counts_for_the_authors_too_where_validation_chose_the_same(study: Study, monkeypatch) -> None:
    """On both partitions the same choice: one row; on one of them: the authors' row takes that run from the study."""

    def rows() -> list[tuple[str, tuple[int, ...]]]:
        found = collect_initialisations(study.folder, "semi-synthetic", "localization_auroc")
        return [(one.origin, tuple(one.scores)) for one in found]

    chosen = {
        seed: load_result("abmil", seed, study.folder / "abmil" / str(seed)).winners[0].config for seed in (1001, 2001)
    }
    monkeypatch.setattr(initialisations, "find_results", partial(_only_chosen, study.folder))
    monkeypatch.setattr(
        initialisations, "published_choice", lambda method, dataset, seed: (chosen[seed].l1, chosen[seed].lr)
    )
    assert rows() == [("chosen", (1001, 2001))]
    monkeypatch.setattr(
        initialisations,
        "published_choice",
        lambda method, dataset, seed: (chosen[seed].l1, chosen[seed].lr if seed == 1001 else -1.0),
    )
    assert rows() == [("chosen", (1001, 2001)), ("published", (1001,))]


def _only_chosen(study: Path, folder: Path, dataset: str) -> list:
    return list(find_results(folder, dataset)) if folder.name == "chosen" else []


def test_where_a_value_lies() -> None:
    one = Initialisations("ng", "chosen", {1: {1: 0.0, 8: 1.0}, 2: {2: 0.5, 9: 0.7}})
    assert [one.share_below(value) for value in (0.2, 0.35, 0.8, 1.0)] == [0.0, 0.5, 0.75, 1.0]
    assert one.first == 0.25
    assert np.isnan(Initialisations("ng", "chosen", {1: {8: 1.0}, 2: {2: 0.5}}).first)


def test_validation_chooses_among_initialisations(study: Study) -> None:
    (found, *_) = collect_initialisations(study.folder, "semi-synthetic", "localization_auroc")
    reached = []
    for seed in study.seeds:
        winners = load_result("abmil", seed, study.folder / "initialisations/chosen/abmil" / str(seed)).winners
        reached.append(max(winners, key=lambda one: one.val_auroc).test.localization_auroc)
    assert found.chosen == pytest.approx(np.mean(reached))


def test_complete_runs_are_not_repeated(study: Study) -> None:
    jobs = initialisation_jobs(study, 3)
    assert all(job.is_done(study) for job in jobs)
    with pytest.raises(UserError, match="holds another run"):
        initialisation_jobs(study, 4)[0].is_done(study)
    assert from_initialisations(Config("ng", seed=7), 1) == (Config("ng", seed=7),)


def test_the_page_shows_the_published_value_in_the_distribution(study: Study) -> None:
    page = write_initialisations(study.folder, "semi-synthetic")
    row = next(line for line in page.splitlines() if line.startswith("| ABMIL"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    found = collect_initialisations(study.folder, "semi-synthetic", "localization_auroc")[0]
    assert cells[:2] == ["ABMIL", "validation's (1001, 2001)"]
    assert float(cells[2]) == pytest.approx(found.first, abs=6e-4)
    theirs = np.mean([published_seed("localization_auroc", "abmil", "semi-synthetic", seed) for seed in (1001, 2001)])
    assert cells[6] == digits(found.chosen)
    assert cells[7] == digits(theirs)
    assert cells[8] == f"{found.share_below(theirs):.0%}"
    assert (study.folder / "initialisations.png").stat().st_size > 10_000
    assert json.loads((study.folder / "initialisations.json").read_text())["scan_auroc"][0]["method"] == "abmil"


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no complete run; train them with --initialisations"):
        write_initialisations(tmp_path, "semi-synthetic")
