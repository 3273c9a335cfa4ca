"""Decode on the GPU (issue 5 point 6): mixed lengths, drafts, busy SMs, long runs, and which path every row takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import dsa_topk
from dsa_topk import _plan
from dsa_topk.testing import CallShape, distributions, recorded
from emulator.decode_cases import SHARES, beyond
from gpu_helpers import (
    CPU,
    DTYPES,
    GPU,
    Mode,
    Outputs,
    Target,
    Verdicts,
    forced_plans,
    launched_as,
    on_gpu,
    select,
    shape_of,
    verify,
)

K = 2048
PAGE_SIZE = 64


def is_decode(plan: _plan.Plan | None) -> bool:
    return plan is None or not plan.kernel.startswith(("Row", "Cluster"))


def decode_plans(target: Target, rows: int, width: int, k: int) -> list[_plan.Plan | None]:
    """The backend's own choice and the decode kernels forced; the others have tests of their own."""
    return [plan for plan in target.plans(rows, width, k) if is_decode(plan)]


def decode_shape(lengths: torch.Tensor, width: int, k: int) -> CallShape:
    """A paged decode call, each row with a table of its own."""
    rows, entries = lengths.numel(), -(-width // PAGE_SIZE)
    table = torch.randperm(rows * entries, generator=torch.Generator().manual_seed(3)).view(rows, entries)
    return CallShape(
        "decode",
        "paged",
        rows,
        width,
        k,
        lengths=lengths.to(torch.int32),
        page_table=table.to(device=lengths.device, dtype=torch.int32),
        page_size=PAGE_SIZE,
    )


def log_uniform(rows: int, most: int, device: str) -> torch.Tensor:
    """Lengths from 1 to ``most``, uniform in their logarithm; the shortest and the longest are among them."""
    lengths = torch.exp2(torch.linspace(0, 1, rows) * torch.log2(torch.tensor(float(most)))).long().clamp(1, most)
    lengths[-1] = most
    return lengths[torch.randperm(rows, generator=torch.Generator().manual_seed(1))].to(device)


@on_gpu
def test_replay_from_1_to_131072_and_back() -> None:
    """One graph, replayed with all rows of one length, up and down; and with a length of its own for each row."""
    rows, width = 16, 131072
    scores = distributions.make("normal", rows, width, device="cuda")
    shape = decode_shape(torch.ones(rows, device="cuda"), width, K)
    assert shape.lengths is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = select(GPU, shape, scores, Mode())
    up = [1, K, K + 1, 3000, 4096, 8193, 16384, 32768, 70001, 131072]
    for turn, length in enumerate([*up, *reversed(up), None]):
        shape.lengths.copy_(log_uniform(rows, width, "cuda")) if length is None else shape.lengths.fill_(length)
        outputs.out.fill_(-7)
        graph.replay()
        verify(shape, scores, Mode(), outputs, f"turn {turn}, length {length}")


@pytest.mark.parametrize("batch", ["log uniform", "one long row"])
def test_mixed_lengths_in_one_launch(target: Target, batch: str) -> None:
    """64 rows of 1 to 131072 scores, and one long row among hundreds of short ones: by every decode kernel."""
    width, k = (3000, 200) if target.small else (131072, K)
    if batch == "log uniform":
        lengths = log_uniform(64, width, target.device)
    else:
        lengths = torch.arange(300, device=target.device) * 7 + k - 50
        lengths[123] = width
    shape = decode_shape(lengths, width, k)
    scores = distributions.make("indexer", shape.rows, width, device=target.device, k=k)
    first: Outputs | None = None
    verdicts = Verdicts()
    for plan in decode_plans(target, shape.rows, width, k):
        with launched_as(plan):
            outputs = select(target, shape, scores, Mode())
        if first is None:
            first = outputs
            verify(shape, scores, Mode(), outputs, plan)
        verdicts.add(outputs.differs(first), f"{batch}, {plan}")
    verdicts.settle()


def paths_of(shape: CallShape, scores: torch.Tensor) -> tuple[Outputs, dict[str, int]]:
    """A call, and how many of its rows took each path."""
    from dsa_topk.backends import cuda

    with cuda.count_paths() as counts:
        outputs = select(GPU, shape, scores, Mode())
    taken = dict(zip(cuda.PATHS, counts.tolist(), strict=True))
    assert sum(taken.values()) == shape.rows, taken
    return outputs, taken


# Buffers as wide as the longest row, of the next kernel, and as an engine with long contexts allocates them.
@on_gpu
@pytest.mark.parametrize("width", [3072, 4096, 16384, 131072])
@pytest.mark.parametrize("rows", [16, 64, 256])
def test_short_windows_are_fast(width: int, rows: int) -> None:
    """Windows of k + 1 to 3072 scores: chosen from a sample, or all in registers, but not by six reads of the row."""
    lengths = torch.linspace(K + 1, 3072, rows).long().to("cuda")
    shape = decode_shape(lengths, width, K)
    scores = distributions.make("normal", rows, width, device="cuda")
    outputs, taken = paths_of(shape, scores)
    verify(shape, scores, Mode(), outputs, taken)
    # Of a row hardly longer than k the k-th score may lie below all that is sampled, where rows are not held.
    assert taken["fast"] >= (0.9 * rows if width > 16384 else rows), taken


@on_gpu
@pytest.mark.parametrize("width", [20000, 131072])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_shorter_than_their_buffer_are_fast(width: int, dtype: torch.dtype) -> None:
    """Clusters sample before they know the length: what lies behind a row's end, +inf and NaN here, must not decide."""
    from dsa_topk.backends import cuda

    lengths = (torch.tensor(SHARES, dtype=torch.float64) * width).long().to("cuda")
    rows = len(SHARES)
    shape = decode_shape(lengths, width, K)
    scores = beyond(distributions.make("normal", rows, width, dtype=dtype, device="cuda", k=K), lengths)
    for plan in decode_plans(GPU, rows, width, K):
        if plan is not None and plan.kernel.startswith(("Split", "Whole", "Spread")):
            with launched_as(plan), cuda.count_paths() as counts:
                outputs = select(GPU, shape, scores, Mode())
            verify(shape, scores, Mode(), outputs, plan)
            assert counts.tolist()[cuda.PATHS.index("fast")] == rows, f"{plan}: {counts.tolist()}"


@on_gpu
@pytest.mark.parametrize("length", [16385, 32765, 32768])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_longest_held_rows(length: int, dtype: torch.dtype) -> None:
    """Every misalignment that fits, copies of the k-th score: few, and more than are ranked all against all."""
    rows = 3
    for shift in range(4 if length < 32766 else 1):
        storage = torch.full((rows, 32768 + 8), torch.inf, dtype=dtype, device="cuda")
        scores = storage[:, shift : shift + length]
        scores.copy_(distributions.make("normal", rows, length, dtype=dtype, device="cuda", k=K))
        order = torch.randperm(length, generator=torch.Generator().manual_seed(shift)).to("cuda")
        for row, copies in ((1, 100), (2, 300)):
            scores[row, order[: K - copies // 2]] = 7.0
            scores[row, order[K - copies // 2 : K + copies // 2]] = 6.5
        shape = CallShape("held", "positions", rows, length, K)
        for plan in decode_plans(GPU, rows, length, K):
            if plan is None or plan.kernel in ("Held32K", "Whole1024"):
                for mode in (Mode(), Mode(tie_break="largest", return_scores=True)):
                    with launched_as(plan):
                        outputs = select(GPU, shape, scores, mode)
                    verify(shape, scores, mode, outputs, plan)


@pytest.mark.parametrize("name", ["mtp", "dp_padding"])
@pytest.mark.parametrize("width", [4096, 16384, 131072])
def test_drafts(target: Target, name: str, width: int) -> None:
    """Rows of a request differ by their lengths only, negative ones among them: by every decode kernel, and the
    reference's bits."""
    width, k = (width // 32, 50) if target.small else (width, K)
    verdicts = Verdicts()
    for rows in (4, 64):
        shape = shape_of(name, rows, width, k, target.device).to(target.device)
        assert shape.lengths is not None
        shape.lengths = shape.lengths.clone()
        shape.lengths[rows - 1] = -3
        shape.lengths[:4] = torch.tensor([width - 3, width - 2, width - 1, width], device=target.device)
        scores = distributions.make("half_zeros", rows // 4, width, device=target.device, k=k).repeat_interleave(4, 0)
        mode = Mode(tie_break="largest", return_scores=True, positions=True)
        want = select(Target(CPU.backend, target.device), shape, scores, mode)
        verify(shape, scores, mode, want, "reference")
        for plan in decode_plans(target, rows, width, k):
            with launched_as(plan):
                verdicts.add(select(target, shape, scores, mode).differs(want), f"{rows} rows, {plan}")
    verdicts.settle()


@pytest.mark.parametrize("width", [4096, 16384, 70001])
def test_same_bits_as_the_reference_and_the_one_block_route(target: Target, width: int) -> None:
    """The same rows in batches of 1, 7, 64 and 300, by every decode kernel and the filter kernel of one block."""
    width, k = (width // 16, 100) if target.small else (width, K)
    names = ("normal", "indexer", "half_zeros", "quantised", "ascending", "bit_patterns", "all_equal", "narrow")
    base = torch.cat([distributions.make(name, 1, width, device=target.device, k=k, seed=2) for name in names])
    lengths = torch.tensor([width, width - 1, k + 1, width, width, width - 9, width, k + 500]).to(target.device)
    lengths = lengths.clamp(max=width)
    every = CallShape("base", "positions", len(names), width, k, lengths=lengths)
    reference = select(Target(CPU.backend, target.device), every, base, Mode())
    verify(every, base, Mode(), reference, "reference")
    verdicts = Verdicts()
    for rows in (1, 7, 64) if target.small else (1, 7, 64, 300):
        index = torch.randint(0, len(names), (rows,)).to(target.device)
        shape = CallShape("batch", "positions", rows, width, k, lengths=lengths[index])
        want = Outputs(reference.out[index], None, None)
        scores = base[index]
        for plan in target.plans(rows, width, k):
            if is_decode(plan) or (plan is not None and plan.kernel == "Row512"):
                with launched_as(plan):
                    verdicts.add(select(target, shape, scores, Mode()).differs(want), f"{rows} rows, {plan}")
    verdicts.settle()


# Run in a process of its own, so that blocks that wait for each other forever end with it. Until all is queued the host
# must not wait for the busy GPU, or the busy part is over by then. So what is used first in a process or on a stream
# (modules, a product's workspace, memory) is used in a turn before, outputs are there and compared afterwards, and
# launches are few: a queue of 1024 that is full makes the host wait as well.
BUSY = """
import time, torch, dsa_topk, dataclasses
from dsa_topk import _plan
from dsa_topk.backends import cuda
from dsa_topk.testing import check_selection
TURNS, PRODUCTS = 5, 20
scores = torch.randn(64, 131072, device="cuda")
short = torch.randn(64, 8192, device="cuda")
limits = cuda._load(0)[1]
usual = _plan.choose(64, 131072, 2048, limits)
plans = [None]
for kernel in _plan.KERNELS:
    if kernel.startswith(("Held", "Split", "Spread", "Whole")):
        sizes = [c for c in (2, 8, 16) if limits.clusters[c]] if kernel in _plan.SEVERAL else [1]
        for blocks in [7] if kernel in _plan.SPREAD else sizes:
            plans.append(dataclasses.replace(usual, kernel=kernel, cluster=blocks))
inputs = [short if plan and plan.kernel.startswith("Held") else scores for plan in plans]
def call(s, plan, out):
    if plan is None:
        return dsa_topk.topk_positions(s, None, 2048, out=out, backend="cuda")
    with cuda.use_plan(plan):
        return dsa_topk.topk_positions(s, None, 2048, out=out, backend="cuda")
want = {id(s): call(s, None, None) for s in (scores, short)}
for s in (scores, short):
    check_selection(s, None, 2048, want[id(s)]).raise_if_bad()
busy, others = [torch.cuda.Stream() for _ in range(2)], [torch.cuda.Stream() for _ in range(3)]
a = torch.randn(8192, 8192, device="cuda")
products = [torch.empty_like(a) for _ in busy]
outs = torch.full((1 + TURNS, len(others), len(plans), 64, 2048), -7, dtype=torch.int32, device="cuda")
def fill(count):  # all SMs, and one thread that sits on one of them for some ten milliseconds
    for stream, product in zip(busy, products):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for _ in range(count):
                torch.mm(a, a, out=product)
def turn(number):  # clusters of several calls compete for the same SMs
    for stream, slots in zip(others, outs[number]):
        with torch.cuda.stream(stream):
            for plan, s, out in zip(plans, inputs, slots):
                call(s, plan, out)
torch.cuda.synchronize()
fill(1)
turn(0)
torch.cuda.synchronize()
begin = time.perf_counter()
fill(PRODUCTS)
for number in range(1, 1 + TURNS):
    turn(number)
queued = time.perf_counter() - begin
was_busy = not all(stream.query() for stream in busy)
torch.cuda.synchronize()
ended = time.perf_counter() - begin
wrong = [str(plan) for i, (plan, s) in enumerate(zip(plans, inputs)) if (outs[:, :, i] != want[id(s)]).any()]
assert not wrong, f"another result beside a busy GPU: {wrong}"
assert was_busy, (
    f"the GPU was idle before the last call was queued (after {queued:.3f} s; all done after {ended:.3f} s): "
    "nothing was tested"
)
"""


@on_gpu
def test_a_cluster_of_one_block_is_refused() -> None:
    """It would wait for what nobody sends."""
    from dsa_topk.backends import cuda

    scores = torch.randn(2, 65536, device="cuda")
    out = torch.full((2, K), -7, dtype=torch.int32, device="cuda")
    with (
        cuda.use_plan(_plan.Plan("Split512", 1, 4.5)),
        pytest.raises(RuntimeError, match="the launch"),
    ):
        dsa_topk.topk_positions(scores, None, K, out=out, backend="cuda")
    assert torch.all(out == -7)


@on_gpu
def test_clusters_finish_beside_other_kernels() -> None:
    """SMs are full of matrix products and of other clusters; a process that hangs is ended, and the test fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", BUSY],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        pytest.fail("blocks of a row wait for each other: not done after 90 s")
    assert done.returncode == 0, done.stderr[-3000:]


LONG_RUN = 200_000


@on_gpu
@pytest.mark.parametrize(
    "kernel", [kernel for kernel in _plan.KERNELS if kernel.startswith(("Held8K", "Split", "Spread"))]
)
def test_200000_launches(kernel: str) -> None:
    """A graph of 200 calls, replayed 1000 times. Each replay compares all of its results, each of which it first
    overwrites, with the first ones."""
    rows, calls, k = 2, 200, 512
    width = 8192 if kernel.startswith("Held") else 20000
    plan = next(p for p in reversed(forced_plans(rows, width, k)) if p.kernel == kernel and p.cluster in (1, 5, 8))
    scores = distributions.make("quantised", rows, width, device="cuda", k=k)
    shape = decode_shape(torch.tensor([width, width - 777], device="cuda"), width, k)
    want = select(Target(CPU.backend, "cuda"), shape, scores, Mode())
    verify(shape, scores, Mode(), want)
    outs = torch.empty(calls, rows, k, dtype=torch.int32, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), launched_as(plan):
        outs.fill_(-7)
        for out in outs:
            shape.call(scores, out=out, backend="cuda")
        wrong += (outs != want.out).flatten(1).any(1).sum()
    for _ in range(LONG_RUN // calls):
        graph.replay()
    assert int(wrong) == 0, f"{int(wrong)} of {LONG_RUN} launches gave another result, {plan}"
    verify(shape, scores, Mode(), Outputs(outs[-1], None, None), plan)


@on_gpu
def test_two_decode_graphs_at_once() -> None:
    """Every pair of a held, a split and a whole-row launch on two streams, replayed 50 times each without waiting."""
    rows, width = 8, 16384
    shape = decode_shape(log_uniform(rows, width, "cuda"), width, K)
    scores = distributions.make("normal", rows, width, device="cuda")
    every = forced_plans(rows, width, K)
    kernels = [kernel for kernel in _plan.KERNELS if kernel.startswith(("Held16K", "Split", "Spread", "Whole512"))]
    plans = [next(plan for plan in reversed(every) if plan.kernel == kernel) for kernel in kernels]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i, one in enumerate(plans):
        for other in plans[i:]:
            captured: list[tuple[torch.cuda.CUDAGraph, Outputs]] = []
            for plan in (one, other):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph), launched_as(plan):
                    outputs = select(GPU, shape, scores, Mode())
                captured.append((graph, outputs))
            torch.cuda.synchronize()
            for _ in range(50):
                for stream, (graph, _) in zip(streams, captured, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
            torch.cuda.synchronize()
            for _, outputs in captured:
                verify(shape, scores, Mode(), outputs, f"{one} beside {other}")


WIDTHS = (4096, 8192, 16384, 32768, 131072)
MUST_BE_FAST = ("normal", "indexer", "narrow", "half_zeros", "recorded")


def scores_of(name: str, rows: int, width: int) -> torch.Tensor:
    if name != "recorded":
        return distributions.make(name, rows, width, device="cuda", k=K)
    found = recorded.load()["decode_scores"].to("cuda")
    return found.repeat(-(-rows // found.shape[0]), 1)[:rows, :width].contiguous()


@on_gpu
@pytest.mark.parametrize("rows", [8, 64, 256])
def test_the_usual_path_is_the_fast_one(rows: int, record_property: Callable[[str, object], None]) -> None:
    """At least 99% of rows of scores as they occur, if fewer than 128 scores equal the k-th one."""
    for width in WIDTHS:
        for name in MUST_BE_FAST:
            if name == "recorded" and width > 8192:
                continue  # there are no longer ones
            scores = scores_of(name, rows, width)
            shape = decode_shape(torch.full((rows,), width, device="cuda"), width, K)
            outputs, taken = paths_of(shape, scores)
            verify(shape, scores, Mode(), outputs, f"{name}, {width}: {taken}")
            record_property(f"fast_share_{name}_{rows}x{width}", round(taken["fast"] / rows, 4))
            if width == 4096 and name in ("half_zeros", "recorded"):
                # In half the rows the k-th score is one of 2000 zeros: a second try over what is held.
                assert taken["fast"] + taken["second try"] == rows, f"{name}, {width}: {taken}"
            else:
                assert taken["fast"] >= 0.99 * rows, f"{name}, {width}: {taken}"


@on_gpu
def test_paths_of_every_distribution() -> None:
    """A table for the log (pytest -s, or a failure): rows by path. Every result is right, whatever the path."""
    from dsa_topk.backends import cuda

    rows = 64
    print("\n" + " ".join(["distribution".ljust(16), "width".rjust(7), *(path.rjust(10) for path in cuda.PATHS)]))
    for name in distributions.NAMES:
        for width in WIDTHS:
            scores = scores_of(name, rows, width)
            shape = decode_shape(torch.full((rows,), width, device="cuda"), width, K)
            outputs, taken = paths_of(shape, scores)
            print(" ".join([name.ljust(16), str(width).rjust(7), *(str(count).rjust(10) for count in taken.values())]))
            verify(shape, scores, Mode(), outputs, f"{name}, {width}: {taken}")
            assert taken["trivial"] == 0
