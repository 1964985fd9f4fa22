"""The report of a small experiment: its numbers, its page, and what it does with folders that are not as wanted."""

import json
import shutil
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from matplotlib.figure import Figure

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json
from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.preprocessing import Percentiles
from normal_guidance.scans.features.store import FeatureStore, open_store
from normal_guidance.scans.index.indexing import describe_scans
from normal_guidance.scans.index.manifest import PARTS, Manifest, ScanRow, read_manifest, write_manifest
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.statistics.differences import claims
from normal_guidance.statistics.localization import localization_measures
from normal_guidance.statistics.split_results import METRICS
from normal_guidance.study import study_page
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import Study, StudyData, bayes_oracle, stored_dataset, train_study
from normal_guidance.study.figures import training
from normal_guidance.study.figures.attention import AttendedScan
from normal_guidance.study.reproduction import reproduce, reproduce_sensitivity
from normal_guidance.study.study_page import (
    _attention,
    _data,
    check_manifest,
    evaluate,
    first_window,
    thumbnails,
    write_report,
)
from normal_guidance.study.study_tables import description_tables
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.predictions import PREDICTIONS
from normal_guidance.sweep.run import load_run
from pages import check_page
from small_study import (
    HOPELESS,
    PROTOCOL,
    make_store,
    make_study,
    part_of,
    small_grid,
    small_sensitivity,
    some_scans,
    without_slice_labels,
    write_splits,
)


@pytest.fixture(scope="module")
def written(small_experiment, tmp_path_factory) -> Study:
    """The experiment with its report."""
    folder = Path(shutil.copytree(small_experiment.folder, tmp_path_factory.mktemp("written") / "out"))
    study = replace(small_experiment, folder=folder)
    with pytest.MonkeyPatch.context() as patch:
        for plot in ("plot_learning_curves", "plot_grid"):  # many alike
            patch.setattr(training, plot, lambda *_: Figure())
        write_report(study)
    return study


def page_of(study: Study) -> str:
    page = (study.folder / "report.html").read_text()
    check_page(page)
    return page


def reported(study: Study, make_grid=small_grid) -> str:
    """The page of a study, trained first."""
    reproduce(study, make_grid=make_grid)
    write_report(study)
    return page_of(study)


def key(row) -> tuple[str, str, str]:
    return row.method, row.against, row.metric


def of_one_split(folder: Path, methods: list[str], bags: Bags, **changes: object) -> Study:
    """A study of the first split alone."""
    store = make_store(folder / "store", bags)
    dataset = stored_dataset([store.folder], write_splits(folder / "splits", store.scan_ids, (1001,)), "small")
    return Study(dataset, folder / "out", tuple(methods), (1001,), PROTOCOL, **changes)


def test_differences_are_those_of_the_runs_own_scores(small_experiment):
    rows = {key(row): row for row in evaluate(small_experiment).differences.rows}
    # All claims among the methods that there are, and the ceiling's, which Holm's correction counts.
    assert rows.keys() == {*claims(["centered_gaussian", "mean", "abmil", "ng"], "ceiling")}

    def mean(method: str, metric: str) -> float:
        runs = [load_run(small_experiment.folder / method / str(seed)) for seed in small_experiment.seeds]
        return np.mean([getattr(run.winners[0].test, metric) for run in runs])

    for metric in METRICS:
        row = rows["ng", "abmil", metric]
        assert row.estimate == pytest.approx(mean("ng", metric) - mean("abmil", metric), abs=1e-6)
        assert row.splits == 2


def test_all_files_are_there(written):
    names = {path.name for path in written.folder.iterdir() if path.is_file()}
    tables = {
        f"{stem}{end}" for stem in ("tables", "differences", "measures") for end in (".csv", ".json", ".md", ".tex")
    }
    assert names == {"report.html", *tables}
    of_sensitivity = {path.name for path in (written.folder / "sensitivity").iterdir()}
    assert of_sensitivity == {"ng", "ng.csv", "ng.json", "ng.md", "ng.tex"}
    methods = ("mean", "abmil", "ng", "slice_reference", "scan_reference")
    runs = [f"{kind}_{method}_{seed}" for kind in ("curves", "grid") for method in methods for seed in (1001, 2001)]
    others = ["localization_auroc", "scan_auroc", "differences_localization_auroc", "differences_scan_auroc"]
    others += ["attention", "divergences", "density", "sensitivity_ng"]
    figures = {path.stem for path in (written.folder / "figures").iterdir()}
    assert figures == {*runs, *others}
    assert page_of(written).count('src="data:image/png;base64,iVBORw0KGgo') == len(figures)


def test_the_page_holds_every_table_and_finding(written):
    page, experiment = page_of(written), evaluate(written)
    grids = [*experiment.results.table.grids(), *experiment.measures.grids(), experiment.results.chosen_grid()]
    grids += experiment.sensitivity["ng"].table.grids()
    first = {part: describe_scans(written.dataset.draw(1001, part)) for part in PARTS}
    grids += description_tables("small", first)
    for table in grids:
        assert table.html() in page, table.title
    for table in experiment.differences.grids():
        assert escape(table.title) in page
        assert replace(table, title="", caption="").html() in page
    for metric in ("localization_auroc", "scan_auroc"):
        sentences = [text for text in experiment.differences.sentences(metric) if "Normal Guidance" in text]
        assert [text for text in sentences if f">{escape(text)}</li>" in page] == sentences != []
    for section in ("Findings", "Tables", "Differences", "Attention", "Sensitivity", "Data", "Training", "Records"):
        assert f">{section}</h2>" in page
    report = read_json(written.folder / "ng" / "2001" / "report.json")
    assert escape(json.dumps(report, indent=1, ensure_ascii=False)) in page
    assert "2 splits of small" in page
    assert "Not complete yet" not in page


@pytest.mark.usefixtures("unrendered")
def test_what_is_not_complete_is_named(copied):
    shutil.rmtree(copied.folder / "abmil" / "2001")
    (copied.folder / "ng" / "1001" / "report.json").unlink()
    shutil.rmtree(copied.folder / "scan_reference" / "2001")
    shutil.rmtree(copied.folder / "sensitivity")
    write_report(copied)
    page = page_of(copied)
    missing = "Not complete yet: ng, seed 1001, abmil, seed 2001, scan reference, seed 2001. Run the same command again"
    assert missing in page
    for title in ("ABMIL", "ABMIL + Normal Guidance", "Supervised reference"):
        assert f"<li>{title} is not complete on every split and is left out of the comparisons.</li>" in page
    assert "Sensitivity</h2>" not in page  # no such runs
    experiment = evaluate(copied)
    assert {key(row)[:2] for row in experiment.differences.rows} == {("mean", "centered_gaussian")}
    assert [seed for method, seed in experiment.measures.summaries if method == "abmil"] == [1001]


def test_hostile_names_are_shown_as_they_are(tmp_path, request):
    """Also in figures, where dollar signs would be mathematics that cannot be typeset."""
    bags = some_scans(48)
    names = tuple(rf"<script>alert({number})</script>$\frac$" for number in range(len(bags)))
    hostile = r"<img src=x onerror=alert(1)> & $\sqrt$"
    study = of_one_split(tmp_path, ["abmil"], replace(bags, scan_ids=names))
    study = replace(study, dataset=replace(study.dataset, name=hostile, has_supervision=False))
    train_study(study, make_grid=small_grid)
    experiment = evaluate(study)
    # Rendered: titles are typeset then.
    assert len(list(_attention(experiment, tmp_path / "figures"))) == 2
    assert list(_data(experiment, tmp_path / "figures"))
    request.getfixturevalue("unrendered")
    page = write_report(study).read_text()
    check_page(page)
    assert f"<h1>Normal Guidance on {escape(hostile)}</h1>" in page
    assert "&lt;script&gt;alert(" in page


@pytest.mark.usefixtures("unrendered")
def test_without_slice_labels_scans_are_compared(tmp_path):
    study = make_study(tmp_path, ["centered_gaussian", "abmil", "ng"], without_slice_labels(some_scans()))
    reproduce_sensitivity(replace(study, methods=("ng",)), make_grid=small_sensitivity)
    page, experiment = reported(study), evaluate(study)
    assert {path.name for path in study.folder.iterdir() if path.is_dir()} == {"abmil", "figures", "ng", "sensitivity"}
    assert experiment.measures is None
    with pytest.raises(UserError, match="the test scans of seed 1001 have no slice labels; nothing can be localized"):
        experiment.predictions[0].measures("abmil")
    for row in experiment.results.table.rows:
        assert all(np.isnan(scores.localization_auroc) and 0 <= scores.scan_auroc <= 1 for scores in row.scores)
    compared = [key(row) for row in experiment.differences.rows]
    assert compared == [("ng", "abmil", "scan_auroc"), ("ng", "abmil", "scan_auprc")]
    assert "Test scans have no slice labelled positive: localization is not compared, and there is no ceiling." in page
    assert "Not complete yet" not in page  # Centered Gaussian has nothing to say here
    assert not (study.folder / "measures.md").exists()
    assert "Attention on 4 random positive test scans" in page
    assert not (study.folder / "figures" / "localization_auroc.png").exists()


def odd_scans(kind: str) -> Bags:
    """Test scans of one kind, or of one slice each."""
    bags = some_scans()
    if kind == "one slice":
        first, ones = (bags.lengths.cumsum(0) - bags.lengths).tolist(), torch.ones_like(bags.lengths)
        return replace(bags, features=bags.features[first], lengths=ones, slice_labels=bags.labels.clone())
    wrong = 0 if kind == "all positive" else 1
    keep = [i for i in range(len(bags)) if not (part_of(i, 1001) == "test" and int(bags.labels[i]) == wrong)]
    return bags[keep]


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("kind", ["all positive", "all negative", "one slice"])
def test_test_scans_that_have_no_such_number_are_told_without(tmp_path, kind):
    bags = odd_scans(kind)
    store = make_store(tmp_path / "store", bags)
    numbers = {scan: number for number, scan in enumerate(some_scans().scan_ids)}
    lines = [f"{scan},{part_of(numbers[scan], 1001)}" for scan in store.scan_ids]
    (tmp_path / "split-1001.csv").write_text("\n".join(["scan_id,part", *lines]))
    dataset = stored_dataset([store.folder], [tmp_path / "split-1001.csv"], "small")
    study = Study(dataset, tmp_path / "out", ("centered_gaussian", "abmil", "ng"), (1001,), PROTOCOL)
    page = reported(study)
    for path in study.folder.glob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
    untested = "localization AUROC" if kind == "one slice" else "scan AUROC"
    assert f"ABMIL + Normal Guidance and ABMIL cannot be compared in {untested}: too few patients" in page
    if kind == "all positive":
        assert "ABMIL + Normal Guidance and Centered Gaussian" in page or "than Centered Gaussian" in page


@pytest.mark.usefixtures("unrendered")
def test_a_run_that_selected_nothing_is_left_out_and_named(tmp_path):
    def partly_hopeless(base: Config) -> tuple[Config, ...]:
        hopeless = (base.method, base.seed) in (("abmil", 2001), ("slice_reference", 1001))
        return grid(base, lr=[HOPELESS] if hopeless else [0.1], l1=[0.0])

    page = reported(make_study(tmp_path, ["abmil", "ng"]), partly_hopeless)
    assert "Not complete yet" not in page
    for text in (
        "ABMIL, seed 2001: 1 of 1 configurations diverged: none was selected; the tables leave it out",
        "ABMIL (1 of 2 seeds)",
        "Slice reference, seed 1001: ",
        "ABMIL is not complete on every split and is left out of the comparisons.",
        "Nothing is compared: a comparison needs two methods",
    ):
        assert text in page


def test_nothing_trained_or_selectable_is_a_user_s_error(small_experiment, tmp_path):
    with pytest.raises(UserError, match="holds no complete run on small; run: nguide experiment STORE --dataset small"):
        write_report(replace(small_experiment, folder=tmp_path))

    def hopeless(base: Config) -> tuple[Config, ...]:
        return grid(base, lr=[HOPELESS], l1=[0.0])

    study = of_one_split(tmp_path, ["mean"], some_scans())
    reproduce(study, make_grid=hopeless)
    message = r"has nothing to report: Mean pooling, seed 1001: .* diverged.*; train more epochs \(--epochs\) in an"
    with pytest.raises(UserError, match=message):
        write_report(study)
    assert not (study.folder / "report.html").exists()


def test_runs_of_splits_that_were_not_given(copied):
    two, three = replace(copied.dataset, seeds=(2001,)), replace(copied.dataset, seeds=(3001,))
    experiment = evaluate(replace(copied, dataset=two, seeds=(2001,)))
    assert [split.seed for split in experiment.predictions] == [2001]
    assert experiment.notes == (
        "The tables include seeds 1001, whose splits were not given this time. The comparisons, measures and attention "
        "leave these seeds out.",
    )
    with pytest.raises(UserError, match=r"holds runs of splits 1001, 2001 only; give those splits, or run"):
        evaluate(replace(copied, dataset=three, seeds=(3001,)))


@pytest.mark.usefixtures("unrendered")
def test_attention_on_one_slice_alone_is_drawn_without_its_pull(copied):
    """Collapsed attention is its own normal reference: there is nothing to push it to."""
    path = copied.folder / "abmil" / "1001" / "predictions.parquet"
    frame = pq.read_table(path).to_pandas()
    frame["log_attention"] = [[np.where(np.arange(size) == 3, 0, -300.0).astype("f4")] for size in frame["slices"]]
    frame["attention"] = [np.exp(heads[0]) for heads in frame["log_attention"]]
    pq.write_table(pa.Table.from_pandas(frame, PREDICTIONS, preserve_index=False), path)
    write_report(copied)
    assert "Attention on 4 random positive test scans" in page_of(copied)
    assert not (copied.folder / "figures" / "divergences.png").exists()


@pytest.mark.usefixtures("unrendered")
def test_files_that_are_damaged_or_gone_are_named(copied):
    path = copied.folder / "mean" / "2001" / "history.parquet"
    for spoil in (lambda: path.write_bytes(b"PAR1 and nothing else"), path.unlink):
        spoil()
        with pytest.raises(UserError, match=r"mean/2001/history.parquet cannot be read \(.*\); copy the run again, or"):
            write_report(copied)


def manifest_of(folder: Path, *, spacing: float | None = 2.5, extra: int = 0, skip: int = 0):
    """As if the scans had been encoded from files."""
    bags = some_scans()

    def rows():
        for scan in list(bags)[skip:]:
            numbers = range(len(scan.features) + extra)
            positions = tuple(-30.0 + (spacing or 1.0) * number for number in numbers)
            files, frames = tuple(f"{scan.scan_id}/{number}.dcm" for number in numbers), (0,) * len(numbers)
            facts = scan.scan_id, scan.patient_id, scan.label, None, "dicom", files, frames, positions, 8, 8
            yield ScanRow(*facts, slice_spacing=spacing)

    return write_manifest(folder / "manifest.parquet", rows(), {"source": "folder", "root": str(folder)})


def test_errors_in_mm_are_slices_times_their_spacing(small_experiment, tmp_path):
    manifest = manifest_of(tmp_path)
    check_manifest(manifest, small_experiment.dataset)
    for summary in evaluate(small_experiment, manifest).measures.summaries.values():
        assert summary["peak_error_mm"].value == pytest.approx(2.5 * summary["peak_error_slices"].value)
    unknown = evaluate(small_experiment, manifest_of(tmp_path, spacing=None))
    assert np.isnan(unknown.measures.summaries["ng", 1001]["peak_error_mm"].value)
    assert "Peak error (mm)" not in unknown.measures.grids()[0].header


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skip": 10}, r"scan 'synthetic-7-\d+' is not in the manifest; give the folder that it was encoded from"),
        ({"extra": 1}, r"scan 'synthetic-7-\d+' has \d+ slices in the store, but \d+ in the manifest; encode it again"),
        ({}, r"scan '\S+' cannot be shown \(.*\); copy its files back to \S+, or leave out --index"),
    ],
)
def test_a_manifest_of_other_scans_or_of_files_that_are_gone_is_refused(copied, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        write_report(copied, manifest=manifest_of(tmp_path, **changes))


@pytest.mark.usefixtures("unrendered")
def test_drawn_scans_with_a_known_ceiling(tmp_path):
    """As `nguide reproduce --report` tells them."""

    def draw(seed: int, part: str) -> Bags:
        return shifted_mean(40, seed + PARTS.index(part), features=8, shift=2.0)

    drawn = StudyData("semi-synthetic", draw, (1001,), bayes_oracle)
    study = Study(drawn, tmp_path, ("abmil", "ng"), (1001,), PROTOCOL)
    page = reported(study)
    assert "than Bayes oracle" in page
    assert "Supervised reference" not in page
    test = draw(1001, "test")
    best = bayes_oracle(test).slice_scores
    expected = localization_measures(best.exp(), test.slice_labels, test.lengths, scores=best).summary()
    own = evaluate(study).measures.summaries["ceiling", 1001]
    for name in ("top_1_hit", "overlap_50"):
        assert own[name].value == pytest.approx(expected[name].value)


@pytest.fixture
def encoded(phantom) -> tuple[Manifest, FeatureStore]:
    return read_manifest(phantom / "index"), open_store(phantom / "store")


def test_pictures_are_the_scan_s_own_slices_as_the_encoder_saw_them(encoded, phantom, monkeypatch):
    manifest, store = encoded
    truth = {scan["scan_id"]: scan for scan in json.loads((phantom / "scans" / "phantom.json").read_text())["scans"]}
    for number in (0, 5, 11):
        row = manifest[number]
        volume, _ = read_volume(row, manifest.root)
        shown = dict(thumbnails(manifest, store, row.scan_id))
        assert len(shown) == study_page.COUNT
        assert list(shown) == sorted(shown)
        assert 1 < min(shown) < max(shown) < len(truth[row.scan_id]["files"])  # the ends show little
        for position, image in shown.items():
            assert np.array_equal(image, np.clip(volume[position - 1], -100, 300))
            assert image.max() > image.min()
    monkeypatch.setattr(study_page, "SIDE", 10)  # large slices are thinned, and figures take them
    thinned = thumbnails(manifest, store, row.scan_id)
    assert {image.shape for _, image in thinned} == {(11, 11)}  # every third of 32 pixels
    assert np.array_equal(thinned[0][1], np.clip(volume[thinned[0][0] - 1, ::3, ::3], -100, 300))
    AttendedScan(row.scan_id, {"ng": torch.ones(len(row))}, thumbnails=thinned)


@pytest.mark.parametrize(
    ("provenance", "window"),
    [
        ({"preprocessing": {"windows": [[-100, 300], None]}}, (-100.0, 300.0)),
        ({"preprocessing": {"windows": [{"percentiles": [1, 99]}], "field": 20.0}}, Percentiles()),
        ({"preprocessing": {"windows": [None]}}, None),
        ({"preprocessing": {"windows": ["lung"]}}, None),
        ({"imported_from": "hdf5"}, None),
    ],
)
def test_a_store_may_say_anything_about_its_windows(encoded, provenance, window):
    field = 20.0 if window == Percentiles() else None
    assert first_window(replace(encoded[1], provenance=provenance)) == (window, field)
    assert first_window(encoded[1].bags()) == (None, None)
