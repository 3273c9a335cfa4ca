"""dsa_topk.compat.flashinfer: FlashInfer's argument lists, defaults and documented results over our kernels."""

from __future__ import annotations

import inspect

import pytest
import torch

from dsa_topk.compat.flashinfer import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform
from engine_cases import BACKENDS, best, expect, extend, ints, slot, snippet


@pytest.fixture(params=BACKENDS)
def device(request):
    return request.param[1]


def arguments(function):
    """Name, kind and default of every parameter, as text."""
    parameters = inspect.signature(function).parameters.values()
    star = False
    texts = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            texts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        texts.append(parameter.name + default)
    return ", ".join(texts)


# As documented in flashinfer-python 0.7.4.
@pytest.mark.parametrize(
    ("function", "documented"),
    [
        (top_k, "input, k, sorted=False, deterministic=False, tie_break=TopKTieBreak.NONE, dsa_graph_safe=False"),
        (
            top_k_page_table_transform,
            "input, src_page_table, lengths, k, row_to_batch=None, deterministic=False, tie_break=TopKTieBreak.NONE, "
            "dsa_graph_safe=False, row_starts=None, page_table_row_starts=None, *, page_size=1, out=None, "
            "out_raw_indices=None",
        ),
        (
            top_k_ragged_transform,
            "input, offsets, lengths, k, deterministic=False, tie_break=TopKTieBreak.NONE, dsa_graph_safe=False, "
            "row_starts=None",
        ),
    ],
)
def test_signature(function, documented):
    assert arguments(function) == documented


def test_tie_break_values():
    assert {member.name: int(member) for member in TopKTieBreak} == {"NONE": 0, "SMALL": 1, "LARGE": 2}
    assert f"{TopKTieBreak.SMALL} {TopKTieBreak.LARGE:>6} {TopKTieBreak.NONE!r}" == "small  large TopKTieBreak.NONE"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_top_k_returns_values_then_int64_indices(device, dtype, is_sorted):
    scores = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    values, indices = top_k(scores, 40, sorted=is_sorted)
    assert values.dtype == dtype
    assert indices.dtype == torch.int64
    assert torch.equal(values, scores.gather(1, indices))
    assert torch.equal(values.sort(dim=1, descending=True).values, scores.topk(40).values)
    for row in range(5):
        assert sorted(indices[row].tolist()) == best(scores[row].cpu(), 40)
    steps = values.float().diff(dim=1) if is_sorted else -indices.diff(dim=1)
    assert (steps <= 0).all()


def test_top_k_ties(device):
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]], device=device)
    assert top_k(scores, 2)[1].tolist() == [[1, 2]]
    assert top_k(scores, 2, tie_break=TopKTieBreak.LARGE)[1].tolist() == [[2, 3]]
    assert top_k(scores, 2, sorted=True, tie_break=2)[1].tolist() == [[3, 2]]


def test_top_k_takes_a_transposed_matrix(device):
    scores = torch.randn(30, 4).to(device).t()
    values, indices = top_k(scores, 3)
    assert torch.equal(values, scores.gather(1, indices))


@pytest.mark.parametrize("k", [0, 11, 8193])
def test_top_k_refuses_a_k_that_the_row_does_not_have(k):
    with pytest.raises(ValueError, match="k: expected 1 <= k <= 10"):
        top_k(torch.zeros(2, 10), k)


@pytest.mark.parametrize("value", [3, -1, "small"])
def test_unknown_tie_break(value):
    with pytest.raises(ValueError, match="tie_break"):
        top_k(torch.zeros(2, 10), 2, tie_break=value)


def test_page_table_with_one_table_row_per_score_row(device):
    scores = torch.randn(3, 90).to(device)
    table = torch.randperm(270).reshape(3, 90).int().to(device)
    lengths = [90, 7, 0]
    out = top_k_page_table_transform(scores, table, ints(lengths, device), 16, deterministic=True, dsa_graph_safe=True)
    want = expect(scores, lengths, 16, None, lambda row, p: slot(table, row, p, 1))
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_table_starts_default_to_row_starts(device):
    scores = torch.randn(2, 60).to(device)
    table = torch.randperm(120).reshape(2, 60).int().to(device)
    lengths, starts = [30, 20], [5, 33]
    arguments = (scores, table, ints(lengths, device), 12)
    by_default = top_k_page_table_transform(*arguments, row_starts=ints(starts, device))
    want = expect(scores, lengths, 12, starts, lambda row, p: slot(table, row, p + starts[row], 1))
    torch.testing.assert_close(by_default.cpu(), want, rtol=0, atol=0)
    explicit = top_k_page_table_transform(
        *arguments, row_starts=ints(starts, device), page_table_row_starts=ints([2, 0], device)
    )
    want = expect(scores, lengths, 12, starts, lambda row, p: slot(table, row, p + [2, 0][row], 1))
    torch.testing.assert_close(explicit.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("page_size", [2, 3, 16])
def test_packed_rows_with_pages_and_raw_output(device, page_size):
    batch = extend([2, 3], [70, 50], page_size=page_size, device=device)
    out, raw = (torch.full((5, 10), -9, dtype=torch.int32, device=device) for _ in range(2))
    returned = top_k_page_table_transform(
        batch.scores,
        batch.compact,
        ints(batch.lengths, device),
        10,
        ints(batch.requests, device),
        row_starts=ints(batch.starts, device),
        page_table_row_starts=ints([0] * 5, device),
        page_size=page_size,
        out=out,
        out_raw_indices=raw,
    )
    assert returned is out
    want = expect(
        batch.scores,
        batch.lengths,
        10,
        batch.starts,
        lambda row, p: slot(batch.compact, batch.requests[row], p, page_size),
    )
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)
    torch.testing.assert_close(raw.cpu(), expect(batch.scores, batch.lengths, 10, batch.starts), rtol=0, atol=0)


def test_starts_in_two_units_must_both_be_given():
    zeros = ints([0], "cpu")
    with pytest.raises(ValueError, match=r"page_table_row_starts: expected a tensor .* page_size=16"):
        top_k_page_table_transform(
            torch.zeros(1, 32), ints([[0, 1]], "cpu"), ints([32], "cpu"), 4, row_starts=zeros, page_size=16
        )


def test_ragged(device):
    batch = extend([2, 3], [70, 50], device=device)
    offsets = [1000, 0, 7, 64, 3]
    out = top_k_ragged_transform(
        batch.scores,
        ints(offsets, device),
        ints(batch.lengths, device),
        20,
        tie_break=TopKTieBreak.SMALL,
        row_starts=ints(batch.starts, device),
    )
    want = expect(batch.scores, batch.lengths, 20, batch.starts, lambda row, p: p + offsets[row])
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_k_beyond_the_width_pads(device):
    scores = torch.randn(1, 5).to(device)
    table = ints([[9, 8, 7, 6, 5]], device)
    want = [[9, 8, 7, 6, 5, -1, -1]]
    assert top_k_page_table_transform(scores, table, ints([5], device), 7).tolist() == want
    assert top_k_ragged_transform(scores, ints([3], device), ints([4], device), 6).tolist() == [[3, 4, 5, 6, -1, -1]]


def test_the_documented_example():
    scope: dict = {}
    exec(snippet("integrate-flashinfer.md"), scope)
    assert torch.equal(scope["values"], scope["scores"].topk(8).values)
    want = expect(scope["scores"], [100, 40], 8, None, lambda row, p: p + 100 * row)
    assert torch.equal(scope["columns"], want)
