"""Slices come as they are in the files, each file is decoded once, memory is bounded, and a crash costs one slice."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from normal_guidance.clinic.viewer import images as module
from normal_guidance.clinic.viewer.images import Cache, SliceImages, UnreadableSliceError, decode
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.scans.index.volumes import read_volume

HERE = Path(__file__).parent


def read_all(images: SliceImages, wanted: list[tuple[int, int]]) -> list[bytes | BaseException]:
    """All at once, as browsers ask."""

    async def run():
        return await asyncio.gather(*(images.read(*place) for place in wanted), return_exceptions=True)

    return asyncio.run(run())


@pytest.fixture
def open_images(manifest):
    opened = []

    def start(row_of=manifest.__getitem__, root=manifest.root):
        opened.append(SliceImages(row_of, root))
        return opened[-1]

    yield start
    for images in opened:
        images.close()


@pytest.fixture
def count(monkeypatch):
    decoded = []
    original = SliceImages._decode

    def counted(self, row, name):
        decoded.append(name)
        return original(self, row, name)

    monkeypatch.setattr(SliceImages, "_decode", counted)
    return decoded


def pixels(contents: list[bytes], row) -> np.ndarray:
    return np.array([np.frombuffer(content, "<i2").reshape(row.rows, row.columns) for content in contents])


def test_whoever_asks_for_the_same_file_shares_it_and_there_is_no_slice_beyond_the_ends(open_images, manifest, count):
    images = open_images()
    got = read_all(images, [(0, 2)] * 20)
    assert len(set(got)) == 1
    assert count == [manifest[0].files[2]]
    read_all(images, [(0, 2)])
    assert len(count) == 1
    beyond = read_all(images, [(0, -1), (0, len(manifest[0])), (0, 10**9)])
    assert [type(error) for error in beyond] == [UnreadableSliceError] * 3


def test_a_file_of_many_slices_is_decoded_once(open_images, manifest, count, tmp_path):
    nibabel = pytest.importorskip("nibabel")
    volume = np.arange(5 * 4 * 3, dtype=np.int16).reshape(3, 4, 5)  # slices, rows, columns
    nibabel.save(nibabel.Nifti1Image(volume.transpose(2, 1, 0), np.diag([-1, -1, 2, 1])), tmp_path / "a.nii.gz")
    row = ScanRow("n", "p", 0, None, "nifti", ("a.nii.gz",) * 3, (0, 1, 2), (0.0, 2.0, 4.0), 4, 5, slice_spacing=2.0)
    images = open_images(lambda scan: row, tmp_path)
    got = read_all(images, [(7, place) for place in (2, 0, 1)])
    np.testing.assert_array_equal(pixels(got, row), volume[[2, 0, 1]])
    assert count == ["a.nii.gz"]


def test_values_beyond_16_bits_are_clipped(manifest, monkeypatch):
    volume = np.array([[[-1e6, -0.4], [0.6, 1e6]]], np.float32)
    monkeypatch.setattr("normal_guidance.scans.index.volumes.read_volume", lambda row, root: (volume, []))
    got = decode(module.SliceRequest(manifest.root, manifest[0]))
    np.testing.assert_array_equal(got, [[[-32768, 0], [1, 32767]]])


def test_memory_is_bounded_when_all_scans_are_browsed(open_images, manifest, monkeypatch):
    row = manifest[0]
    limit = 5 * (2 * row.rows * row.columns + module.FAILURE_BYTES)
    monkeypatch.setattr(module, "CACHE_BYTES", limit)
    images = open_images()
    for scan in range(6):
        read_all(images, [(scan, place) for place in range(len(manifest[scan]))])
        assert images.cache.bytes <= limit
        assert len(images.cache._held) == 5


def test_a_decoder_that_crashes_costs_its_slice_only(open_images, manifest, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    import crashing

    row = manifest[0]
    numbered = replace(row, positions=tuple(float(place) for place in range(len(row))))
    monkeypatch.setattr(module, "decode", crashing.crash_on_the_first)
    images = open_images(lambda scan: numbered)
    dead, *others = read_all(images, [(0, place) for place in range(6)])
    assert isinstance(dead, UnreadableSliceError)
    assert "Slice 1 cannot be read: the process that read it was killed by SIGSEGV" in str(dead)
    volume, _ = read_volume(row, manifest.root)
    np.testing.assert_array_equal(pixels(others, row), np.rint(volume[1:6]).astype(int))


def test_a_file_that_is_gone_is_told_and_tried_again_when_it_is_back(open_images, manifest, tmp_path, monkeypatch):
    row = manifest[0]
    images = open_images(root=tmp_path)
    (gone,) = read_all(images, [(0, 3)])
    file = tmp_path / row.files[3]
    file.parent.mkdir(parents=True)
    file.write_bytes((manifest.root / row.files[3]).read_bytes())
    (still,) = read_all(images, [(0, 3)])  # a page that asks for it all the time keeps no worker busy
    for error in (gone, still):
        assert isinstance(error, UnreadableSliceError)
        assert "Slice 4 cannot be read" in str(error)
        assert row.files[3] in str(error)
    monkeypatch.setattr(module, "FAILURE_SECONDS", 0.0)
    (back,) = read_all(images, [(0, 3)])
    assert len(back) == 2 * row.rows * row.columns


def test_names_in_a_manifest_do_not_lead_out_of_the_root(open_images, manifest, tmp_path):
    (tmp_path / "secret.dcm").write_bytes((manifest.root / manifest[0].files[0]).read_bytes())
    (tmp_path / "root").mkdir()
    row = replace(manifest[0], files=("../secret.dcm",) * len(manifest[0]))
    (error,) = read_all(open_images(lambda scan: row, tmp_path / "root"), [(0, 0)])
    assert "leads out of its folder" in str(error)


uses = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40) | st.none()))


@example([(0, 3), (1, 50), (0, None), (1, None), (2, 1), (1, None)], 10)  # one that is larger than the limit alone
@given(uses, st.integers(1, 60))
def test_the_cache_is_the_longest_tail_of_uses_that_fits(uses, limit):
    cache, order = Cache(limit, size=lambda size: size), {}
    for key, size in uses:
        if size is None:
            value = cache.get(key)
            assert value == order.get(key)
            if key in order:
                order[key] = order.pop(key)
            continue
        cache.put(key, size)
        order.pop(key, None)
        order[key] = size
        while sum(order.values()) > limit and len(order) > 1:
            order.pop(next(iter(order)))
        assert cache.bytes == sum(order.values())
        assert len(cache._held) == len(order)
