"""Bags keep every scan unchanged, and errors name the wrong scan."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import UNKNOWN, Bag, Bags, collate, number_of_scan


def some_bags() -> Bags:
    return Bags(
        features=torch.randn(9, 4),
        lengths=torch.tensor([2, 3, 4]),
        labels=torch.tensor([0, 1, 1]),
        slice_labels=torch.tensor([0, 0, 0, 1, 1, *[UNKNOWN] * 4]),
        scan_ids=("a", "b", "c"),
        patient_ids=("p", "q", "q"),
    )


@st.composite
def scans(draw: st.DrawFn) -> list[Bag]:
    bags = []
    for i in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 9))
        label = draw(st.integers(0, 1))
        known = draw(st.booleans())
        labels = torch.tensor(draw(st.lists(st.integers(0, label), min_size=size, max_size=size)))
        bags.append(Bag(torch.randn(size, 3), label, labels if known else None, f"s{i}", f"p{i // 2}"))
    return bags


@given(scans(), st.data())
def test_unpack_is_the_inverse_of_pack_also_of_selected_scans(bags: list[Bag], data: st.DataObject) -> None:
    packed = Bags.pack(bags)
    chosen = data.draw(st.lists(st.integers(0, len(bags) - 1), min_size=1, unique=True))
    start = data.draw(st.integers(0, len(bags) - 1))
    selected = [bags[i] for i in chosen]
    parts = [(packed, bags), (packed[chosen], selected), (packed[torch.tensor(chosen)], selected)]
    for part, want in [*parts, (packed[start:], bags[start:])]:
        for before, after in zip(want, part.unpack(), strict=True):
            names = (before.label, before.scan_id, before.patient_id)
            assert (after.label, after.scan_id, after.patient_id) == names
            torch.testing.assert_close(after.features, before.features, rtol=0, atol=0)
            torch.testing.assert_close(after.slice_labels, before.slice_labels, rtol=0, atol=0)


def test_slices_of_scans_are_views_and_masks_select() -> None:
    bags = some_bags()
    assert bags[1:].features.data_ptr() == bags.features[2:].data_ptr()
    assert bags[bags.labels == 1].scan_ids == ("b", "c")
    assert bags[::2].scan_ids == ("a", "c")
    assert bags[-1].scan_id == "c"
    for index in ([-2], torch.tensor([-2]), [False, True, False], torch.tensor([False, True, False])):
        part = bags[index]
        assert part.scan_ids == ("b",)
        assert torch.equal(part.features, bags.features[2:5])
    assert [bag.scan_id for bag in bags] == ["a", "b", "c"]
    assert len(bags[[]]) == len(Bags(torch.zeros(0, 8), [], [])) == 0
    assert repr(bags[torch.zeros(3, dtype=torch.bool)]) == "Bags(no scans, 4 features)"


def test_what_can_be_localized_is_counted() -> None:
    bags = some_bags()
    assert bags.localizable.tolist() == [False, True, False]
    assert "1 localizable, 1 positive but not localizable" in repr(bags)
    for labels in (torch.zeros(4), torch.ones(4)):  # all negative, all positive: kept, but there is nothing to rank
        one_class = replace(bags, slice_labels=torch.cat([bags.slice_labels[:5], labels.long()]))
        assert len(one_class) == 3
        assert one_class.localizable.tolist() == [False, True, False]
        assert "1 positive but not localizable" in repr(one_class)
    without = Bags(bags.features, bags.lengths, bags.labels)
    assert without.localizable.tolist() == [False] * 3
    assert "localizable" not in repr(without)


def test_ids_are_numbered_where_left_out_and_repr_tells_shape_lengths_prevalence_and_memory() -> None:
    bags = Bags(torch.zeros(1000, 768), torch.tensor([400, 600]), torch.tensor([0, 1]))
    text = "2 scans of 400-600 slices (median 400), 1000 slices x 768 features, 1 positive (50.0 %), 2.9 MiB"
    assert repr(bags) == f"Bags({text})"
    assert bags.scan_ids == ("scan-0", "scan-1") == bags.patient_ids
    assert Bags.pack([Bag(torch.zeros(1, 2), 0)]).patient_ids == ("scan-0",)


@given(st.integers(1, 7), st.booleans(), st.booleans())
def test_batches_hold_every_scan_once(size: int, shuffle: bool, drop_last: bool) -> None:
    bags = Bags(torch.randn(10, 2), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 0, 1]))
    generator = torch.Generator().manual_seed(3)
    batches = list(bags.batches(size, shuffle=shuffle, generator=generator, drop_last=drop_last))
    seen = [scan for batch in batches for scan in batch.scan_ids]
    assert len(seen) == len(set(seen)) == (4 // size * size if drop_last else 4)
    assert shuffle or seen == list(bags.scan_ids[: len(seen)])
    assert all(len(batch) == size for batch in batches[: None if drop_last else -1])


TWO = torch.zeros(2, 3)
PADDED = np.ones((2, 4, 3))
PADDED[1, 3] = 0
NAN = "scan 'b', position 1, feature 2: value nan"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda change=change: replace(some_bags(), **change), message)
            for change, message in (
                ({"features": torch.where(torch.arange(36) == 14, torch.nan, 0).view(9, 4)}, NAN),
                ({"slice_labels": torch.tensor([0, 0, 0, 3, 1, 0, 0, 0, 0])}, "scan 'b', position 1: label 3"),
                ({"slice_labels": torch.tensor([0, 0, 0, 1, 1, 0, -1, 0, 0])}, "scan 'c': 1 of 4 slices have no label"),
                ({"slice_labels": torch.zeros(8, dtype=torch.int64)}, "slice_labels: 8 for 9 slices"),
                ({"labels": torch.tensor([[0], [1], [1]])}, r"labels of shape \(3, 1\); give a vector"),
            )
        ),
        (lambda: Bags.pack([]), "no scans to pack"),
        *(
            (lambda label=label: Bag(TWO, label, None, "x"), "scan 'x' has label .*; labels are 0 or 1")
            for label in (None, 2, "1", 0.5, np.array([0, 1]), torch.tensor([1, 1]))
        ),
        (
            lambda: Bags.from_arrays(PADDED, [0, 1]),
            r"the last slice of scan 1 is 0 throughout, like padding .*scan\[:n\]",
        ),
        (lambda: Bags.from_arrays([], []), "the list is empty"),
        (lambda: Bags.from_arrays([PADDED[0], "b.npy"], [0, 1]), "scan 'scan-1': features: got str 'b.npy'"),
        (lambda: Bags(PADDED[0], [4]), r"got no labels; Bags\(features, lengths, labels\) takes"),
        *(
            (lambda make=make, labels=labels: make(labels), r"position 0: label .*; slice labels are 0 or 1")
            for make in (
                lambda labels: Bag(np.zeros((2, 8)), 1, labels, scan_id="A"),
                lambda labels: Bags.from_arrays([np.zeros((2, 8))], [1], slice_labels=[labels]),
                lambda labels: collate([(np.zeros((2, 8)), 1, labels)]),
            )
            for labels in ([0.7, 1.9], [np.nan, 0], [2, 0], [0.5, 1])
        ),
    ],
)
def test_what_cannot_be_a_scan_or_a_choice_of_scans_is_refused(call, message: str, unchecked: None) -> None:
    """Beside what docs/errors_page.py has."""
    with pytest.raises(UserError, match=message):
        call()


def test_arrays_columns_and_lists_are_as_good_as_tensors() -> None:
    """Every form gives the same tensors; an array turned round, of other bytes or read-only is copied."""
    rows = np.arange(10.0).reshape(5, 2)
    frozen = rows.copy()
    frozen.flags.writeable = False
    for features in (rows, rows.tolist(), pd.DataFrame(rows), rows[::-1][::-1], rows.astype(">f4"), frozen):
        for form in (list, np.array, pd.Series, torch.tensor):
            bags = Bags(features, form([2, 3]), form([0, 1]), form([0, 0, 0, 1, 1]))
            torch.testing.assert_close(bags.features, torch.arange(10.0).view(5, 2))
            assert bags.lengths.tolist() == [2, 3]
            assert bags[1].slice_labels.tolist() == [0, 1, 1]
    assert Bags(rows.astype(np.float16), [5], [1]).dtype == torch.float16
    assert Bags(torch.from_numpy(rows), [5], [1]).dtype == torch.float64  # a tensor keeps its dtype
    assert Bag(rows[::-1], np.int64(1)).features[0, 0] == 8
    column = pd.Series([0, 1], index=["x", "y"])  # an index that does not count from 0
    assert Bags(rows, [2, 3], column).labels.tolist() == [0, 1]


def test_a_list_of_arrays_is_as_good_as_a_list_of_bags() -> None:
    arrays = [np.ones((2, 3)), torch.ones(4, 3), [[1.0, 2.0, 3.0]]]
    slices = [None, [0, 1, 0, 0], [0]]
    bags = Bags.from_arrays(arrays, [0, 1, 0], slice_labels=slices, scan_ids=list("abc"))
    same = Bags.pack([Bag(*scan) for scan in zip(arrays, [0, 1, 0], slices, "abc", strict=True)])
    for field in ("features", "lengths", "labels", "slice_labels"):
        torch.testing.assert_close(getattr(bags, field), getattr(same, field))
    assert bags.scan_ids == bags.patient_ids == ("a", "b", "c")
    assert Bags.from_arrays(np.ones((2, 4, 3)), torch.tensor([0, 1])).lengths.tolist() == [4, 4]
    assert Bags.from_arrays(iter(arrays), [0, 1, 0], patient_ids=list("PPQ")).patient_ids == ("P", "P", "Q")


def test_labels_are_numbers_or_arrays_of_one() -> None:
    for label in (1, True, 1.0, np.int64(1), np.array(1), np.array([1]), torch.tensor(1), torch.tensor([1.0])):
        assert Bag(TWO, label).label == 1
        assert collate([(TWO, label)]).labels.tolist() == [1]
    assert Bag(TWO, 1, [0.0, 1.0]).slice_labels.dtype == torch.int64


def test_collate_makes_batches_of_what_a_dataset_gives() -> None:
    scans = [(np.ones((2 + number, 3)), number % 2, [0] * (1 + number) + [number % 2]) for number in range(4)]
    loader = DataLoader(scans, batch_size=2, collate_fn=collate)
    batches = list(loader)
    assert [batch.lengths.tolist() for batch in batches] == [[2, 3], [4, 5]]
    assert batches[0].slice_labels.tolist() == [0, 0, 0, 0, 1]
    bags = Bags.pack([Bag(*scan, scan_id=f"s{number}") for number, scan in enumerate(scans)])
    (whole,) = DataLoader(bags, batch_size=4, collate_fn=collate, num_workers=1)  # Bags are a dataset, and travel
    torch.testing.assert_close(whole.features, bags.features)
    assert whole.scan_ids == bags.scan_ids


def test_collate_takes_a_scan_that_a_sampler_drew_twice() -> None:
    bag = Bag(torch.ones(2, 3), 1, scan_id="A17", patient_id="P")
    batch = collate([bag, bag, Bag(torch.ones(1, 3), 0)])
    assert batch.scan_ids == ("A17", "A17 (2)", "scan-2")
    assert batch.patient_ids == ("P", "P", "scan-2")


@pytest.mark.parametrize("number", [100, -4])
def test_a_scan_that_is_not_there_is_named(number: int) -> None:
    for index in (number, [0, number]):
        with pytest.raises(IndexError, match=f"no scan {number} in the bags; give its id, or its number from 0 to 2"):
            some_bags()[index]


@pytest.mark.parametrize("number", [1.5, None, slice(2)])
def test_what_is_no_number_of_a_scan_is_named(number: object, unchecked: None) -> None:
    with pytest.raises(TypeError, match=r"no scan .* in store s; give its id, or its number from 0 to 1"):
        number_of_scan(number, ("a", "b"), "store s")  # type: ignore[arg-type]
