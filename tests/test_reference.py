"""The reference against a brute-force oracle in plain Python: no tensors, exact integers, one sorted() per row."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import dsa_topk
from dsa_topk import reference
from dsa_topk._call import Call, Form, Order

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
INT64 = (-(2**63), 2**63 - 1)
INT32 = (-(2**31), 2**31 - 1)


# --- the oracle


def rank(bits: int, dtype: torch.dtype) -> tuple[int, float]:
    """A Python value that orders like the contract: the score as a double, which holds all three types exactly."""
    if dtype == torch.float32:
        value = struct.unpack("<f", struct.pack("<i", bits))[0]
    elif dtype == torch.float16:
        value = struct.unpack("<e", struct.pack("<h", bits))[0]
    else:
        value = struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0]
    return (0, 0.0) if math.isnan(value) else (1, value)


def low32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def oracle(form: str, scores: torch.Tensor, lengths: torch.Tensor | None, k: int, **kw: Any) -> dict[str, list]:
    """Indices, positions and score bits of a call, computed row by row from the words of the contract."""
    rows, width = scores.shape
    bits = scores.detach().view(BITS[scores.dtype]).tolist()
    minus_infinity = torch.tensor(-math.inf, dtype=scores.dtype).view(BITS[scores.dtype]).item()
    as_list = {name: value.tolist() for name, value in kw.items() if isinstance(value, torch.Tensor)}
    result: dict[str, list] = {"indices": [], "positions": [], "bits": []}
    for i in range(rows):
        start = clamp(as_list["row_starts"][i], 0, width) if "row_starts" in as_list else 0
        limit = width - start
        if form == "paged":
            requests, entries = kw["page_table"].shape
            b = as_list["row_to_batch"][i] if "row_to_batch" in as_list else i
            first = as_list["page_table_starts"][i] if "page_table_starts" in as_list else 0
            valid = 0 <= b < requests and 0 <= first <= entries
            limit = min(limit, (entries - first) * kw["page_size"]) if valid else 0
        n = clamp(width if lengths is None else int(lengths[i]), 0, limit)
        sign = 1 if kw.get("tie_break", "smallest") == "smallest" else -1
        ranked = sorted(range(n), key=lambda p: (rank(bits[i][start + p], scores.dtype), -sign * p), reverse=True)
        chosen = ranked[:k]
        if kw.get("order", "position") == "position":
            chosen.sort()
        if form == "ragged":
            values = [low32(p + as_list["out_offsets"][i]) for p in chosen]
        elif form == "paged":
            size = kw["page_size"]
            values = [low32(as_list["page_table"][b][first + p // size] * size + p % size) for p in chosen]
        else:
            values = list(chosen)
        pad = k - len(chosen)
        result["indices"].append(values + [-1] * pad)
        result["positions"].append(chosen + [-1] * pad)
        result["bits"].append([bits[i][start + p] for p in chosen] + [minus_infinity] * pad)
    return result


def compare(form: str, scores: torch.Tensor, lengths: torch.Tensor | None, k: int, **kw: Any) -> None:
    """Call with every output asked for and compare each with the oracle's."""
    expected = oracle(form, scores, lengths, k, **kw)
    before = scores.detach().view(BITS[scores.dtype]).clone()
    positions = None
    if form != "positions":
        kw["out_positions"] = positions = torch.full((scores.shape[0], k), 77, dtype=torch.int32)
    call = getattr(dsa_topk, f"topk_{form}")
    indices, selected = call(scores, lengths, k, return_scores=True, backend="torch", **kw)
    assert indices.dtype == torch.int32
    assert selected.dtype == scores.dtype
    assert indices.tolist() == expected["indices"]
    assert selected.view(BITS[scores.dtype]).tolist() == expected["bits"]
    if positions is not None:
        assert positions.tolist() == expected["positions"]
    assert torch.equal(scores.detach().view(BITS[scores.dtype]), before)
    assert torch.equal(call(scores, lengths, k, backend="torch", **kw), indices)


# --- properties


def from_bits(rows: list[list[int]], width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(rows, dtype=BITS[dtype]).reshape(len(rows), width).view(dtype)


def score_bits(dtype: torch.dtype) -> st.SearchStrategy[int]:
    """Bit patterns of any kind, often ones that tie, and always the ends of each class."""
    size = 32 if dtype == torch.float32 else 16
    infinity = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
    magnitudes = [0, 1, 2, infinity - 1, infinity, infinity + 1, 2 ** (size - 1) - 1, infinity // 2, infinity // 2 + 1]
    sign = 2 ** (size - 1)
    edges = [value for magnitude in magnitudes for value in (magnitude, magnitude - sign)]
    return st.sampled_from(edges) | st.integers(-sign, sign - 1)


def exact_integers(width: int) -> st.SearchStrategy[int]:
    near = st.integers(-3, width + 3)
    return near | st.sampled_from([*INT64, *INT32, 2**31, 2**32, 2**32 + 1, -(2**32), 2**63 - 1 - width])


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, torch.Tensor, torch.Tensor | None, int, dict[str, Any]]:
    """A call of any form with its arguments; sizes are tiny because every rule already shows there."""
    form = draw(st.sampled_from(["positions", "ragged", "paged"]))
    dtype = draw(st.sampled_from(DTYPES))
    rows, width = draw(st.integers(0, 3)), draw(st.integers(0, 12))
    pool = draw(st.lists(score_bits(dtype), min_size=1, max_size=6))  # few values: ties are the rule
    scores = from_bits(
        [[draw(st.sampled_from(pool)) for _ in range(width)] for _ in range(rows)] or [[]] * rows, width, dtype
    )
    k = draw(st.integers(1, 14))

    def vector(values: st.SearchStrategy[int]) -> torch.Tensor:
        numbers = [draw(values) for _ in range(rows)]
        small = all(INT32[0] <= number <= INT32[1] for number in numbers)
        tensor = torch.tensor(numbers, dtype=torch.int32 if small and draw(st.booleans()) else torch.int64)
        if draw(st.booleans()):  # any stride is legal
            spread = torch.full((rows, 3), -9, dtype=tensor.dtype)
            spread[:, 1] = tensor
            tensor = spread[:, 1]
        return tensor

    kw: dict[str, Any] = {
        "order": draw(st.sampled_from(["position", "score"])),
        "tie_break": draw(st.sampled_from(["smallest", "largest"])),
    }
    lengths = vector(exact_integers(width)) if draw(st.booleans()) else None
    if draw(st.booleans()):
        kw["row_starts"] = vector(exact_integers(width))
    if form == "ragged":
        kw["out_offsets"] = vector(exact_integers(width))
    elif form == "paged":
        mapped = draw(st.booleans())
        requests, entries = draw(st.integers(0 if mapped else rows, 4)), draw(st.integers(0, 6))
        table = st.integers(0, 9) | st.sampled_from([*INT32, -1])
        kw["page_table"] = torch.tensor(
            [[draw(table) for _ in range(entries)] for _ in range(requests)], dtype=torch.int32
        ).reshape(requests, entries)
        kw["page_size"] = draw(st.integers(1, 5) | st.sampled_from([64, 2**31 - 1]))
        if mapped:
            kw["row_to_batch"] = vector(st.integers(-1, 4) | st.sampled_from([*INT64, *INT32]))
        if draw(st.booleans()):
            kw["page_table_starts"] = vector(st.integers(-1, 7) | st.sampled_from([*INT64, *INT32]))
    return form, scores, lengths, k, kw


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_any_call_equals_the_oracle(call: tuple[str, torch.Tensor, torch.Tensor | None, int, dict[str, Any]]) -> None:
    form, scores, lengths, k, kw = call
    compare(form, scores, lengths, k, **kw)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_keys_order_every_pair_of_bit_patterns_as_the_contract_does(data: st.DataObject, dtype: torch.dtype) -> None:
    bits = data.draw(st.lists(score_bits(dtype), min_size=2, max_size=2))
    first, second = reference.score_keys(torch.tensor(bits, dtype=BITS[dtype]), dtype).tolist()
    a, b = rank(bits[0], dtype), rank(bits[1], dtype)
    assert (first > second, first == second) == (a > b, a == b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_65536_patterns_of_a_16_bit_type_in_rank_order(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    scores = patterns.view(dtype)
    ranks = [rank(bits, dtype) for bits in patterns.tolist()]
    expected = sorted(range(2**16), key=lambda p: (ranks[p], -p), reverse=True)
    for first in range(0, 2**16, 8192):  # k ends at 8192: cut the best ones off by rank and select again
        remaining = torch.tensor(sorted(expected[first:]))
        got = dsa_topk.topk_positions(scores[remaining][None], None, 8192, order="score", backend="torch")
        assert remaining[got[0].long()].tolist() == expected[first : first + 8192]


# --- strides, sizes, chunks


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_stride_zero_and_padded_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(4, 40, generator=generator).to(dtype)
    lengths = torch.tensor([3, 30, 0, 31])
    compare("positions", base[0, 3:34].expand(4, 31), lengths, 7)
    compare("positions", base[:, 5:36], lengths, 7, row_starts=torch.tensor([0, 1, 2, 3]))


def test_huge_row_stride() -> None:
    # 2**31 + 5 elements apart: the storage is virtual (never touched pages cost nothing), so two rows are enough.
    storage = torch.UntypedStorage(2 * (2**31 + 64))
    scores = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (2, 20), (2**31 + 5, 1))
    scores.copy_(torch.randn(2, 20, generator=torch.Generator().manual_seed(2)))
    compare("positions", scores, None, 5)


def test_a_single_row_may_have_any_row_stride() -> None:
    row = torch.randn(1, 9).as_strided((1, 9), (0, 1))
    compare("positions", row, None, 4)


def test_table_with_padded_rows_and_expanded_vectors() -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.randint(0, 99, (3, 10), generator=generator, dtype=torch.int32)[:, 2:7]
    scores = torch.randn(3, 20, generator=generator)
    length = torch.tensor([17], dtype=torch.int32).expand(3)
    compare("paged", scores, length, 6, page_table=table, page_size=4, row_to_batch=torch.tensor([2]).expand(3))


@pytest.mark.parametrize("order", ["position", "score"])
@pytest.mark.parametrize("tie_break", ["smallest", "largest"])
def test_long_rows_and_large_k_across_chunks(order: str, tie_break: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows above the chunk size, rows that share a chunk, and a last chunk that is not full.
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(0, 40, (5, 9000), generator=generator).to(torch.float32)
    lengths = torch.tensor([9000, 8192, 8193, 100, -1])
    kw = {"out_offsets": torch.tensor([0, 10, -10, 2**31, 5]), "order": order, "tie_break": tie_break}
    compare("ragged", scores, lengths, 8192, **kw)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 18001)
    compare("ragged", scores, lengths, 8192, **kw)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 1000)
    compare("ragged", scores, lengths, 8192, **kw)


def test_mostly_outside_the_window_with_better_scores_there() -> None:
    scores = torch.full((3, 500), math.inf)
    scores[:, ::7] = math.nan
    for i, start in enumerate((1, 250, 497)):
        scores[i, start : start + 3] = torch.tensor([math.nan, -math.inf, math.nan])
    starts = torch.tensor([1, 250, 497])
    compare("positions", scores, torch.tensor([3, 3, 3]), 2, row_starts=starts)
    compare("positions", scores, torch.tensor([3, 3, 3]), 5, row_starts=starts, order="score", tie_break="largest")


@pytest.mark.parametrize("dtype", DTYPES)
def test_returned_scores_keep_signalling_nans_and_signs(dtype: torch.dtype) -> None:
    infinity = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
    sign = 2**31 if dtype == torch.float32 else 2**15
    scores = from_bits([[infinity + 1, -sign, 0, infinity + 1 - sign, infinity - sign]], 5, dtype)
    compare("positions", scores, None, 6, order="score")
    compare("positions", scores, None, 6)


def test_outputs_with_gaps_leave_the_gaps_alone() -> None:
    scores = torch.randn(3, 30, generator=torch.Generator().manual_seed(5))
    buffer = torch.full((3, 17), 55, dtype=torch.int32)
    out, out_positions = buffer[:, 1:6], buffer[:, 8:13]
    result = dsa_topk.topk_ragged(
        scores, None, 5, out_offsets=torch.tensor([9, 9, 9]), out=out, out_positions=out_positions, backend="torch"
    )
    assert result is out
    assert torch.equal(out, out_positions + 9)
    untouched = torch.ones(17, dtype=torch.bool)
    untouched[1:6] = untouched[8:13] = False
    assert (buffer[:, untouched] == 55).all()


def test_scores_that_require_grad_are_detached() -> None:
    scores = torch.randn(2, 9, requires_grad=True)
    indices, selected = dsa_topk.topk_positions(scores, None, 3, return_scores=True)
    assert not selected.requires_grad
    assert torch.equal(selected, scores.detach().gather(1, indices.long()))


def test_outputs_made_in_inference_mode_can_be_filled_outside_and_the_reverse() -> None:
    scores = torch.randn(2, 9)
    with torch.inference_mode():
        inner = torch.empty(2, 3, dtype=torch.int32)
    outer = torch.empty(2, 3, dtype=torch.int32)
    dsa_topk.topk_positions(scores, None, 3, out=inner, backend="torch")
    with torch.inference_mode():
        dsa_topk.topk_positions(scores, None, 3, out=outer, backend="torch")
    assert torch.equal(inner, outer)
    outer.add_(1)  # still an ordinary tensor


# --- memory, host synchronisation, graphs


def _peak_temporaries(rows: int, width: int) -> int:
    """Most bytes alive at once that a call takes from torch's allocator."""
    scores = torch.randn(rows, width)
    out = torch.empty(rows, 64, dtype=torch.int32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        dsa_topk.topk_positions(scores, torch.full((rows,), width), 64, out=out, backend="torch")
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def test_temporaries_are_bounded_by_the_chunk_not_by_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # A 64th of the real chunk: the bound is per score, so it carries over. 24 B here leave 40 B for a device's sort.
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", reference.CHUNK_ELEMENTS // 64)
    chunk = reference.CHUNK_ELEMENTS
    one, many = _peak_temporaries(chunk // 4096, 4096), _peak_temporaries(8 * chunk // 4096, 4096)
    assert 8 * chunk <= one <= 24 * chunk  # at least the 64-bit keys: the measurement sees something
    assert many <= one + chunk
    assert 64 * 64 * chunk < 2**30


@pytest.mark.slow
def test_4096_rows_of_131072_need_less_than_1_gib() -> None:
    # In a process of its own, where the peak of resident memory is that of this call; rows share one input row. (Not
    # getrusage: its peak begins with that of the parent, here a test worker that may be large.)
    script = """
import re, torch, dsa_topk
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
scores = torch.randn(1, 131072).expand(4096, -1)
dsa_topk.topk_positions(scores[:1, :100], None, 8, backend="torch")
before = peak()
dsa_topk.topk_positions(scores, None, 2048, backend="torch")
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 2**22 < int(result.stdout) < 2**30


@pytest.mark.parametrize("form", ["positions", "ragged", "paged"])
@pytest.mark.parametrize("order", ["position", "score"])
def test_nothing_depends_on_data_or_leaves_the_device(form: Form, order: Order) -> None:
    # Meta tensors have no values: .item(), boolean-mask indexing and nonzero() raise on them.
    device = "meta"
    vector = torch.zeros(6, dtype=torch.int64, device=device)
    call = Call(
        form,
        torch.empty(6, 100, device=device),
        vector,
        9,
        row_starts=vector,
        order=order,
        out=torch.empty(6, 9, dtype=torch.int32, device=device),
        out_scores=torch.empty(6, 9, device=device),
    )
    if form == "ragged":
        call.out_offsets = vector
    elif form == "paged":
        call.page_table = torch.zeros(2, 3, dtype=torch.int32, device=device)
        call.page_size, call.row_to_batch, call.page_table_starts = 3, vector, vector
    if form != "positions":
        call.out_positions = torch.empty(6, 9, dtype=torch.int32, device=device)
    reference.select(call)
    with pytest.raises((RuntimeError, NotImplementedError)):
        vector.max().item()  # what the reference would have run into


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("order", ["position", "score"])
def test_captured_in_a_cuda_graph_and_replayed_with_other_metadata(order: Order) -> None:
    generator = torch.Generator().manual_seed(6)
    scores = torch.randn(7, 30000, generator=generator)
    lengths = [torch.randint(-5, 31000, (7,), generator=generator) for _ in range(2)]
    static_scores, static_lengths = scores.cuda(), lengths[0].cuda()
    out = torch.empty(7, 2048, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dsa_topk.topk_positions(static_scores, static_lengths, 2048, order=order, out=out, backend="torch")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        dsa_topk.topk_positions(static_scores, static_lengths, 2048, order=order, out=out, backend="torch")
    for length in lengths:
        static_lengths.copy_(length)
        graph.replay()
        expected = dsa_topk.topk_positions(scores, length, 2048, order=order, backend="torch")
        assert torch.equal(out.cpu(), expected)
