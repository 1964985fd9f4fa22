"""Damage to a file of ours is refused, or changes nothing; tests/fuzz/own_cases.py tries it in every file."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from normal_guidance.base.errors import UserError, reading
from normal_guidance.base.files import (
    MARK,
    read_json,
    read_parquet,
    write_json,
    write_parquet,
)
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.store import open_store, write_store
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.predictions import read_predictions
from normal_guidance.sweep.run import load_run, load_winner, run_sweep

FLIPS = 150
"""Bits to flip in each file, of thousands."""


def flips(content: bytes, seed: int = 0) -> Iterator[bytes]:
    """The content with one bit flipped: some of all, and all in the text around the seal."""
    chosen = random.Random(seed).sample(range(8 * len(content)), min(FLIPS, 8 * len(content)))
    mark = content.find(MARK.encode())
    around = range(8 * max(0, mark - 12), 8 * (mark + 80)) if mark >= 0 else ()
    for bit in {*chosen, *(bit for bit in around if bit < 8 * len(content))}:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def read_table(path: Path) -> object:
    with reading(path, "copy it again", pa.ArrowException):  # callers do this
        table = read_parquet(path)
    return table.to_pydict(), table.schema.metadata


def read_tensor_lists(path: Path) -> object:
    tensors, about = read_tensors(path, "copy it again")
    return {name: tensor.tolist() for name, tensor in tensors.items()}, about


TABLE = pa.table({"id": ["a", "b"], "value": [1.5, None]}).replace_schema_metadata({"about": "x"})
TENSORS = {"w": torch.linspace(0, 1, 12).reshape(3, 4), "n": torch.arange(5)}
SEALED: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "json": (lambda path: write_json(path, {"threshold": 0.25, "notes": ["é", None], "inner": {"seed": 7}}), read_json),
    "parquet": (lambda path: write_parquet(path, TABLE), read_table),
    "safetensors": (lambda path: write_tensors(path, TENSORS, {"about": "y"}), read_tensor_lists),
}


@pytest.mark.parametrize("kind", SEALED)
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path, kind: str) -> None:
    write, read = SEALED[kind]
    path, refused = tmp_path / f"a.{kind}", list[str]()
    write(path)
    before, changed = read(path), list(flips(path.read_bytes()))
    for damaged in changed:
        path.write_bytes(damaged)
        try:
            assert read(path) == before
        except UserError as error:
            refused.append(str(error))
    assert all(str(tmp_path) in said for said in refused)
    assert len(refused) > len(changed) / 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"threshold": NaN}', "NaN is not JSON"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ("[" * 100_000 + "]" * 100_000, "levels deep"),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "levels deep"),
        ("[1]", "not a JSON object"),
        ("", "cannot be read"),
    ],
)
def test_json_that_is_not_ours(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=reason):
        read_json(tmp_path / "a.json")


CONFIG = Config("ng", epochs=2, batch_size=8)


def parts() -> Iterator[Bags]:
    return (shifted_mean(24, seed, features=8, shift=2.0) for seed in (1, 2, 3))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a store."""
    folder = tmp_path_factory.mktemp("damage") / "made"
    run_sweep(folder / "run", [CONFIG], *parts())
    write_store(folder / "store", shifted_mean(3, 1, features=8), provenance={})
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


@pytest.mark.parametrize("name", ["best.safetensors", "best.json", "history.parquet", "predictions.parquet"])
@pytest.mark.parametrize("how", ["removed", "truncated"])
def test_a_complete_run_that_lost_a_file_is_not_shown_as_complete(copied: Path, name: str, how: str) -> None:
    path = copied / "run" / name
    path.unlink() if how == "removed" else path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=f"{name}.*copy the run again, or delete it"):
        run_sweep(copied / "run", [CONFIG], *parts())


def test_damage_is_found_when_a_scan_is_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "store", shifted_mean(4, 1, features=8), provenance={})
    path = store.folder / "features-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    opened = open_store(store.folder)
    assert opened.rows(torch.tensor([0])).shape[1] == 8
    with pytest.raises(UserError, match=rf"the features of scan {opened.scan_ids[3]!r} are damaged; copy the store"):
        opened.rows(torch.tensor([3]))
    monkeypatch.setenv("NGUIDE_VERIFY", "0")  # for those who verified
    assert open_store(store.folder).rows(torch.tensor([3])).shape[1] == 8


def test_a_shard_that_becomes_shorter_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", shifted_mean(300, 1, features=64), provenance={})
    path = store.folder / "features-00000.safetensors"
    with path.open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(UserError, match=r"has become shorter since the store was opened"):
        store.rows(torch.tensor([299]))


def test_features_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    bags = shifted_mean(3, 1, features=8)
    bags.features[-1, 2] = torch.nan
    with pytest.raises(UserError, match=rf"scan {bags.scan_ids[2]!r} has features that are NaN or infinite"):
        write_store(tmp_path / "store", bags, provenance={})


def change(path: Path, edit: Any) -> None:
    """Edit a JSON file, or replace columns of a parquet file, and seal it again."""
    if path.suffix == ".json":
        content = read_json(path)
        edit(content)
        write_json(path, content)
        return
    table = read_parquet(path)
    for name, values in edit(table).items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    write_parquet(path, table)


def cut_attention(table: pa.Table) -> dict[str, list[Any]]:
    first, *others = table["attention"].to_pylist()
    return {"attention": [first[:-1], *others]}


READERS: dict[str, Callable[[Path], object]] = {
    "run/report.json": lambda path: load_run(path.parent),
    "run/best.json": lambda path: load_winner(path.parent),
    "run/predictions.parquet": read_predictions,
    "store/index.parquet": lambda path: open_store(path.parent),
    "store/store.json": lambda path: open_store(path.parent),
}
ODD_INPUTS = {"identity": {}, "preprocessing": {}, "inputs": 3}
OTHER_SHAPES: dict[str, list[tuple[Callable[[Any], object], str]]] = {
    "run/report.json": [
        (lambda c: c["winners"][0]["test"].update(scan_auroc=7.0), "scan_auroc is 7.0, not between 0 and 1"),
        (lambda c: c["winners"][0]["test"].update(new=1), r"winners\[0\].test.new is unknown"),
        (lambda c: c["winners"][0].update(epoch=0), "epoch is 0, not 1 or more"),
        (lambda c: c["environments"][0].update(commit="x"), "commit is 'x', not an object"),
        (lambda c: c["data"].update(test={}), "data.test.scans is missing"),
    ],
    "run/best.json": [
        (lambda c: c.update(features="8"), "features is '8', not a whole number"),
        (lambda c: c.update(features=10**8), "do not fit together .no weights are of 100000000 features"),
        (lambda c: c["config"].update(lr=[1]), r"config.lr is \[1\], not a number"),
    ],
    "run/predictions.parquet": [(cut_attention, "scan .* has not as many numbers of attention")],
    "store/index.parquet": [
        (lambda _: {"shard": [2**31 - 1, 0, 0]}, "has an impossible shard; copy the store again"),
        (lambda _: {"slices": [0, 1, 1]}, "has an impossible slices; copy"),
        (lambda _: {"label": [0, 1, 7]}, "has a label other than 0 and 1; copy"),
        (lambda _: {"label": [0, 1, None]}, "column label has a value missing; copy"),
        (lambda _: {"part": ["dev", None, None]}, "has an unknown part; copy"),
        (lambda _: {"slice_labels": [[0], [0], [0]]}, "has not as many slice_labels as slices; copy"),
        (lambda _: {"scan_id": ["a", "a", "b"]}, "a scan occurs twice; copy"),
    ],
    "store/store.json": [
        (lambda c: c.update(recipe=[]), r"recipe is \[\], not text.*; copy the store again"),
        (lambda c: c.pop("recipe"), "recipe is missing.*; copy"),
        (lambda c: c.update(features=0), "features is 0, not between 1.*; copy"),
        (lambda c: c.update(findings="any"), "findings is 'any', not a list.*; copy"),
        (lambda c: c.update(provenance=[]), r"provenance is \[\], not an object.*; copy"),
        (lambda c: c.update(provenance=ODD_INPUTS), "provenance.inputs is 3, not an object.*; copy"),
    ],
}
"""By file: a change of its content, and what is said of it."""


@pytest.mark.parametrize(
    ("file", "edit", "reason"), [(file, *row) for file, rows in OTHER_SHAPES.items() for row in rows]
)
def test_a_file_of_another_shape_is_refused(copied: Path, file: str, edit: Any, reason: str) -> None:
    change(copied / file, edit)
    with pytest.raises(UserError, match=rf"{file}.*{reason}"):
        READERS[file](copied / file)
