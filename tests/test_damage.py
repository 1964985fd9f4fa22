"""Damage to a file of ours is refused, or changes nothing; tests/fuzz/own_cases.py tries it in every file."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from normal_guidance.base.errors import UserError
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
from normal_guidance.study.experiment import environment
from normal_guidance.sweep.config import Config, Execution
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


def check(path: Path, read: Callable[[], Any], same: Callable[[Any, Any], bool] = lambda a, b: a == b) -> None:
    """Flip bits of a file; most are refused, the others change nothing."""
    before, content = read(), path.read_bytes()
    refused = harmless = 0
    unnamed: list[str] = []
    try:
        for damaged in flips(content):
            path.write_bytes(damaged)
            try:
                after = read()
            except UserError as error:
                unnamed += [str(error)] if str(path.parent) not in str(error) else []
                refused += 1
            else:
                assert same(before, after), f"{path.name}: read as something else"
                harmless += 1
    finally:
        path.write_bytes(content)
    assert not unnamed
    assert refused > harmless


def test_json_parquet_and_tensors(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"threshold": 0.25, "notes": ["é", None], "inner": {"seed": 7}})
    check(tmp_path / "a.json", lambda: read_json(tmp_path / "a.json"))
    table = pa.table({"id": ["a", "b"], "value": [1.5, None]}).replace_schema_metadata({"about": "x"})
    write_parquet(tmp_path / "a.parquet", table)

    def table_of() -> pa.Table:
        try:
            return read_parquet(tmp_path / "a.parquet")
        except pa.ArrowException as error:  # callers do this
            raise UserError(f"{tmp_path}: {error}") from error

    check(tmp_path / "a.parquet", table_of, lambda a, b: a.equals(b, check_metadata=True))
    write_tensors(tmp_path / "a.safetensors", {"w": torch.randn(3, 4), "n": torch.arange(5)}, {"about": "y"})

    def equal(a: Any, b: Any) -> bool:
        return a[1] == b[1] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][name], b[0][name]) for name in a[0])

    check(tmp_path / "a.safetensors", lambda: read_tensors(tmp_path / "a.safetensors", "copy it again"), equal)


def test_files_of_earlier_versions_have_no_seal(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"threshold": 0.25}')
    assert read_json(tmp_path / "old.json") == {"threshold": 0.25}


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


def test_damage_is_found_when_a_scan_is_first_read(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", shifted_mean(4, 1, features=8), provenance={})
    path = store.folder / "features-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    opened = open_store(store.folder)
    assert opened.rows(torch.tensor([0])).shape[1] == 8
    with pytest.raises(UserError, match=rf"the features of scan {opened.scan_ids[3]!r} are damaged; copy the store"):
        opened.rows(torch.tensor([3]))
    assert open_store(store.folder, verify=False).rows(torch.tensor([3])).shape[1] == 8


def test_those_who_verified_may_read_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "store", shifted_mean(2, 1, features=8), provenance={})
    monkeypatch.setenv("NGUIDE_VERIFY", "0")
    assert not open_store(store.folder).verify


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


def test_an_environment_has_nothing_that_json_lacks() -> None:
    own = environment(Execution())
    assert json.loads(json.dumps(own, allow_nan=False)) == own


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
        (lambda c: c.update(environments=[]), "environments is empty"),
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
