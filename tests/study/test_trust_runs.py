"""The folder of a run finds its own features, and says what is missing."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.scans.features.store import write_store
from normal_guidance.study.experiment import DATASETS
from normal_guidance.study.trust.examine import examine_saved
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.run import load_winner, run_sweep
from small_study import some_scans
from small_trust import CONFIG, make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> SimpleNamespace:
    return make_run(tmp_path_factory.mktemp("trust"))


def forgetful(trained: SimpleNamespace, out: Path, **options: str) -> Path:
    """The same run with other options in its report."""
    out.mkdir()
    for file in trained.run.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    write_json(out / "report.json", read_json(out / "report.json") | {"options": options})
    return out


def test_a_run_of_the_command_line_knows_where_its_features_are(trained):
    found = examine_saved(trained.run)
    test = trained.store.part("test")
    assert (found.scans, found.positive, found.notes) == (len(test), int(test.labels.sum()), ())
    written = read_json(trained.run / "report.json")["winners"][0]["test"]
    assert found.scan_auroc.value == pytest.approx(written["scan_auroc"])
    assert found["randomize"].more["localization AUROC"] == pytest.approx(written["localization_auroc"])


def test_validation_scans_may_be_tested_too(trained):
    found = examine_saved(trained.run, part="val", device="cpu")
    assert (found.scans, found.notes) == (len(trained.store.part("val")), ())


def test_a_run_that_does_not_know_is_told(trained, tmp_path):
    run = forgetful(trained, tmp_path / "run", dataset="head-ct")
    with pytest.raises(UserError, match="does not say where its features are; give them: --store STORE"):
        examine_saved(run)
    found = examine_saved(run, store=trained.folder / "store", split=trained.split)
    assert found.as_json() == examine_saved(trained.run).as_json()


def test_other_scans_are_tested_with_a_note(trained, tmp_path):
    others = some_scans(60, seed=99)
    write_store(tmp_path / "others", [("test", others)], provenance={})
    run = forgetful(trained, tmp_path / "run")
    found = examine_saved(run, store=tmp_path / "others")
    assert found.scans == 60
    assert "not the run's own test scans" in found.notes[0]
    expected = predict_bags(load_winner(trained.run), others).logit
    assert found.curves["deletion"].whole_logit.value == pytest.approx(
        (expected / expected.double().std())[others.labels == 1].mean().item(), rel=1e-4
    )


def test_what_is_missing_is_named(trained, tmp_path):
    gone = forgetful(trained, tmp_path / "gone", store=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"was trained with .*nowhere, which no longer exists; give --store STORE"):
        examine_saved(gone)
    with pytest.raises(UserError, match="models are not tested on part 'train'; choose one of val, test"):
        examine_saved(trained.run, part="train")
    with pytest.raises(UserError, match="has one winner and no group 'best'; leave the group out"):
        examine_saved(trained.run, group="best")
    narrow = some_scans(60, features=4)
    write_store(tmp_path / "narrow", [("test", narrow)], provenance={})
    with pytest.raises(UserError, match="takes 8 features a slice, but the store has 4"):
        examine_saved(forgetful(trained, tmp_path / "run"), store=tmp_path / "narrow")


def test_a_drawn_data_set_is_drawn_again(monkeypatch, tmp_path):
    def draw(seed: int, part: str):
        return some_scans(60, seed=seed + ("train", "val", "test").index(part))

    monkeypatch.setitem(DATASETS, "semi-synthetic", replace(DATASETS["semi-synthetic"], draw=draw))
    parts = [draw(1001, part) for part in ("train", "val", "test")]
    run_sweep(tmp_path / "run", [replace(CONFIG, seed=1001)], *parts, options={"dataset": "semi-synthetic"})
    assert examine_saved(tmp_path / "run").notes == ()


def test_the_slice_reference_has_no_attention(tmp_path):
    parts = [some_scans(60, seed=seed) for seed in (1, 2, 3)]
    config = Config("slice_reference", receptive_field=4, epochs=2, batch_size=16, train_above_val=False)
    run_sweep(tmp_path / "run", [config], *parts)
    with pytest.raises(UserError, match="was trained on slice labels and has no attention to test"):
        examine_saved(tmp_path / "run")


def test_untrained_models_are_built_as_the_run_builds_them(trained, monkeypatch):
    """They differ from the winner in weights alone, and from each other."""
    made = []

    def spy(model, scans, *, untrained, **options):
        made.extend(untrained(seed) for seed in (1, 2))
        raise UserError("enough")

    monkeypatch.setattr("normal_guidance.study.trust.examine.examine", spy)
    with pytest.raises(UserError, match="enough"):
        examine_saved(trained.run)
    winner = load_winner(trained.run)
    assert [type(one) for one in made] == [type(winner)] * 2
    weights = [one.state_dict()["score.weight"] for one in (winner, *made)]
    assert not any(torch.equal(weights[i], weights[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
