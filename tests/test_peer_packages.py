"""The real flashinfer and sgl_kernel packages, where they are installed beside a GPU: results, graphs, drop-in modules.

Everywhere else stand-ins play them (test_backends_equivalence.py, whose equivalence cases run on the real ones too).
How the packages get to a machine without a package index: tools/peers/carry_packages.sh.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass, replace

import pytest
import torch

import dsa_topk
from dsa_topk.compat import flashinfer as flashinfer_here
from dsa_topk.compat import sglang as sglang_here
from dsa_topk.engine import DSATopKBackend, TopkMetadata, TopkTransformMethod
from dsa_topk.testing import check_selection
from engine_cases import OUTSIDE, extend, ints
from test_engine_graph import LAYOUTS, Buffers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"no {package}")


FLASHINFER = pytest.param("flashinfer", marks=needs("flashinfer"))
SGL_KERNEL = pytest.param("sgl-kernel", marks=needs("sgl_kernel"))
PAGED, RAGGED = TopkTransformMethod.PAGED, TopkTransformMethod.RAGGED
K = 2048  # the only k of sgl_kernel
RULES = {"small": "smallest", "large": "largest"}


def same_rows(result, expected):
    """The same numbers in every row: the order inside a row is promised by ours alone."""
    assert result.dtype == torch.int32
    assert torch.equal(result.sort(dim=1).values, expected.sort(dim=1).values)


# --- The public functions with backend="flashinfer" and backend="sgl-kernel" ---


@dataclass
class Call:
    """Packed rows of three requests; ``scores`` is a view inside a wider buffer whose rest scores higher."""

    scores: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    offsets: torch.Tensor
    requests: torch.Tensor
    tables: dict[int, torch.Tensor]  # by page size

    def arguments(self, form, page_size=1):
        if form == "paged":
            table = self.tables[page_size]
            common = {"page_table": table, "page_size": page_size, "row_to_batch": self.requests}
        else:
            common = {"out_offsets": self.offsets} if form == "ragged" else {}
        return {"lengths": self.lengths, "row_starts": self.starts, **common}


LENGTHS = (0, 1, K - 1, K, K + 1, 5000)  # nothing, less than k, its borders, and a real choice


def call_of(*, distinct, dtype=torch.float32, with_starts=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width, stride = 3 * 5000, 3 * 5000 + 72
    rows = len(LENGTHS)
    requests = torch.tensor([0, 0, 1, 1, 2, 2])
    starts = requests * 5000 if with_starts else torch.zeros_like(requests)
    buffer = torch.full((rows, stride), OUTSIDE, dtype=dtype)
    for row, length in enumerate(LENGTHS):
        # Few values (ties everywhere) or none twice; both exact in 16 bits as well.
        values = torch.randperm(5000, generator=generator).float() - 2500
        values = values / 64 if distinct else (values / 100).round()
        buffer[row, starts[row] : starts[row] + length] = values[:length].to(dtype)
    compact = torch.randperm(3 * 79, generator=generator).reshape(3, 79)
    tokens = torch.arange(79 * 64)
    wide = compact[:, tokens // 64] * 64 + tokens % 64
    return Call(
        scores=buffer.cuda()[:, :width],
        lengths=ints(list(LENGTHS), "cuda"),
        starts=ints(starts, "cuda"),
        offsets=ints(torch.arange(rows) * 100_000, "cuda"),
        requests=ints(requests, "cuda"),
        tables={1: ints(wide, "cuda"), 64: ints(compact, "cuda")},
    )


FORMS = [("positions", 1), ("ragged", 1), ("paged", 1), ("paged", 64)]


@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize(
    ("name", "form", "page_size"),
    [
        *(pytest.param("flashinfer", *form, marks=needs("flashinfer")) for form in FORMS),
        *(pytest.param("sgl-kernel", *form, marks=needs("sgl_kernel")) for form in FORMS if form[1] == 1),
    ],
)
def test_any_exact_set_of_padded_rows(name, form, page_size, with_starts):
    # sgl_kernel keeps 4096 candidates of a coarse bin: with few ties it is exact.
    call = call_of(distinct=name == "sgl-kernel", with_starts=with_starts)
    arguments = call.arguments(form, page_size)
    if not with_starts:
        del arguments["row_starts"]
    before = call.scores.clone()
    result = getattr(dsa_topk, f"topk_{form}")(call.scores, k=K, backend=name, **arguments)
    lengths = arguments.pop("lengths")
    verdict = check_selection(call.scores, lengths, K, result, form=form, mode="set", **arguments)
    assert verdict, verdict.reason
    assert torch.equal(call.scores, before)


@needs("flashinfer")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["smallest", "largest"])
@pytest.mark.parametrize(("form", "page_size"), FORMS)
def test_flashinfer_with_a_tie_rule_takes_the_canonical_set(form, page_size, rule, dtype):
    call = call_of(distinct=False, dtype=dtype)
    function = getattr(dsa_topk, f"topk_{form}")
    arguments = {"k": K, "tie_break": rule, **call.arguments(form, page_size)}
    same_rows(
        function(call.scores, backend="flashinfer", **arguments),
        function(call.scores, backend="torch", **arguments),
    )


@needs("flashinfer")
def test_flashinfer_writes_raw_positions_and_outputs_with_a_row_stride():
    call = call_of(distinct=False)
    arguments = {"k": K, **call.arguments("paged", 64)}
    both = torch.full((len(LENGTHS), 2 * K), -7, dtype=torch.int32, device="cuda")
    raw = torch.empty(len(LENGTHS), K, dtype=torch.int32, device="cuda")
    outputs = {"out": both[:, :K], "out_positions": both[:, K:]}
    dsa_topk.topk_paged(call.scores, backend="flashinfer", **outputs, **arguments)
    same_rows(both[:, :K], dsa_topk.topk_paged(call.scores, out_positions=raw, backend="torch", **arguments))
    same_rows(both[:, K:], raw)
    # Slot for slot, not only as sets.
    pages = call.tables[64][call.requests.long()].gather(1, (both[:, K:].clamp(min=0) // 64).long())
    assert torch.equal(both[:, :K], torch.where(both[:, K:] < 0, -1, pages * 64 + both[:, K:] % 64).int())


@needs("flashinfer")
def test_deterministic_flashinfer_repeats_itself(monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_TOPK_FLASHINFER_DETERMINISTIC", "1")
    call = call_of(distinct=False)
    run = DSATopKBackend.FLASHINFER.topk_func
    first = run(call.scores, call.lengths, K, call.starts)
    for _ in range(5):
        assert torch.equal(run(call.scores, call.lengths, K, call.starts), first)


# --- The engine layer, captured and replayed ---


def replayed(call, buffers, fill):
    """Capture after one eager call (modules are loaded there), then yield the result of each step's replay."""
    call(buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(buffers)
    for step in (1, 2, 0):
        fill(step)
        result.fill_(-7)
        graph.replay()
        yield result


@needs("flashinfer")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flashinfer_layouts_replay(layout, rule, monkeypatch):
    # With a tie rule, since every step has a row full of ties. Lengths stay in range: FlashInfer does not clamp them.
    monkeypatch.setenv("SGLANG_DSA_TOPK_FLASHINFER_TIE_BREAK", rule)
    monkeypatch.setenv("DSA_TOPK_TIE_BREAK", RULES[rule])
    monkeypatch.setenv("DSA_TOPK_PAGE_TABLE", "wide")  # the table that the flashinfer backend prefers
    seed = LAYOUTS.index(layout)
    buffers = Buffers(seed)

    def fill(step):
        buffers.fill(step, seed + step)
        buffers.lengths.clamp_(0, 5900)

    fill(0)
    for result in replayed(lambda b: layout(b, DSATopKBackend.FLASHINFER), buffers, fill):
        same_rows(result, layout(buffers, DSATopKBackend.TORCH))


SGL_LAYOUTS = {
    "decode": (PAGED, False),
    "packed paged": (PAGED, True),
    "ragged": (RAGGED, True),
    "ragged from column 0": (RAGGED, False),
}


@needs("sgl_kernel")
@pytest.mark.parametrize("layout", SGL_LAYOUTS)
def test_sgl_kernel_layouts_replay(layout):
    method, with_starts = SGL_LAYOUTS[layout]
    steps = [extend([2, 1, 3], [2500, 3000, 2100 + 7 * step], page_size=64, seed=step) for step in range(3)]
    if not with_starts:  # every window at column 0
        for step in steps:
            for row, start in enumerate(step.starts):
                step.scores[row] = step.scores[row].roll(-start)
    width = max(step.scores.shape[1] for step in steps)
    rows, entries = 6, max(step.wide.shape[1] for step in steps)
    scores = torch.full((rows, width), OUTSIDE, device="cuda")
    lengths, starts, offsets = (torch.zeros(rows, dtype=torch.int32, device="cuda") for _ in range(3))
    table = torch.zeros(rows if layout == "decode" else 3, entries, dtype=torch.int32, device="cuda")
    cu_q, cu_k = (torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(2))
    metadata = TopkMetadata(page_table_1=table, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)

    def fill(number):
        step = steps[number]
        scores.fill_(OUTSIDE)
        scores[:, : step.scores.shape[1]] = step.scores.cuda()
        lengths.copy_(torch.tensor(step.lengths))
        lengths[number] = (0, K - 1, K + 3)[number]
        starts.copy_(torch.tensor(step.starts))
        offsets.copy_(torch.arange(rows) * 100 + number)
        wide = step.wide[torch.tensor(step.requests)] if layout == "decode" else step.wide
        table[:, : wide.shape[1]] = wide.cuda() + 100 * number
        cu_q.copy_(torch.tensor(step.cu_q))
        cu_k.copy_(torch.tensor(step.cu_k))

    def run(backend):
        return backend.topk_transform(
            scores,
            lengths,
            K,
            method,
            replace(metadata, cu_seqlens_q=None) if layout == "decode" else metadata,
            row_starts=starts if with_starts else None,
            topk_indices_offset=offsets if method is RAGGED else None,
        )

    fill(0)
    for result in replayed(lambda _: run(DSATopKBackend.SGL_KERNEL), None, fill):
        same_rows(result, run(DSATopKBackend.TORCH))


@pytest.mark.parametrize("name", [FLASHINFER, SGL_KERNEL])
@pytest.mark.parametrize("method", [PAGED, RAGGED])
def test_no_call_waits_for_the_device(method, name):
    batch = extend([2, 1], [2500, 3000], device="cuda")
    metadata = TopkMetadata(
        page_table_1=batch.wide, cu_seqlens_q=ints(batch.cu_q, "cuda"), cu_seqlens_k=ints(batch.cu_k, "cuda")
    )
    lengths, starts = ints(batch.lengths, "cuda"), ints(batch.starts, "cuda")

    def run():
        DSATopKBackend(name).topk_transform(
            batch.scores, lengths, K, method, metadata, row_starts=starts, topk_indices_offset=starts
        )

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- The drop-in modules against the functions that they stand in for ---


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@needs("flashinfer")
@pytest.mark.parametrize("name", ["top_k", "top_k_page_table_transform", "top_k_ragged_transform"])
def test_drop_in_has_the_signature_of_flashinfer(name):
    import flashinfer

    assert parameters(getattr(flashinfer_here, name)) == parameters(getattr(flashinfer, name))


@needs("flashinfer")
def test_drop_in_tie_breaks_are_those_of_flashinfer():
    from flashinfer.topk import TopKTieBreak

    here = flashinfer_here.TopKTieBreak
    assert [(m.name, m.value, str(m), repr(m), f"{m:>8}") for m in here] == [
        (m.name, m.value, str(m), repr(m), f"{m:>8}") for m in TopKTieBreak
    ]


@needs("sgl_kernel")
@pytest.mark.parametrize("name", ["fast_topk_v2", "fast_topk_transform_fused", "fast_topk_transform_ragged_fused"])
def test_drop_in_has_the_signature_of_sgl_kernel(name):
    import sgl_kernel

    assert parameters(getattr(sglang_here, name)) == parameters(getattr(sgl_kernel, name))


@needs("flashinfer")
@pytest.mark.parametrize("is_sorted", [False, True])
def test_drop_in_top_k_gives_what_flashinfer_gives(is_sorted):
    import flashinfer

    scores = torch.stack([torch.randperm(30_000) for _ in range(4)]).float().cuda()
    ours = flashinfer_here.top_k(scores, 300, sorted=is_sorted)
    theirs = flashinfer.top_k(scores, 300, sorted=is_sorted)
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs]
    for one, other in zip(ours, theirs, strict=True):
        if not is_sorted:
            one, other = one.sort(dim=1).values, other.sort(dim=1).values
        assert torch.equal(one, other)


@needs("flashinfer")
@pytest.mark.parametrize("tie_break", [0, 1, 2])
def test_drop_in_transforms_give_what_flashinfer_gives(tie_break):
    import flashinfer

    call = call_of(distinct=tie_break == 0)
    zeros = torch.zeros_like(call.starts)
    for page_size, table in call.tables.items():
        paged = {"row_to_batch": call.requests, "row_starts": call.starts, "page_table_row_starts": zeros}
        given = (call.scores, table, call.lengths, K)
        ours, theirs = (
            module.top_k_page_table_transform(*given, tie_break=tie_break, page_size=page_size, **paged)
            for module in (flashinfer_here, flashinfer)
        )
        same_rows(ours, theirs)
    # Without page_table_row_starts both read the table from row_starts on.
    table = ints(torch.arange(3 * call.scores.shape[1]).reshape(3, -1), "cuda")
    given = (call.scores, table, call.lengths, K, call.requests)
    ours, theirs = (
        module.top_k_page_table_transform(*given, tie_break=tie_break, row_starts=call.starts)
        for module in (flashinfer_here, flashinfer)
    )
    same_rows(ours, theirs)
    given = (call.scores.contiguous(), call.offsets, call.lengths, K)
    ours, theirs = (
        module.top_k_ragged_transform(*given, tie_break=tie_break, row_starts=call.starts)
        for module in (flashinfer_here, flashinfer)
    )
    same_rows(ours, theirs)


@needs("sgl_kernel")
@pytest.mark.parametrize("packed", [False, True])
def test_drop_in_functions_give_what_sgl_kernel_gives(packed):
    import sgl_kernel

    call = call_of(distinct=True, with_starts=packed)
    starts = call.starts if packed else None
    given = (call.scores, call.lengths)
    same_rows(
        sglang_here.fast_topk_v2(*given, K, row_starts=starts), sgl_kernel.fast_topk_v2(*given, K, row_starts=starts)
    )
    # Several rows per request with starts (extend), one without (decode): what the package's callers do.
    table = call.tables[1] if packed else call.tables[1][call.requests.long()]
    cu_q = ints([0, 2, 4, 6] if packed else list(range(7)), "cuda")
    ours, theirs = (
        module.fast_topk_transform_fused(*given, table, cu_q, K, row_starts=starts)
        for module in (sglang_here, sgl_kernel)
    )
    same_rows(ours, theirs)
    ours, theirs = (
        module.fast_topk_transform_ragged_fused(*given, call.offsets, K, row_starts=call.starts)
        for module in (sglang_here, sgl_kernel)
    )
    same_rows(ours, theirs)
