"""HDF5 files of unknown origin: values come as h5py reads them, and nothing leads out of the file."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from test_convert import refused

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features.feature_files import open_file
from normal_guidance.scans.features.hdf5_files import CHUNK_BYTES, PIECE_BYTES, open_hdf5

HUGE_CHUNK = CHUNK_BYTES // 20 + 1
PACKED = {"compression": "gzip", "shuffle": True, "fletcher32": True}
VALUES = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.h5"


@pytest.mark.parametrize(
    "options",
    [{}, PACKED, {"compression": "lzf"}, {"chunks": (4, 2)}, {"maxshape": (None, 5)}],
    ids=str,
)
def test_values_are_those_of_h5py(path, options):
    with h5py.File(path, "w") as file:
        file.create_dataset("a/b", data=VALUES, **options)
        file["a"].attrs["label"], file["text"] = 1, ["é", "b"]
        file["one"], file["link"] = np.float64(0.5), h5py.SoftLink("/a/b")
    with open_hdf5(path) as group:
        assert sorted(group) == ["a", "link", "one", "text"]
        assert len(group["a"]) == 2
        assert group["a"]["label"] == 1
        found = group["a"]["b"]
        assert (found.shape, found.dtype, len(found)) == ((9, 5), VALUES.dtype, 9)
        np.testing.assert_array_equal(found, VALUES)
        np.testing.assert_array_equal(found[2:7], VALUES[2:7])
        np.testing.assert_array_equal(found[3], VALUES[3])
        assert found[4:4].shape == (0, 5)
        np.testing.assert_array_equal(group["link"], VALUES)
        assert np.asarray(group["one"]) == 0.5
        assert [text.decode() for text in np.asarray(group["text"]).tolist()] == ["é", "b"]
    with h5py.File(path, "w"):  # HDF5 locks what it reads
        pass


@pytest.mark.parametrize("chunks", [None, (7000, 64)])
def test_large_datasets_come_in_pieces(path, chunks):
    rows = PIECE_BYTES // 1024 + 5000
    values = np.arange(rows * 256, dtype=np.float32).reshape(rows, 256)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=chunks)
    with open_hdf5(path) as group:
        found, step = group["x"], group["x"].about.step
        assert 1 <= step < rows
        np.testing.assert_array_equal(found, values)
        np.testing.assert_array_equal(found[step - 3 : step + 4], values[step - 3 : step + 4])


def test_nothing_leads_to_another_file(path, tmp_path):
    """A password file was imported as features."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"root:x:0:0:root:/root")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = VALUES
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (1, 5), "f4", external=[(str(secret), 0, 20)])
        file["label"] = 1
    refused(path, r"/features takes its data from other files; copy the data into this one")
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((9, 5), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (9, 5))
        file.create_virtual_dataset("features", layout)
        file["label"] = 1
    refused(path, r"/features takes its data from other files")
    with h5py.File(path, "w") as file:
        file["out"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/")
        file["features"], file["label"] = h5py.SoftLink("/out/x"), 1
    refused(path, r"/features is a link to another file \(.*other.h5\); copy the data")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        *(
            (
                lambda file, chunks=chunks: file.create_dataset("features", (10**9, 6), "f4", chunks=chunks),
                r"/features declares 24,000,000,000 bytes, more than the 268,435,456 that 0 stored bytes",
            )
            for chunks in (None, (1000, 6))
        ),
        (
            lambda file: file.create_dataset("features", data=VALUES, scaleoffset=3),
            "/features is packed by filter 6; write it with one of deflate, shuffle, fletcher32, lzf",
        ),
        (
            lambda file: file.create_dataset("features", (9, 5), "f4", maxshape=(None, 5), chunks=(HUGE_CHUNK, 5)),
            r"/features has chunks of 536,870,92\d bytes, more than 536,870,912; write it with chunks=True",
        ),
        (
            lambda file: (file.update(features=VALUES), file.create_dataset("label", (1,), h5py.vlen_dtype("f4"))),
            "/label holds neither numbers nor text",
        ),
        (lambda file: file.update(features=h5py.SoftLink("/features")), "/features is a link that leads in a circle"),
        (lambda file: file.update(features=h5py.SoftLink("/nowhere")), "/features is a link to 'nowhere', which is no"),
    ],
)
def test_what_is_not_plain_is_refused(path, write, message):
    with h5py.File(path, "w") as file:
        write(file)
        if "label" not in file:
            file["label"] = 1
    assert path.stat().st_size < 20_000
    refused(path, message)


def test_damage_is_one_line(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=VALUES, compression="gzip")
        file["label"] = 1
    content, messages = path.read_bytes(), []
    for place in range(0, len(content), 97):
        path.write_bytes(content[:place] + b"\xff" * 9 + content[place + 9 :])
        try:
            with open_file(path, "hdf5") as fields:
                np.asarray(fields["features"])
        except UserError as error:
            messages.append(str(error))
    assert messages
    assert not any("\n" in one for one in messages)
