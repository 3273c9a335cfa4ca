"""Named call shapes describe legal calls of their form, with what makes each of them hard."""

from __future__ import annotations

import pytest
import torch

import dsa_topk
from dsa_topk.testing import distributions, shapes

SIZE = {"rows": 13, "width": 1000, "k": 64}


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_public_function_takes_it(name: str, index_dtype: torch.dtype) -> None:
    for rows, width, k, page_size in ((13, 1000, 64, 64), (8, 300, 400, 3), (1, 1, 1, 1), (0, 9, 2, 64), (3, 0, 2, 64)):
        shape = shapes.make(name, rows=rows, width=width, k=k, page_size=page_size, index_dtype=index_dtype)
        assert (shape.rows, shape.width, shape.k, shape.name) == (rows, width, k, name)
        assert shape.lengths.shape == (rows,)
        assert shape.lengths.dtype == index_dtype
        scores = distributions.make("half_zeros", rows, width)
        result, picked = shape.call(scores, backend="torch", return_scores=True)
        shape.check(scores, result, returned_scores=picked).raise_if_bad()


@pytest.mark.parametrize("name", shapes.NAMES)
def test_values_are_legal(name: str) -> None:
    """``validate=True`` accepts every shape but the padding's negative lengths."""
    shape = shapes.make(name, **SIZE)
    scores = distributions.make("normal", shape.rows, shape.width)
    if name == "dp_padding":
        with pytest.raises(ValueError, match="lengths"):
            shape.call(scores, backend="torch", validate=True)
    else:
        shape.call(scores, backend="torch", validate=True)


def test_same_numbers_again() -> None:
    for name in shapes.NAMES:
        one, two = shapes.make(name, seed=4, **SIZE), shapes.make(name, seed=4, **SIZE)
        for entry in ("lengths", "row_starts", "page_table", "row_to_batch", "page_table_starts", "out_offsets"):
            first, second = getattr(one, entry), getattr(two, entry)
            assert (first is None) == (second is None)
            assert first is None or torch.equal(first, second)


def test_forms() -> None:
    forms = {name: shapes.make(name, **SIZE).form for name in shapes.NAMES}
    assert forms == {
        "decode": "paged",
        "mtp": "paged",
        "ragged": "ragged",
        "packed": "paged",
        "chunked": "paged",
        "prefill_cp": "ragged",
        "mixed": "positions",
        "dp_padding": "paged",
    }


def test_starts_are_not_only_multiples_of_four() -> None:
    for name in ("ragged", "packed", "chunked", "prefill_cp", "mixed"):
        assert (shapes.make(name, **SIZE).row_starts % 4 != 0).any(), name


def test_what_makes_each_shape_hard() -> None:
    made = {name: shapes.make(name, **SIZE) for name in shapes.NAMES}
    assert (made["dp_padding"].lengths < 0).any()
    assert {0, 1, 63, 64, 65, 1000} <= set(made["mixed"].lengths.tolist())
    mtp = made["mtp"]
    assert mtp.row_to_batch.tolist() == [i // 4 for i in range(13)]
    assert all(mtp.lengths[i + 1] - mtp.lengths[i] == 1 for i in (0, 1, 2, 4, 5, 6))
    assert (made["chunked"].page_table_starts > 0).any()
    assert made["chunked"].row_to_batch.min() == 3
    assert torch.equal(made["ragged"].out_offsets, made["ragged"].row_starts)
    assert not torch.equal(made["prefill_cp"].out_offsets, made["prefill_cp"].row_starts)
    assert made["prefill_cp"].lengths[-3:].tolist() == [0, 0, 0]


def test_unused_table_entries_are_garbage() -> None:
    table = shapes.make("decode", **SIZE).page_table
    assert (table == 0x7EADBEEF).any()
    used = table[table != 0x7EADBEEF]
    assert used.unique().numel() == used.numel()


def test_windows_stay_within_the_scores() -> None:
    for name in shapes.NAMES:
        shape = shapes.make(name, **SIZE)
        starts = 0 if shape.row_starts is None else shape.row_starts
        assert (starts + shape.lengths <= shape.width).all()


def test_unknown_name_raises() -> None:
    with pytest.raises(ValueError, match="name: expected one of decode"):
        shapes.make("prefill", **SIZE)


def test_check_finds_a_wrong_row() -> None:
    shape = shapes.make("decode", **SIZE)
    scores = distributions.make("normal", shape.rows, shape.width)
    result = dsa_topk.topk_paged(scores, shape.lengths, shape.k, **shape.kwargs(), backend="torch")
    assert shape.check(scores, result)
    assert not shape.check(scores, result + 1)
