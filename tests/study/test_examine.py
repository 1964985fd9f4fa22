"""Tests of attention say of good, inverted, position-bound and unlearnt attention what it is, and take saved models."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.scans.features.store import write_store
from normal_guidance.show.figure_style import GREEN, save
from normal_guidance.study.experiment import DATASETS
from normal_guidance.study.figures.deletion import LINES, plot_trust
from normal_guidance.study.trust.attention_tests import Bootstrap, ScanPredictions, judge_alarm
from normal_guidance.study.trust.examine import examine, examine_saved, trust_page, verdict_table
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.run import load_winner, run_sweep
from small_study import some_scans
from small_trust import (
    CONFIG,
    STRONG,
    bayes,
    fresh_abmil,
    make_run,
    paper_scans,
    strong_scans,
    with_attention_of,
    with_learnt_classifier,
)

PASSES, FAILS, UNDECIDED = "passes", "fails", "cannot be told"


@pytest.fixture(scope="module")
def bags():
    return paper_scans()


@pytest.fixture(scope="module")
def strong():
    return strong_scans()


@pytest.mark.slow
def test_attention_near_bayes_passes_everything_on_data_as_weak_as_the_papers(bags):
    good = examine(bayes(), bags, untrained=fresh_abmil)
    assert {finding.verdict for finding in good.findings} == {PASSES}
    assert good["shuffle"].number.low > 0.5
    assert 0.7 < good.scan_auroc.low < good.scan_auroc.high < 0.85  # the paper's ceiling is .81
    assert good["inverted"].more["localization AUROC"].low > 0.8
    assert "slice labels confirm it" in good["inverted"].meaning


@pytest.mark.slow
def test_inverted_attention_raises_the_alarm_without_slice_labels(bags):
    wrong = examine(bayes(sign=-1), replace(bags, slice_labels=None), untrained=fresh_abmil)
    # It does come from the image.
    assert [finding.verdict for finding in wrong.findings] == [PASSES, FAILS, FAILS, FAILS]
    assert wrong["inverted"].number.high < 0
    assert wrong["inverted"].meaning == "ALARM: attention points away from the evidence."
    assert "localization AUROC" not in wrong["inverted"].more


def test_where_the_scan_score_tells_nothing_slice_labels_decide(strong):
    def silent(features, lengths):
        return torch.full((len(lengths),), torch.nan), bayes(STRONG, sign=-1)(features, lengths).attention

    trust = examine(silent, strong)
    assert (trust["inverted"].verdict, trust["deletion"].verdict) == (FAILS, UNDECIDED)
    assert "by slice labels alone" in trust["inverted"].meaning
    assert trust.curves is trust.scan_auroc is None
    assert examine(silent, replace(strong, slice_labels=None))["inverted"].verdict == UNDECIDED


@pytest.mark.parametrize(("bias", "verdict"), [(0.02, UNDECIDED), (0.5, FAILS)])
def test_a_trace_below_chance_is_no_alarm(bags, bias, verdict):
    """Slices in random order, the positive ones a little further back: in so many scans that is significant."""
    drawn = torch.rand(len(bags.features), generator=torch.Generator().manual_seed(1)).double()
    own = ScanPredictions(torch.zeros(len(bags)).double(), drawn - bias * bags.slice_labels, torch.ones_like(drawn))
    found = judge_alarm(None, own, bags, Bootstrap(bags))
    assert found.more["localization AUROC"].high < 0.5
    assert found.verdict == verdict


def test_position_alone_is_unmasked_by_shuffling(strong):
    trust = examine(with_attention_of(CenteredGaussian(), bayes(STRONG)), strong, untrained=fresh_abmil)
    assert trust["shuffle"].verdict == FAILS
    position = trust["shuffle"].more["stays at the places, shuffled (position alone)"]
    assert position.value == pytest.approx(1.0)
    assert trust["shuffle"].number.value == pytest.approx(-1.0, abs=0.15)
    assert trust["inverted"].verdict != FAILS  # the middle is not a bad guess


def test_a_method_without_weights_is_what_an_untrained_one_is_and_has_a_page(strong):
    trust = examine(CenteredGaussian(), strong)
    assert [finding.verdict for finding in trust.findings[:3]] == [FAILS, FAILS, UNDECIDED]
    assert trust["randomize"].more["rank correlation with untrained models"].value == pytest.approx(1.0)
    assert "scan AUROC unknown" in trust_page(trust)
    assert "nan" not in trust_page(trust)


def test_a_plain_function_must_say_how_it_is_untrained_and_a_seed_gives_the_same_numbers(strong):
    trust, again, other = (examine(bayes(STRONG), strong[:40], seed=seed) for seed in (0, 0, 1))
    assert trust["randomize"].verdict == UNDECIDED
    assert "untrained=" in trust["randomize"].action
    assert "untrained" not in trust.curves["deletion"].auroc
    assert str(trust.as_json()) == str(again.as_json()) != str(other.as_json())  # NaN is not equal to itself


def test_too_few_patients_and_an_unknown_share_are_refused(strong, unchecked):
    for scans, by, message in (
        (strong[:6], "slices", r"patients have positive scans .* the tests need 5 of each"),
        (replace(strong[:40], patient_ids=("A",) * 40), "slices", "1 patients have positive scans and 1 have negative"),
        (strong, "heads", "by is 'heads'; choose one of slices, attention"),
    ):
        with pytest.raises(UserError, match=message):
            examine(bayes(), scans, by=by)


@pytest.fixture(scope="module")
def many():
    return paper_scans(1000)


@pytest.mark.slow
def test_a_guided_model_with_random_weights_is_unmasked_by_fresh_weights(many):
    found = examine(fresh_abmil(21), many[:500])  # ng is ABMIL, trained with another loss
    assert found["randomize"].verdict == FAILS
    assert "untrained models separate positive from negative scans as well" in found["randomize"].meaning
    assert found["inverted"].verdict != FAILS
    # Shuffling cannot see it: attention without position goes with the slices, whatever it has learnt.
    assert found["shuffle"].verdict == PASSES
    assert found["shuffle"].more["share of attention that shuffling moves (equivariance error)"].value < 1e-6
    assert found["shuffle"].more["scan AUROC lost by shuffling"].value == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_classifier_with_unlearnt_attention_fails_what_it_should(many):
    found = examine(with_learnt_classifier(fresh_abmil(5)), many)
    assert found.scan_auroc.low > 0.7
    assert [finding.verdict for finding in found.findings[:3]] == [PASSES, FAILS, FAILS]
    assert found["inverted"].verdict != FAILS


@pytest.fixture(scope="module")
def clear():
    return examine(bayes(STRONG), strong_scans(60), untrained=fresh_abmil)


def test_the_page_tells_every_verdict_number_and_what_to_do(clear):
    rows = verdict_table(clear).rows
    assert [row[:3] for row in rows] == [[test.title, test.verdict, str(test.number)] for test in clear.findings]
    assert "60 scans" in verdict_table(clear).caption
    page = trust_page(clear, picture="trust.png")
    for finding in clear.findings:
        assert finding.meaning in page
        assert f"What to do: {finding.action}" in page
        for name in finding.more:
            assert f"- {name}: " in page
    assert "](trust.png)" in page
    assert "trust.png" not in trust_page(clear)


def test_lines_are_the_curves_and_begin_or_end_with_the_whole_scan(clear):
    figure = plot_trust(clear.curves)
    assert len(figure.axes) == 4
    removed, kept = clear.curves["deletion"], clear.curves["insertion"]
    expected = [
        ([0.0, *removed.shares], [removed.whole_auroc, *removed.auroc["attended"]]),
        ([*kept.shares, 1.0], [*kept.auroc["attended"], kept.whole_auroc]),
        ([0.0, *removed.shares], [removed.whole_logit, *removed.logit["attended"]]),
        ([*kept.shares, 1.0], [*kept.logit["attended"], kept.whole_logit]),
    ]
    for panel, (shares, points) in zip(figure.axes, expected, strict=True):
        attended = next(line for line in panel.lines if to_hex(line.get_color()) == to_hex(GREEN))
        assert np.allclose(attended.get_xydata().T, [shares, [point.value for point in points]])
        assert len([line for line in panel.lines if len(line.get_xdata()) == 6]) == len(LINES)
    assert math.isclose(removed.whole_auroc.value, kept.whole_auroc.value)


def test_the_legend_names_every_order_once(clear, tmp_path):
    without = examine(bayes(STRONG), strong_scans(30))
    named = [
        sorted(text.get_text() for text in plot_trust(trust.curves, by=by).legends[0].get_texts())
        for trust, by in ((clear, "slices"), (without, "attention"))
    ]
    assert named[0] == sorted(line["label"] for line in LINES.values())
    assert {*named[0]} - {*named[1]} == {"attended to by untrained models"}
    assert save(plot_trust(without.curves), tmp_path / "trust.svg").read_bytes().startswith(b"<?xml")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> SimpleNamespace:
    return make_run(tmp_path_factory.mktemp("trust"))


def forgetful(saved: SimpleNamespace, out: Path, **options: str) -> Path:
    """The same run with other options in its report."""
    shutil.copytree(saved.run, out)
    write_json(out / "report.json", read_json(out / "report.json") | {"options": options})
    return out


def test_a_run_of_the_command_line_knows_where_its_features_are(saved, tmp_path):
    trust = examine_saved(saved.run)
    test = saved.store.part("test")
    assert (trust.scans, trust.positive, trust.notes) == (len(test), int(test.labels.sum()), ())
    written = read_json(saved.run / "report.json")["winners"][0]["test"]
    assert trust.scan_auroc.value == pytest.approx(written["scan_auroc"])
    assert trust["randomize"].more["localization AUROC"] == pytest.approx(written["localization_auroc"])
    # A run that does not know its features is given them.
    run = forgetful(saved, tmp_path / "run", dataset="head-ct")
    given = examine_saved(run, store=saved.folder / "store", split=saved.split)
    assert given.as_json() == trust.as_json()


def test_other_scans_are_tested_with_a_note(saved, tmp_path):
    others = some_scans(60, seed=99)
    write_store(tmp_path / "others", [("test", others)], provenance={})
    run = forgetful(saved, tmp_path / "run")
    found = examine_saved(run, store=tmp_path / "others")
    assert (found.scans, found.positive) == (60, int(others.labels.sum()))
    assert "not the run's own test scans" in found.notes[0]


def test_what_is_missing_is_named(saved, tmp_path):
    gone = forgetful(saved, tmp_path / "gone", store=str(tmp_path / "nowhere"))
    narrow = some_scans(60, features=4)
    write_store(tmp_path / "narrow", [("test", narrow)], provenance={})
    forgotten = forgetful(saved, tmp_path / "run")
    config = Config("slice_reference", receptive_field=4, epochs=2, batch_size=16, train_above_val=False)
    run_sweep(tmp_path / "slices", [config], *(some_scans(60, seed=seed) for seed in (1, 2, 3)))
    for folder, options, message in (
        (gone, {}, r"was trained with .*nowhere, which no longer exists; give --store STORE"),
        (saved.run, {"part": "train"}, "models are not tested on part 'train'; choose one of val, test"),
        (saved.run, {"group": "best"}, "has one winner and no group 'best'; leave the group out"),
        (forgotten, {}, "does not say where its features are; give them: --store STORE"),
        (forgotten, {"store": tmp_path / "narrow"}, "takes 8 features a slice, but the store has 4"),
        (tmp_path / "slices", {}, "was trained on slice labels and has no attention to test"),
    ):
        with pytest.raises(UserError, match=message):
            examine_saved(folder, **options)


def test_a_drawn_data_set_is_drawn_again(monkeypatch, tmp_path):
    def draw(seed: int, part: str):
        return some_scans(60, seed=seed + ("train", "val", "test").index(part))

    monkeypatch.setitem(DATASETS, "semi-synthetic", replace(DATASETS["semi-synthetic"], draw=draw))
    parts = [draw(1001, part) for part in ("train", "val", "test")]
    run_sweep(tmp_path / "run", [replace(CONFIG, seed=1001)], *parts, options={"dataset": "semi-synthetic"})
    assert examine_saved(tmp_path / "run").notes == ()


def test_untrained_models_are_built_as_the_run_builds_them(saved, monkeypatch):
    """They differ from the winner in weights alone, and from each other."""
    made = []

    def spy(model, scans, *, untrained, **options):
        made.extend(untrained(seed) for seed in (1, 2))
        raise UserError("enough")

    monkeypatch.setattr("normal_guidance.study.trust.examine.examine", spy)
    with pytest.raises(UserError, match="enough"):
        examine_saved(saved.run)
    winner = load_winner(saved.run)
    assert [type(one) for one in made] == [type(winner)] * 2
    weights = [one.state_dict()["score.weight"] for one in (winner, *made)]
    assert not any(torch.equal(weights[i], weights[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
