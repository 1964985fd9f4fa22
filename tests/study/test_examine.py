"""Tests of attention say of good, inverted, position-bound and unlearnt attention what it is, and take saved models."""

import math
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
from normal_guidance.show.figure_style import GREEN
from normal_guidance.study.experiment import DATASETS
from normal_guidance.study.figures.deletion import LINES, draw_trust, plot_trust
from normal_guidance.study.trust.attention_tests import Bootstrap, ScanPredictions, judge_alarm
from normal_guidance.study.trust.examine import examine, examine_saved, trust_page, verdict_table
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.loop import predict_bags
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


@pytest.fixture(scope="module")
def good(bags):
    return examine(bayes(), bags, untrained=fresh_abmil)


@pytest.fixture(scope="module")
def wrong(bags):
    """Without slice labels: the alarm does not need them."""
    return examine(bayes(sign=-1), replace(bags, slice_labels=None), untrained=fresh_abmil)


@pytest.mark.slow
def test_attention_near_bayes_passes_everything_on_data_as_weak_as_the_papers(good):
    assert {finding.verdict for finding in good.findings} == {PASSES}
    assert good["shuffle"].number.low > 0.5
    assert 0.7 < good.scan_auroc.low < good.scan_auroc.high < 0.85  # the paper's ceiling is .81
    assert good["inverted"].more["localization AUROC"].low > 0.8
    assert "slice labels confirm it" in good["inverted"].meaning


@pytest.mark.slow
def test_inverted_attention_raises_the_alarm_without_slice_labels(wrong):
    assert wrong["inverted"].verdict == FAILS
    assert wrong["inverted"].number.high < 0
    assert wrong["inverted"].meaning == "ALARM: attention points away from the evidence."
    assert "localization AUROC" not in wrong["inverted"].more
    assert (wrong["deletion"].verdict, wrong["randomize"].verdict) == (FAILS, FAILS)
    assert wrong["shuffle"].verdict == PASSES  # it does come from the image


def test_where_the_scan_score_tells_nothing_slice_labels_decide(strong):
    def silent(features, lengths):
        return torch.full((len(lengths),), torch.nan), bayes(STRONG, sign=-1)(features, lengths).attention

    found = examine(silent, strong)
    assert (found["inverted"].verdict, found["deletion"].verdict) == (FAILS, UNDECIDED)
    assert "by slice labels alone" in found["inverted"].meaning
    assert found.curves is None
    assert found.scan_auroc is None
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
    found = examine(with_attention_of(CenteredGaussian(), bayes(STRONG)), strong, untrained=fresh_abmil)
    assert found["shuffle"].verdict == FAILS
    position = found["shuffle"].more["stays at the places, shuffled (position alone)"]
    assert position.value == pytest.approx(1.0)
    assert found["shuffle"].number.value == pytest.approx(-1.0, abs=0.15)
    assert found["inverted"].verdict != FAILS  # the middle is no bad guess


def test_a_method_without_weights_is_what_an_untrained_one_is(strong):
    found = examine(CenteredGaussian(), strong)
    assert (found["shuffle"].verdict, found["randomize"].verdict) == (FAILS, FAILS)
    assert found["randomize"].more["rank correlation with untrained models"].value == pytest.approx(1.0)
    assert found["deletion"].verdict == UNDECIDED


def test_a_plain_function_must_say_how_it_is_untrained(strong):
    found = examine(bayes(STRONG), strong[:40])
    assert found["randomize"].verdict == UNDECIDED
    assert "untrained=" in found["randomize"].action
    assert "untrained" not in found.curves["deletion"].auroc


def test_the_same_seed_gives_the_same_numbers(strong):
    one, two, other = (examine(bayes(STRONG), strong[:40], seed=seed).as_json() for seed in (0, 0, 1))
    assert str(one) == str(two)  # NaN is not equal to itself
    assert str(one) != str(other)


def test_too_few_patients_and_an_unknown_share_are_refused(strong, unchecked):
    with pytest.raises(UserError, match=r"patients have positive scans .* the tests need 5 of each"):
        examine(bayes(), strong[:6])
    with pytest.raises(UserError, match="1 patients have positive scans and 1 have negative"):
        examine(bayes(), replace(strong[:40], patient_ids=("A",) * 40))
    with pytest.raises(UserError, match="by is 'heads'; choose one of slices, attention"):
        examine(bayes(), strong, by="heads")


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
    assert [row[:2] for row in rows] == [[finding.title, finding.verdict] for finding in clear.findings]
    assert rows[2][2] == str(clear["deletion"].number)
    assert "60 scans" in verdict_table(clear).caption
    page = trust_page(clear, picture="trust.png")
    for finding in clear.findings:
        assert finding.meaning in page
        assert f"What to do: {finding.action}" in page
        for name in finding.more:
            assert f"- {name}: " in page
    assert "](trust.png)" in page
    assert "trust.png" not in trust_page(clear)


def test_a_method_without_scan_score_has_a_page():
    page = trust_page(examine(CenteredGaussian(), strong_scans(30)))
    assert "scan AUROC unknown" in page
    assert "nan" not in page


def test_lines_are_the_curves_and_begin_or_end_with_the_whole_scan(clear):
    figure = plot_trust(clear.curves)
    assert len(figure.axes) == 4
    removed, kept = clear.curves["deletion"], clear.curves["insertion"]
    expected = [
        (0, [removed.whole_auroc, *removed.auroc["attended"]]),
        (-1, [*kept.auroc["attended"], kept.whole_auroc]),
        (0, [removed.whole_logit, *removed.logit["attended"]]),
        (-1, [*kept.logit["attended"], kept.whole_logit]),
    ]
    for panel, (whole, points) in zip(figure.axes, expected, strict=True):
        attended = next(line for line in panel.lines if to_hex(line.get_color()) == to_hex(GREEN))
        assert np.allclose(attended.get_ydata(), [point.value for point in points])
        assert attended.get_xdata()[whole] == (0.0 if whole == 0 else 1.0)
        assert len([line for line in panel.lines if len(line.get_xdata()) == 6]) == len(LINES)
    assert math.isclose(expected[0][1][0].value, expected[1][1][-1].value)


def test_the_legend_names_every_order_once(clear, tmp_path):
    (legend,) = plot_trust(clear.curves).legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(line["label"] for line in LINES.values())
    without = examine(bayes(STRONG), strong_scans(30))
    (legend,) = plot_trust(without.curves, by="attention").legends
    assert "attended to by untrained models" not in {text.get_text() for text in legend.get_texts()}
    assert draw_trust(without.curves, tmp_path / "trust.svg").read_bytes().startswith(b"<?xml")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> SimpleNamespace:
    return make_run(tmp_path_factory.mktemp("trust"))


def forgetful(saved: SimpleNamespace, out: Path, **options: str) -> Path:
    """The same run with other options in its report."""
    out.mkdir()
    for file in saved.run.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    write_json(out / "report.json", read_json(out / "report.json") | {"options": options})
    return out


def test_a_run_of_the_command_line_knows_where_its_features_are(saved):
    found = examine_saved(saved.run)
    test = saved.store.part("test")
    assert (found.scans, found.positive, found.notes) == (len(test), int(test.labels.sum()), ())
    written = read_json(saved.run / "report.json")["winners"][0]["test"]
    assert found.scan_auroc.value == pytest.approx(written["scan_auroc"])
    assert found["randomize"].more["localization AUROC"] == pytest.approx(written["localization_auroc"])


def test_a_run_that_does_not_know_its_features_is_given_them(saved, tmp_path):
    run = forgetful(saved, tmp_path / "run", dataset="head-ct")
    found = examine_saved(run, store=saved.folder / "store", split=saved.split)
    assert found.as_json() == examine_saved(saved.run).as_json()


def test_other_scans_are_tested_with_a_note(saved, tmp_path):
    others = some_scans(60, seed=99)
    write_store(tmp_path / "others", [("test", others)], provenance={})
    run = forgetful(saved, tmp_path / "run")
    found = examine_saved(run, store=tmp_path / "others")
    assert found.scans == 60
    assert "not the run's own test scans" in found.notes[0]
    expected = predict_bags(load_winner(saved.run), others).logit
    assert found.curves["deletion"].whole_logit.value == pytest.approx(
        (expected / expected.double().std())[others.labels == 1].mean().item(), rel=1e-4
    )


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
