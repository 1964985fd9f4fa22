"""`ng.fit` and `ng.predict` for each kind of scans, and what a notebook shows of what they return."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import normal_guidance as ng
from normal_guidance.base.files import read_json
from normal_guidance.clinic import NotPredicted, write_predictions
from normal_guidance.core.bags import Bags
from normal_guidance.front.fitted_model import FittedModel
from normal_guidance.front.predicted import Predictions
from normal_guidance.scans.features.store import FeatureStore, write_store
from normal_guidance.scans.index.problems import Problem
from normal_guidance.show.figure_style import TRUTH
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.predictions import read_predictions
from small_bundle import few_settings

MOST = 500  # characters of a repr


def draw(scans: int, seed: int, first: int = 0) -> Bags:
    names = tuple(f"S{first + number:04}" for number in range(scans))
    return replace(shifted_mean(scans, seed, features=6, shift=2.0), scan_ids=names, patient_ids=names)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        few_settings(patch, FOLDS=3)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    parts = {"train": draw(40, 1), "test": draw(30, 2, first=40)}
    return write_store(tmp_path_factory.mktemp("front") / "store", parts.items(), provenance={})


@pytest.fixture(scope="module")
def model(store: FeatureStore) -> FittedModel:
    return ng.fit(store, out=store.folder.with_name("model"))


@pytest.fixture(scope="module")
def new(model: FittedModel) -> Predictions:
    return model.predict(draw(12, 3, first=90))


def test_every_object_of_a_notebook_is_short(store: FeatureStore, model: FittedModel, new: Predictions) -> None:
    refused = NotPredicted("S1", Problem("S1", "a.dcm", "unreadable", "a.dcm: no pixels", "refused"))
    for made in (store, store[0], store.bags(), model, model.verdict, new, new[0], refused):
        assert len(repr(made)) <= MOST, type(made)
        assert repr(made).startswith(f"{type(made).__name__}(")
    for made in (store, model, model.verdict, new):
        page = made._repr_html_()
        assert len(page) < 10_000
        assert "http" not in page
        assert "<script" not in page


@pytest.mark.parametrize("function", [ng.fit, ng.predict, ng.open_store])
def test_help_is_short(function: object) -> None:
    assert len(pydoc.plain(pydoc.render_doc(function))) < 3500


def test_text_in_html_is_escaped(tmp_path: Path) -> None:
    odd = replace(draw(2, 1), scan_ids=("<b>1", "2"))
    assert "&lt;b&gt;1" in write_store(tmp_path / "store", odd, provenance={})._repr_html_()


def test_a_store_gives_its_scans_by_number_and_by_id(store: FeatureStore, unchecked: None) -> None:
    bags = store.bags()
    for scan in (store[1], store["S0001"], store[np.int64(-69)], bags["S0001"], list(store)[1]):
        assert (scan.scan_id, scan.patient_id, scan.label) == ("S0001", "S0001", int(bags.labels[1]))
        assert torch.equal(scan.features, bags[1].features)
        assert torch.equal(scan.slice_labels, bags[1].slice_labels)
    with pytest.raises(ng.UserError, match=r"no scan 'S9' in store .*; its 70 scans are S0000, S0001, "):
        store["S9"]
    with pytest.raises(IndexError):
        store[70]
    table = store.to_pandas()
    assert table["scan_id"].tolist() == list(store.scan_ids)
    assert table["positive_slices"].tolist() == bags.positive_slices.tolist()
    unknown = replace(store, scans=store.scans.assign(slice_labels=None))
    assert unknown.to_pandas()["positive_slices"].isna().all()
    assert unknown[0].slice_labels is None


def test_a_model_says_and_draws_what_it_does(model: FittedModel, store: FeatureStore) -> None:
    verdict = model.verdict
    assert verdict.sentences[0].startswith("It finds the slices better than position does: +.")
    assert str(verdict.out_of_fold.gain) in repr(model)
    assert len(store.part("test")) == verdict.test.positive + verdict.test.negative
    assert verdict.to_pandas()["scan AUROC"][0] == str(verdict.out_of_fold.scans)
    assert verdict.sentences[0] in model.report.read_text(encoding="utf-8")
    left, right = model.plot().axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == verdict.to_pandas()["out of fold"].tolist()
    assert right.get_title() == "scan AUROC"


def test_a_model_lists_and_draws_its_scans_as_its_folder_has_them(
    model: FittedModel, store: FeatureStore, unchecked: None
) -> None:
    kept = read_predictions(model.folder / "predictions.parquet", part="out-of-fold").to_pandas()
    table = model.to_pandas()
    for name in ("scan_id", "patient_id", "label", "slices"):
        assert table[name].tolist() == kept[name].tolist()
    assert table["probability"].tolist() == pytest.approx(kept["probability"].tolist(), abs=1e-6)
    assert table["key_slice"].tolist() == [int(attention.argmax()) + 1 for attention in kept["attention"]]
    assert table["positive"].tolist() == (table["probability"] >= model.measured.bundle.threshold).tolist()
    positive = table[table["label"] == 1].iloc[0]
    for scan in (positive["scan_id"], positive.name):
        figure = model.plot(scan)
        (panel,) = figure.axes
        assert positive["scan_id"] in figure.get_suptitle()
        (curve,) = (line for line in panel.lines if line.get_label() == "attention")
        np.testing.assert_allclose(curve.get_ydata(), kept["attention"][positive.name], atol=1e-6)
        (truth,) = (block for block in panel.patches if block.get_label() == TRUTH)
        positives = store[int(positive.name)].slice_labels.nonzero().flatten()
        assert (truth.get_x(), truth.get_width()) == (int(positives[0]) + 0.5, len(positives))
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ng.UserError, match=r"no scan 'S0099' in model .*; its 40"):
        model.plot("S0099")


def test_predictions_agree_with_the_files_of_the_command(new: Predictions, tmp_path: Path) -> None:
    write_predictions(new, new.bundle, tmp_path / "out")
    lines = {line["scan_id"]: line for line in read_json(tmp_path / "out" / "summary.json")["scans"]}
    table = new.to_pandas().set_index("scan_id")
    assert {*table.index} == {*lines}
    for scan, line in lines.items():
        assert table.loc[scan, "probability"] == line["probability"]
        assert table.loc[scan, "key_slices"] == line["key_slices"]
        one = new[scan]
        slices = new.slices().query("scan_id == @scan")
        assert slices["slice"].tolist() == list(range(1, len(one.row) + 1))
        assert slices["position"].tolist() == list(range(len(one.row)))
        best = int(line["key_slices"].split()[0])
        assert slices["attention"].max() == slices.set_index("slice")["attention"][best]
        marks = new.plot(scan).axes[0].lines[1]
        assert marks.get_label() == "key slices"
        assert marks.get_xdata()[0] == best
        assert len(new.plot(scan).axes[0].patches) == (one.is_positive is True)  # the interval


def test_predictions_are_a_sequence(new: Predictions, model: FittedModel, unchecked: None) -> None:
    assert new[0] is new["S0090"] is next(iter(new))
    assert [one.row.scan_id for one in new[:2]] == ["S0090", "S0091"]
    assert isinstance(new[:2], Predictions)
    again = ng.predict(draw(12, 3, first=90), model.folder, progress=False)
    assert [one.logit for one in again] == [one.logit for one in new]
    with pytest.raises(ng.UserError, match="no scan 'S1' in the predictions; its 12"):
        new["S1"]
    with pytest.raises(ng.UserError, match=r"model: got FittedModel; .* predict by themselves, model.predict"):
        ng.predict(draw(2, 3), model)


def test_arrays_have_their_labels_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bags = draw(20, 1)
    made = ng.fit([bag.features.numpy() for bag in bags], bags.labels)
    assert made.folder == Path("model")
    assert made.verdict.out_of_fold.gain is None
    assert len(made.plot(0).axes) == 1


def test_what_cannot_be_fitted_is_refused(store: FeatureStore, tmp_path: Path, unchecked: None) -> None:
    with pytest.raises(ng.UserError, match=r"store .* has 30 test scans of its own; leave test= out"):
        ng.fit(store, out=tmp_path / "model", test=draw(30, 3, first=90))
    with pytest.raises(ng.UserError, match="out: got Tensor; it is the folder for the model"):
        ng.fit(store, out=torch.zeros(2))
