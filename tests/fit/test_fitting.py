"""`nguide fit`: a folder that predicts, sentences that do not flatter, and refusals."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.clinic.predict.predicting import score
from normal_guidance.clinic.viewer.runs import find_splits
from normal_guidance.core.bags import Bags
from normal_guidance.fit import measured
from normal_guidance.fit.bundle import load_bundle
from normal_guidance.fit.ensemble import prior_attention
from normal_guidance.fit.fit_ensemble import FoldPlan
from normal_guidance.fit.fit_page import ScoredScans, _mistakes, _results, plot_scans
from normal_guidance.fit.fitting import ModelFit, fit_model, training_scans
from normal_guidance.fit.hub import model_card
from normal_guidance.fit.measured import OUT_OF_FOLD
from normal_guidance.scans.features.store import FeatureStore, write_store
from normal_guidance.show.text_tables import digits, signed
from normal_guidance.statistics.calibration import FEW, Calibration, Operation, describe
from normal_guidance.statistics.conformal import calibrate_intervals
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.predictions import read_predictions
from small_bundle import few_settings
from small_command import output_of

QUICK = FoldPlan(folds=3)
Made = tuple[Path, ModelFit]  # the folder, and what was fitted


def draw(scans: int, seed: int, shift: float, first: int = 0) -> Bags:
    names = tuple(f"S{first + number:04}" for number in range(scans))
    return replace(shifted_mean(scans, seed, features=6, shift=shift), scan_ids=names, patient_ids=names)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        few_settings(patch)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    parts = {"train": draw(60, 1, 2.0), "test": draw(40, 2, 2.0, first=60)}
    return write_store(tmp_path_factory.mktemp("fit") / "store", parts.items(), provenance={"encoder": "drawn"})


@pytest.fixture(scope="module")
def made(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("fit") / "model"
    return out, fit_model(store.part("train"), out, test=store.part("test"), plan=QUICK)


def test_the_folder_predicts_as_the_model_does(made: Made, store: FeatureStore) -> None:
    out, model = made
    loaded, new = load_bundle(out), store.part("test").bags()[:1]
    logit, log_attention = score(loaded, new.features)
    own = model.fit.ensemble(new.features, new.lengths)
    assert loaded.method == "ensemble"
    assert logit == pytest.approx(own.logit.item(), abs=1e-5)
    torch.testing.assert_close(log_attention.float(), own.log_attention)
    rows = read_predictions(out / "predictions.parquet", ("scan_id", "logit", "probability"), part=OUT_OF_FOLD)
    assert rows["logit"].to_pylist() == pytest.approx(model.fit.logits.tolist(), abs=1e-5)
    first = model.bundle.operation.calibration.probability(model.fit.logits[0].item())
    assert rows["probability"][0].as_py() == pytest.approx(first, abs=1e-5)
    assert len(read_predictions(out / "predictions.parquet", ("scan_id",), part="test")) == 40
    assert find_splits(out)[0].sources[0].title == "Ensemble"


def test_a_planted_signal_is_told_as_found(made: Made) -> None:
    finds, tells, test, expects = made[1].sentences()
    gain, scans = made[1].out_of_fold.gain, made[1].out_of_fold.scans
    assert finds == (
        f"It finds the slices better than position does: {gain}, {gain.scans} scans; localization AUROC "
        f"{digits(gain.auroc)}, by position {digits(gain.position)}."
    )
    assert tells.startswith(f"It tells scans apart: AUROC {scans} (")
    assert test.startswith(f"On test scans, which no model has seen: localization AUROC {made[1].test.gain} beyond pos")
    assert expects.startswith("It expects findings ")
    assert "skill" not in " ".join(made[1].sentences())
    assert gain.gain > 0.15 < made[1].test.gain.gain
    assert made[1].test.scans.value > 0.9
    assert made[1].bundle.cautions == ()
    assert "cautions" not in read_json(made[0] / "bundle.json")


def test_the_leaderboard_has_every_kind_position_and_the_ensemble(made: Made, store: FeatureStore) -> None:
    model, scans = made[1], store.part("train").bags()
    rows = model.leaderboard
    assert read_json(made[0] / "leaderboard.json")["leaderboard"] == [asdict(row) for row in rows]
    assert (rows[0].name, rows[-1].name) == ("ensemble", "position")
    assert (rows[0].scans, rows[0].localization) == (model.out_of_fold.scans, model.out_of_fold.localization)
    kinds = {row.name: row for row in rows[1:-1]}
    assert [*kinds] == [row.name for row in sorted(kinds.values(), key=lambda row: row.log_loss)]
    for number, (kind, found) in enumerate(zip(measured.KINDS, model.fit.kinds, strict=True)):
        row = kinds.pop(kind.method)
        assert (row.attends, row.scores) == (number in model.fit.choice.attends, number in model.fit.choice.scores)
        assert row.why.startswith("counts in " if row.attends or row.scores else "left out: ")
        assert row.log_loss == pytest.approx(log_loss(scans.labels, torch.sigmoid(found.logits.double())), abs=1e-5)
        assert row.scans.value == pytest.approx(roc_auc_score(scans.labels, found.logits))
        assert (row.localization is None) == (kind.method == "mean")
    assert not kinds
    assert 0.5 < rows[-1].localization.auroc <= model.out_of_fold.gain.position  # the best of several guesses
    page = read_page(made[0])
    assert all(f"<td>{escape(cell)}</td>" in page for row in rows for cell in row.cells() if cell)


@pytest.mark.parametrize(("usual", "shape"), [(True, "in one block of slices, as usual"), (False, "anywhere in the s")])
def test_the_last_sentence_says_which_findings_it_expects(made: Made, usual: bool, shape: str) -> None:
    model = made[1]
    fit = replace(model.fit, choice=model.fit.choice._replace(usual=usual, shown=True))
    many = replace(model.out_of_fold, positive=FEW, negative=FEW)
    told = replace(model, fit=fit, out_of_fold=many, test=None).sentences()
    assert len(told) == 3
    assert told[2].startswith(f"It expects findings {shape}")
    few = replace(model, out_of_fold=replace(many, positive=FEW - 1), test=None).sentences()[2]
    assert few.startswith(f"Take all of it as rough: {FEW - 1} positive")


def test_fewer_than_ten_scans_of_a_class_are_a_caution(made: Made) -> None:
    for positive, negative, few in ((9, 40, True), (40, 9, True), (10, 10, False)):
        measured = replace(made[1].out_of_fold, positive=positive, negative=negative)
        result = replace(made[1], out_of_fold=measured)
        said = f"{positive} positive and {negative} negative scans leave a scan AUROC of .800 uncertain by ±."
        assert [said in caution for caution in result.cautions()] == [True] * few
        assert result.sentences()[-1].startswith(f"Take all of it as rough: {said}")


def test_few_test_scans_are_trained_on_unless_they_shall_be_kept(tmp_path: Path) -> None:
    for count, kept, asked in ((29, None, 29), (30, 30, 30), (0, None, None)):
        parts = (
            {"train": draw(20, 1, 2.0), "test": draw(count, 2, 2.0, first=20)} if count else {"train": draw(20, 1, 2.0)}
        )
        folder = tmp_path / str(count)
        made = write_store(folder, parts.items(), provenance={})
        for keep_test, wanted in ((False, kept), (True, asked)):
            train, test = training_scans(made, keep_test=keep_test)
            assert (None if test is None else len(test)) == wanted
            assert len(train) == 20 + count - (wanted or 0)


def test_a_killed_fit_goes_on_and_leaves_nothing_behind(store: FeatureStore, made: Made, tmp_path: Path) -> None:
    def stop(share: float) -> None:
        if share > 0.7:
            raise KeyboardInterrupt

    options = {"test": store.part("test"), "plan": QUICK}
    with pytest.raises(KeyboardInterrupt):
        fit_model(store.part("train"), tmp_path / "model", watch=stop, **options)
    assert [file.name for file in tmp_path.iterdir()] == [".model.kinds"]
    shares: list[float] = []
    fit_model(store.part("train"), tmp_path / "model", watch=shares.append, **options)
    assert min(shares) > 2 / 3
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    for name in ("model.safetensors", "predictions.parquet", "leaderboard.json"):
        assert (tmp_path / "model" / name).read_bytes() == (made[0] / name).read_bytes()


def test_noise_is_told_as_noise(tmp_path: Path) -> None:
    noise = write_store(tmp_path / "store", [("train", draw(40, 6, 0.0))], provenance={"encoder": "drawn"})
    fitted = fit_model(noise, tmp_path / "model", plan=QUICK)
    sentences, ensemble, new = fitted.sentences(), fitted.fit.ensemble, draw(4, 9, 0.0)
    assert not ensemble.shown
    torch.testing.assert_close(predict_bags(ensemble, new).attention, prior_attention(new.lengths))
    assert sentences[0].startswith("It does not find slices: it attends to the same places in every scan, where find")
    assert sentences[1].startswith("It is not shown to tell scans apart: AUROC .")
    assert sentences[2].startswith(("Do not use it", "Take all of it as rough"))
    page = read_page(tmp_path / "model")
    assert "class=shown" not in page
    assert "differences between the curves may be chance" in page
    assert "not shown to be better than position" in page
    assert "no scans were kept aside for a test" in page
    model, (apart, slices) = load_bundle(tmp_path / "model"), load_bundle(tmp_path / "model").cautions
    assert apart.startswith("This model was not shown to tell scans apart (scan AUROC .")
    assert slices == (
        "This model attends to the same places in every scan: its key slices show where findings usually lie, and "
        "nothing about the patient; see the model's report."
    )
    assert predict_new(tmp_path / "model", tmp_path / "new")["model_cautions"] == [apart, slices]
    assert f"- {apart}\n- {slices}\n" in model_card(model, "a/b")
    output_of("bundle", tmp_path / "model", "-o", tmp_path / "copy")
    assert load_bundle(tmp_path / "copy").cautions == model.cautions


def test_without_slice_labels_finding_slices_is_unknown(tmp_path: Path) -> None:
    plain = [("train", replace(draw(30, 3, 2.0), slice_labels=None))]
    store = write_store(tmp_path / "store", plain, provenance={"encoder": "drawn"})
    made = fit_model(store, tmp_path / "model", plan=QUICK)
    assert made.sentences()[0].startswith("Whether it finds the slices is unknown: no scan has labels for some")
    page = read_page(tmp_path / "model")
    assert "no slice labels" in page
    assert "which slices are positive is not known" in page
    assert "Intervals promise nothing about the finding: no patients have a positive scan with slice labels" in page
    assert predict_new(tmp_path / "model", tmp_path / "new")["interval"]["coverage"] is None
    told = output_of("fit", store.folder, "-o", tmp_path / "other", "--coverage", "0.9", code=2)
    assert "intervals with a coverage of 0.9 need 9, better 30; label more scans" in told
    assert not (tmp_path / "other").exists()


def test_the_intervals_are_calibrated_out_of_fold(made: Made, store: FeatureStore) -> None:
    model, train, test = made[1], store.part("train"), store.part("test")
    own = calibrate_intervals(model.fit.attention, train.lengths, train.slice_labels)
    assert load_bundle(made[0]).intervals == model.bundle.intervals == own
    assert (own.coverage, own.scans) == (0.9, int(train.labels.sum()))
    new = test.bags()
    first, last = own.interval(model.fit.ensemble(new.features, new.lengths).attention, new.lengths)
    held = [
        bool(low <= positive[0] and positive[-1] <= high)
        for labels, low, high in zip(new.slice_labels.split(new.lengths.tolist()), first, last, strict=True)
        if len(positive := labels.nonzero().flatten())
    ]
    assert model.bundle.training["test"]["intervals"] == {"held": sum(held), "scans": int(test.labels.sum())}
    page = read_page(made[0])
    assert "An interval contains the whole finding of a positive scan with 90 % probability." in page
    assert f"On the test scans it contains the whole finding in {sum(held)} of {len(held)}." in page
    assert "The promise is for new positive scans of the same kind" in page


def predict_new(model: Path, out: Path, *options: str) -> dict[str, Any]:
    """The most probable new scan's prediction.json, from features that a user has."""
    new = draw(20, 9, 2.0, first=900)
    np.savez(out.with_suffix(".npz"), x=new.features.numpy(), lengths=new.lengths.numpy(), ids=list(new.scan_ids))
    output_of("predict", out.with_suffix(".npz"), "--model", model, "-o", out, *options)
    scans = [read_json(file) for file in out.glob("*/prediction.json")]
    return max(scans, key=lambda scan: scan["probability"])  # a positive one: a negative has no interval


def test_a_copy_has_another_threshold_and_the_promise_but_no_predictions(made: Made, tmp_path: Path) -> None:
    words = "contains the whole finding of a positive scan with 90 % probability"
    told = output_of("bundle", made[0], "-o", tmp_path / "copy", "--sensitivity", "1")
    assert f"An interval {words}." in told
    assert sorted(file.name for file in (tmp_path / "copy").iterdir()) == ["bundle.json", "model.safetensors"]
    copy = load_bundle(tmp_path / "copy")
    assert copy.operation.point.validation.sensitivity == 1.0
    assert any("nguide encode did not make the features" in note for note in copy.operation.notes)
    assert copy.intervals == made[1].bundle.intervals is not None
    promised = predict_new(tmp_path / "copy", tmp_path / "new")["interval"]
    assert (promised["share"], promised["coverage"], promised["meaning"]) == (None, 0.9, words)
    asked = predict_new(made[0], tmp_path / "asked", "--share", "0.8")["interval"]
    assert (asked["share"], asked["coverage"]) == (0.8, None)
    assert asked["meaning"].endswith("promises nothing")


def test_a_damaged_calibration_names_its_file(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made[0], tmp_path / "model")
    file = tmp_path / "model" / "bundle.json"
    content = read_json(file)
    write_json(file, {**content, "intervals": {**content["intervals"], "version": 7}})
    with pytest.raises(UserError, match=r"bundle\.json: the calibration of intervals is of version 7"):
        load_bundle(tmp_path / "model")


def read_page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_the_page_names_the_scans_that_were_called_wrongly_out_of_fold(made: Made, store: FeatureStore) -> None:
    """Here none is; where a model says the opposite, all are, and the farthest from the threshold come first."""
    page, train, fit = read_page(made[0]), store.part("train"), made[1].fit
    assert "Missed: 0." in page
    assert "False alarms: 0." in page
    assert "nguide view MODEL opens this page with a link to each scan." in page  # as a file it has no links
    order = fit.logits.argsort().tolist()  # of the right model: the surest negatives first
    between = (fit.logits[train.labels == 0].max() + fit.logits[train.labels == 1].min()) / 2
    opposite = replace(made[1], fit=replace(fit, logits=between + 3 * (between - fit.logits)))
    text = "".join(_mistakes(opposite, train))
    alarms = [scan for scan in order if train.labels[scan] == 0]
    missed = [scan for scan in reversed(order) if train.labels[scan] == 1]
    assert f"Missed: {len(missed)}, of which 20 are listed." in text
    peaks = [int(attention.argmax()) + 1 for attention in fit.attention.split(train.lengths.tolist())]
    named = re.findall(r"<a data-scan='([^']+)' data-slice='(\d+)'>", text)
    assert named == [(train.scan_ids[scan], str(peaks[scan])) for scan in (*missed[:20], *alarms[:20])]


def test_the_page_begins_with_the_sentences_needs_no_network_and_names_no_patient(
    made: Made, store: FeatureStore
) -> None:
    page = read_page(made[0])
    assert not [name for name in store.patient_ids if name in page]
    places = [page.index(escape(sentence)) for sentence in made[1].sentences()]
    assert places == sorted(places)
    assert places[-1] < page.index("<h2")
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=[\"']?(http|//|file)", page)
    assert page.count('src="data:image/png;base64,') == 3
    assert len(page) < 1_000_000


def test_the_page_has_both_parts_what_is_specific_to_patients_and_what_was_chosen(made: Made) -> None:
    page, test, fit = read_page(made[0]), made[1].test, made[1].fit
    assert "<th>Out of fold</th><th>Test</th>" in page
    for one in (made[1].out_of_fold, test):
        for text in (one.localization, one.gain, digits(one.gain.position)):
            assert f"<td>{text}</td>" in page
        specific = one.specific
        assert f"<td>{signed(specific.difference)} [{digits(specific.low)}, {digits(specific.high)}]</td>" in page
    assert escape(describe(made[1].bundle.operation)[0]) in page
    assert "60 scans of 60 patients were divided into 3 folds by patient (seed 0)" in page
    assert f"The ensemble is the mean of {len(fit.ensemble)} models." in page
    assert ("Guided kinds attend" in page) == fit.choice.usual != ("Kinds without guidance attend" in page)


def test_one_part_may_lack_slice_labels(made: Made) -> None:
    unlabelled = replace(made[1].out_of_fold, localization=None, gain=None, specific=None)
    for mixed in (replace(made[1], out_of_fold=unlabelled), replace(made[1], test=unlabelled)):
        assert _results(mixed).count("<td>no slice labels</td>") == 6


def test_a_calibration_that_is_right_lies_on_the_diagonal() -> None:
    random = np.random.default_rng(1)
    probability = random.random(4000)
    labels = torch.from_numpy((random.random(4000) < probability).astype(np.int64))
    logits = torch.from_numpy(np.log(probability / (1 - probability)))
    parts = {"out of fold": ScoredScans(logits, labels, "")}
    _, panel = plot_scans(parts, Operation(Calibration(), None)).axes
    points = next(line for line in panel.lines if line.get_linestyle() == "None")
    np.testing.assert_allclose(points.get_xdata(), points.get_ydata(), atol=0.06)


def test_its_attention_can_be_tested(made: Made, store: FeatureStore, tmp_path: Path) -> None:
    words = ["trust", made[0], "--store", store.folder, "-o", tmp_path / "trust"]
    output_of(*words)
    verdicts = {row["name"]: row["verdict"] for row in read_json(tmp_path / "trust" / "trust.json")["findings"]}
    assert verdicts["deletion"] == verdicts["inverted"] == "passes"
    assert verdicts["randomize"] != "fails"
    assert "a model is not tested on part 'val'" in output_of(*words, "--part", "val", code=2)
    missing = output_of(*words[:2], *words[4:], code=2)
    assert "does not say where its features are; give some: --store STORE" in missing


def test_the_command(store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_settings(monkeypatch, FOLDS=3)
    told = output_of("fit", store.folder, "-o", tmp_path / "model", "-v")
    lead, promise = "It finds the slices better than position does: +.", "An interval contains the whole finding"
    order = ("Scans: 60 of 60 patients, 25 positive", "At most ", "Model: ", "Mean pooling", lead, promise, "Next: ")
    assert [told.index(words) for words in order] == sorted(told.index(words) for words in order)
    assert f"Report:{tmp_path / 'model' / 'report.html'}" in told.replace(" ", "")
    again = ("fit", store.folder, "-o", tmp_path / "model")
    assert "model is complete already; nothing was done" in output_of(*again)
    assert "model is a folder that is not empty" in output_of(*again, "--seed", 1, code=2)


def test_a_wrong_sensitivity_or_coverage_is_refused_before_the_work(store: FeatureStore, tmp_path: Path) -> None:
    def working(share: float) -> None:
        pytest.fail(f"{share} is done")

    for option, message in (
        ({"sensitivity": 2.0}, "sensitivity is 2"),
        ({"coverage": 90.0}, "coverage is 90"),
        ({"coverage": 0.99}, r"25 patients have .* coverage of 0.99 need 99; label more"),
    ):
        with pytest.raises(UserError, match=message):
            fit_model(store.part("train"), tmp_path / "model", plan=QUICK, watch=working, **option)
