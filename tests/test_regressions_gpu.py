"""Faults known from public reports that only a GPU can show: graphs, devices, streams, launches, speed cliffs.

``test_regressions.py`` holds the others and the list of all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import dsa_topk
from dsa_topk.testing import check_selection, distributions

ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
Test = Callable[..., None]


def on_gpu(test: Test) -> Test:
    """Only with a GPU."""
    return pytest.mark.gpu(ONE_GPU(test))


def on_two_gpus(test: Test) -> Test:
    """Only with two GPUs."""
    return pytest.mark.gpu(TWO_GPUS(test))


@on_gpu
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_b32_b40_replays_survive_other_work(rows: int) -> None:
    """200 replays with new inputs, other graphs in the pool, memory churned in between, canaries around the buffers."""
    backend, width = "cuda", 131072
    frame = torch.full((rows + 2, 2048 + 64), 0x5A5A5A5A, dtype=torch.int32, device="cuda")
    out = frame[1:-1, 32:-32]
    scores = torch.zeros(rows, width, device="cuda")
    lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    other_in = torch.randn(4, 50000, device="cuda")
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        dsa_topk.topk_positions(scores, lengths, 2048, out=out, backend=backend)
    with torch.cuda.graph(other, pool=pool):
        other_out = dsa_topk.topk_positions(other_in, None, 512, backend=backend)
    expected_other = dsa_topk.topk_positions(other_in, None, 512, backend=backend)
    for turn in range(200):
        scores.copy_(distributions.make("normal", rows, width, device="cuda", seed=turn))
        lengths.copy_(torch.randint(-3, width + 9, (rows,), device="cuda"))
        if turn % 20 == 0:
            churn = [torch.empty(1 << (20 + turn % 7), device="cuda") for _ in range(8)]
            del churn
            torch.cuda.empty_cache()
            dsa_topk.topk_positions(torch.randn(rows + 9, 300000, device="cuda"), None, 2048, backend=backend)
        other.replay()
        graph.replay()
        if turn % 10 == 0:
            check_selection(scores, lengths, 2048, out).raise_if_bad()
            assert torch.equal(other_out, expected_other)
    frame[1:-1, 32:-32] = 0x5A5A5A5A
    assert (frame == 0x5A5A5A5A).all()


@on_gpu
def test_b42_no_plan_goes_stale() -> None:
    """Captured with all rows short, replayed with all rows long, and the other way round."""
    for first, second in ((5, 262144), (262144, 5)):
        scores = distributions.make("normal", 4, 262144, device="cuda")
        lengths = torch.full((4,), first, dtype=torch.int32, device="cuda")
        dsa_topk.topk_positions(scores, lengths, 2048, backend="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dsa_topk.topk_positions(scores, lengths, 2048, backend="cuda")
        lengths.fill_(second)
        graph.replay()
        check_selection(scores, lengths, 2048, out).raise_if_bad()


@on_gpu
def test_b43_first_call_ever_inside_a_capture() -> None:
    """A fresh process: nothing was loaded or queried before the capture began."""
    program = """
import torch, dsa_topk
from dsa_topk.testing import check_selection
scores = torch.randn(3, 200000, device="cuda")
table = torch.arange(4000, dtype=torch.int32, device="cuda").expand(3, 4000)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = dsa_topk.topk_paged(scores, None, 2048, page_table=table, page_size=64, backend="cuda")
    more = dsa_topk.topk_positions(scores.bfloat16(), None, 513, backend="cuda")  # another type and k
graph.replay()
torch.cuda.synchronize()
check_selection(scores, None, 2048, out, form="paged", page_table=table, page_size=64).raise_if_bad()
check_selection(scores.bfloat16(), None, 513, more).raise_if_bad()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@on_two_gpus
def test_b45_other_device_than_the_current_one() -> None:
    torch.cuda.set_device(0)
    device = torch.device("cuda:1")
    scores, stream = torch.randn(3, 100000, device=device), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.device(1), torch.cuda.stream(stream):
        out = dsa_topk.topk_positions(scores, None, 2048, backend="cuda")
        stream.synchronize()
    check_selection(scores, None, 2048, out).raise_if_bad()
    out = dsa_topk.topk_positions(scores, None, 2048, backend="cuda")
    assert out.device == device
    check_selection(scores, None, 2048, out).raise_if_bad()
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="lengths"):
        dsa_topk.topk_positions(scores, torch.zeros(3, dtype=torch.int32, device="cuda:0"), 2048, backend="cuda")
    assert torch.cuda.current_device() == 0


@on_two_gpus
@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 1, 0)])
def test_b46_facts_of_one_device_do_not_serve_another(order: tuple[int, ...]) -> None:
    program = f"""
import torch, dsa_topk
from dsa_topk.testing import check_selection
for index in {order}:
    scores = torch.randn(2, 300000, device=f"cuda:{{index}}")
    check_selection(scores, None, 4096, dsa_topk.topk_positions(scores, None, 4096, backend="cuda")).raise_if_bad()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@on_two_gpus
def test_b47_ranks_agree() -> None:
    scores = distributions.make("quantised", 5, 131072, device="cuda:0")
    results = [dsa_topk.topk_positions(scores.to(f"cuda:{i}"), None, 2048, backend="cuda").cpu() for i in (0, 1)]
    assert torch.equal(results[0], results[1])


@on_gpu
def test_b52_graphs_replayed_at_once() -> None:
    """Two captured graphs on two streams, 300 replays each without synchronisation."""
    captured = []
    for seed in (1, 2):
        scores = distributions.make("normal", 2, 262144, device="cuda", seed=seed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dsa_topk.topk_positions(scores, None, 2048, backend="cuda")
        captured.append((graph, torch.cuda.Stream(), scores, out))
    torch.cuda.synchronize()
    for _ in range(300):
        for graph, stream, _scores, _out in captured:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _graph, _stream, scores, out in captured:
        check_selection(scores, None, 2048, out).raise_if_bad()


@on_gpu
def test_b54_finishes_without_the_whole_device() -> None:
    """Other work holds the multiprocessors; a launch that waits for all its blocks at once would spin for ever."""
    busy, side = torch.randn(8192, 8192, device="cuda"), torch.cuda.Stream()
    scores = distributions.make("normal", 2, 1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dsa_topk.topk_positions(scores, None, 2048, backend="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(30):
            busy = busy @ busy * 1e-4
    for _ in range(50):
        eager = dsa_topk.topk_positions(scores, None, 2048, backend="cuda")
        graph.replay()
    torch.cuda.synchronize()
    check_selection(scores, None, 2048, eager).raise_if_bad()
    assert torch.equal(eager, captured)


@on_gpu
def test_b56_output_is_final_and_input_is_not_read_early() -> None:
    """Scores and lengths written late on the same stream, the output copied right behind: 300 changing rounds."""
    scores = torch.empty(4, 20000, device="cuda")
    lengths = torch.empty(4, dtype=torch.int32, device="cuda")
    sources = [distributions.make("normal", 4, 20000, device="cuda", seed=seed) for seed in range(6)]
    copies = []
    for turn in range(300):
        scores.fill_(float("inf"))
        lengths.fill_(20000)
        torch.cuda._sleep(20000)
        scores.copy_(sources[turn % 6])
        lengths.fill_(15000 + turn % 6)
        copies.append(dsa_topk.topk_positions(scores, lengths, 2048, backend="cuda").clone())
    for turn, copy in enumerate(copies):
        right = torch.full((4,), 15000 + turn % 6, device="cuda")
        if turn < 6:
            check_selection(sources[turn % 6], right, 2048, copy).raise_if_bad()
        assert torch.equal(copy, copies[turn % 6])


@on_gpu
def test_b64_an_empty_batch_can_be_captured() -> None:
    graph = torch.cuda.CUDAGraph()
    scores, none = torch.zeros(0, 50, device="cuda"), torch.zeros(3, 0, device="cuda")
    with torch.cuda.graph(graph):
        a = dsa_topk.topk_positions(scores, None, 8, backend="cuda")
        b = dsa_topk.topk_positions(none, None, 8, backend="cuda")
    graph.replay()
    torch.cuda.synchronize()
    assert a.shape == (0, 8)
    assert (b == -1).all()


@on_gpu
def test_b73_no_cliff_between_neighbouring_sizes() -> None:
    """Batch 1 to 8, 8K to 1M: the achieved rate never falls to half of the one before."""
    for rows in (1, 2, 4, 8):
        before = 0.0
        for width in (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576):
            scores = distributions.make("normal", rows, width, device="cuda")
            out = torch.empty(rows, 2048, dtype=torch.int32, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    dsa_topk.topk_positions(scores, None, 2048, out=out, backend="cuda")
            times = []
            for _ in range(7):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop))
            rate = rows * width / sorted(times)[3]
            assert rate > before / 2, f"{rows} x {width}: {rate / before:.2f} of the rate of half the width"
            before = rate


@on_gpu
@pytest.mark.parametrize(("rows", "width"), [(4096, 262144), (256, 1048576), (1, 131072)])
def test_b39_b75_extra_memory_is_small(rows: int, width: int) -> None:
    """Beyond inputs and outputs a call may take a constant, whatever the shape: at most 64 MiB."""
    scores = torch.randn(rows, width, device="cuda")
    out = torch.empty(rows, 2048, dtype=torch.int32, device="cuda")
    dsa_topk.topk_positions(scores, None, 2048, out=out, backend="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dsa_topk.topk_positions(scores, None, 2048, out=out, backend="cuda")
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
