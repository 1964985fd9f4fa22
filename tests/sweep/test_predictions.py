"""predictions.parquet: what is written is read again, in whole or in part, and other files are refused by name."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.prediction import Prediction
from normal_guidance.sweep.predictions import (
    PREDICTIONS,
    packed_prediction,
    prediction_table,
    read_predictions,
    write_predictions_table,
)

HEADS = 3


def predicted(lengths: list[int], seed: int) -> tuple[Bags, Prediction]:
    random = torch.Generator().manual_seed(seed)
    slices = sum(lengths)
    names = tuple(f"{seed}-{number}" for number in range(len(lengths)))
    labels = torch.arange(len(lengths)) % 2
    bags = Bags(torch.zeros(slices, 1), torch.tensor(lengths), labels, scan_ids=names)
    values = torch.randn(HEADS, slices, generator=random)
    return bags, Prediction(torch.randn(len(lengths), generator=random), values.exp().mean(0), values)


@pytest.fixture
def path(tmp_path):
    tables = [
        prediction_table(*predicted([2, 5], seed=1), part="val", group="a"),
        prediction_table(*predicted([3], seed=2), part="test", group="a"),
        prediction_table(*predicted([4, 1, 6], seed=3), part="test", group="b"),
    ]
    write_predictions_table(tmp_path / "predictions.parquet", tables)
    return tmp_path / "predictions.parquet"


def test_rows_of_a_part_or_a_winner_are_read(path):
    assert read_predictions(path).schema.equals(PREDICTIONS)
    assert read_predictions(path)["scan_id"].to_pylist() == ["1-0", "1-1", "2-0", "3-0", "3-1", "3-2"]
    assert read_predictions(path, part="test")["scan_id"].to_pylist() == ["2-0", "3-0", "3-1", "3-2"]
    assert read_predictions(path, ("scan_id",), group="a").to_pydict() == {"scan_id": ["1-0", "1-1", "2-0"]}
    last = read_predictions(path, ("slices", "label"), part="test", group="b")
    assert last.to_pydict() == {"slices": [4, 1, 6], "label": [0, 1, 0]}


def test_the_packed_prediction_comes_back(path):
    _, expected = predicted([4, 1, 6], seed=3)
    assert all(map(torch.equal, expected[:3], packed_prediction(read_predictions(path, group="b"))[:3]))


def test_a_probability_may_be_given(tmp_path):
    bags, prediction = predicted([2, 2], seed=1)
    given = torch.tensor([0.25, 0.75], dtype=torch.float64)
    table = prediction_table(bags, prediction, part="new", probability=given)
    assert table["probability"].to_pylist() == [0.25, 0.75]


def test_files_of_others_are_refused_by_name(path, tmp_path):
    whole = pq.read_table(path)
    pq.write_table(whole.drop_columns(["log_attention"]), tmp_path / "column.parquet")
    pq.write_table(whole.set_column(8, "attention", pa.array(["none"] * 6)), tmp_path / "kind.parquet")
    for name, detail in (
        ("column.parquet", "has no column 'log_attention'"),
        ("kind.parquet", r"cannot be read \(.*\)"),
        ("gone.parquet", r"cannot be read \(.*\)"),
    ):
        with pytest.raises(UserError, match=f"{name} {detail}; copy the run again, or delete it and start it again"):
            read_predictions(tmp_path / name)
    assert read_predictions(tmp_path / "column.parquet", ("scan_id",)).num_rows == 6
