"""One flipped bit in a file of ours is refused, or changes nothing."""

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


def check(
    path: Path, read: Callable[[], Any], same: Callable[[Any, Any], bool] = lambda a, b: a == b
) -> tuple[int, int]:
    """Flip bits of a file; count the refused ones and those that changed nothing, and accept no others."""
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
    return refused, harmless


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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "run"
    parts = (shifted_mean(24, seed, features=8, shift=2.0) for seed in (1, 2, 3))
    run_sweep(folder, [Config("ng", epochs=2, batch_size=8)], *parts)
    return folder


def test_every_file_of_a_run(run: Path) -> None:
    def weights() -> dict[str, torch.Tensor]:
        return load_winner(run).state_dict()

    def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    check(run / "best.safetensors", weights, equal)
    check(run / "best.json", weights, equal)
    check(run / "report.json", lambda: load_run(run).report)
    check(run / "predictions.parquet", lambda: read_predictions(run / "predictions.parquet"), pa.Table.equals)


@pytest.mark.parametrize("name", ["best.safetensors", "best.json", "history.parquet", "predictions.parquet"])
@pytest.mark.parametrize("how", ["removed", "truncated"])
def test_a_complete_run_that_lost_a_file_is_not_shown_as_complete(
    run: Path, tmp_path: Path, name: str, how: str
) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / name
    path.unlink() if how == "removed" else path.write_bytes(path.read_bytes()[:-20])
    parts = (shifted_mean(24, seed, features=8, shift=2.0) for seed in (1, 2, 3))
    with pytest.raises(UserError, match=f"{name}.*copy the run again, or delete it"):
        run_sweep(tmp_path / "run", [Config("ng", epochs=2, batch_size=8)], *parts)


def test_every_file_of_a_store(tmp_path: Path) -> None:
    bags = shifted_mean(6, 1, features=8)
    store = write_store(tmp_path / "store", bags, provenance={"encoder": "noise"}, recipe="r")

    def content() -> tuple[Any, ...]:
        opened = open_store(store.folder)
        found = opened.bags()
        return (opened.provenance, opened.recipe, opened.scan_ids, opened.labels.tolist(), found.features.tolist())

    for name in ("store.json", "index.parquet", "features-00000.safetensors"):
        check(store.folder / name, content)


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


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a JSON file, and seal it again."""
    content = read_json(path)
    edit(content)
    write_json(path, content)


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        (
            "report.json",
            lambda c: c["winners"][0]["test"].update(scan_auroc=7.0),
            "scan_auroc is 7.0, not between 0 and 1",
        ),
        ("report.json", lambda c: c["winners"][0]["test"].update(new=1), r"winners\[0\].test.new is unknown"),
        ("report.json", lambda c: c["winners"][0].update(epoch=0), "epoch is 0, not 1 or more"),
        ("report.json", lambda c: c.update(environments=[]), "environments is empty"),
        ("report.json", lambda c: c["environments"][0].update(commit="x"), "commit is 'x', not an object"),
        ("report.json", lambda c: c["data"].update(test={}), "data.test.scans is missing"),
        ("best.json", lambda c: c.update(features="8"), "features is '8', not a whole number"),
        ("best.json", lambda c: c.update(features=10**8), "do not fit together .no weights are of 100000000 features"),
        ("best.json", lambda c: c["config"].update(lr=[1]), r"config.lr is \[1\], not a number"),
    ],
)
def test_a_run_of_another_shape(run: Path, tmp_path: Path, name: str, edit: Any, reason: str) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    change(folder / name, edit)
    read = load_run if name == "report.json" else load_winner
    with pytest.raises(UserError, match=rf"{name}.*{reason}"):
        read(folder)


def change_table(path: Path, **columns: Any) -> None:
    """Replace columns of a parquet file, and seal it again."""
    table = read_parquet(path)
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    write_parquet(path, table)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"shard": [2**31 - 1, 0, 0]}, "has an impossible shard"),
        ({"slices": [0, 1, 1]}, "has an impossible slices"),
        ({"label": [0, 1, 7]}, "has a label other than 0 and 1"),
        ({"label": [0, 1, None]}, "column label has a value missing"),
        ({"part": ["dev", None, None]}, "has an unknown part"),
        ({"slice_labels": [[0], [0], [0]]}, "has not as many slice_labels as slices"),
        ({"scan_id": ["a", "a", "b"]}, "a scan occurs twice"),
    ],
)
def test_an_index_of_another_shape(tmp_path: Path, columns: dict[str, Any], reason: str) -> None:
    store = write_store(tmp_path / "store", shifted_mean(3, 1, features=8), provenance={})
    change_table(store.folder / "index.parquet", **columns)
    with pytest.raises(UserError, match=rf"index.parquet is damaged: .*{reason}; copy the store again"):
        open_store(store.folder)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda c: c.update(recipe=[]), r"recipe is \[\], not text"),
        (lambda c: c.pop("recipe"), "recipe is missing"),
        (lambda c: c.update(features=0), "features is 0, not between 1"),
        (lambda c: c.update(findings="any"), "findings is 'any', not a list"),
        (lambda c: c.update(provenance=[]), r"provenance is \[\], not an object"),
        (
            lambda c: c.update(provenance={"identity": {}, "preprocessing": {}, "inputs": 3}),
            "provenance.inputs is 3, not an object",
        ),
    ],
)
def test_a_store_json_of_another_shape(tmp_path: Path, edit: Any, reason: str) -> None:
    store = write_store(tmp_path / "store", shifted_mean(3, 1, features=8), provenance={})
    change(store.folder / "store.json", edit)
    with pytest.raises(UserError, match=rf"store.json is damaged: {reason}.*; copy the store again"):
        open_store(store.folder)


def test_predictions_whose_attention_does_not_fit(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    path = folder / "predictions.parquet"
    lists = read_parquet(path)["attention"].to_pylist()
    change_table(path, attention=[lists[0][:-1], *lists[1:]])
    with pytest.raises(
        UserError, match=r"predictions.parquet is damaged: scan .* has not as many numbers of attention"
    ):
        read_predictions(path)
