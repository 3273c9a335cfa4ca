"""dsa_topk.compat.sglang: SGLang's argument lists over our kernels, and where ours are stricter."""

from __future__ import annotations

import inspect

import pytest
import torch

from dsa_topk.compat import sglang
from engine_cases import BACKENDS, OUTSIDE, expect, extend, ints, slot, snippet, stand_in


@pytest.fixture(params=BACKENDS)
def device(request):
    return request.param[1]


# As documented in sglang 0.5.23 (and sgl-kernel for the fast_* ones); `metadata` may also be left out in ours.
@pytest.mark.parametrize(
    ("name", "documented"),
    [
        ("plan_topk_v2", ["seq_lens", "static_threshold", "*out"]),
        ("topk_transform_ragged_v2", ["scores", "seq_lens", "*out_offsets", "*out_indices", "*row_starts"]),
        (
            "topk_transform_paged_v2",
            ["scores", "seq_lens", "page_tables", "out_page_indices", "page_size", "metadata", "out_raw_indices"],
        ),
        (
            "topk_transform_packed_v2",
            ["scores", "seq_lens", "page_tables", "out_page_indices", "page_size", "*row_starts", "*row_to_batch"],
        ),
        ("fast_topk_v2", ["score", "lengths", "topk", "row_starts"]),
        (
            "fast_topk_transform_fused",
            ["score", "lengths", "page_table_size_1", "cu_seqlens_q", "topk", "row_starts"],
        ),
        ("fast_topk_transform_ragged_fused", ["score", "lengths", "topk_indices_offset", "topk", "row_starts"]),
    ],
)
def test_signature(name, documented):
    parameters = inspect.signature(getattr(sglang, name)).parameters.values()
    assert [("*" if p.kind is p.KEYWORD_ONLY else "") + p.name for p in parameters] == documented


def test_the_older_name_is_the_same_function():
    assert sglang.topk_transform_512_v2 is sglang.topk_transform_paged_v2


def test_plan_is_valid_and_routes_nothing(device):
    plan = sglang.plan_topk_v2(ints([5, 7, 200_000], device), 4096)
    assert (plan.shape, plan.dtype, plan.device.type) == ((4, 2), torch.int32, device)
    assert plan[0].tolist() == [2**31 - 1, 0]
    assert not plan[1:].any()


def test_plan_leaves_a_given_buffer_alone(device):
    lengths, out = ints([5, 7], device), torch.full((3, 2), 9, dtype=torch.int32, device=device)
    assert sglang.plan_topk_v2(lengths, out=out) is out
    assert (out == 9).all()
    assert sglang.topk_v2_plan_is_written(lengths) is False
    with pytest.raises(ValueError, match=r"out: expected an int32 tensor \[3, 2\]"):
        sglang.plan_topk_v2(lengths, out=out[:2])


@pytest.mark.parametrize("k", [1, 100, 512, 1024, 2048])
def test_ragged_v2(device, k):
    lengths, starts, offsets = [3000, k, k + 1, 0, -4], [3, 1, 2, 0, 8], [3, 100, 0, 0, 1]
    scores = torch.full((5, 3008), OUTSIDE)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        scores[row, start : start + max(length, 0)] = torch.randn(max(length, 0))
    scores = scores.to(device)
    before, out = scores.clone(), torch.zeros(5, k, dtype=torch.int32, device=device)
    result = sglang.topk_transform_ragged_v2(
        scores,
        ints(lengths, device),
        out_offsets=ints(offsets, device),
        out_indices=out,
        row_starts=ints(starts, device),
    )
    assert result is None
    want = expect(scores, lengths, k, starts, lambda row, p: p + offsets[row])
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)
    assert torch.equal(scores, before)  # SGLang's kernel masks columns ahead of the window


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_paged_v2_and_its_output_modes(device, paged, raw):
    scores, lengths = torch.randn(3, 500).to(device), [500, 64, 0]
    table = torch.randperm(24).reshape(3, 8).int().to(device)
    out, positions = (torch.zeros(3, 64, dtype=torch.int32, device=device) for _ in range(2))
    plan = sglang.plan_topk_v2(ints(lengths, device))
    sglang.topk_transform_paged_v2(
        scores, ints(lengths, device), table if paged else None, out, 64, plan, positions if raw else None
    )
    want = expect(scores, lengths, 64)
    if raw:
        torch.testing.assert_close(positions.cpu(), want, rtol=0, atol=0)
    if paged:
        want = expect(scores, lengths, 64, None, lambda row, p: slot(table, row, p, 64))
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_first_generation_argument_list(device):
    scores, table = torch.randn(2, 100).to(device), ints([[1, 0], [2, 3]], device)
    out, raw = (torch.zeros(2, 10, dtype=torch.int32, device=device) for _ in range(2))
    sglang.topk_transform_paged(scores, ints([100, 50], device), table, out, 64, raw)
    want = expect(scores, [100, 50], 10, None, lambda row, p: slot(table, row, p, 64))
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)
    torch.testing.assert_close(raw.cpu(), expect(scores, [100, 50], 10), rtol=0, atol=0)


def test_packed_v2(device):
    batch = extend([2, 1, 3], [70, 9, 50], device=device)
    out = torch.zeros(6, 20, dtype=torch.int32, device=device)
    sglang.topk_transform_packed_v2(
        batch.scores,
        ints(batch.lengths, device),
        batch.compact,
        out,
        batch.page_size,
        row_starts=ints(batch.starts, device),
        row_to_batch=ints(batch.requests, device),
    )
    want = expect(
        batch.scores,
        batch.lengths,
        20,
        batch.starts,
        lambda row, p: slot(batch.compact, batch.requests[row], p, batch.page_size),
    )
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("with_starts", [False, True])
def test_legacy_paged_maps_rows_by_query_lengths(device, with_starts):
    batch = extend([2, 0, 3], [70, 9, 50], device=device)
    starts = batch.starts if with_starts else None
    lengths = batch.lengths if with_starts else [40, 41, 0, 1, 2]
    out = sglang.fast_topk_transform_fused(
        batch.scores,
        ints(lengths, device),
        batch.wide,
        ints(batch.cu_q, device),
        30,
        row_starts=ints(starts, device) if with_starts else None,
    )
    want = expect(batch.scores, lengths, 30, starts, lambda row, p: slot(batch.wide, batch.requests[row], p, 1))
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_legacy_decode_positions_and_ragged(device):
    batch = extend([1, 1], [70, 50], device=device)
    lengths, starts = ints(batch.lengths, device), ints(batch.starts, device)
    positions = sglang.fast_topk_v2(batch.scores, lengths, 12, starts)
    torch.testing.assert_close(positions.cpu(), expect(batch.scores, batch.lengths, 12, batch.starts), rtol=0, atol=0)
    columns = sglang.fast_topk_transform_ragged_fused(batch.scores, lengths, starts, 12, starts)
    want = expect(batch.scores, batch.lengths, 12, batch.starts, lambda row, p: p + batch.starts[row])
    torch.testing.assert_close(columns.cpu(), want, rtol=0, atol=0)
    slots = sglang.fast_topk_transform_fused(batch.scores, lengths, batch.wide, ints([0, 1, 2], device), 12)
    want = expect(batch.scores, batch.lengths, 12, None, lambda row, p: slot(batch.wide, row, p, 1))
    torch.testing.assert_close(slots.cpu(), want, rtol=0, atol=0)


def test_an_output_that_is_no_matrix():
    with pytest.raises(ValueError, match="out_indices"):
        sglang.topk_transform_paged_v2(torch.zeros(1, 4), ints([4], "cpu"), None, ints([0], "cpu"), 1)


def test_the_documented_snippet_replaces_and_goes_back(monkeypatch):
    names = ("topk_transform_paged_v2", "topk_transform_packed_v2", "topk_transform_ragged_v2")
    legacy = ("fast_topk_v2", "fast_topk_transform_fused", "fast_topk_transform_ragged_fused")
    theirs = stand_in(monkeypatch, "sglang.kernels.ops.attention.dsv4.topk", **dict.fromkeys(names, "theirs"))
    package = stand_in(monkeypatch, "sgl_kernel", **dict.fromkeys(legacy, "theirs"))
    scope: dict = {}
    exec(snippet("integrate-sglang.md"), scope)
    for module, name in [(theirs, name) for name in names] + [(package, name) for name in legacy]:
        assert getattr(module, name) is getattr(sglang, name)
        assert getattr(module, name).__module__ == "dsa_topk.compat.sglang"
    assert set(scope["originals"].values()) == {"theirs"}
    assert len(scope["originals"]) == 6
