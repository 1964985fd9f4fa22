"""New scans through the model: the run's own numbers come out again, and odd scans cost themselves only."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from pydicom import dcmread

from normal_guidance.base.errors import UserError
from normal_guidance.clinic import NotPredicted, PredictOptions, ScanPrediction, load_bundle, predict, write_bundle
from normal_guidance.clinic.predict import predicting
from normal_guidance.clinic.predict.new_scans import find_scans
from normal_guidance.clinic.predict.predicting import predict_found
from normal_guidance.scans.features.encoding import EncodingTask, encode
from normal_guidance.scans.features.preprocessing import Preprocessing
from normal_guidance.scans.index import volumes
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.statistics.conformal import IntervalCalibration
from normal_guidance.statistics.localization import APART_MM, key_positions, smallest_interval
from small_bundle import WINDOW, read_or_die, tiny, train

pytestmark = pytest.mark.usefixtures("tiny_encoder")


def run(paths, bundle, **options) -> dict[str, ScanPrediction | NotPredicted]:
    given = PredictOptions(**{"workers": 0, **options})
    outcomes = list(predict(paths, bundle, options=given))
    return {getattr(outcome, "row", outcome).scan_id: outcome for outcome in outcomes}


@pytest.fixture
def new(copy, tmp_path) -> Path:
    copy("one")
    return tmp_path / "one"


@pytest.fixture
def calibrated(bundle):
    return replace(bundle, intervals=IntervalCalibration(0.9, 30, 0.7))


@pytest.mark.slow
def test_the_runs_own_predictions_come_out_again(trained, bundle):
    """From the files, with nothing but the bundle: what training wrote about its validation and test scans."""
    files_of = {row.scan_id: row.files for row in trained.manifest}
    made = {outcome.row.files: outcome for outcome in run(trained.folder / "scans", bundle).values()}
    written = pd.read_parquet(trained.run / "predictions.parquet")
    calibration, threshold = bundle.operation.calibration, bundle.operation.point.threshold
    assert len(written) > 8
    for row in written.itertuples():
        again = made[files_of[row.scan_id]]
        assert again.logit == pytest.approx(row.logit, abs=1e-5)
        np.testing.assert_allclose(again.attention, row.attention, atol=1e-6)
        p = 1 / (1 + np.exp(-(calibration.slope * again.logit + calibration.intercept)))
        assert again.probability == pytest.approx(p)
        assert again.is_positive == (p >= threshold)
        assert again.row.patient_id == row.patient_id
        assert again.problems == ()


def test_heads_are_averaged_and_add_up_to_one(bundle, new):
    """TransMIL's attention leaves a share to the class token."""
    from normal_guidance.sweep.stack import initial_model

    config = replace(bundle.config, method="mhng")
    many = replace(bundle, config=config, model=initial_model(config, 8).eval())
    one = run(new, many)["one"]
    assert one.head_attention.shape == (8, len(one.row))
    torch.testing.assert_close(one.head_attention.sum(1), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(one.attention, one.head_attention.mean(0))
    hu, _ = read_volume(one.row, one.root)
    features = tiny().encode(bundle.preprocessing.apply(torch.from_numpy(hu)))
    raw = many.model(features, torch.tensor([len(features)])).log_attention.exp().double()
    assert (raw.sum(1) < 0.99).all()
    torch.testing.assert_close(one.head_attention, raw / raw.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_share_and_number_of_keys_are_the_users(new, bundle, calibrated):
    one = run(new, bundle, share=0.8, keys=2)["one"]
    assert len(one.key_slices) == 2
    first, last = smallest_interval(one.attention, torch.tensor([len(one.row)]), 0.8)
    assert (one.interval_positions, one.share) == ((int(first), int(last)), 0.8)
    assert one.attention[first : last + 1].sum() >= 0.8 - 1e-6
    promised = run(new, calibrated)["one"]
    assert (promised.share, promised.coverage) == (None, 0.9)
    assert run(new, calibrated, share=0.8)["one"].meaning == one.meaning  # what is asked for wins
    for wrong in ({"share": 0.0}, {"share": 1.5}, {"keys": 0}):
        with pytest.raises(UserError):
            PredictOptions(**wrong)


def weights(values: Sequence[float]) -> torch.Tensor:
    given = torch.tensor(values, dtype=torch.float64)
    return given / given.sum()


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=60), st.integers(1, 6), st.sampled_from([None, 1.0, 3.0, 5.0])
)
def test_key_slices_are_apart_and_above_average(values, count, spacing):
    attention = weights(values)
    keys = key_positions(attention, count, spacing)
    apart = max(2, 0 if spacing is None else int(np.ceil(APART_MM / spacing)))
    assert 1 <= len(keys) <= count
    assert attention[keys[0]] == pytest.approx(attention.max().item(), abs=1e-8)
    assert all(abs(key - other) >= apart for key in keys for other in keys if key != other)
    assert all(attention[key] >= (1 - 1e-5) / len(attention) for key in keys)
    assert all(higher >= lower - 1e-8 for higher, lower in pairwise(attention[list(keys)].tolist()))


def test_two_places_are_both_shown_and_a_bell_over_its_width():
    attention = weights([1, 1, 8, 9, 8, 1, 1, 1, 1, 6, 7, 6, 1, 1])
    assert key_positions(attention, spacing=5.0)[:2] == (3, 10)
    assert key_positions(attention, spacing=None)[:2] == (3, 10)
    assert key_positions(attention, count=1) == (3,)

    assert key_positions(weights([1] * 11), count=3) == (5, 3, 7)  # the first end of a tie is not a key
    wide, narrow = (torch.softmax(-0.5 * ((torch.arange(40.0) - 20) / width) ** 2, 0) for width in (4, 0.3))
    assert sorted(key_positions(wide, spacing=5.0)) == [16, 18, 20, 22, 24]
    assert len(key_positions(narrow, spacing=5.0)) == 1


def test_refusals_name_scan_value_range_and_option(copy, bundle, calibrated, tmp_path):
    """CT without a rescale tag may be off by 1,024 HU; one slice is enough."""
    copy("all/good", SeriesInstanceUID="1.1")
    copy("all/thin", spacing=0.5, SeriesInstanceUID="1.2")
    copy("all/short", slices=3, SeriesInstanceUID="1.3")
    copy("all/mr", Modality="MR", SeriesInstanceUID="1.4")
    files = copy("all/torn", SeriesInstanceUID="1.5")
    files[2].write_bytes(files[2].read_bytes()[:700])
    raw = copy("all/raw", SeriesInstanceUID="1.6")[0]
    dataset = dcmread(raw)
    del dataset.RescaleIntercept
    dataset.save_as(raw)
    low, high = bundle.expects.slice_spacing
    spacing = f"the model was trained on {low:.3g} to {high:.3g} mm and takes {low / 1.5:.3g} to {high * 1.5:.3g} mm"
    least = bundle.expects.least_slices
    assert least > 3
    outcomes = run(tmp_path / "all", bundle)
    assert isinstance(outcomes.pop("good"), ScanPrediction)
    said = {scan: outcome.reason.detail for scan, outcome in outcomes.items()}
    assert said["thin"] == f"its slices are 0.5 mm apart; {spacing}"
    assert said["short"].startswith("it has 3 slices; the model was trained on ")
    assert said["short"].endswith(f"and takes {least} or more")
    assert said["mr"] == f"Modality is MR, not CT ({len(files)} files)"
    assert said["torn"].startswith("1 of its files cannot be read (torn/0002.dcm: ")
    assert said["raw"].startswith("its values are not HU: ")
    assert "RescaleIntercept is missing; read as 1 and 0" in said["raw"]
    assert all(outcome.refused for outcome in outcomes.values())
    assert {outcome.reason.action for outcome in outcomes.values()} == {"refused; --force goes on"}
    hidden = run(tmp_path / "all", bundle, anonymize=True).values()
    assert sum(isinstance(outcome, ScanPrediction) for outcome in hidden) == 1

    forced = run(tmp_path / "all", calibrated, force=True)
    assert [scan for scan, made in forced.items() if made.coverage is not None] == ["good"]  # no promise for the others
    assert set(forced) == {"good", *said} == {"good", "thin", "short", "mr", "torn", "raw"}
    assert all(isinstance(made, ScanPrediction) for made in forced.values())
    for scan in said:
        actions = [problem.action for problem in forced[scan].problems if problem.kind == "unsuitable"]
        assert actions == ["predicted because of --force"]
    assert len(forced["torn"].row) == len(files) - 1
    assert forced["mr"].logit == pytest.approx(forced["good"].logit)
    assert forced["mr"].row.modality == "MR"


def test_the_encoder_is_loaded_only_if_there_is_something_to_do_and_another_one_is_refused(
    copy, new, bundle, tmp_path, monkeypatch
):
    copy("mr", Modality="MR")
    monkeypatch.setattr(type(bundle), "load_encoder", lambda self: pytest.fail("it loads"))
    assert run(tmp_path / "mr", bundle)["mr"].refused
    with pytest.raises(UserError, match="tiny is not the one of the bundle"):
        list(predict(new, bundle, encoder=tiny(scale=3.0), options=PredictOptions(workers=0)))
    bundle.model.classifier.bias.data.fill_(torch.nan)
    (told,) = predict(new, bundle, encoder=tiny(), options=PredictOptions(workers=0))
    assert "not finite" in told.reason.detail


def test_a_slice_that_cannot_be_decoded_fails_its_scan_only(copy, bundle, tmp_path):
    """Its header is whole, so that only decoding notices."""
    copy("two/good", SeriesInstanceUID="1.1")
    files = copy("two/bad", scan=1, SeriesInstanceUID="1.2")
    content = files[2].read_bytes()
    files[2].write_bytes(content.replace(b"MONOCHROME2 ", b"MONOCHROME9 "))
    outcomes = run(tmp_path / "two", bundle)
    assert isinstance(outcomes["good"], ScanPrediction)
    assert not outcomes["bad"].refused
    assert "bad/0002.dcm" in outcomes["bad"].reason.detail
    assert isinstance(run(tmp_path / "two", bundle, force=True)["bad"], NotPredicted)
    hidden = run(tmp_path / "two", bundle, anonymize=True)["scan-001"]
    assert "0002" not in repr((hidden.reason, hidden.problems))


@pytest.mark.slow
def test_a_decoder_that_dies_takes_its_scan_only(copy, bundle, tmp_path, monkeypatch):
    copy("two/good", SeriesInstanceUID="1.1")
    copy("two/deadly", scan=1, SeriesInstanceUID="1.2")
    monkeypatch.setattr(volumes, "read_volume", read_or_die)
    deadly, good = predict_found(find_scans([tmp_path / "two"]), bundle, options=PredictOptions(workers=1))
    assert isinstance(good, ScanPrediction)
    assert "SIGSEGV" in deadly.reason.detail


@pytest.mark.slow
def test_two_thousand_slices_go_through_in_batches(copy, bundle, tmp_path):
    copy("long", slices=2000)
    encoder, sizes = tiny(), []
    encoder.module.register_forward_hook(lambda module, images, features: sizes.append(len(images[0])))
    (one,) = predict(tmp_path / "long", bundle, encoder=encoder, options=PredictOptions(workers=0, force=True))
    assert (max(sizes), sum(sizes)) == (64, 2000)
    assert one.attention.shape == (2000,)
    assert one.attention.sum().item() == pytest.approx(1.0)
    assert len(one.key_slices) == 5


def as_nifti(trained, row) -> nibabel.Nifti1Image:
    """The scan as a volume; DICOM's left and posterior are NIfTI's -x and -y."""
    hu, _ = read_volume(row, trained.manifest.root)
    down, across = row.pixel_spacing
    return nibabel.Nifti1Image(hu.transpose(2, 1, 0), np.diag([-across, -down, row.slice_spacing, 1.0]))


@pytest.mark.parametrize("axes", ["RAS", "LPS", "PIR", "SLA", "IAL"])
def test_a_volume_is_read_the_same_whatever_way_it_was_written(trained, bundle, tmp_path, axes):
    row = next(row for row in trained.manifest if len(row) >= 12)
    image = as_nifti(trained, row)
    turned = image.as_reoriented(ornt_transform(io_orientation(image.affine), axcodes2ornt(axes)))
    nibabel.save(turned, tmp_path / "odd.nii.gz")
    one = run(tmp_path / "odd.nii.gz", bundle)["odd"]
    features = trained.store.select([row.scan_id]).bags().features
    expected = bundle.model(features, torch.tensor([len(row)]))
    assert one.logit == pytest.approx(expected.logit.item(), abs=1e-4)
    assert one.instance_numbers == [None] * len(row)
    np.testing.assert_allclose(one.attention, expected.attention.detach(), atol=1e-5)


FIELD = 80.0


@pytest.fixture(scope="module")
def field(trained, tmp_path_factory):
    """The phantoms encoded with a field, and a bundle of a run on them, written and read again as it is handed over."""
    folder = tmp_path_factory.mktemp("field")
    parts = dict(zip(trained.store.scan_ids, trained.store.scans["part"], strict=True))
    way = Preprocessing(windows=(WINDOW,), field=FIELD)
    store = encode(EncodingTask(trained.manifest, tiny, way, read_volume, parts=parts), folder / "store").store
    run = train(folder / "run", store, replace(trained.config, epochs=1))
    return store, load_bundle(write_bundle(load_bundle(run), folder / "bundle"))


@pytest.mark.parametrize("kind", ["dicom", "nifti"])
def test_a_new_scan_gets_the_field_of_training(trained, field, new, tmp_path, kind):
    row, (store, bundle) = trained.manifest[0], field
    assert bundle.preprocessing.field == FIELD
    assert round(FIELD / row.pixel_spacing[0]) < row.rows, "the field is smaller than the slices"
    path = new if kind == "dicom" else tmp_path / "one.nii.gz"
    if kind == "nifti":
        nibabel.save(as_nifti(trained, row), path)
    one = run(path, bundle)["one"]
    features = store.select([row.scan_id]).bags().features
    expected = bundle.model(features, torch.tensor([len(row)]))
    assert one.logit == pytest.approx(expected.logit.item(), abs=1e-5)
    np.testing.assert_allclose(one.attention, expected.attention.detach(), atol=1e-6)
    whole = trained.store.select([row.scan_id]).bags().features
    assert not torch.allclose(features, whole, atol=0.1), "whole slices would be something else"


def test_the_new_scans_own_spacing_decides_and_without_one_it_is_left_out(trained, field, copy, tmp_path):
    """8 mm between rows and 5 between columns: 10 x 16 of 32 x 32 pixels."""
    _, bundle = field
    copy("one", PixelSpacing=[8, 5])
    one = run(tmp_path / "one", bundle)["one"]
    hu, _ = read_volume(trained.manifest[0], trained.manifest.root)
    middle = torch.from_numpy(hu[:, 11:21, 8:24].copy())
    features = tiny().encode(replace(bundle.preprocessing, field=None).apply(middle))
    expected = bundle.model(features, torch.tensor([len(hu)]))
    assert one.logit == pytest.approx(expected.logit.item(), abs=1e-5)
    copy("two/good", SeriesInstanceUID="1.1")
    copy("two/bare", scan=1, SeriesInstanceUID="1.2", PixelSpacing=None)
    for force in (False, True):
        outcomes = run(tmp_path / "two", bundle, force=force)
        assert isinstance(outcomes["good"], ScanPrediction)
        reason = outcomes["bare"].reason
        assert (reason.kind, reason.action) == ("no_spacing", "left out")
        assert reason.detail == "a field of 80 mm needs the pixel spacing, which is unknown"


def two_phases(copy, tmp_path: Path, first: int, second: int) -> None:
    """One series of two phases, whose instance numbers start again; the files of the second sort first."""
    copy("single", AcquisitionNumber=first)
    for file in copy("both", AcquisitionNumber=first):
        dataset = dcmread(file.rename(file.with_name(f"z{file.name}")))
        dataset.AcquisitionNumber = second
        dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = f"{dataset.SOPInstanceUID[:60]}.9"
        dataset.PixelData = dataset.pixel_array[::-1].tobytes()
        dataset.save_as(file.with_name(f"a{file.name}"))


def test_one_phase_is_predicted_and_phases_that_nothing_tells_apart_are_refused(copy, bundle, tmp_path):
    two_phases(copy, tmp_path, 1, 2)
    alone, both = run(tmp_path / "single", bundle)["single"], run(tmp_path / "both", bundle)["both"]
    assert all(Path(file).name.startswith("z") for file in both.row.files)
    assert both.probability == pytest.approx(alone.probability, abs=1e-6)
    assert any("Several acquisitions" in caution for caution in both.cautions)
    for folder in ("single", "both"):
        shutil.rmtree(tmp_path / folder)
    two_phases(copy, tmp_path, 1, 1)
    refused = run(tmp_path / "both", bundle)["both"]
    assert isinstance(refused, NotPredicted)
    assert "several acquisitions" in refused.reason.detail
    forced = run(tmp_path / "both", bundle, force=True)["both"]
    assert any(caution.startswith("Forced: it mixes several acquisitions") for caution in forced.cautions)


def test_a_predictor_keeps_its_workers_and_gives_what_single_calls_give(copy, bundle, tmp_path):
    for number, name in enumerate(("one", "two")):
        copy(name, scan=number)
    separately = {name: run(tmp_path / name, bundle)[name].logit for name in ("one", "two")}
    with predicting.Predictor(bundle, bundle.load_encoder(), PredictOptions(workers=1)) as predictor:
        pools = []
        for name, logit in separately.items():
            (again,) = predictor.predict(find_scans([tmp_path / name]))
            assert again.logit == logit
            pools.append([worker.process.pid for worker in predictor._pool._started])
        assert pools[0] == pools[1] != []
        stopped = predictor.predict(find_scans([tmp_path / "one", tmp_path / "two"]))
        next(stopped)
        stopped.close()  # which stops the workers
        (again,) = predictor.predict(find_scans([tmp_path / "one"]))
        assert again.logit == separately["one"]
    assert predictor._pool is None
