"""Backends give the same selection, each within what it promises; what the comparison backends pass on, and refuse.

FlashInfer and sgl-kernel are played by stand-ins with their public signatures that compute row by row (in an order of
their own); where the real packages and a GPU are there, the same cases run on them too.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import dsa_topk
from dsa_topk.backends import flashinfer as flashinfer_backend
from dsa_topk.backends import sgl_kernel as sgl_kernel_backend
from dsa_topk.engine import DSATopKBackend, TopkMetadata, TopkTransformMethod
from engine_cases import NEEDS_GPU, OUTSIDE, best, ints

PAGED, RAGGED = TopkTransformMethod.PAGED, TopkTransformMethod.RAGGED


class Recorder(ModuleType):
    """A stand-in package: keeps the arguments of its calls."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []


def shuffled(rows, k):
    """-1 padded rows in descending order of position: no order was promised."""
    return torch.tensor([sorted(row, reverse=True) + [-1] * (k - len(row)) for row in rows], dtype=torch.int32)


def select(scores, lengths, k, starts, tie_break=0):
    rule = "largest" if tie_break == 2 else "smallest"
    begin = [0] * len(lengths) if starts is None else starts.tolist()
    lines = zip(scores.cpu(), begin, lengths.tolist(), strict=True)
    return [best(line[first : first + length], k, rule) for line, first, length in lines]


def fake_flashinfer():
    module = Recorder("flashinfer")

    def top_k_page_table_transform(
        input, src_page_table, lengths, k, row_to_batch=None, deterministic=False, tie_break=0, dsa_graph_safe=False,
        row_starts=None, page_table_row_starts=None, *, page_size=1, out=None, out_raw_indices=None,
    ):  # fmt: skip
        module.calls.append(locals().copy())
        if page_table_row_starts is None:
            page_table_row_starts = row_starts
        picked = shuffled(select(input, lengths, k, row_starts, tie_break), k)
        result = torch.full_like(picked, -1)
        for row, line in enumerate(picked.tolist()):
            request = row if row_to_batch is None else int(row_to_batch[row])
            first = 0 if page_table_row_starts is None else int(page_table_row_starts[row])
            for at, p in enumerate(line):
                if p >= 0:
                    entry = int(src_page_table[request, first + p // page_size])
                    result[row, at] = entry * page_size + p % page_size
        if out_raw_indices is not None:
            assert out_raw_indices.is_contiguous()
            out_raw_indices.copy_(picked)
        if out is None:
            return result.to(input.device)
        assert out.is_contiguous()
        return out.copy_(result)

    def top_k_ragged_transform(
        input, offsets, lengths, k, deterministic=False, tie_break=0, dsa_graph_safe=False, row_starts=None
    ):
        assert input.is_contiguous()
        module.calls.append(locals().copy())
        picked = shuffled(select(input, lengths, k, row_starts, tie_break), k)
        return torch.where(picked < 0, -1, picked + offsets[:, None].cpu()).to(torch.int32).to(input.device)

    module.top_k_page_table_transform = top_k_page_table_transform
    module.top_k_ragged_transform = top_k_ragged_transform
    return module


def fake_sgl_kernel():
    module = Recorder("sgl_kernel")

    def fast_topk_v2(score, lengths, topk, row_starts=None):
        module.calls.append(locals().copy())
        return shuffled(select(score, lengths, topk, row_starts), topk)

    def fast_topk_transform_fused(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
        module.calls.append(locals().copy())
        picked = shuffled(select(score, lengths, topk, row_starts), topk)
        assert int(cu_seqlens_q[-1]) == score.shape[0]
        for request in range(len(cu_seqlens_q) - 1):
            for row in range(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1])):
                slots = page_table_size_1[request, picked[row].clamp(min=0).long()]
                picked[row] = torch.where(picked[row] < 0, -1, slots)
        return picked

    def fast_topk_transform_ragged_fused(score, lengths, topk_indices_offset, topk, row_starts=None):
        assert row_starts is not None or int(lengths.max()) <= topk  # as its documentation demands
        module.calls.append(locals().copy())
        picked = shuffled(select(score, lengths, topk, row_starts), topk)
        return torch.where(picked < 0, -1, picked + topk_indices_offset[:, None]).to(torch.int32)

    module.fast_topk_v2 = fast_topk_v2
    module.fast_topk_transform_fused = fast_topk_transform_fused
    module.fast_topk_transform_ragged_fused = fast_topk_transform_ragged_fused
    return module


def install(monkeypatch, backend, package, module):
    """Put a stand-in in the place of a package, on a machine without a GPU."""
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(backend, "unavailable", lambda: None)
    monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, device_types=("cpu", "cuda")))
    cache = backend._functions if backend is flashinfer_backend else backend._module
    cache.cache_clear()
    return cache


@pytest.fixture
def flashinfer(monkeypatch):
    module = fake_flashinfer()
    cache = install(monkeypatch, flashinfer_backend, "flashinfer", module)
    yield module
    cache.cache_clear()


@pytest.fixture
def sgl_kernel(monkeypatch):
    module = fake_sgl_kernel()
    cache = install(monkeypatch, sgl_kernel_backend, "sgl_kernel", module)
    yield module
    cache.cache_clear()


# --- Equivalence ---

BATCH, WIDTH, K = 8, 16384, 2048
QUERIES = [1, 2, 3, 1, 2, 1, 3, 2]
TIE_BREAKS = [None, "small", "large"]
REAL = [
    pytest.param("cuda", marks=NEEDS_GPU),
    pytest.param(
        "flashinfer",
        marks=[*NEEDS_GPU, pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no flashinfer")],
    ),
    pytest.param(
        "sgl-kernel",
        marks=[*NEEDS_GPU, pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is None, reason="no sgl_kernel")],
    ),
]


def batch_of(method, with_starts, queries, device):
    """The packed case of SGLang's equivalence test: windows of equal room, a table per request, no two scores equal."""
    generator = torch.Generator().manual_seed(17)
    width = max(WIDTH, BATCH * (K + 1)) if with_starts else WIDTH
    room = width // BATCH if with_starts else width
    requests = torch.repeat_interleave(torch.arange(BATCH), torch.tensor(queries))
    rows = len(requests)
    cu_k = torch.arange(BATCH + 1) * room
    starts = cu_k[:-1][requests] if with_starts else None
    lengths = torch.randint(K + 1, room + 1, (rows,), generator=generator)
    scores = torch.stack([torch.randperm(width, generator=generator) for _ in range(rows)]).float() - width / 2
    table = torch.arange(width)[None] + torch.arange(BATCH)[:, None] * width
    metadata = TopkMetadata(
        page_table_1=ints(table, device),
        cu_seqlens_q=ints([0, *torch.tensor(queries).cumsum(0).tolist()], device),
        cu_seqlens_k=ints(cu_k, device),
    )
    arguments = {"attn_metadata": metadata, "row_starts": None if starts is None else ints(starts, device)}
    if method is RAGGED:
        arguments["topk_indices_offset"] = ints(torch.arange(rows) * width, device)
    return scores.to(device), ints(lengths, device), arguments


def compare(name, device, method, with_starts, queries):
    scores, lengths, arguments = batch_of(method, with_starts, queries, device)
    expected = DSATopKBackend.TORCH.topk_transform(scores, lengths, K, method, **arguments)
    result = DSATopKBackend(name).topk_transform(scores, lengths, K, method, **arguments)
    assert result.shape == expected.shape
    assert result.dtype == torch.int32
    assert torch.equal(result.sort(dim=1).values, expected.sort(dim=1).values)
    return arguments


@pytest.mark.parametrize("queries", [[1] * BATCH, QUERIES], ids=["one query each", "several queries"])
@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("method", [PAGED, RAGGED])
@pytest.mark.parametrize("name", ["flashinfer", "sgl-kernel"])
def test_stand_ins_agree_with_the_reference(name, method, with_starts, queries, flashinfer, sgl_kernel):
    compare(name, "cpu", method, with_starts, queries)
    assert len((flashinfer if name == "flashinfer" else sgl_kernel).calls) == 1


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("queries", [[1] * BATCH, QUERIES], ids=["one query each", "several queries"])
@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("method", [PAGED, RAGGED])
@pytest.mark.parametrize("name", REAL)
def test_real_backends_agree_with_the_reference(name, method, with_starts, queries, tie_break, monkeypatch):
    if tie_break is not None:
        monkeypatch.setenv("SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK", tie_break)
        monkeypatch.setenv("DSA_TOPK_TIE_BREAK", {"small": "smallest", "large": "largest"}[tie_break])
    compare(name, "cuda", method, with_starts, queries)


@pytest.mark.parametrize("rule", ["small", "large"])
def test_with_ties_flashinfer_keeps_the_rule_it_was_given(rule, flashinfer, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK", rule)
    monkeypatch.setenv("DSA_TOPK_TIE_BREAK", {"small": "smallest", "large": "largest"}[rule])
    scores, lengths = torch.zeros(2, 50), ints([50, 7], "cpu")
    result = DSATopKBackend.FLASHINFER.topk_func(scores, lengths, 10)
    expected = DSATopKBackend.TORCH.topk_func(scores, lengths, 10)
    assert torch.equal(result.sort(dim=1).values, expected.sort(dim=1).values)


# --- What FlashInfer is given ---


def test_packed_paged_arguments(flashinfer):
    arguments = compare("flashinfer", "cpu", PAGED, True, QUERIES)
    call = flashinfer.calls[0]
    metadata, starts = arguments["attn_metadata"], arguments["row_starts"]
    requests = torch.repeat_interleave(torch.arange(BATCH), torch.tensor(QUERIES))
    assert call["row_to_batch"].tolist() == requests.tolist()
    assert torch.equal(call["row_starts"], starts)
    assert torch.equal(call["page_table_row_starts"], starts - metadata.cu_seqlens_k[:-1][requests])
    assert call["dsa_graph_safe"] is True
    assert (call["deterministic"], call["tie_break"]) == (False, 0)
    assert call["src_page_table"] is metadata.page_table_1


def test_decode_arguments_have_no_row_map(flashinfer):
    compare("flashinfer", "cpu", PAGED, False, [1] * BATCH)
    call = flashinfer.calls[0]
    assert call["row_to_batch"] is call["row_starts"] is call["page_table_row_starts"] is None


@pytest.mark.parametrize(("variable", "value"), [(None, 0), ("small", 1), ("large", 2)])
@pytest.mark.parametrize("deterministic", [None, "1"])
def test_flashinfer_settings(variable, value, deterministic, flashinfer, monkeypatch):
    if variable:
        monkeypatch.setenv("SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK", variable)
    if deterministic:
        monkeypatch.setenv("SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC", deterministic)
    for run in ("func", "ragged", "paged"):
        backend, lengths = DSATopKBackend.FLASHINFER, ints([9, 9], "cpu")
        if run == "func":
            backend.topk_func(torch.rand(2, 9), lengths, 3)
        else:
            backend.topk_transform(
                torch.rand(2, 9), lengths, 3, RAGGED if run == "ragged" else PAGED,
                TopkMetadata(page_table_1=ints([[0] * 9] * 2, "cpu")), topk_indices_offset=lengths,
            )  # fmt: skip
    assert [(call["tie_break"], call["deterministic"]) for call in flashinfer.calls] == [
        (value, bool(deterministic))
    ] * 3


@pytest.mark.parametrize(("tie_break", "value"), [("smallest", 1), ("largest", 2)])
def test_a_named_tie_rule_reaches_flashinfer(tie_break, value, flashinfer):
    scores = torch.rand(1, 9)
    dsa_topk.topk_positions(scores, None, 3, tie_break=tie_break, backend="flashinfer")
    assert flashinfer.calls[0]["tie_break"] == value


def padded(rows, width, stride, spare=0):
    """A view of ``rows`` rows inside a buffer whose rows are longer; what lies between is better than any score."""
    buffer = torch.full((rows * stride - spare,), OUTSIDE)
    view = buffer.as_strided((rows, width), (stride, 1))
    view.copy_(torch.rand(rows, width))
    return view


@pytest.mark.parametrize("form", ["paged", "ragged", "positions"])
def test_padded_scores_are_not_copied(form, flashinfer):
    scores, lengths = padded(3, 20, 32), ints([20, 7, 0], "cpu")
    extra = {
        "paged": {"page_table": ints([[5, 4], [3, 2], [1, 0]], "cpu"), "page_size": 16},
        "ragged": {"out_offsets": ints([0, 100, 200], "cpu")},
        "positions": {},
    }[form]
    function = getattr(dsa_topk, f"topk_{form}")
    result = function(scores, lengths, 8, backend="flashinfer", **extra)
    assert flashinfer.calls[0]["input"].data_ptr() == scores.data_ptr()
    assert torch.equal(result.sort(dim=1).values, function(scores, lengths, 8, **extra).sort(dim=1).values)


@pytest.mark.parametrize(("stride", "spare"), [(32, 12), (0, 0)], ids=["last row has no padding", "one row for all"])
def test_scores_that_cannot_be_widened_are_copied(stride, spare, flashinfer):
    scores = padded(3, 20, stride, spare) if stride else torch.rand(1, 20).expand(3, 20)
    lengths = ints([20, 7, 0], "cpu")
    result = dsa_topk.topk_positions(scores, lengths, 8, backend="flashinfer")
    expected = dsa_topk.topk_positions(scores, lengths, 8)
    assert torch.equal(result.sort(dim=1).values, expected.sort(dim=1).values)


def test_table_windows_start_at_entry_0_unless_told_otherwise(flashinfer):
    # FlashInfer's own default would take row_starts for the table as well.
    scores, table = torch.rand(2, 40), ints([list(range(10, 50)), list(range(50, 90))], "cpu")
    call = {"page_table": table, "page_size": 1, "row_starts": ints([3, 9], "cpu")}
    result = dsa_topk.topk_paged(scores, ints([20, 20], "cpu"), 5, backend="flashinfer", **call)
    expected = dsa_topk.topk_paged(scores, ints([20, 20], "cpu"), 5, **call)
    assert torch.equal(result.sort(dim=1).values, expected.sort(dim=1).values)


def test_outputs_with_a_row_stride_int64_and_raw_positions(flashinfer):
    both = torch.empty(2, 12, dtype=torch.int32)
    scores, table = torch.rand(2, 40), ints([[2, 1, 0], [5, 4, 3]], "cpu")
    lengths = torch.tensor([40, 3])
    arguments = {"page_table": table, "page_size": 16}
    dsa_topk.topk_paged(
        scores, lengths, 6, out=both[:, :6], out_positions=both[:, 6:], backend="flashinfer", **arguments
    )
    raw = torch.empty(2, 6, dtype=torch.int32)
    expected = dsa_topk.topk_paged(scores, lengths, 6, out_positions=raw, **arguments)
    assert torch.equal(both[:, :6].sort(dim=1).values, expected.sort(dim=1).values)
    assert torch.equal(both[:, 6:].sort(dim=1).values, raw.sort(dim=1).values)


@pytest.mark.parametrize("form", ["paged", "positions"])
def test_empty_shapes_never_reach_flashinfer(form, flashinfer):
    out = torch.zeros(2, 4, dtype=torch.int32)
    if form == "paged":
        table = torch.empty(2, 0, dtype=torch.int32)
        dsa_topk.topk_paged(torch.rand(2, 8), None, 4, page_table=table, page_size=4, out=out, backend="flashinfer")
    else:
        dsa_topk.topk_positions(torch.rand(2, 0), None, 4, out=out, backend="flashinfer")
    assert (out == -1).all()
    assert flashinfer.calls == []


# --- Refusals ---


def older_flashinfer():
    """0.6.7."""
    module = Recorder("flashinfer")
    module.top_k_page_table_transform = lambda input, src_page_table, lengths, k, row_to_batch=None: None
    module.top_k_ragged_transform = lambda input, offsets, lengths, k: None
    return module


@pytest.mark.parametrize(("form", "version"), [("paged", r"0\.6\.17"), ("ragged", r"0\.6\.10")])
def test_an_older_flashinfer_is_refused_with_the_version_needed(form, version, monkeypatch):
    cache = install(monkeypatch, flashinfer_backend, "flashinfer", older_flashinfer())
    monkeypatch.setattr(flashinfer_backend, "_version", lambda: "0.6.7")
    zeros = ints([0, 0], "cpu")
    extra = {"page_table": ints([[0], [0]], "cpu"), "page_size": 1} if form == "paged" else {"out_offsets": zeros}
    with pytest.raises(ValueError, match=rf"0\.6\.7 has no .*row_starts.*install flashinfer-python>={version}$"):
        getattr(dsa_topk, f"topk_{form}")(torch.rand(2, 8), None, 4, row_starts=zeros, backend="flashinfer", **extra)
    cache.cache_clear()


def test_compact_tables_need_a_newer_flashinfer(monkeypatch):
    module = fake_flashinfer()
    newer = module.top_k_page_table_transform

    def top_k_page_table_transform(
        input, src_page_table, lengths, k, row_to_batch=None, deterministic=False, tie_break=0, dsa_graph_safe=False,
        row_starts=None, page_table_row_starts=None,
    ):  # fmt: skip
        assert input.is_contiguous()  # padded rows are documented together with page_size
        return newer(input, src_page_table, lengths, k, row_to_batch)

    module.top_k_page_table_transform = top_k_page_table_transform
    cache = install(monkeypatch, flashinfer_backend, "flashinfer", module)
    table, out = ints([[1, 0], [3, 2]], "cpu"), torch.empty(2, 4, dtype=torch.int32)
    scores = padded(2, 2, 32)
    result = dsa_topk.topk_paged(scores, None, 2, page_table=table, page_size=1, out=out[:, :2], backend="flashinfer")
    assert sorted(result[0].tolist()) == [0, 1]
    assert module.calls[0]["input"].data_ptr() == scores.data_ptr()
    with pytest.raises(ValueError, match=r"has no page_size; install flashinfer-python>=0\.7\.0$"):
        dsa_topk.topk_paged(torch.rand(2, 8), None, 4, page_table=table, page_size=4, backend="flashinfer")
    cache.cache_clear()


def test_a_broken_flashinfer_is_a_refusal_with_its_reason(monkeypatch):
    cache = install(monkeypatch, flashinfer_backend, "flashinfer", None)  # None makes the import fail
    with pytest.raises(ValueError, match="flashinfer can't be imported"):
        dsa_topk.topk_positions(torch.rand(1, 8), None, 4, backend="flashinfer")
    cache.cache_clear()


@pytest.mark.parametrize(
    ("form", "arguments", "text"),
    [
        ("positions", {"k": 2049}, "largest is 2048"),
        ("positions", {"order": "score"}, "order='score'"),
        ("positions", {"return_scores": True}, "return_scores"),
        ("paged", {"page_size": 3}, "powers of two"),
        ("ragged", {"out_positions": torch.empty(1, 4, dtype=torch.int32)}, "out_positions"),
    ],
)
def test_what_flashinfer_cannot_do_is_refused(form, arguments, text, flashinfer):
    extra = {
        "positions": {},
        "paged": {"page_table": ints([[0, 1, 2]], "cpu")},
        "ragged": {"out_offsets": ints([0], "cpu")},
    }[form]
    with pytest.raises(ValueError, match=text):
        getattr(dsa_topk, f"topk_{form}")(
            torch.rand(1, 8), None, **{"k": 4, **extra, **arguments}, backend="flashinfer"
        )
    assert flashinfer.calls == []


@pytest.mark.parametrize(
    ("form", "dtype", "arguments", "text"),
    [
        ("positions", torch.float32, {"k": 512}, "k = 512; it serves 2048 only"),
        ("positions", torch.bfloat16, {}, "bfloat16"),
        ("positions", torch.float32, {"tie_break": "largest"}, "tie_break='largest'"),
        ("positions", torch.float32, {"order": "score"}, "order='score'"),
        ("paged", torch.float32, {"page_size": 64}, "page_size = 64"),
        ("paged", torch.float32, {"page_table_starts": ints([0], "cpu")}, "page_table_starts"),
        ("ragged", torch.float32, {"out_positions": torch.empty(1, 2048, dtype=torch.int32)}, "out_positions"),
    ],
)
def test_what_sgl_kernel_cannot_do_is_refused(form, dtype, arguments, text, sgl_kernel):
    extra = {
        "positions": {},
        "paged": {"page_table": ints([[0, 1, 2]], "cpu"), "page_size": 1},
        "ragged": {"out_offsets": ints([0], "cpu")},
    }[form]
    with pytest.raises(ValueError, match=text):
        getattr(dsa_topk, f"topk_{form}")(
            torch.rand(1, 8).to(dtype), None, **{"k": 2048, **extra, **arguments}, backend="sgl-kernel"
        )
    assert sgl_kernel.calls == []


def test_an_sgl_kernel_without_the_function_is_refused(monkeypatch):
    cache = install(monkeypatch, sgl_kernel_backend, "sgl_kernel", Recorder("sgl_kernel"))
    with pytest.raises(ValueError, match="has no fast_topk_v2"):
        dsa_topk.topk_positions(torch.rand(1, 8), None, 2048, backend="sgl-kernel")
    cache.cache_clear()


def test_sgl_kernel_gathers_table_rows_when_no_query_lengths_are_known(sgl_kernel):
    scores, table = torch.rand(3, 3000), torch.randperm(6000).int().reshape(2, 3000)
    call = {"page_table": table, "page_size": 1, "row_to_batch": ints([1, 0, 1], "cpu")}
    result = dsa_topk.topk_paged(scores, None, 2048, backend="sgl-kernel", **call)
    expected = dsa_topk.topk_paged(scores, None, 2048, **call)
    assert torch.equal(result.sort(dim=1).values, expected.sort(dim=1).values)


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [(flashinfer_backend, "flashinfer", "flashinfer"), (sgl_kernel_backend, "sgl-kernel", "sgl_kernel")],
)
def test_a_package_that_is_not_installed(module, name, package, monkeypatch):
    module.unavailable.cache_clear()
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None)
    with pytest.raises(
        RuntimeError, match=rf"backend='{name}' is not available on this machine: .* not installed \(pip"
    ):
        dsa_topk.topk_positions(torch.rand(1, 8), None, 4, backend=name)
    module.unavailable.cache_clear()


@pytest.mark.parametrize("module", [flashinfer_backend, sgl_kernel_backend])
def test_a_machine_without_a_gpu(module, monkeypatch):
    module.unavailable.cache_clear()
    monkeypatch.setitem(sys.modules, module.__name__.rsplit(".", 1)[1], ModuleType("stand-in"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA device" in module.unavailable()
    module.unavailable.cache_clear()


def test_auto_never_chooses_a_comparison_backend(flashinfer, sgl_kernel):
    dsa_topk.topk_positions(torch.rand(1, 4096), None, 2048)
    assert flashinfer.calls == sgl_kernel.calls == []
    assert not flashinfer_backend.capabilities.canonical
    assert not sgl_kernel_backend.capabilities.canonical
