"""The engine layer: every layout against a row-by-row computation, the rules of routing, settings and error texts."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dsa_topk
from dsa_topk.engine import BaseIndexerMetadata, DSATopKBackend, Settings, TopkMetadata, TopkTransformMethod
from dsa_topk.engine import backend as backend_module
from dsa_topk.engine import rows as row_maps
from engine_cases import BACKENDS, OUTSIDE, expect, extend, ints, slot

PAGED, RAGGED = TopkTransformMethod.PAGED, TopkTransformMethod.RAGGED
TORCH = DSATopKBackend.TORCH
ENVIRONMENT = (
    "SGLANG_DSA_FUSE_TOPK",
    "SGLANG_OPT_USE_TOPK_V2",
    "SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC",
    "SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK",
    "DSA_TOPK_TIE_BREAK",
    "DSA_TOPK_PAGE_TABLE",
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=BACKENDS)
def where(request):
    """The backend and the device of a test: the reference on the CPU, our kernels where there is a GPU."""
    name, device = request.param
    return DSATopKBackend(name), device


def metadata_of(batch, **changes):
    device = str(batch.scores.device)
    fields = {
        "real_page_table": batch.compact,
        "page_size": batch.page_size,
        "page_table_1": batch.wide,
        "cu_seqlens_q": ints(batch.cu_q, device),
        "cu_seqlens_k": ints(batch.cu_k, device),
        "lengths": ints(batch.lengths, device),
        "topk_indices_offset": ints(batch.starts, device),
    }
    return TopkMetadata(**{**fields, **changes})


# --- RAGGED ---

# Four residues of the start (the alignments that a vector load meets) times the lengths on both sides of every border
# at which a per-row algorithm may change: 4 x 11 cases.
LENGTHS = (0, 1, 2047, 2048, 2049, 8192, 8193, 16384, 16385, 65537, 131072)
K = 2048


def ragged_scores(lengths, starts, width, device, seed=0):
    scores = torch.full((len(lengths), width), OUTSIDE, device=device)
    generator = torch.Generator().manual_seed(seed)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        scores[row, start : start + length] = torch.randn(length, generator=generator).to(device)
    return scores


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("residue", range(4))
def test_ragged_window(where, residue, length):
    backend, device = where
    lengths, starts = [length, max(length - 1, 0)], [8 + residue, residue]
    scores = ragged_scores(lengths, starts, length + 16, device, seed=length)
    before = scores.clone()
    offsets = [7_000_003 + residue, 0]
    out = backend.topk_transform(
        scores,
        ints(lengths, device),
        K,
        RAGGED,
        None,
        topk_indices_offset=ints(offsets, device),
        row_starts=ints(starts, device),
    )
    want = expect(scores, lengths, K, starts, lambda row, position: position + offsets[row])
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)
    assert torch.equal(scores, before)


def test_ragged_mixed_lengths_in_one_call(where):
    backend, device = where
    lengths = [0, 3, 2047, 2048, 2049, 8193, 16385, 20000, -5]
    starts = [0, 1, 2, 3, 5, 6, 7, 11, 4]
    scores = ragged_scores([max(n, 0) for n in lengths], starts, 20032, device)
    offsets = [start * 3 + 1 for start in starts]
    out = backend.topk_transform(
        scores,
        ints(lengths, device),
        K,
        RAGGED,
        None,
        topk_indices_offset=ints(offsets, device),
        row_starts=ints(starts, device),
    )
    want = expect(scores, lengths, K, starts, lambda row, position: position + offsets[row])
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("length", [2048, 2049, 9000, 17000])
def test_ragged_without_row_starts(where, length):
    backend, device = where
    scores = ragged_scores([length], [0], length + 4, device)
    out = backend.topk_transform(
        scores, ints([length], device), K, RAGGED, None, topk_indices_offset=ints([64], device)
    )
    want = expect(scores, [length], K, None, lambda row, position: position + 64)
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_ragged_offset_equal_to_start_gives_columns(where):
    backend, device = where
    batch = extend([3, 2], [10, 4], device=device)
    assert batch.starts == [0, 0, 0, 10, 10]
    assert batch.lengths == [8, 9, 10, 3, 4]
    out = backend.topk_transform(
        batch.scores,
        ints(batch.lengths, device),
        5,
        RAGGED,
        None,
        topk_indices_offset=ints(batch.starts, device),
        row_starts=ints(batch.starts, device),
    )
    for row, columns in enumerate(out.tolist()):
        chosen = [column for column in columns if column >= 0]
        picked = batch.scores[row, chosen]
        assert picked.max() < OUTSIDE
        window = batch.scores[row, batch.starts[row] : batch.starts[row] + batch.lengths[row]]
        assert sorted(picked.tolist()) == sorted(window.topk(min(5, len(window))).values.tolist())


def test_ragged_needs_an_offset():
    with pytest.raises(RuntimeError, match="topk_indices_offset"):
        TORCH.topk_transform(torch.zeros(2, 8), ints([8, 8], "cpu"), 4, RAGGED, None)


# --- PAGED: decode, MTP, packed, chunked, prefill context parallelism ---


@pytest.mark.parametrize("tables", ["compact", "wide", "both"])
def test_decode_on_either_table(where, tables):
    backend, device = where
    batch = extend([1, 1, 1, 1], [3000, 17, 2048, 2049], device=device)
    scores = torch.full((4, 3000), OUTSIDE, device=device)
    for row, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
        scores[row, :length] = batch.scores[row, start : start + length]
    metadata = metadata_of(batch)
    if tables == "compact":
        metadata.page_table_1 = None
    if tables == "wide":
        metadata.real_page_table = None
    out = backend.topk_transform(scores, ints(batch.lengths, device), K, PAGED, metadata)
    want = expect(scores, batch.lengths, K, None, lambda row, p: slot(batch.compact, row, p, batch.page_size))
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)
    explained = backend.explain(scores, K, PAGED, metadata).route
    assert explained.table == ("page_table_1" if tables == "wide" else "real_page_table")
    assert explained.rows == "identity"


@pytest.mark.parametrize("table_rows", ["per request", "per row"])
def test_mtp_rows_of_one_request_share_its_table(where, table_rows):
    backend, device = where
    next_n, keys = 3, [500, 1, 40]
    batch = extend([1, 1, 1], keys, device=device)
    lengths = [count - next_n + 1 + t for count in keys for t in range(next_n)]
    assert min(lengths) < 0 < max(lengths)  # a short request leaves negative lengths, as graph filler rows do
    scores = torch.randn(len(lengths), 512, generator=torch.Generator().manual_seed(1)).to(device)
    requests = [row // next_n for row in range(len(lengths))]
    metadata = metadata_of(batch, cu_seqlens_q=ints([0, 3, 6, 9], device))
    if table_rows == "per row":
        metadata.real_page_table = batch.compact[requests]
        metadata.page_table_1 = None
    out = backend.topk_transform(scores, ints(lengths, device), 64, PAGED, metadata)
    want = expect(scores, lengths, 64, None, lambda row, p: slot(batch.compact, requests[row], p, batch.page_size))
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("prepared", [True, False])
def test_packed_extend(where, wide, prepared):
    backend, device = where
    batch = extend([5, 0, 3, 1], [301, 7, 150, 77], device=device)
    metadata = metadata_of(batch) if wide else metadata_of(batch, page_table_1=None)
    starts = ints(batch.starts, device)
    if prepared:
        metadata = metadata.prepared(len(batch.starts), starts)
    out = backend.topk_transform(batch.scores, ints(batch.lengths, device), 100, PAGED, metadata, row_starts=starts)
    want = expect(
        batch.scores,
        batch.lengths,
        100,
        batch.starts,
        lambda row, p: slot(batch.compact, batch.requests[row], p, batch.page_size),
    )
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_packed_slice_starts_inside_a_page_of_the_wide_table(where):
    backend, device = where
    batch = extend([2, 2], [200, 90], device=device)
    skip = [37, 38, 5, 6]  # tokens of each request that its row leaves out: no multiple of the page size
    starts = [start + more for start, more in zip(batch.starts, skip, strict=True)]
    lengths = [length - more for length, more in zip(batch.lengths, skip, strict=True)]
    out = backend.topk_transform(
        batch.scores, ints(lengths, device), 40, PAGED, metadata_of(batch), row_starts=ints(starts, device)
    )
    want = expect(
        batch.scores,
        lengths,
        40,
        starts,
        lambda row, p: slot(batch.wide, batch.requests[row], p + skip[row], 1),
    )
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_packed_slice_on_the_compact_table_needs_page_boundaries(where, monkeypatch):
    backend, device = where
    batch = extend([1, 1, 1], [200, 90, 90], device=device)
    metadata = metadata_of(batch, page_table_1=None)
    skip = [32, 16, 5]  # the last one begins inside a page, which no entry can say
    starts = [start + more for start, more in zip(batch.starts, skip, strict=True)]
    lengths = [length - more for length, more in zip(batch.lengths, skip, strict=True)]
    arguments = (batch.scores, ints(lengths, device), 40, PAGED, metadata)
    out = backend.topk_transform(*arguments, row_starts=ints(starts, device))
    want = expect(
        batch.scores,
        lengths,
        40,
        starts,
        lambda row, p: slot(batch.compact, row, p + skip[row], batch.page_size),
    )
    want[2] = -1
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)
    monkeypatch.setenv("DSA_TOPK_VALIDATE", "1")
    with pytest.raises(ValueError, match="page_table_starts"):
        backend.topk_transform(*arguments, row_starts=ints(starts, device))


@pytest.mark.parametrize("as_tensor", [True, False])
def test_chunked_rows_name_their_requests(where, as_tensor):
    backend, device = where
    batch = extend([4, 3, 5], [120, 64, 200], device=device)
    chunk = slice(2, 9)  # the end of request 0, all of 1, the beginning of 2
    requests = batch.requests[chunk]
    metadata = metadata_of(batch)
    starts, lengths = batch.starts[chunk], batch.lengths[chunk]
    out = backend.topk_transform(
        batch.scores[chunk],
        ints(lengths, device),
        50,
        PAGED,
        metadata,
        row_starts=ints(starts, device),
        batch_idx_list=ints(requests, device) if as_tensor else requests,
    )
    want = expect(
        batch.scores[chunk],
        lengths,
        50,
        starts,
        lambda row, p: slot(batch.compact, requests[row], p, batch.page_size),
    )
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def zigzag(device):
    """One rank of a zigzag split of two requests: early and late shards, the keys of each gathered behind the last."""
    batch = extend([1, 1], [160, 90], device=device)
    shards = [(0, 10, 30), (0, 130, 160), (1, 0, 11), (1, 80, 90)]  # request, first query, end
    requests, lengths, starts, queries, base = [], [], [], [], 0
    for request, first, end in shards:
        queries.append(end - first)
        requests += [request] * (end - first)
        lengths += list(range(first + 1, end + 1))
        starts += [base] * (end - first)
        base += end
    scores = torch.full((len(requests), base), OUTSIDE)
    generator = torch.Generator().manual_seed(3)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        scores[row, start : start + length] = torch.randn(length, generator=generator)
    return batch, [shard[0] for shard in shards], queries, requests, lengths, starts, scores.to(device)


@pytest.mark.parametrize("wide", [True, False])
def test_prefill_context_parallel_paged(where, wide):
    backend, device = where
    batch, listed, queries, requests, lengths, starts, scores = zigzag(device)
    indexer = BaseIndexerMetadata(metadata_of(batch), PAGED, backend)
    if not wide:
        indexer.attn_metadata.page_table_1 = None
    out = indexer.topk_transform(
        scores,
        24,
        ks=ints(starts, device),
        cu_seqlens_q=ints(queries, device),
        ke_offset=ints(lengths, device),
        batch_idx_list=listed,
    )
    want = expect(scores, lengths, 24, starts, lambda row, p: slot(batch.compact, requests[row], p, batch.page_size))
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_prefill_context_parallel_ragged_offsets_count_queries(where):
    backend, device = where
    batch, listed, queries, _, lengths, starts, scores = zigzag(device)
    indexer = BaseIndexerMetadata(metadata_of(batch), RAGGED, backend)
    out = indexer.topk_transform(
        scores,
        24,
        ks=ints(starts, device),
        cu_seqlens_q=ints(queries, device),
        ke_offset=ints(lengths, device),
        batch_idx_list=listed,
    )
    offsets = [sum(queries[:shard]) for shard, count in enumerate(queries) for _ in range(count)]
    want = expect(scores, lengths, 24, starts, lambda row, p: p + offsets[row])
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_prefill_context_parallel_with_one_query_per_shard(where):
    # Both readings of batch_idx_list fit then; the caller's own cumulative lengths say that it is shards.
    backend, device = where
    batch = extend([1, 1], [60, 30], device=device)
    lengths, starts, listed = [30, 60], [0, 30], [1, 0]
    scores = torch.full((2, 90), OUTSIDE)
    scores[0, :30], scores[1, 30:90] = torch.randn(30), torch.randn(60)
    scores = scores.to(device)
    out = BaseIndexerMetadata(metadata_of(batch), PAGED, backend).topk_transform(
        scores,
        8,
        ks=ints(starts, device),
        cu_seqlens_q=ints([1, 1], device),
        ke_offset=ints(lengths, device),
        batch_idx_list=listed,
    )
    want = expect(scores, lengths, 8, starts, lambda row, p: slot(batch.compact, listed[row], p, batch.page_size))
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0)


def test_padding_rows_behind_the_batch_are_empty(where):
    backend, device = where
    batch = extend([3, 2], [50, 40], device=device)
    scores = torch.cat([batch.scores, torch.full((4, 90), OUTSIDE, device=device)])
    lengths = [*batch.lengths, 50, 50, 0, -3]  # even with left-over lengths
    starts = [*batch.starts, 0, 40, 0, 0]
    out = backend.topk_transform(
        scores, ints(lengths, device), 16, PAGED, metadata_of(batch), row_starts=ints(starts, device)
    )
    want = expect(
        batch.scores,
        batch.lengths,
        16,
        batch.starts,
        lambda row, p: slot(batch.compact, batch.requests[row], p, batch.page_size),
    )
    torch.testing.assert_close(out[:5].cpu(), want, rtol=0, atol=0)
    assert (out[5:] == -1).all()


def test_padding_rows_behind_the_shards_are_empty(where):
    backend, device = where
    batch, listed, queries, requests, lengths, starts, scores = zigzag(device)
    live = len(requests)
    padded = torch.cat([scores, torch.zeros(3, scores.shape[1], device=device)])
    out = BaseIndexerMetadata(metadata_of(batch), PAGED, backend).topk_transform(
        padded,
        24,
        ks=ints([*starts, 0, 0, 0], device),
        cu_seqlens_q=ints(queries, device),
        ke_offset=ints([*lengths, 40, 40, 40], device),
        batch_idx_list=listed,
    )
    want = expect(scores, lengths, 24, starts, lambda row, p: slot(batch.compact, requests[row], p, batch.page_size))
    torch.testing.assert_close(out[:live].cpu(), want, rtol=0, atol=0)
    assert (out[live:] == -1).all()


def test_transform_compiles_whole(where):
    backend, device = where
    batch = extend([2, 3], [70, 50], device=device)
    metadata = metadata_of(batch)

    def step(scores, lengths, starts):
        return backend.topk_transform(scores, lengths, 16, PAGED, metadata, row_starts=starts) + 1

    arguments = (batch.scores, ints(batch.lengths, device), ints(batch.starts, device))
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments), step(*arguments))


def test_rows_of_an_idle_rank(where):
    backend, device = where
    batch = extend([1, 1], [20, 20], device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    scores = torch.empty(0, 40, device=device)
    metadata = metadata_of(batch, cu_seqlens_q=ints([0, 0, 0], device))
    assert backend.topk_transform(scores, none, 8, PAGED, metadata, row_starts=none).shape == (0, 8)
    assert backend.topk_transform(scores, none, 8, RAGGED, metadata, topk_indices_offset=none).shape == (0, 8)
    assert backend.topk_func(scores, none, 8).shape == (0, 8)


# --- Unfused ---


@pytest.mark.parametrize("seed", range(3))
def test_unfused_is_valid_and_right(where, seed):
    backend, device = where
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 500, (12,), generator=generator).tolist()
    lengths = [0, 64, 65, *torch.randint(0, 800, (9,), generator=generator).tolist()]
    scores = torch.randperm(12 * 1500, generator=generator).reshape(12, 1500).float().to(device)  # free of ties
    out = backend.topk_func(scores, ints(lengths, device), 64, ints(starts, device))
    assert out.dtype == torch.int32
    for row, line in enumerate(out.tolist()):
        valid = [entry for entry in line if entry >= 0]
        assert len(valid) == min(lengths[row], 64) == len(set(valid))
        assert all(entry < lengths[row] for entry in valid)
        window = scores[row, starts[row] : starts[row] + lengths[row]]
        assert set(valid) == set(window.topk(len(valid)).indices.tolist())


@pytest.mark.parametrize("how", ["argument", "environment", "indexer"])
@pytest.mark.parametrize("method", [PAGED, RAGGED])
def test_unfused_returns_positions(where, how, method, monkeypatch):
    backend, device = where
    batch = extend([2, 2], [80, 60], device=device)
    lengths, starts = ints(batch.lengths, device), ints(batch.starts, device)
    if how == "environment":
        monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")
    if how == "indexer":
        indexer = BaseIndexerMetadata(metadata_of(batch), method, backend, force_unfused_topk=True)
        out = indexer.topk_transform(batch.scores, 20, ks=starts)
    else:
        out = backend.topk_transform(
            batch.scores,
            lengths,
            20,
            method,
            metadata_of(batch),
            topk_indices_offset=starts,
            row_starts=starts,
            force_unfused_topk=how == "argument",
        )
    torch.testing.assert_close(out.cpu(), expect(batch.scores, batch.lengths, 20, batch.starts), rtol=0, atol=0)


# --- The indexer's pass-through ---


def test_pass_through_hands_everything_on(monkeypatch):
    seen = {}

    def record(self, logits, lengths, topk, method, metadata, **kwargs):
        seen.update(kwargs, logits=logits, lengths=lengths, topk=topk, method=method, metadata=metadata)
        return logits

    monkeypatch.setattr(DSATopKBackend, "topk_transform", record)
    metadata = metadata_of(extend([2, 1], [9, 5]))
    logits, ks, ke, offset = torch.zeros(3, 14), ints([0, 0, 9], "cpu"), ints([8, 9, 5], "cpu"), ints([1, 2, 3], "cpu")
    queries = ints([2, 1], "cpu")
    result = BaseIndexerMetadata(metadata, RAGGED, TORCH).topk_transform(
        logits,
        7,
        ks=ks,
        cu_seqlens_q=queries,
        ke_offset=ke,
        batch_idx_list=[1, 0],
        topk_indices_offset_override=offset,
    )
    assert result is logits
    assert seen["lengths"] is ke
    assert seen["row_starts"] is ks
    assert seen["topk_indices_offset"] is offset
    assert seen["batch_idx_list"] == [1, 0]
    assert seen["cu_seqlens_q_topk"].tolist() == [0, 2, 3]
    assert (seen["topk"], seen["method"], seen["metadata"]) == (7, RAGGED, metadata)
    assert seen["force_unfused_topk"] is False


def test_pass_through_takes_the_rest_from_the_metadata(monkeypatch):
    seen = {}
    monkeypatch.setattr(DSATopKBackend, "topk_transform", lambda self, *args, **kwargs: seen.update(kwargs, args=args))
    metadata = metadata_of(extend([2, 1], [9, 5]))
    BaseIndexerMetadata(metadata, RAGGED, TORCH).topk_transform(torch.zeros(3, 14), 7)
    assert seen["args"][1] is metadata.lengths
    assert seen["topk_indices_offset"] is metadata.topk_indices_offset
    assert seen["row_starts"] is seen["cu_seqlens_q_topk"] is seen["batch_idx_list"] is None


def test_pass_through_reads_an_engines_own_metadata_object():
    # SGLang's class has other names for some of it and lacks the rest.
    batch = extend([1, 1], [40, 30])
    metadata = SimpleNamespace(
        page_size=batch.page_size,
        real_page_table=batch.compact,
        page_table_1=None,
        cu_seqlens_q=ints(batch.cu_q, "cpu"),
        cu_seqlens_k=ints(batch.cu_k, "cpu"),
        dsa_seqlens_expanded=ints([40, 30], "cpu"),
    )
    scores = torch.randn(2, 64)
    out = BaseIndexerMetadata(metadata, PAGED, TORCH).topk_transform(scores, 8)
    want = expect(scores, [40, 30], 8, None, lambda row, p: slot(batch.compact, row, p, batch.page_size))
    assert torch.equal(out, want)


def test_pass_through_takes_cumulative_query_lengths_too():
    batch, listed, queries, _, lengths, starts, scores = zigzag("cpu")
    indexer = BaseIndexerMetadata(metadata_of(batch), PAGED, TORCH)
    common = {"ks": ints(starts, "cpu"), "ke_offset": ints(lengths, "cpu"), "batch_idx_list": listed}
    cumulative = [0, *torch.tensor(queries).cumsum(0).tolist()]
    by_lengths = indexer.topk_transform(scores, 24, cu_seqlens_q=ints(queries, "cpu"), **common)
    assert torch.equal(by_lengths, indexer.topk_transform(scores, 24, cu_seqlens_q=ints(cumulative, "cpu"), **common))
    with pytest.raises(ValueError, match="cu_seqlens_q: expected 4 query lengths or 5 cumulative"):
        indexer.topk_transform(scores, 24, cu_seqlens_q=ints([1, 2], "cpu"), **common)


def test_pass_through_without_lengths():
    indexer = BaseIndexerMetadata(TopkMetadata(), PAGED, TORCH)
    with pytest.raises(ValueError, match="ke_offset"):
        indexer.topk_transform(torch.zeros(1, 4), 2)


# --- No host synchronisation ---

LAYOUTS = (
    "decode",
    "mtp",
    "packed",
    "packed compact",
    "chunk",
    "context parallel",
    "ragged",
    "context parallel ragged",
)


def run_layout(layout, backend, device):
    """One call of each layout, with shapes and no promise about values (they may be fake)."""

    def numbers(*shape):
        return torch.ones(*shape, dtype=torch.int32, device=device)

    metadata = TopkMetadata(
        real_page_table=numbers(3, 4),
        page_size=8,
        page_table_1=None if "compact" in layout else numbers(3, 32),
        cu_seqlens_q=numbers(4),
        cu_seqlens_k=numbers(4),
    )
    rows = 3 if layout == "decode" else 6
    scores, per_row = torch.zeros(rows, 32, device=device), numbers(rows)
    method = RAGGED if "ragged" in layout else PAGED
    if layout in ("decode", "mtp"):
        return backend.topk_transform(scores, per_row, 4, method, metadata)
    if layout == "chunk":
        return backend.topk_transform(scores, per_row, 4, method, metadata, row_starts=per_row, batch_idx_list=per_row)
    if layout == "ragged":
        return backend.topk_transform(scores, per_row, 4, method, metadata, topk_indices_offset=per_row)
    if layout.startswith("context"):
        return BaseIndexerMetadata(metadata, method, backend).topk_transform(
            scores, 4, ks=per_row, cu_seqlens_q=numbers(2), ke_offset=per_row, batch_idx_list=numbers(2)
        )
    return backend.topk_transform(scores, per_row, 4, method, metadata, row_starts=per_row)


@pytest.fixture
def watched_repeat_interleave(monkeypatch):
    """Refuse ``repeat_interleave`` without ``output_size``: it would read its row count back from the device."""
    original = torch.repeat_interleave

    def checked(*args, **kwargs):
        assert kwargs.get("output_size") is not None
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "repeat_interleave", checked)
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", checked)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_reads_device_data(layout, watched_repeat_interleave):
    # A fake tensor has no data: whatever reads some on the host (item, tolist, nonzero, a bool) raises.
    with FakeTensorMode():
        result = run_layout(layout, TORCH, "cpu")
    assert tuple(result.shape) == ((3 if layout == "decode" else 6), 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["cuda", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_synchronises(layout, name, watched_repeat_interleave):
    backend = DSATopKBackend(name)
    run_layout(layout, backend, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_layout(layout, backend, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_host_list_reaches_the_device_without_waiting():
    values = [3, 3, 0, 2, 2, 2]
    row_maps.list_on_device(values, torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = row_maps.list_on_device(values, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.tolist() == values


def test_prepared_metadata_needs_no_row_maps_later(monkeypatch):
    batch = extend([5, 3], [60, 44])
    starts = ints(batch.starts, "cpu")
    plain = TORCH.topk_transform(
        batch.scores, ints(batch.lengths, "cpu"), 16, PAGED, metadata_of(batch), row_starts=starts
    )
    prepared = metadata_of(batch).prepared(8, starts)
    monkeypatch.setattr(row_maps, "requests_of_rows", None)
    monkeypatch.setattr(row_maps, "window_starts", None)
    again = TORCH.topk_transform(batch.scores, ints(batch.lengths, "cpu"), 16, PAGED, prepared, row_starts=starts)
    assert torch.equal(plain, again)


def test_prepared_names_what_is_missing():
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        TopkMetadata().prepared(3)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        TopkMetadata(cu_seqlens_q=ints([0, 3], "cpu")).prepared(3, ints([0, 0, 0], "cpu"))


# --- Names, settings, errors, explanations ---


@pytest.mark.parametrize(
    ("text", "member"),
    [
        ("cuda", DSATopKBackend.CUDA),
        ("dsa-topk", DSATopKBackend.CUDA),
        ("sgl-kernel", DSATopKBackend.SGL_KERNEL),
        ("SGL_KERNEL", DSATopKBackend.SGL_KERNEL),
        ("flashinfer", DSATopKBackend.FLASHINFER),
        (" torch ", DSATopKBackend.TORCH),
        (DSATopKBackend.TORCH, DSATopKBackend.TORCH),
    ],
)
def test_parse(text, member):
    assert DSATopKBackend.parse(text) is member
    flags = (member.is_cuda(), member.is_sgl_kernel(), member.is_flashinfer(), member.is_torch())
    assert sum(flags) == 1


def test_parse_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="'trtllm'"):
        DSATopKBackend.parse("trtllm")
    with pytest.raises(TypeError, match="NoneType"):
        DSATopKBackend.parse(None)


def test_parse_auto_follows_the_machine():
    expected = "cuda" if dsa_topk.backends.get("cuda").unavailable() is None else "torch"
    assert DSATopKBackend.parse("auto").value == expected


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_an_unknown_setting_raises_and_names_itself(name, monkeypatch):
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=rf"{name}: expected one of .*, or unset; got 'maybe'"):
        TORCH.topk_func(torch.zeros(1, 4), ints([4], "cpu"), 2)


@pytest.mark.parametrize("word", ["1", "true", "yes", "y", "on", "ON"])
def test_a_switch_takes_every_word_for_on(word, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC", word)
    assert Settings.from_env().flashinfer_deterministic is True


@pytest.mark.parametrize("word", ["0", "false", "no", "n", "off", "OFF"])
def test_a_switch_takes_every_word_for_off(word, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", word)
    assert Settings.from_env().fuse is False


def test_settings_from_the_environment(monkeypatch):
    assert Settings.from_env() == Settings()
    for name, value in zip(ENVIRONMENT, ("no", "False", "1", "large", "largest", "wide"), strict=True):
        monkeypatch.setenv(name, value)
    assert Settings.from_env() == Settings(False, False, True, 2, "largest", "wide")
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
    assert Settings.from_env() == Settings()


def test_tie_rule_from_the_environment(where, monkeypatch):
    backend, device = where
    scores = torch.zeros(1, 10, device=device)
    assert backend.topk_func(scores, ints([9], device), 3).tolist() == [[0, 1, 2]]
    monkeypatch.setenv("DSA_TOPK_TIE_BREAK", "largest")
    assert backend.topk_func(scores, ints([9], device), 3).tolist() == [[6, 7, 8]]


@pytest.mark.parametrize(
    ("variable", "value", "packed", "table"),
    [
        (None, None, False, "real_page_table"),
        (None, None, True, "page_table_1"),
        ("SGLANG_OPT_USE_TOPK_V2", "0", False, "page_table_1"),
        ("DSA_TOPK_PAGE_TABLE", "compact", True, "real_page_table"),
        ("DSA_TOPK_PAGE_TABLE", "wide", False, "page_table_1"),
    ],
)
def test_which_table_is_read(variable, value, packed, table, monkeypatch):
    if variable is not None:
        monkeypatch.setenv(variable, value)
    batch = extend([1, 1, 1], [30, 20, 10])
    starts = ints(batch.starts, "cpu") if packed else None
    route = TORCH.explain(batch.scores, 4, PAGED, metadata_of(batch), row_starts=starts).route
    assert route.table == table
    assert route.page_size == (1 if table == "page_table_1" else batch.page_size)


def test_who_lets_the_engine_drop_the_wide_table(monkeypatch):
    assert [member.should_use_topk_v2() for member in DSATopKBackend] == [True, False, False, True]
    monkeypatch.setenv("SGLANG_OPT_USE_TOPK_V2", "0")
    assert not any(member.should_use_topk_v2() for member in DSATopKBackend)


@pytest.mark.parametrize(
    ("changes", "call", "text"),
    [
        ({"real_page_table": None, "page_table_1": None}, {}, "real_page_table or page_table_1"),
        (
            {"cu_seqlens_q": None},
            {"row_starts": ints([0, 0], "cpu")},
            "row_starts: packed PAGED rows need cu_seqlens_q",
        ),
        ({"cu_seqlens_k": None}, {"row_starts": ints([0, 0], "cpu")}, "cu_seqlens_k or window_starts"),
        ({}, {"batch_idx_list": [0, 1, 1]}, "batch_idx_list: expected one request per row"),
        (
            {"cu_seqlens_q": None, "real_page_table": ints([[0]], "cpu"), "page_table_1": None},
            {},
            "real_page_table: PAGED with 2 rows needs a table row for each",
        ),
    ],
)
def test_what_a_layout_lacks_is_named(changes, call, text):
    batch = extend([1, 1], [30, 20])
    with pytest.raises(RuntimeError, match=text):
        TORCH.topk_transform(batch.scores, ints(batch.lengths, "cpu"), 4, PAGED, metadata_of(batch, **changes), **call)


def test_mismatched_rows_are_refused_not_rerouted():
    batch = extend([1, 1], [30, 20])
    with pytest.raises(ValueError, match="lengths"):
        TORCH.topk_transform(batch.scores, ints([3], "cpu"), 4, PAGED, metadata_of(batch))


def test_a_backend_that_is_not_there_says_so():
    if torch.cuda.is_available():
        pytest.skip("a GPU machine may have it")
    with pytest.raises(RuntimeError, match="'flashinfer' is not available"):
        DSATopKBackend.FLASHINFER.topk_func(torch.zeros(1, 4), ints([4], "cpu"), 2)
    with pytest.raises(RuntimeError, match="'cuda' is not available"):
        DSATopKBackend.CUDA.topk_func(torch.zeros(1, 4), ints([4], "cpu"), 2)


def test_each_kind_of_call_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(backend_module, "_logged", set())
    batch = extend([1, 1], [30, 20])
    arguments = (batch.scores, ints(batch.lengths, "cpu"), 4, PAGED, metadata_of(batch))
    with caplog.at_level(logging.INFO, logger="dsa_topk.engine"):
        for _ in range(3):
            TORCH.topk_transform(*arguments)
        TORCH.topk_transform(*arguments, row_starts=ints(batch.starts, "cpu"))
    assert [record.name for record in caplog.records] == ["dsa_topk.engine"] * 2
    assert "torch: topk_paged, real_page_table with page size 16" in caplog.text
    assert "page_table_1 with page size 1" in caplog.text


def test_explain_is_readable():
    batch = extend([1, 1], [30, 20])
    explained = TORCH.explain(batch.scores, 4, PAGED, metadata_of(batch), row_starts=ints(batch.starts, "cpu"))
    text = str(explained)
    assert "torch: topk_paged, page_table_1 with page size 1" in text
    assert "table window from row_starts - cu_seqlens_k" in text
    assert explained.registry.backend == "torch"
